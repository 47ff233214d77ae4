"""Assignment: which parts a run consists of, who writes each, and which nodes hold it.

A part is the states with the same set of copies. Pure, and the same for the same input.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from adacheck_store.format.errors import UsageError
from adacheck_store.format.keys import MAX_NUMBER, part_name
from adacheck_store.placement import Node, check, choose, domains

from .exchange import Ranks
from .states import Keep, State, keep, kept_bytes

T = TypeVar("T")


class Policy(Enum):
    """What redundancy is used for."""

    AGENT = "agent"
    """k+1 agents hold every part. Copies save network: a source reaches its own node for free."""
    LIVE = "live"
    """What lives on in the trainers of other domains is not kept; agents hold the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Where ranks run: the node of each, and the nodes that have an agent."""

    nodes: Sequence[Node]
    ranks: Mapping[int, str]
    domain: Mapping[str, str] = field(init=False)
    _spans: dict[Ranks, int] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "domain", domains(self.nodes))

    def spans(self, copies: Ranks) -> int:
        """How many failure domains the ranks lie in."""
        found = self._spans.get(copies)
        if found is None:
            found = len({self.domain[self.ranks[rank]] for rank in copies})
            self._spans[copies] = found
        return found

    def survives(self, copies: Ranks, k: int) -> bool:
        """True if some of these ranks are left whichever k domains are lost."""
        return self.spans(copies) > k


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A node that holds a part, and the source that sends it there; free if it runs there."""

    node: str
    source: int
    local: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part: its states in order, the ranks any of which may write it, and who holds it.

    ``owner`` drains it to the lower tiers. ``kept`` says of each state what a step keeps.
    """

    name: str
    sources: Ranks
    owner: int
    holders: tuple[Holder, ...]
    states: tuple[State, ...]
    kept: tuple[Keep, ...]

    def step_bytes(self, gradient_bytes: int) -> int:
        """Bytes of one step of the part, heads apart."""
        pairs = zip(self.states, self.kept, strict=True)
        return sum(kept_bytes(state, kept, gradient_bytes) for state, kept in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The parts of a run by name; ``missing`` says what is missing for k+1 holders, if anything."""

    k: int
    policy: Policy
    topology: Topology
    parts: tuple[Part, ...]
    missing: str = ""


def assign(
    states: Iterable[State], topology: Topology, *, k: int = 1, policy: Policy = Policy.AGENT,
    names: Mapping[Ranks, str] | None = None, allow_degraded: bool = False,
) -> Assignment:  # fmt: skip
    """Parts with their holders. ``names`` are those that parts had in the revision before.

    Raises `UsageError` if a rank's node has no agent, or if there are fewer than k+1 failure
    domains and ``allow_degraded`` is not set.
    """
    missing = check(topology.ranks, topology.nodes, k, allow_degraded=allow_degraded)
    grouped: dict[Ranks, list[State]] = defaultdict(list)
    for state in states:
        grouped[state.copies].append(state)
    strangers = {rank for copies in grouped for rank in copies} - topology.ranks.keys()
    if strangers:
        raise UsageError(
            f"nobody has said where ranks {sorted(strangers)[:20]} run",
            hint="give the node of every rank",
        )
    named = _names(grouped, names or {})
    places = _Places(topology, k, policy)
    order = _rounds(grouped, named, topology)
    near = {copies: places.near(copies, _nbytes(grouped[copies])) for copies in order}
    parts = []
    for copies in order:
        mine = tuple(grouped[copies])
        holders = near[copies] + places.far(copies, near[copies], _nbytes(mine))
        parts.append(
            Part(
                name=named[copies], sources=copies, holders=holders, states=mine,
                owner=places.owner(copies, near[copies], _nbytes(mine)),
                kept=tuple(_keep(state, topology, k, policy) for state in mine),
            )
        )  # fmt: skip
    parts.sort(key=lambda part: part.name)
    return Assignment(k=k, policy=policy, topology=topology, parts=tuple(parts), missing=missing)


def _nbytes(states: Sequence[State]) -> int:
    return sum(state.nbytes for state in states)


