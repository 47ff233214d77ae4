"""Marks: which steps of a chain a holder can produce alone, and the watermark of all of them.

A *chain* is a part (``p000001``) or a rank's extras (``r000001``), by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Spans = tuple[tuple[int, int], ...]
"""Steps as inclusive ranges, ascending and disjoint."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What a holder says of a chain: "these steps I can produce from what I hold".

    ``spans`` are those steps along the line that ends in ``term``; ``tip`` is the id at the last
    of them (empty where the chain starts anew there). Steps up to ``settled`` can no longer be
    disowned by a save that failed: the trainer has built on them. ``newest`` follows: the newest
    step that can be produced, -1 if none.
    """

    term: str
    spans: Spans
    tip: str
    settled: int
    newest: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "newest", self.spans[-1][1] if self.spans else -1)

    def covers(self, step: int) -> bool:
        """True if the step can be produced."""
        for first, last in reversed(self.spans):
            if first <= step:
                return step <= last
        return False

    def before(self, step: int) -> int:
        """The newest step below one that can be produced, -1 if none."""
        return _last_within(self.spans, step - 1)


NOTHING = Mark("", (), "", -1)


@dataclass(frozen=True, slots=True)
class Seat:
    """Who holds a chain: its own node first. Only the own node's agent makes a new version."""

    version: int
    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What an agent answers to every call: who it is, and a mark for each chain it has.

    ``boot`` is another one after every start of the process; ``watermark`` is the newest it knows
    of the term; ``refused`` are chains it has no room for.
    """

    node: str
    boot: str
    term: str
    marks: Mapping[str, Mark]
    seats: Mapping[str, Seat]
    watermark: int = -1
    refused: frozenset[str] = frozenset()


def newest_common(chains: Iterable[Iterable[Mark]]) -> int:
    """The newest settled step that every mark of every chain covers, -1 if there is none.

    Where two marks of a chain end in one step under two ids, nothing is common.
    """
    found: list[Mark] = []
    for marks in chains:
        tips: dict[int, str] = {}
        for mark in marks:
            if mark.tip and tips.setdefault(mark.newest, mark.tip) != mark.tip:
                return -1
            found.append(mark)
    step = min((mark.settled for mark in found), default=-1)
    while step >= 0:
        best = min(_last_within(mark.spans, step) for mark in found)
        if best == step:
            break
        step = best
    return step


def both(one: Spans, other: Spans) -> Spans:
    """Steps in both."""
    found = []
    rest = list(reversed(other))
    for first, last in one:
        while rest and rest[-1][0] <= last:
            low, high = rest[-1]
            if high >= first:
                found.append((max(first, low), min(last, high)))
            if high > last:
                break
            rest.pop()
    return tuple(found)


def _last_within(spans: Spans, step: int) -> int:
    for first, last in reversed(spans):
        if first <= step:
            return min(last, step)
    return -1
