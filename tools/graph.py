"""The history of a run as a graph: terms, newest first, each joined to its parent where it forks.

``*`` is the newest step of a term, ``o`` a base, ``x`` a gap, ``@`` a tag, ``_`` a floor, ``|/`` a
fork.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from adacheck_store.catalog import Catalog, read_catalog
from adacheck_store.store import Store

from .log import TermRow, terms
from .rows import all_refs, choose_run


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRow:
    """A line of the graph: ``graph`` is what is drawn before ``text``.

    ``what``: ``term``, ``base``, ``gap``, ``tag``, ``floor``, ``fork`` or ``start``.
    """

    graph: str
    what: str
    term: str
    step: int | None
    text: str


def graph(store: Store, run: str = "") -> Iterator[GraphRow]:
    """Lines from the newest term down to the first."""
    catalog = read_catalog(store.tiers, choose_run(store, run))
    found = _events(catalog)
    rows = {row.term: row for row in terms(catalog)}
    lanes: list[tuple[str, int]] = []  # parents that a child above waits for, and at which step
    for term in sorted(rows, reverse=True):
        row = rows[term]
        others = [lane for lane in lanes if lane[0] != term]
        joining = sorted((step for parent, step in lanes if parent == term), reverse=True)
        yield from _term(row, found[term], "| " * len(others), joining)
        lanes = others
        if row.parent in rows and row.fork_step is not None:
            lanes.append((row.parent, row.fork_step))


def _term(
    row: TermRow, events: list[tuple[int, str, str]], lead: str, joining: list[int]
) -> Iterator[GraphRow]:
    """A term's lines: its newest step, what it has, and where children join it, going down."""
    place = "" if row.on_line else ", off the line"
    begun = row.steps or ("claimed, never begun" if row.revisions == 0 else "no steps")
    excuse = f" ({row.excuse})" if row.excuse else ""
    yield GraphRow(graph=f"{lead}{'| ' * len(joining)}*", what="term", term=row.term, step=None,
                   text=f"{row.term}{place}: {begun}{excuse}")  # fmt: skip
    for step, what, text in sorted(events, key=lambda event: (-event[0], event[1], event[2])):
        yield from _joins(row, lead, joining, step)
        yield GraphRow(graph=f"{lead}{'| ' * len(joining)}{_SIGNS[what]}", what=what, term=row.term,
                       step=step, text=text)  # fmt: skip
    yield from _joins(row, lead, joining, -1)
    if row.parent:
        yield GraphRow(graph=f"{lead}|", what="start", term=row.term, step=row.fork_step,
                       text=f"forked from {row.parent} at step {row.fork_step}")  # fmt: skip


def _joins(row: TermRow, lead: str, joining: list[int], below: int) -> Iterator[GraphRow]:
    """Children that fork above a step join the term here."""
    while joining and joining[0] >= below:
        step = joining.pop(0)
        yield GraphRow(graph=f"{lead}{'| ' * len(joining)}|/", what="fork", term=row.term,
                       step=step, text=f"step {step}")  # fmt: skip


_SIGNS = {"base": "o", "gap": "x", "tag": "@", "floor": "_"}


def _events(catalog: Catalog) -> dict[str, list[tuple[int, str, str]]]:
    """What stands at a step of each term."""
    found: dict[str, list[tuple[int, str, str]]] = defaultdict(list)
    bases: dict[tuple[str, int], list[tuple[str, str, set[str]]]] = defaultdict(list)
    for ref in all_refs(catalog):
        if ref.kind == "base":
            bases[ref.term, ref.step].append((ref.part, ref.origin, set(ref.tiers)))
    for (term, step), held in bases.items():
        parts = {part for part, _, _ in held}
        many = f" of {len(parts)} parts" if len(parts) > 1 else ""
        origins = "+".join(sorted({origin for _, origin, _ in held}))
        tiers = " ".join(sorted(set().union(*(tiers for _, _, tiers in held))))
        found[term].append((step, "base", f"base {step}{many}, {origins}, in {tiers}"))
    for place in sorted({*catalog.bases, *catalog.gap_spans}):
        for low, high in catalog.gaps(place).spans:
            which = f"{low}..{high - 1}" if high > low + 1 else str(low)
            found[place[0]].append((high, "gap", f"gap of {place[1]}: {which}"))
    for tag in catalog.tags:
        found[tag.term].append((tag.step, "tag", f"tag {tag.name}, step {tag.step}"))
    for tier, floors in catalog.floors.items():
        newest = max(floors, key=lambda floor: (floor.step, floor.index), default=None)
        if newest is not None:
            kept = f", {len(newest.kept)} steps kept below" if newest.kept else ""
            text = f"floor of {tier}, step {newest.step}{kept}"
            begun = [term for term in newest.terms if _has(catalog, term, newest.step)]
            holder = max(begun, default=min(newest.terms))
            found[holder].append((newest.step, "floor", text))
    return found


def _has(catalog: Catalog, term: str, step: int) -> bool:
    first = min((m.step for m in catalog.manifests.values() if m.term == term), default=step + 1)
    return first < step  # a fork step is of the parent
