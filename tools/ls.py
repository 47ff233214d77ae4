"""What lies in a store: its runs, and of a run what every tier holds of every term."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from adacheck_store.catalog import Catalog, RecordRef, read_catalog
from adacheck_store.format.derived import ORIGIN
from adacheck_store.format.errors import AdaCheckError, RestoreError
from adacheck_store.parting import offered
from adacheck_store.recovery import Prover, RestorePlan, tolerant_line
from adacheck_store.store import Store
from adacheck_store.tiers.base import Tier

from .rows import all_refs, choose_run, ranges, runs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run: its terms, the steps seen on its line, the newest that its records can produce.

    ``provable`` is by heads and links: `fsck` reads the blocks too. ``nbytes`` maps a tier to
    the bytes of its records. ``troubles`` counts what could not be read.
    """

    run: str
    terms: int
    newest_term: str
    steps: str
    newest: int | None
    provable: int | None
    bases: int
    records: int
    nbytes: Mapping[str, int]
    troubles: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingRow:
    """What a tier holds of a term: steps of its deltas, steps of its bases, bytes."""

    run: str
    term: str
    on_line: bool
    tier: str
    bases: str
    deltas: str
    extras: str
    records: int
    nbytes: int


def ls(
    store: Store, run: str = "", *, tier: str = "", term: str = ""
) -> Iterator[RunRow | HoldingRow]:
    """All runs of a store; of a run that is named also what lies where.

    ``tier`` and ``term`` (or its beginning) leave out what lies elsewhere and what others wrote.
    """
    names = [choose_run(store, run)] if run else runs_of(store)
    for name in names:
        catalog = read_catalog(store.tiers, name)
        yield run_row(catalog, store.tiers)
        if run:
            for row in holdings(catalog):
                if tier in ("", row.tier) and row.term.startswith(term):
                    yield row


def run_row(catalog: Catalog, tiers: Sequence[Tier]) -> RunRow:
    """The row of a run."""
    refs = all_refs(catalog)
    nbytes: dict[str, int] = defaultdict(int)
    for ref in refs:
        for tier in ref.tiers:
            nbytes[tier] += ref.nbytes
    prover = line_prover(catalog)
    seen = prover.seen_steps() if prover else []
    terms = {manifest.term for manifest in catalog.manifests.values()}
    return RunRow(
        run=catalog.run, terms=len(terms), newest_term=max(terms, default=""),
        steps=ranges(seen), newest=seen[0] if seen else None,
        provable=newest_provable(prover, tiers), bases=sum(map(len, catalog.bases.values())),
        records=len(refs), nbytes=dict(sorted(nbytes.items())), troubles=len(catalog.troubles),
    )  # fmt: skip


def line_prover(catalog: Catalog) -> Prover | None:
    """A prover over the line, as far back as manifests reach; None without a manifest."""
    try:
        return Prover(catalog, tolerant_line(catalog))
    except (RestoreError, ValueError):
        return None


def newest_provable(prover: Prover | None, tiers: Sequence[Tier]) -> int | None:
    """The newest step that a prover proves and whose copies, by ``tiers``, are still equal."""
    if prover is None:
        return None
    for step in prover.seen_steps():
        if isinstance(offered(tiers, prover, step), RestorePlan):
            return step
    return None


def holdings(catalog: Catalog) -> Iterator[HoldingRow]:
    """What every tier holds of every term."""
    try:
        line = {segment.term for segment in tolerant_line(catalog)}
    except AdaCheckError:
        line = set()
    table: dict[tuple[str, str], list[RecordRef]] = defaultdict(list)
    for ref in all_refs(catalog):
        for tier in ref.tiers:
            table[ref.term, tier].append(ref)
    for (term, tier), refs in sorted(table.items()):
        own = [ref for ref in refs if ref.origin != ORIGIN]
        steps = {kind: [ref.step for ref in own if ref.kind == kind] for kind in KINDS}
        yield HoldingRow(
            run=catalog.run, term=term, on_line=term in line, tier=tier,
            bases=ranges(steps["base"]), deltas=ranges(steps["delta"]),
            extras=ranges(steps["extra"]), records=len(refs),
            nbytes=sum(ref.nbytes for ref in refs),
        )  # fmt: skip


KINDS = ("base", "delta", "extra")
"""Kinds that belong to a step."""
