"""Ways to keep a run's states: as a run does, with copies found or not, and as policies would."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from adacheck_store.format.keys import part_name
from adacheck_store.placement import place
from adacheck_store.redundancy.assign import (
    Assignment,
    Holder,
    Part,
    Policy,
    Topology,
    assign,
)
from adacheck_store.redundancy.costs import MOST_RANKS
from adacheck_store.redundancy.exchange import Ranks
from adacheck_store.redundancy.sighting import Piece
from adacheck_store.redundancy.states import Keep, State


def ways(found: Sequence[State], topology: Topology, k: int) -> Mapping[str, Assignment]:
    """By name: a run with ``redundancy="off"`` and ``"auto"``, then each policy.

    Among more than `MOST_RANKS` ranks a run does not look for copies.

    Raises `UsageError` for too few failure domains.
    """
    shared = dealt if len(topology.ranks) <= MOST_RANKS else apart
    told = {policy.value: assign(found, topology, k=k, policy=policy) for policy in Policy}
    run = {"off": apart(found, topology), "auto": shared(found, topology)}
    return {name: held(each, k) for name, each in run.items()} | told


def held(found: Assignment, k: int) -> Assignment:
    """Each rank's part on its own node and k others, as agents place it."""
    where = found.topology
    placed = place(where.ranks, where.nodes, k).holders
    parts = tuple(
        replace(
            part, holders=tuple(
                Holder(node=node, source=part.owner, local=node == where.ranks[part.owner])
                for node in placed[part.owner]
            ),
        ) for part in found.parts
    )  # fmt: skip
    return replace(found, k=k, parts=parts)


def dealt(found: Sequence[State], topology: Topology) -> Assignment:
    """Every state is written by one of its ranks, each of which writes as much of it.

    A run deals out whole tensors (`shares`); it comes to the same but for the size of one.
    """
    alike: dict[tuple[Ranks, Ranks, Ranks], list[State]] = defaultdict(list)
    for state in found:
        alike[state.copies, state.param, state.optimizer].append(state)
    mine: dict[int, list[State]] = {rank: [] for rank in sorted(topology.ranks)}
    for (copies, *_), states in alike.items():
        total = sum(state.piece.elements for state in states)
        tensors = sum(state.tensors for state in states)
        for at, rank in enumerate(sorted(copies)):
            start, stop = (total * edge // len(copies) for edge in (at, at + 1))
            if stop > start:
                share = stop - start
                mine[rank].append(
                    states[0]._replace(
                        piece=Piece(flat=(start, stop)),
                        param_bytes=sum(s.param_bytes for s in states) * share // total,
                        optimizer_bytes=sum(s.optimizer_bytes for s in states) * share // total,
                        tensors=tensors * (at + 1) // len(copies) - tensors * at // len(copies),
                    )
                )
    return _written(mine, topology)


def apart(found: Sequence[State], topology: Topology) -> Assignment:
    """Every rank writes all that it has: of what others step the parameters, as one state."""
    mine: dict[int, list[State]] = {rank: [] for rank in sorted(topology.ranks)}
    bare: dict[Ranks, int] = defaultdict(int)
    pieces: dict[Ranks, Counter[Ranks]] = defaultdict(Counter)
    own, others = dict.fromkeys(mine, 0), dict.fromkeys(mine, 0)
    for state in found:
        bare[state.param] += state.param_bytes
        pieces[state.param][state.optimizer] += state.tensors
        for rank in state.copies:
            alone = frozenset((rank,))
            mine[rank].append(
                state._replace(
                    copies=alone, param=alone, optimizer=alone if state.optimizer else frozenset()
                )
            )
            own[rank] += state.param_bytes
    for ranks, nbytes in bare.items():
        stepped = pieces[ranks].most_common()  # of a tensor nearly every stepper has a piece
        for rank in ranks:
            own[rank] -= nbytes
            others[rank] += next((n for by, n in stepped if rank not in by), 0)
    for rank, states in mine.items():
        if own[rank] < 0:
            alone = frozenset((rank,))
            states.append(
                State(
                    scope="", name="parameters that others step", piece=Piece(flat=(0, 0)),
                    copies=alone, param=alone, param_bytes=-own[rank], tensors=others[rank],
                )
            )  # fmt: skip
    return _written(mine, topology)


def _written(mine: Mapping[int, Sequence[State]], topology: Topology) -> Assignment:
    """A part for each rank, of what it writes."""
    parts = tuple(
        Part(
            name=part_name(rank), sources=frozenset((rank,)), owner=rank, holders=(),
            states=tuple(states),
            kept=tuple(Keep.GRADIENT if s.optimizer else Keep.PARAMETER for s in states),
        ) for rank, states in mine.items()
    )  # fmt: skip
    return Assignment(k=0, policy=Policy.AGENT, topology=topology, parts=parts)
