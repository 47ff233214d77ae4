"""What another topology makes unsafe: states as they are assigned now, if nodes lay otherwise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from adacheck_store.redundancy.assign import Assignment, Part, Policy

NAMES_MAX = 3
"""Tensors named in a row; further ones are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsafeRow:
    """States that survive the loss of fewer domains than ``k``, and of more before.

    ``before`` and ``after`` are how many domains may be lost at once; -1: they are gone.
    """

    policy: str
    before: int
    after: int
    states: int
    bytes: int
    tensors: str


def nodes_of(part: Part, assigned: Assignment) -> frozenset[str]:
    """The nodes that have a part: its holders, and under ``live`` its trainers as well."""
    nodes = {holder.node for holder in part.holders}
    if assigned.policy is Policy.LIVE:
        nodes |= {assigned.topology.ranks[rank] for rank in part.sources}
    return frozenset(nodes)


def unsafe(policy: str, assigned: Assignment, domain: Mapping[str, str]) -> Iterator[UnsafeRow]:
    """What is less safe if nodes lie in these failure domains; those not named are gone."""
    names: dict[tuple[int, int], dict[str, None]] = defaultdict(dict)
    states: dict[tuple[int, int], int] = defaultdict(int)
    sizes: dict[tuple[int, int], int] = defaultdict(int)
    for part in assigned.parts:
        nodes = nodes_of(part, assigned)
        before = len({assigned.topology.domain[node] for node in nodes}) - 1
        after = len({domain[node] for node in nodes if node in domain}) - 1
        if after < min(before, assigned.k):
            for state in part.states:
                names[before, after][state.name] = None
            states[before, after] += len(part.states)
            sizes[before, after] += sum(state.nbytes for state in part.states)
    for before, after in sorted(states, key=lambda each: (each[1], each[0])):
        found = list(names[before, after])
        more = f" and {len(found) - NAMES_MAX} more" if len(found) > NAMES_MAX else ""
        yield UnsafeRow(
            policy=policy, before=before, after=after,
            states=states[before, after], bytes=sizes[before, after],
            tensors=", ".join(found[:NAMES_MAX]) + more,
        )  # fmt: skip
