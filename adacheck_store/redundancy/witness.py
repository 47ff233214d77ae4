"""Witnesses: what each rank tells of states that others hold too, and what follows from it.

Of a state that several ranks hold one keeps what it takes to make it again. Of all that changes it
every holder keeps a digest: of its gradients, with what was done to it otherwise. As long as these
agree what is kept of one rank is what all of them have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from adacheck_store.format.rank_sets import ranks_of, runs_of
from adacheck_store.format.redundancy import Ground, Redundancy

from .exchange import Ranks

DIGEST_BYTES = 16

NAMES_SHOWN = 5
"""Tensors that are named of those that have come apart."""

Place = tuple[str, str, str]
"""Part, scope and name of a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """What a rank tells of the states `shared_by` it, at a step.

    ``digests`` has `DIGEST_BYTES` of each, in order, of all that has changed it after step
    ``since``, at which all copies were equal; -1 where the rank does not know. ``trouble`` says
    what it cannot follow by digests, if anything.
    """

    since: int
    digests: bytes
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """A state whose copies have been changed in different ways, by sets of ranks that agree."""

    place: Place
    sides: tuple[Ranks, ...]

    def __str__(self) -> str:
        sides = " and ".join(
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
            for ranks in self.sides
        )
        return f"{self.place[2]} ({sides})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What witnesses of one step say: what has come apart, and which ranks do not know.

    ``troubles`` are what ranks cannot follow by digests.
    """

    partings: tuple[Parting, ...] = ()
    unknowing: Ranks = frozenset()
    troubles: Mapping[int, str] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether all copies are certainly equal."""
        return not self.partings and not self.unknowing

    def __str__(self) -> str:
        words = []
        if self.partings:
            names = [str(each) for each in self.partings[:NAMES_SHOWN]]
            more = len(self.partings) - len(names)
            names += [f"{more} more"] if more else []
            words.append(f"copies have been updated in different ways: {'; '.join(names)}")
        if self.unknowing:
            who = ", ".join(map(str, sorted(self.unknowing)))
            words.append(f"rank {who} cannot tell whether its copies are equal to those kept")
        return "; ".join(words)


def ranks_holding(found: Redundancy, ground: Ground) -> Ranks:
    """The ranks that hold both sides of what is so grounded."""
    sides = [found.sets[side] for side in (ground.param, ground.optimizer) if side >= 0]
    return frozenset.intersection(*(frozenset(ranks_of(runs)) for runs in sides))


def sets_of(found: Redundancy, parts: Sequence[str], rank: int) -> dict[Place, str]:
    """The states that a rank and others hold, each with a name for the ranks that hold it."""
    return {
        place: ".".join(map(str, runs_of(ranks)))
        for place, ranks in shared(found, parts).items() if rank in ranks
    }  # fmt: skip


def shared_by(found: Redundancy, parts: Sequence[str], rank: int) -> tuple[Place, ...]:
    """The states that a rank and others hold; ``parts`` are the names of the manifest's."""
    return tuple(sets_of(found, parts, rank))


def shared(found: Redundancy, parts: Sequence[str]) -> dict[Place, Ranks]:
    """Every state that several ranks hold, with those, in order."""
    held = [ranks_holding(found, ground) for ground in found.grounds]
    return {
        (part, found.grounds[ground].scope, found.names[name]): held[ground]
        for part, states in zip(parts, found.parts, strict=True)
        for name, ground in states.pairs() if len(held[ground]) > 1
    }  # fmt: skip


def compare(found: Redundancy, parts: Sequence[str], said: Mapping[int, Witness | None]) -> Verdict:
    """What the witnesses of all ranks say, of one step; None is a rank that left none."""
    copies = shared(found, parts)
    by_rank: dict[int, list[Place]] = defaultdict(list)
    for place, ranks in copies.items():
        for rank in ranks:
            by_rank[rank].append(place)
    since = max((each.since for each in said.values() if each is not None), default=-1)
    digests: dict[Place, dict[bytes, set[int]]] = {place: defaultdict(set) for place in copies}
    unknowing = set()
    for rank, places in by_rank.items():
        told = said.get(rank)
        size = DIGEST_BYTES * len(places)
        if told is None or told.since < 0 or told.since != since or len(told.digests) != size:
            unknowing.add(rank)
            continue
        for number, place in enumerate(places):
            at = DIGEST_BYTES * number
            digests[place][told.digests[at : at + DIGEST_BYTES]].add(rank)
    return Verdict(
        partings=tuple(
            Parting(place=place, sides=tuple(sorted(map(frozenset, sides.values()), key=min)))
            for place, sides in digests.items() if len(sides) > 1
        ),
        unknowing=frozenset(unknowing),
        troubles={rank: told.trouble for rank, told in said.items() if told and told.trouble},
    )  # fmt: skip


def to_tree(witness: Witness) -> dict[str, Any]:
    """As an extra keeps it: the digests are an array, for heads are read by all who look."""
    digests = torch.frombuffer(bytearray(witness.digests), dtype=torch.uint8)
    return {"since": witness.since, "digests": digests}
