"""Watching: copies that were proven are compared on, and one that comes apart is named.

Each step compares some of the blocks, by fingerprints that trainers make anyway. What differs was
equal when it was compared last; until when all were equal is what a restore may rely on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .exchange import Ranks
from .sighting import MAIN_ROLES, Piece
from .states import NOBODY, State, alone


class Spot(NamedTuple):
    """A place that copies are compared at: a block of one role of a state's piece."""

    scope: str
    name: str
    piece: Piece
    role: str
    block: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Copies that are no longer equal: at which step it was seen, where, and on which ranks.

    ``ranks`` differ from most of the others; where there is no majority (``certain`` is false)
    nobody can tell who is right, and they are all that were compared. ``agreed`` is the newest
    step at which they were compared there and equal.
    """

    step: int
    spot: Spot
    ranks: Ranks
    certain: bool
    agreed: int

    def __str__(self) -> str:
        who = ", ".join(map(str, sorted(self.ranks)))
        what = f"{self.spot.name} ({self.spot.role}, block {self.spot.block})"
        most = "most copies" if self.certain else "each other, and nobody can tell which is right"
        return (
            f"step {self.step}: {what}: ranks {who} differ from {most}; equal at step {self.agreed}"
        )


class Watch:
    """Compares the copies of a run's states, step by step, on whichever rank sees the reports.

    ``agreed`` is the step at which the detector found all equal, ``spots`` are those that are
    going to be compared.
    """

    def __init__(self, states: Iterable[State], agreed: int, spots: Iterable[Spot] = ()) -> None:
        self._sides: dict[tuple[str, str, Piece], State] = {
            (state.scope, state.name, state.piece): state for state in states
        }
        self._begun = agreed
        self._last = dict.fromkeys(spots, agreed)

    @property
    def agreed(self) -> int:
        """The newest step since which every spot was compared, on all its ranks, and equal."""
        return min(self._last.values(), default=self._begun)

    def compare(
        self, step: int, reports: Mapping[int, Mapping[Spot, bytes]]
    ) -> tuple[Divergence, ...]:
        """Compare what ranks report of a step; who is silent is neither right nor wrong."""
        seen: dict[Spot, dict[int, bytes]] = defaultdict(dict)
        for rank, report in reports.items():
            for spot, value in report.items():
                seen[spot][rank] = value
        found = []
        for spot in sorted(seen, key=repr):
            known = self._copies(spot)
            values = {rank: value for rank, value in seen[spot].items() if rank in known}
            if len(values) < 2:
                continue
            wrong, certain = _minority(values)
            agreed = self._last.setdefault(spot, self._begun)
            if wrong:
                found.append(
                    Divergence(step=step, spot=spot, ranks=wrong, certain=certain, agreed=agreed)
                )
            elif values.keys() == known:
                self._last[spot] = step
        return tuple(found)

    def _copies(self, spot: Spot) -> Ranks:
        """The ranks whose copies of it are to be equal."""
        state = self._sides.get((spot.scope, spot.name, spot.piece))
        if state is None:
            return NOBODY
        return state.param if spot.role in MAIN_ROLES else state.optimizer


def _minority(values: Mapping[int, bytes]) -> tuple[Ranks, bool]:
    """Who differs from more than half; all, and False, if no value has more than half."""
    counts = Counter(values.values())
    value, most = counts.most_common(1)[0]
    if 2 * most > len(values):
        return frozenset(rank for rank, own in values.items() if own != value), True
    return frozenset(values), False


def split(states: Iterable[State], found: Iterable[Divergence]) -> tuple[State, ...]:
    """The states once diverged ranks are taken out of their copies: for the next revision.

    What such a rank has becomes a state of its own, under a scope of its own, and is kept.
    """
    wrong: dict[tuple[str, str, Piece], dict[bool, dict[int, int]]] = defaultdict(
        lambda: {True: {}, False: {}}
    )
    for each in found:
        spot = each.spot
        sides = wrong[spot.scope, spot.name, spot.piece][spot.role in MAIN_ROLES]
        for rank in each.ranks:
            sides[rank] = min(each.step, sides.get(rank, each.step))
    split_up: list[State] = []
    for state in states:
        both = wrong.get((state.scope, state.name, state.piece))
        split_up += [state] if both is None else _parted(state, both[True], both[False])
    return tuple(split_up)


def _parted(
    state: State, params: Mapping[int, int], optimizers: Mapping[int, int]
) -> Iterator[State]:
    """The state without these ranks, and what each of them has."""
    out = {**optimizers, **params}
    param = state.param.difference(params)
    optimizer = state.optimizer.difference(optimizers)
    rest = state.copies.difference(out)
    if rest:
        yield state._replace(copies=rest, param=param, optimizer=optimizer)
    for rank in sorted(out):
        own = frozenset((rank,))
        why = f"differed from its copies at step {out[rank]}"
        has_both = rank in state.copies
        has_param = bool(state.param) and (has_both or rank in params)
        has_optimizer = bool(state.optimizer) and (has_both or rank in optimizers)
        yield alone(
            state._replace(
                copies=own, why=why, changes=True,
                param=own if has_param else NOBODY,
                param_bytes=state.param_bytes if has_param else 0,
                optimizer=own if has_optimizer else NOBODY,
                optimizer_bytes=state.optimizer_bytes if has_optimizer else 0,
            )
        )  # fmt: skip
