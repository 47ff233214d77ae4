"""What rank 0 makes of what all ranks hold: who writes what, and which copies came apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from adacheck_store.format.keys import part_name
from adacheck_store.group import named
from adacheck_store.placement import Node

from . import witness
from .agreement import Known, decode_told, name_of
from .assign import Topology
from .exchange import Ranks
from .shares import Sharing, StateKey, owners_of, shares
from .sighting import MAIN_ROLES, Piece
from .states import Holding, Side, State, states
from .watch import Divergence, Spot, Watch
from .witness import Verdict, Witness

AS_BEFORE = b"="
"""Instead of an assignment: all copies were compared, and all is as it was agreed before."""


LONE = "a rank cannot tell how it was changed"


class Lead:
    """Rank 0's memory of what was agreed before; no other rank needs one."""

    def __init__(self) -> None:
        self._before: Sharing | None = None
        self._name = ""
        self._states: tuple[State, ...] = ()
        self._owners: Mapping[StateKey, int] = {}
        self._agreed = self._doubted = -1
        self._differed: dict[tuple[str, int], int] = {}
        self._apart = Apart()

    def decide(self, step: int, heard: Sequence[bytes]) -> bytes:
        """The assignment that follows from what all ranks hold, or `AS_BEFORE`.

        Empty where a rank has made no update: equal tensors that stood still prove nothing. Where a
        rank does not write by the last assignment, for it failed there, all are sent another.
        Raises `GroupError` where ranks do not agree on who holds what.
        """
        read = Known()
        told = [decode_told(data, rank, read) for rank, data in enumerate(heard)]
        followed = self._before is not None and all(each.by == self._name for each in told)
        verdict = self._hear(step, [each.witness for each in told]) if followed else Verdict()
        if not all(each.updated for each in told):
            return b""
        held = {rank: each.held for rank, each in enumerate(told)}
        known = {each.place[2] for each in verdict.partings}
        before = [state for state in self._states if state.name not in known]
        where = Topology(
            nodes=[Node(name=name) for name in sorted({each.node for each in told})],
            ranks={rank: each.node for rank, each in enumerate(told)},
        )
        apart = compare(before, held, step=step, agreed=self._agreed)
        within = {rank: self._apart.within(rank, each) for rank, each in held.items()}
        self._states = tuple(self._told(states(within), apart))
        found = shares(self._states, where, owners=self._owners)
        self._owners = owners_of(found)
        words = (*_words(step, verdict), *map(str, apart), *unlike(held))
        if followed:  # what it says of the steps before it is in force
            self._doubted = -1
        if apart and self._doubted < 0:
            self._doubted = self._agreed
        sharing = Sharing.of(found, self._doubted if self._doubted >= 0 else step, words)
        self._agreed = step
        if followed and self._before is not None and sharing.alike(self._before):
            return AS_BEFORE
        found_now = sharing.encode()
        self._before, self._name = sharing, name_of(found_now)
        return found_now

    def _told(self, found: Iterable[State], apart: Sequence[Divergence]) -> Iterator[State]:
        """The states, with why those that came apart have fewer copies than they had."""
        now = {(each.spot.name, rank): each.step for each in apart for rank in each.ranks}
        self._differed |= now
        for state in found:
            places = [(state.name, rank) for rank in state.copies]
            if len(places) > 1:  # they are copies of each other, at least
                for place in set(places) - now.keys():
                    self._differed.pop(place, None)
            steps = [self._differed[place] for place in places if place in self._differed]
            why = f"differed from its copies at step {min(steps)}" if steps else state.why
            yield state._replace(why=why)

    def _hear(self, step: int, said: Sequence[Witness | None]) -> Verdict:
        """Take in what all ranks tell of the step before."""
        assert self._before is not None
        parts = [part_name(rank) for rank in range(len(said))]
        verdict = witness.compare(self._before.redundancy, parts, dict(enumerate(said)))
        self._apart.add(step, verdict)
        return verdict


