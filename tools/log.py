"""The history of a run: its terms with their forks, and the entries of its log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from adacheck_store.catalog import Catalog, read_catalog
from adacheck_store.format.errors import AdaCheckError
from adacheck_store.format.keys import Term
from adacheck_store.recovery import tolerant_line
from adacheck_store.store import Store

from .rows import all_refs, choose_run, ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class TermRow:
    """A term: where it leaves its parent, the steps seen of it, and its place in the log.

    ``line_steps`` is the stretch of the line that it gives (empty for a branch); ``claim`` the
    index of its claim (None: not in the log), ``excuse`` says why its end was no death, where the
    log does. A term that was claimed and never began to write
    has no ``revisions``.
    """

    run: str
    term: str
    on_line: bool
    parent: str
    fork_step: int | None
    first: int | None
    steps: str
    line_steps: str
    revisions: int
    claim: int | None
    excuse: str = ""
    tips: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorRow:
    """A floor: ``tier`` may have deleted what is of ``terms``, below ``step`` and not ``kept``."""

    run: str
    index: int
    tier: str
    term: str
    step: int
    kept: str
    terms: tuple[str, ...]


def log(store: Store, run: str = "") -> Iterator[TermRow | FloorRow]:
    """Terms, oldest first, then floors."""
    catalog = read_catalog(store.tiers, choose_run(store, run))
    yield from terms(catalog)
    yield from floors(catalog)


def terms(catalog: Catalog) -> Iterator[TermRow]:
    """A row for each term that has a claim or a manifest."""
    claims = {claim.term: claim.index for claim in catalog.claims if not claim.excuse}
    excuses = {claim.term: claim.excuse for claim in catalog.claims if claim.excuse}
    names = {*claims, *(manifest.term for manifest in catalog.manifests.values())}
    try:
        line = {segment.term: segment for segment in tolerant_line(catalog)}
    except AdaCheckError:
        line = {}
    seen: dict[str, list[int]] = defaultdict(list)
    for ref in all_refs(catalog):
        seen[ref.term].append(ref.step)
    for term in sorted(names, key=Term.parse):
        revisions = [m for m in catalog.manifests.values() if m.term == term]
        origin = min(revisions, key=lambda m: m.step, default=None)
        steps = seen[term]
        segment = line.get(term)
        on_line = ranges(s for s in steps if segment.covers(s)) if segment else ""
        yield TermRow(
            run=catalog.run, term=term, on_line=segment is not None,
            parent=origin.parent_term if origin else "",
            fork_step=origin.fork_step if origin and origin.parent_term else None,
            first=origin.step if origin else None, steps=ranges(steps), line_steps=on_line,
            revisions=len(revisions), claim=claims.get(term), excuse=excuses.get(term, ""),
            tips=dict(origin.tips) if origin else {},
        )  # fmt: skip


def floors(catalog: Catalog) -> Iterator[FloorRow]:
    """A row for each floor, by tier."""
    for tier, found in sorted(catalog.floors.items()):
        for floor in sorted(found, key=lambda floor: floor.index):
            yield FloorRow(
                run=catalog.run, index=floor.index, tier=tier, term=floor.term, step=floor.step,
                kept=ranges(floor.kept), terms=floor.terms,
            )  # fmt: skip