def _names(grouped: Iterable[Ranks], known: Mapping[Ranks, str]) -> dict[Ranks, str]:
    """A name for each part: the one it had, else the next free number, by rank."""
    found = {copies: known[copies] for copies in grouped if copies in known}
    used = set(known.values())
    numbers = (number for number in range(MAX_NUMBER + 1) if part_name(number) not in used)
    for copies in sorted((c for c in grouped if c not in known), key=lambda c: (min(c), sorted(c))):
        found[copies] = part_name(next(numbers))
    return found


def _rounds(
    grouped: Mapping[Ranks, Sequence[State]], named: Mapping[Ranks, str], topology: Topology
) -> list[Ranks]:
    """Parts, largest first; of equals one of each node, then the second ones, as in placement."""
    seen: dict[str, int] = defaultdict(int)
    order = []
    for copies in sorted(grouped, key=lambda copies: named[copies]):
        node = topology.ranks[min(copies)]
        order.append((-_nbytes(grouped[copies]), seen[node], node, named[copies], copies))
        seen[node] += 1
    return [copies for *_, copies in sorted(order, key=lambda each: each[:4])]


def _keep(state: State, topology: Topology, k: int, policy: Policy) -> Keep:
    """Under the policy ``agent`` every state is kept, safe or not: copies only save network."""
    if policy is Policy.LIVE or not topology.survives(state.copies, k):
        return keep(state, lambda copies: topology.survives(copies, k))
    return Keep.GRADIENT if state.optimizer else Keep.PARAMETER


class _Places:
    """Chooses holders and owners one part after another, so that each carries about as much."""

    def __init__(self, topology: Topology, k: int, policy: Policy) -> None:
        self._topology = topology
        self._k = k
        self._policy = policy
        self._held = dict.fromkeys(topology.domain, 0)
        self._sent = dict.fromkeys(topology.ranks, 0)
        self._drained = dict.fromkeys(topology.ranks, 0)

    def near(self, sources: Ranks, nbytes: int) -> tuple[Holder, ...]:
        """Holders that need no network, each in another failure domain.

        None under the policy ``live``: there the trainers themselves hold the part.
        """
        if self._policy is Policy.LIVE:
            return ()
        by_node = self._by_node(sources)
        chosen: list[str] = []
        while len(chosen) <= self._k:
            load = {node: self._held[node] for node in by_node}
            node = choose(chosen, self._topology.domain, load) if chosen else _least(load, load)
            if node is None:
                break
            chosen.append(node)
            self._held[node] += nbytes
        return tuple(
            Holder(node=node, source=_least(by_node[node], self._sent), local=True)
            for node in chosen
        )

    def far(self, sources: Ranks, near: Sequence[Holder], nbytes: int) -> tuple[Holder, ...]:
        """Further holders, where too few domains have the part."""
        domain = self._topology.domain
        one_each = {domain[node]: node for node in sorted(self._by_node(sources), reverse=True)}
        chosen = [holder.node for holder in near] or sorted(one_each.values())
        found: list[Holder] = []
        while len(chosen) <= self._k:
            node = choose(chosen, domain, self._held)
            if node is None:
                break
            chosen.append(node)
            self._held[node] += nbytes
            source = _least(sources, self._sent)
            self._sent[source] += nbytes
            found.append(Holder(node=node, source=source, local=False))
        return tuple(found)

    def owner(self, sources: Ranks, near: Sequence[Holder], nbytes: int) -> int:
        """A source whose own node holds the part, where there is one."""
        rank = _least([holder.source for holder in near] or sources, self._drained)
        self._drained[rank] += nbytes
        return rank

    def _by_node(self, sources: Ranks) -> Mapping[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        for rank in sorted(sources):
            found[self._topology.ranks[rank]].append(rank)
        return found


def _least(candidates: Iterable[T], load: Mapping[T, int]) -> T:
    """The one with the least load, of equals the first in order."""
    return min(sorted(candidates), key=lambda each: load[each])  # type: ignore[type-var]