def unlike(held: Mapping[int, Iterable[Holding]]) -> list[str]:
    """Tensors that ranks have under one name in different shapes or dtypes, in words.

    It may be meant (a shard that nothing declares one), or ranks have built different models.
    """
    found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, holdings in held.items():
        for each in holdings:
            if each.param is not None and not each.scope:
                width = each.param.nbytes // (each.param.piece.elements or 1)
                kind = f"{list(each.shape)}" + (f" of {width} bytes each" if width else "")
                found[each.name][kind].append(rank)
    return [
        f"{name} is {' and '.join(f'{kind} on {named(ranks)}' for kind, ranks in kinds.items())}"
        for name, kinds in sorted(found.items()) if len(kinds) > 1
    ]  # fmt: skip


def _words(step: int, verdict: Verdict) -> list[str]:
    """What is new in a verdict."""
    troubles = [f"rank {rank}: {text}" for rank, text in sorted(verdict.troubles.items())]
    return [f"step {step}: {verdict}", *troubles] if verdict.partings else troubles


class Apart:
    """What is no copy whatever its bytes are now: ranks have changed it in different ways.

    Else it would be taken for one again at each look, and be apart at the step after. Of a tensor
    each rank has a mark, and those have copies that have the same: also such as hold the parameter
    alone, which no witness tells of. Ranks that could not tell at the last look have none.
    """

    def __init__(self) -> None:
        self._marks: dict[str, dict[int, int]] = defaultdict(dict)
        self._lone: Ranks = frozenset()
        self._since: dict[str, int] = {}
        self._made = 0

    def add(self, step: int, verdict: Verdict) -> None:
        """At a step this was found."""
        self._lone = frozenset(verdict.troubles)
        for each in verdict.partings:
            name = each.place[2]
            self._since.setdefault(name, step)
            parts: dict[tuple[int, int], int] = {}
            for number, side in enumerate(each.sides):
                for rank in side:
                    known = (self._marks[name].get(rank, 0), number)
                    if known not in parts:
                        self._made += 1
                        parts[known] = self._made
                    self._marks[name][rank] = parts[known]

    def within(self, rank: int, held: Sequence[Holding]) -> tuple[Holding, ...]:
        """What a rank holds, without those copies."""
        return tuple(self._cut(rank, each) for each in held)

    def _cut(self, rank: int, held: Holding) -> Holding:
        marks = self._marks.get(held.name)
        if marks is None and not self._lone:
            return held
        why = LONE
        if marks is not None:
            why = f"was updated otherwise than its copies, seen at step {self._since[held.name]}"

        def cut(one: Side | None) -> Side | None:
            if one is None:
                return None
            mine = (marks or {}).get(rank, 0)
            copies = frozenset(
                other for other in one.copies
                if (marks or {}).get(other, 0) == mine and not self._lone & {rank, other}
            ) | {rank}  # fmt: skip
            if copies == one.copies and rank not in (marks or {}):
                return one
            return replace(one, copies=copies, why=one.why or why)

        return replace(held, param=cut(held.param), optimizer=cut(held.optimizer))


def compare(
    before: Iterable[State], held: Mapping[int, Iterable[Holding]], *, step: int, agreed: int
) -> tuple[Divergence, ...]:
    """Which copies of an earlier assignment are none any more, and were at step ``agreed``."""
    sides: dict[tuple[int, str], list[tuple[str, Side]]] = defaultdict(list)
    for rank, holdings in held.items():
        for each in holdings:
            for role, side in ((MAIN_ROLES[0], each.param), ("state", each.optimizer)):
                if side is not None and not side.why:
                    sides[rank, each.name].append((role, side))
    shared = [state for state in before if len(state.param) > 1 or len(state.optimizer) > 1]
    reports: dict[int, dict[Spot, bytes]] = defaultdict(dict)
    sets: dict[Ranks, bytes] = {}  # few, of many ranks each, and told of every tensor by every rank
    for state in shared:
        for rank in state.param | state.optimizer:
            for role, side in sides[rank, state.name]:
                if _same(side.piece, state):
                    spot = Spot(state.scope, state.name, state.piece, role)
                    reports[rank][spot] = sets.setdefault(side.copies, str(len(sets)).encode())
    return Watch(shared, agreed).compare(step, reports)


def _same(piece: Piece, state: State) -> bool:
    """Whether a side is that of a state: its piece, or a whole parameter of which it is a part."""
    return piece == state.piece or piece.elements > state.piece.elements
