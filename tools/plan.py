"""Plan: what a run would cost and survive, without GPU or cluster, as typed rows.

States, parts, holders and owners are those of `adacheck_store.redundancy`; here they are added up.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from adacheck_store.format.errors import UsageError
from adacheck_store.placement import place as hold
from adacheck_store.redundancy.assign import Assignment, Part
from adacheck_store.redundancy.costs import MOST_RANKS
from adacheck_store.redundancy.exchange import Ranks
from adacheck_store.redundancy.states import Keep, states

from .plan_diff import UnsafeRow, nodes_of, unsafe
from .plan_looks import LookRow, looks
from .plan_models import Model
from .plan_records import base_head, delta_head, extra
from .plan_strategy import Items, Strategy, holdings, merged, place
from .plan_survival import minimal, simulate, survivals
from .plan_topology import Cluster
from .plan_ways import ways

ENUMERATED_MAX = 50_000
"""Holdings of all ranks up to which each is a state of its own."""

GIB = 1 << 30
MOMENT_BYTES = 4
"""Of an element, in each of the optimizer's arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is asked: ``k``, ``window`` and so on are those of a run, see `Config`.

    ``other`` is a topology that the same nodes may have instead.
    """

    model: Model
    strategy: Strategy
    cluster: Cluster
    items: Items
    k: int = 1
    window: int = 2
    base_every: int = 64
    keep_bases: int = 2
    failures: int = 4
    trials: int = 20_000
    seed: int = 0
    other: Cluster | None = None
    enumerate_max: int = ENUMERATED_MAX

    def __post_init__(self) -> None:
        """Raise `UsageError` for numbers that mean nothing."""
        least = {"k": 0, "window": 1, "base_every": 1, "keep_bases": 1, "failures": 0, "trials": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise UsageError(f"{name} is {getattr(self, name)}", hint=f"at least {low}")
        if self.failures > self.cluster.nodes:
            raise UsageError(
                f"{self.failures} failures of {self.cluster.nodes} nodes", hint="ask for fewer"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """What is planned. ``counted`` says how: every tensor of every rank, or those alike as one."""

    model: str
    parameters: int
    state_bytes: int
    strategy: str
    ranks: int
    nodes: int
    k: int
    counted: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """Bytes of one of `plan_ways.ways`; of a rank or node the busiest.

    ``step`` are the tensors of one step's deltas, each part once; ``base`` the states that agents
    hold, once. ``step_rank``: what a rank hands to holders, its own node's among them.
    ``base_rank``: what a rank drains of a base. ``heads`` are those of a step's deltas,
    ``extras`` those of a step, each once; ``head_rank`` what a rank owns of heads, ``extra_rank``
    its extra. From ``network`` on these, and heads of bases, are in. ``network_node``: what a node
    sends to others at a step. ``cores_node``: cores that fold.
    """

    policy: str
    parts: int
    step: int
    step_rank: int
    base: int
    base_rank: int
    heads: int
    head_rank: int
    extras: int
    extra_rank: int
    network: int
    network_node: int
    ram_node: int
    nvme_node: int
    object: int
    cores_node: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachRow:
    """Shares of what there is that every-step saving needs, and what a failure then costs.

    1.0 is all there is. ``interval`` is 1 if every step can be saved, else the steps between
    whole states that the network and disks can carry. ``t_ckpt_s`` is until holders have a step;
    ``lost_s`` what a failure that is survived costs on average, t_ckpt + 1/(2f).
    """

    policy: str
    network: float
    disk: float
    object: float
    cpu: float
    ram: float
    nvme: float
    every_step: bool
    interval: int
    t_ckpt_s: float
    lost_s: float
    lost_s_per_day: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalRow:
    """The probability that memory alone brings all back after ``failures`` at once.

    ``exact``: of so many nodes, any set as likely as any other; None if it takes too long to
    count. ``racks``: simulated, nodes and racks failing by their rates; ``error`` is its standard
    error.
    """

    policy: str
    failures: int
    exact: float | None
    racks: float
    error: float


Row = PlanRow | LookRow | CostRow | ReachRow | SurvivalRow | UnsafeRow


def plan(asked: Settings) -> Iterator[Row]:
    """All rows: what is planned, what a look sends, then costs, reach and survival of each way,
    and what is unsafe in the other topology, if there is one.

    Raises `UsageError` for a strategy that does not fit, or too few failure domains for k.
    """
    world = asked.cluster.world
    placed = place(asked.model, asked.strategy, world)
    if len(placed) * world <= asked.enumerate_max:
        counted = "every tensor of every rank"
        found = states(holdings(placed, asked.items))
    else:
        counted = "tensors of equal placement as one"
        found = tuple(merged(placed, asked.items))
    topology = asked.cluster.topology()
    yield PlanRow(
        model=asked.model.name, parameters=asked.model.elements,
        state_bytes=sum(state.nbytes for state in found), strategy=asked.strategy.kind,
        ranks=world, nodes=asked.cluster.nodes, k=asked.k, counted=counted,
    )  # fmt: skip
    if world <= MOST_RANKS:
        yield looks(placed, asked.items.optimizer // MOMENT_BYTES, world)
    assigned = ways(found, topology, asked.k)
    placed_at = hold(topology.ranks, topology.nodes, asked.k).holders
    bills = [_Bill(asked, name, each, placed_at) for name, each in assigned.items()]
    yield from (bill.cost() for bill in bills)
    yield from (bill.reach() for bill in bills)
    for name, each in assigned.items():
        yield from _survival(asked, name, each)
    if asked.other is not None:
        domain = asked.other.topology().domain
        for name, each in assigned.items():
            yield from unsafe(name, each, domain)


@dataclass(slots=True)
class _Node:
    """What one node has to do and to keep, in bytes; ``folded`` in elements a step."""

    held: int = 0
    deltas: int = 0
    largest: int = 0
    folded: int = 0
    sent: int = 0
    received: int = 0
    drained: int = 0
    drained_bases: int = 0


class _Bill:
    """An assignment, added up."""

    def __init__(
        self, asked: Settings, name: str, assigned: Assignment,
        extras_at: Mapping[int, Sequence[str]],
    ) -> None:  # fmt: skip
        self._asked, self._name = asked, name
        self._assigned = assigned
        self._nodes: dict[str, _Node] = {name: _Node() for name in asked.cluster.names}
        self._handed: dict[int, int] = defaultdict(int)
        self._owned: dict[int, int] = defaultdict(int)
        self._heads: dict[int, int] = defaultdict(int)
        self._step = self._base = self._all = self._base_heads = 0
        for part in assigned.parts:
            self._add(part)
        shared = _shared(assigned)
        self._extras = {rank: extra(shared[rank]) for rank in extras_at}
        for rank, nodes in extras_at.items():
            self._add_extra(assigned.topology.ranks[rank], nodes, self._extras[rank])

    def _add(self, part: Part) -> None:
        ranks = self._assigned.topology.ranks
        step = part.step_bytes(self._asked.items.gradient)
        whole = sum(state.nbytes for state in part.states)
        head, base = self._heads_of(part, step)
        self._heads[part.owner] += head
        self._base_heads += base
        self._step += step
        self._all += whole
        self._base += whole if part.holders else 0
        self._owned[part.owner] += whole
        owner = self._nodes[ranks[part.owner]]
        owner.drained += step + head
        owner.drained_bases += whole + base
        for holder in part.holders:
            node = self._nodes[holder.node]
            node.held += whole + base
            node.deltas += step + head
            node.largest = max(node.largest, whole + base)
            node.folded += sum(state.piece.elements for state in part.states)
            self._handed[holder.source] += step
            if not holder.local:
                node.received += step + head
                self._nodes[ranks[holder.source]].sent += step + head

    def _heads_of(self, part: Part, step: int) -> tuple[int, int]:
        """Bytes of the heads of its delta, which has ``step`` bytes of tensors, and of a base."""
        pairs = zip(part.states, part.kept, strict=True)
        kept = sum(state.tensors for state, keep in pairs if keep is not Keep.NOTHING)
        states, moments = part.states, self._asked.items.optimizer // MOMENT_BYTES
        optimizer = sum(state.optimizer_bytes for state in states)
        roles = [sum(state.param_bytes for state in states)]
        roles += [optimizer // moments] * moments if optimizer else []
        base = base_head(sum(state.tensors for state in states), roles)
        return delta_head(kept, step, roles) if part.holders else 0, base

    def _add_extra(self, home: str, nodes: Sequence[str], nbytes: int) -> None:
        """The extra of a rank, which goes to its own node and to others."""
        self._nodes[home].drained += nbytes
        for node in nodes:
            self._nodes[node].deltas += nbytes
            if node != home:
                self._nodes[node].received += nbytes
                self._nodes[home].sent += nbytes

    def cost(self) -> CostRow:
        """Bytes and cores."""
        nodes = self._nodes.values()
        heads, extras = sum(self._heads.values()), sum(self._extras.values())
        return CostRow(
            policy=self._name, parts=len(self._assigned.parts), step=self._step,
            step_rank=max(self._handed.values(), default=0), base=self._base,
            base_rank=max(self._owned.values()), heads=heads, head_rank=max(self._heads.values()),
            extras=extras, extra_rank=max(self._extras.values()),
            network=sum(node.sent for node in nodes),
            network_node=max(node.sent for node in nodes), ram_node=max(map(self._ram, nodes)),
            nvme_node=max(self._kept(node.drained_bases, node.drained) for node in nodes),
            object=self._kept(self._all + self._base_heads, self._step + heads + extras),
            cores_node=max(node.folded for node in nodes)
            / self._asked.cluster.fold_elements_per_s / self._asked.cluster.step_s,
        )  # fmt: skip

    def _ram(self, node: _Node) -> int:
        """A replica of what is held, room for W+2 deltas, and one part's base coming in."""
        return node.held + (self._asked.window + 2) * node.deltas + node.largest

    def _kept(self, base: int, delta: int) -> int:
        """What retention leaves in a lower tier when it is most: one base more is being written."""
        bases = self._asked.keep_bases
        return (bases + 1) * base + bases * self._asked.base_every * delta

    def reach(self) -> ReachRow:
        """Whether every step can be saved."""
        asked, have, cost = self._asked, self._asked.cluster, self.cost()
        nodes = self._nodes.values()
        line = have.network_gbit_s * 1e9 / 8
        every = asked.base_every
        drained = [node.drained + node.drained_bases / every for node in nodes]
        up = max(node.sent + more for node, more in zip(nodes, drained, strict=True))
        network = max(up, *(node.received for node in nodes)) / (line * have.step_s)
        disk = max(drained) / (have.disk_gb_s * 1e9 * have.step_s)
        objects = sum(drained) / (have.object_gb_s * 1e9 * have.step_s)
        shares = {
            "network": network, "disk": disk, "object": objects,
            "cpu": cost.cores_node / have.cores,
            "ram": cost.ram_node / (have.memory_gib * GIB),
            "nvme": cost.nvme_node / (have.disk_gib * GIB),
        }  # fmt: skip
        reached = all(share <= 1 for share in shares.values())
        interval = 1 if reached else self._whole_interval(line)
        busiest = max(max(node.sent, node.received) for node in nodes)
        t_ckpt = busiest / line if reached else self._whole_seconds(line)
        lost = t_ckpt + interval * have.step_s / 2
        rate = sum(have.units.values())
        return ReachRow(
            policy=cost.policy, every_step=reached, interval=interval, t_ckpt_s=t_ckpt,
            lost_s=lost, lost_s_per_day=lost * rate, **shares,
        )  # fmt: skip

    def _whole_interval(self, line: float) -> int:
        """Steps between whole states. Deltas cannot be left out, so this is what is left."""
        return max(1, math.ceil(self._whole_seconds(line) / self._asked.cluster.step_s))

    def _whole_seconds(self, line: float) -> float:
        """Seconds that a whole state takes to disks and objects."""
        have = self._asked.cluster
        most = max(node.drained_bases for node in self._nodes.values())
        return max(most / line, most / (have.disk_gb_s * 1e9), self._all / (have.object_gb_s * 1e9))


def _shared(assigned: Assignment) -> Counter[int]:
    """How many states each rank has in common with others, and witnesses."""
    alike: Counter[Ranks] = Counter()
    for part in assigned.parts:
        for state in part.states:
            alike[state.copies] += state.tensors
    found: Counter[int] = Counter()
    for copies, tensors in alike.items():
        if len(copies) > 1:
            found.update(dict.fromkeys(copies, tensors))
    return found


def _survival(asked: Settings, name: str, assigned: Assignment) -> Iterator[SurvivalRow]:
    groups = having(assigned)
    exact = survivals(asked.cluster.names, groups, asked.failures)
    for failures in range(1, asked.failures + 1):
        found = simulate(
            asked.cluster.units, groups, failures, trials=asked.trials, seed=asked.seed
        )
        yield SurvivalRow(
            policy=name, failures=failures,
            exact=exact[failures] if exact else None, racks=found.share, error=found.error,
        )  # fmt: skip


def having(assigned: Assignment) -> list[frozenset[str]]:
    """The nodes that have each part."""
    return minimal({nodes_of(part, assigned) for part in assigned.parts})
