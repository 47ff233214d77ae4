"""Redundancy as a manifest has it: who holds which state, how that is known, what is kept of it.

Tables and indexes into them, so that a thousand ranks with a thousand tensors each stay small.
Each table ascends, and all of it is referred to: one meaning has one spelling.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import strict
from .rank_sets import ranks_of

POLICIES = ("agent", "live")
DEGREES = ("full", "partial", "none")
KEEPS = ("nothing", "parameter", "gradient")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Ground:
    """What is known of a state: ``param`` and ``optimizer`` index `Redundancy.sets` (-1: none).

    ``scope`` as in a slice. ``keep`` is what a step keeps of it; ``why`` says why further copies
    are not proven, empty if there are none.
    """

    scope: str
    param: int
    optimizer: int
    keep: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPart:
    """A part: its degree, its ``holders`` as pairs of a node and the source that sends it there.

    ``states`` are pairs of indexes, one after another in one tuple: into `Redundancy.names` and
    `Redundancy.grounds`. They ascend; a tensor of several pieces stands there several times.
    """

    degree: str
    holders: tuple[tuple[int, int], ...]
    states: tuple[int, ...]

    def pairs(self) -> Iterator[tuple[int, int]]:
        """The states as pairs of name and ground."""
        return zip(self.states[::2], self.states[1::2], strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundancy:
    """What a manifest says of redundancy; its ``parts`` are those of the manifest, in order.

    ``agreed`` is the newest step at which all copies were compared and equal. ``nodes`` are names
    with their failure domains, ``ranks`` has the node of each rank from 0 on. ``sets`` are sets
    of ranks as runs (`rank_sets`).
    """

    k: int
    policy: str
    agreed: int
    nodes: tuple[tuple[str, str], ...]
    ranks: tuple[int, ...]
    sets: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    grounds: tuple[Ground, ...]
    parts: tuple[HeldPart, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON; `decode_redundancy` is the inverse."""
        return {
            "k": self.k,
            "policy": self.policy,
            "agreed": self.agreed,
            "nodes": [list(node) for node in self.nodes],
            "ranks": list(self.ranks),
            "sets": [list(runs) for runs in self.sets],
            "names": list(self.names),
            "grounds": [
                {"scope": g.scope, "param": g.param, "optimizer": g.optimizer, "keep": g.keep,
                 "why": g.why}
                for g in self.grounds
            ],
            "parts": [
                {"class": p.degree, "holders": [list(h) for h in p.holders],
                 "states": list(p.states)}
                for p in self.parts
            ],
        }  # fmt: skip


def decode_redundancy(value: Any, sources: Sequence[Sequence[int]]) -> Redundancy:
    """From JSON; raises `ValueError`. ``sources`` are those of the manifest's parts."""
    found = strict.fields(
        value, "k", "policy", "agreed", "nodes", "ranks", "sets", "names", "grounds", "parts"
    )
    redundancy = Redundancy(
        k=strict.count(found["k"]),
        policy=_word(found["policy"], POLICIES),
        agreed=strict.count(found["agreed"]),
        nodes=tuple(_node(item) for item in strict.items(found["nodes"])),
        ranks=tuple(strict.count(node) for node in strict.items(found["ranks"])),
        sets=tuple(tuple(strict.items(runs)) for runs in strict.items(found["sets"])),
        names=tuple(strict.text(name) for name in strict.items(found["names"])),
        grounds=tuple(_ground(item) for item in strict.items(found["grounds"])),
        parts=tuple(_part(item) for item in strict.items(found["parts"])),
    )
    _check_tables(redundancy)
    _check_parts(redundancy, sources)
    return redundancy


def _word(value: Any, words: tuple[str, ...]) -> str:
    if value not in words:
        raise ValueError(f"none of {words}: {str(value)[:40]!r}")
    return str(value)


def _node(item: Any) -> tuple[str, str]:
    name, domain = strict.items(item, 2)
    return strict.text(name), strict.text(domain)


def _ground(item: Any) -> Ground:
    found = strict.fields(item, "scope", "param", "optimizer", "keep", "why")
    return Ground(
        scope=strict.text(found["scope"], empty=True),
        param=strict.integer(found["param"]),
        optimizer=strict.integer(found["optimizer"]),
        keep=_word(found["keep"], KEEPS),
        why=strict.text(found["why"], empty=True),
    )


def _part(item: Any) -> HeldPart:
    found = strict.fields(item, "class", "holders", "states")
    pairs = (strict.items(pair, 2) for pair in strict.items(found["holders"]))
    return HeldPart(
        degree=_word(found["class"], DEGREES),
        holders=tuple((strict.count(node), strict.count(rank)) for node, rank in pairs),
        states=tuple(strict.items(found["states"])),
    )


def _check_tables(found: Redundancy) -> None:
    strict.ascending([name for name, _ in found.nodes], "nodes")
    strict.ascending(found.sets, "sets")
    strict.ascending(found.names, "names")
    strict.ascending(found.grounds, "grounds")
    _indexes(found.ranks, len(found.nodes), "node of a rank")
    for runs in found.sets:
        ranks = ranks_of(runs)
        if not ranks or ranks[-1] >= len(found.ranks):
            raise ValueError("a set of nobody, or of a rank that is not there")
    sides = [side for g in found.grounds for side in (g.param, g.optimizer)]
    if any((g.param, g.optimizer) == (-1, -1) for g in found.grounds):
        raise ValueError("a state that is neither parameter nor optimizer's")
    _all_used([side for side in sides if side != -1], len(found.sets), "set")


def _check_parts(found: Redundancy, sources: Sequence[Sequence[int]]) -> None:
    if len(found.parts) != len(sources):
        raise ValueError(f"redundancy of {len(found.parts)} parts of {len(sources)}")
    names: set[int] = set()
    grounds: set[int] = set()
    for part, ranks in zip(found.parts, sources, strict=True):
        _indexes([node for node, _ in part.holders], len(found.nodes), "holder")
        if not {source for _, source in part.holders} <= set(ranks):
            raise ValueError("who sends a part to a holder is none of its sources")
        if ranks[-1] >= len(found.ranks) or len({n for n, _ in part.holders}) < len(part.holders):
            raise ValueError("a source that is not there, or a holder twice")
        if len(part.states) % 2 or any(type(index) is not int for index in part.states):
            raise ValueError("states are pairs of indexes")
        pairs = list(part.pairs())
        if pairs != sorted(pairs):
            raise ValueError("states must ascend")
        names.update(part.states[::2])
        grounds.update(part.states[1::2])
    _all_used(names, len(found.names), "name")
    _all_used(grounds, len(found.grounds), "ground")


def _indexes(values: Iterable[int], size: int, what: str) -> None:
    if any(not 0 <= value < size for value in values):
        raise ValueError(f"a {what} out of its table")


def _all_used(values: Iterable[int], size: int, what: str) -> None:
    if set(values) != set(range(size)):
        raise ValueError(f"a {what} out of its table, or one that nothing refers to")
