"""How a run stands: each tier, what it can prove alone and who holds it; and each living agent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from adacheck_store.catalog import Catalog, Trouble, read_catalog
from adacheck_store.format.errors import AdaCheckError
from adacheck_store.store import Store
from adacheck_store.tiers import lock_file
from adacheck_store.tiers.base import Tier

from . import agents
from .ls import line_prover, newest_provable
from .rows import all_refs, choose_run, held_alone


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRow:
    """A tier, or all of them together (``tier`` is ``all``).

    ``newest`` is the newest step of the line of which it has a record, ``provable`` the newest
    that its records alone can produce (by heads and links). ``holder`` is the process that has
    it open for writing.
    """

    run: str
    tier: str
    newest: int | None
    provable: int | None
    behind: int | None
    bases: int
    newest_base: int | None
    records: int
    nbytes: int
    holder: str = ""
    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TroubleRow:
    """Something that could not be read: a tier (``key`` empty) or a record."""

    run: str
    tier: str
    key: str
    what: str
    remedy: str


Row = TierRow | TroubleRow | agents.Row


def status(store: Store, run: str = "") -> Iterator[Row]:
    """A row for each tier, one for all together; for each agent, its chains and drains; and what
    could not be read. The memories of agents on this node are tiers among the others."""
    name = choose_run(store, run)
    with agents.meet(store.url, name) as met:
        yield from _tiers(store, name, met.memories)
        yield from met.rows()
        for node, error in met.silent.items():
            yield trouble_row(name, Trouble(tier=f"agent {node}", key="", error=error))


def _tiers(store: Store, name: str, memories: list[Tier]) -> Iterator[TierRow | TroubleRow]:
    tiers = [*memories, *store.tiers]
    catalog = read_catalog(tiers, name)
    whole = _row(catalog, tiers, name, "all", None)
    for tier in tiers:
        try:
            alone = held_alone(catalog, tier, name)
        except AdaCheckError:
            continue  # it is among the catalog's troubles
        row = _row(alone, tiers, name, tier.traits.name, whole.newest, tier)
        yield row
    yield whole
    for trouble in (*store.troubles, *catalog.troubles):
        yield trouble_row(name, trouble)


def _row(
    catalog: Catalog,
    tiers: Sequence[Tier],
    run: str,
    name: str,
    newest: int | None,
    tier: Tier | None = None,
) -> TierRow:
    prover = line_prover(catalog)
    seen = prover.seen_steps() if prover else []
    refs = all_refs(catalog)
    bases = [ref.step for found in catalog.bases.values() for ref in found]
    provable = newest_provable(prover, tiers if tier is None else [tier])
    path = str(getattr(tier, "path", ""))
    known = newest is not None and provable is not None
    return TierRow(
        run=run, tier=name, newest=seen[0] if seen else None, provable=provable,
        behind=max(0, (newest or 0) - (provable or 0)) if known else None,
        bases=len(bases), newest_base=max(bases, default=None), records=len(refs),
        nbytes=sum(ref.nbytes * (1 if tier else len(ref.tiers)) for ref in refs),
        holder=lock_file.holder(path) if path else "", path=path,
    )  # fmt: skip


def trouble_row(run: str, trouble: Trouble) -> TroubleRow:
    """The row of what could not be read."""
    return TroubleRow(
        run=run, tier=trouble.tier, key=trouble.key, what=str(trouble.error),
        remedy=trouble.error.hint or "fsck says what it means",
    )  # fmt: skip
