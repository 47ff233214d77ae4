"""What rank 0 makes of what all ranks hold: who writes what, and which copies came apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from adacheck_store.placement import Node

from .agreement import decode_holdings
from .assign import Topology
from .shares import Sharing, StateKey, owners_of, shares
from .sighting import MAIN_ROLES, Piece
from .states import Holding, Side, State, states
from .watch import Divergence, Spot, Watch

AS_BEFORE = b"="
"""Instead of an assignment: all copies were compared, and all is as it was agreed before."""


class Lead:
    """Rank 0's memory of what was agreed before; no other rank needs one."""

    def __init__(self) -> None:
        self._before: Sharing | None = None
        self._states: tuple[State, ...] = ()
        self._owners: Mapping[StateKey, int] = {}
        self._agreed = -1

    def decide(self, step: int, heard: Sequence[bytes]) -> bytes:
        """The assignment that follows from what all ranks hold, or `AS_BEFORE`.

        Empty where a rank has made no update: equal tensors that stood still prove nothing.
        Raises `GroupError` where ranks do not agree on who holds what.
        """
        told = [decode_holdings(data, rank) for rank, data in enumerate(heard)]
        if not all(updated for _, updated, _ in told):
            return b""
        held = {rank: each for rank, (_, _, each) in enumerate(told)}
        where = Topology(
            nodes=[Node(name=name) for name in sorted({node for node, _, _ in told})],
            ranks={rank: node for rank, (node, _, _) in enumerate(told)},
        )
        apart = compare(self._states, held, step=step, agreed=self._agreed)
        self._states = tuple(_told(states(held), apart))
        found = shares(self._states, where, owners=self._owners)
        self._owners = owners_of(found)
        sharing = Sharing.of(found, self._agreed if apart else step, tuple(map(str, apart)))
        self._agreed = step
        if self._before is not None and sharing.alike(self._before):
            return AS_BEFORE
        self._before = sharing
        return sharing.encode()


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
    for state in shared:
        for rank in state.param | state.optimizer:
            for role, side in sides[rank, state.name]:
                if _same(side.piece, state):
                    spot = Spot(state.scope, state.name, state.piece, role)
                    reports[rank][spot] = repr(sorted(side.copies)).encode()
    return Watch(shared, agreed).compare(step, reports)


def _same(piece: Piece, state: State) -> bool:
    """Whether a side is that of a state: its piece, or a whole parameter of which it is a part."""
    return piece == state.piece or piece.elements > state.piece.elements


def _told(found: Iterable[State], apart: Sequence[Divergence]) -> Iterable[State]:
    """The states, with why those that came apart have fewer copies than they had."""
    at = {(each.spot.name, rank): each.step for each in apart for rank in each.ranks}
    for state in found:
        steps = [at[state.name, rank] for rank in state.copies if (state.name, rank) in at]
        why = f"differed from its copies at step {min(steps)}" if steps else state.why
        yield state._replace(why=why)
