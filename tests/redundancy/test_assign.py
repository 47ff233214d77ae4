"""Assignment: whatever k failure domains are lost, each state is still had from somewhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_store.format.errors import UsageError
from adacheck_store.placement import Node
from adacheck_store.redundancy.assign import Assignment, Part, Policy, Topology, assign
from adacheck_store.redundancy.states import Holding, Keep, states
from tests.redundancy.kit import (
    ELEMENTS,
    WHOLE,
    ddp,
    everyone,
    figure6,
    held,
    shard,
    topology,
    zero1,
    zero3,
)

BOTH = pytest.mark.parametrize("policy", Policy)


def lost_states(found: Assignment, lost: set[str]) -> Iterator[str]:
    """Names of the states that are gone once these domains are."""
    where = found.topology
    for part in found.parts:
        agents = {where.domain[holder.node] for holder in part.holders} - lost
        trainers = {where.domain[where.ranks[rank]] for rank in part.sources} - lost
        for state, kept in zip(part.states, part.kept, strict=True):
            kept_left = agents if kept is not Keep.NOTHING else set()
            if not kept_left | (trainers if found.policy is Policy.LIVE else set()):
                yield state.name


def survives_all(found: Assignment) -> None:
    """Lose every set of k domains."""
    domains = sorted(set(found.topology.domain.values()))
    for lost in itertools.combinations(domains, found.k):
        assert not list(lost_states(found, set(lost)))


def network(part: Part) -> int:
    """Copies that go through the network."""
    return sum(not holder.local for holder in part.holders)


STRATEGIES = {
    "ddp": (ddp(8), 0),
    "zero-1": (zero1(8), 1),
    "zero-3": (zero3(8), 1),
    "mics across": (zero3(8, replicas=2), 0),
    "figure 6": (figure6(8), 1),
}


@BOTH
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_on_four_nodes(strategy: str, policy: Policy) -> None:
    """Network is used where sources are in one domain; everything survives any node's loss."""
    by_rank, copies = STRATEGIES[strategy]
    found = assign(states(by_rank), topology(2, 2, 2, 2), policy=policy)
    survives_all(found)
    assert {network(part) for part in found.parts} == {copies}
    for part in found.parts:
        live = policy is Policy.LIVE
        assert len(part.holders) == (copies if live else 2)
        assert part.owner in part.sources
        if live and not copies:
            assert set(part.kept) == {Keep.NOTHING}
            assert part.step_bytes(2) == 0
        else:
            assert part.step_bytes(2) == 2 * sum(s.piece.elements for s in part.states)


def test_parts_are_the_states_with_one_set_of_copies() -> None:
    """DDP is one part whose every rank is a source; ZeRO-1 has one for each rank."""
    (part,) = assign(states(ddp(4, tensors=3)), topology(2, 2)).parts
    assert (part.name, part.sources, len(part.states)) == ("p000000", everyone(4), 3)
    parts = assign(states(zero1(4, tensors=3)), topology(2, 2)).parts
    assert [(p.name, p.sources, len(p.states)) for p in parts] == [
        (f"p{r:06d}", {r}, 3) for r in range(4)
    ]


def test_copies_on_one_host_do_not_count_as_two() -> None:
    """Nodes that report one boot id are one domain: both policies send elsewhere, or refuse."""
    with pytest.raises(UsageError, match="needs 2 failure domains"):
        assign(states(ddp(4)), topology(2, 2, boot=True))
    found = assign(states(ddp(4)), topology(2, 2, boot=True), allow_degraded=True)
    assert "needs 2" in found.missing
    assert [len(part.holders) for part in found.parts] == [1]
    pair = {r: [held(f"w{r // 2}", (WHOLE, {r // 2 * 2, r // 2 * 2 + 1}))] for r in range(4)}
    for policy in Policy:
        found = assign(states(pair), topology(2, 2), policy=policy)
        survives_all(found)
        assert [network(part) for part in found.parts] == [1, 1]
        assert {kept for part in found.parts for kept in part.kept} == {Keep.PARAMETER}


def test_work_is_shared_out() -> None:
    """Holders, senders and owners carry about as much each."""
    found = assign(states(zero3(16, tensors=4)), topology(*[2] * 8))
    held_by = [h.node for p in found.parts for h in p.holders]
    assert {held_by.count(f"n{node}") for node in range(8)} == {4}
    assert sorted(p.owner for p in found.parts) == list(range(16))
    many = {r: [held(f"w{i}", (WHOLE, everyone(8)), (WHOLE, everyone(8))) for i in range(1)]
            + [held(f"g{r // 4}", (WHOLE, set(range(r // 4 * 4, r // 4 * 4 + 4))))]
            for r in range(8)}  # fmt: skip
    parts = assign(states(many), topology(*[1] * 8)).parts
    assert len({p.owner for p in parts}) == 3
    for part in parts:  # who drains has it on its own node
        assert part.owner in {holder.source for holder in part.holders if holder.local}
    assert len({h.node for p in parts for h in p.holders}) == 6


@pytest.mark.parametrize("nodes", [[1] * 5, [2] * 3, [2] * 8, [3] * 4, [4] * 7, [8] * 2])
@pytest.mark.parametrize("k", [1, 2])
def test_every_node_holds_as_much(nodes: list[int], k: int) -> None:
    """Of shards of one size on nodes of one size, whatever their numbers are."""
    if len(nodes) <= k:
        return
    size = sum(nodes)
    found = assign(states(zero3(size, elements=size)), topology(*nodes), k=k)
    held_by = [holder.node for part in found.parts for holder in part.holders]
    counts = {held_by.count(f"n{node}") for node in range(len(nodes))}
    assert max(counts) - min(counts) <= 1
    sent = [h.source for p in found.parts for h in p.holders if not h.local]
    assert {sent.count(rank) for rank in range(size)} == {k}


def test_names_of_parts_go_on() -> None:
    """A set that was a part before keeps its name, and no other gets it."""
    first = assign(states(zero3(4)), topology(2, 2))
    names = {part.sources: part.name for part in first.parts}
    by_rank = zero3(4)
    by_rank[0].append(held("new", (WHOLE, {0, 3})))
    by_rank[3].append(held("new", (WHOLE, {0, 3})))
    second = assign(states(by_rank), topology(2, 2), names=names)
    assert {p.sources: p.name for p in second.parts} == {**names, frozenset((0, 3)): "p000004"}


def test_what_is_misused() -> None:
    """A node without agent, a rank that nobody has placed."""
    with pytest.raises(UsageError, match="no agent on n9"):
        assign((), Topology(nodes=[Node(name="n0")], ranks={0: "n9"}))
    with pytest.raises(UsageError, match=r"ranks \[2, 3\]"):
        assign(states(ddp(4)), topology(1, 1))


@BOTH
@given(st.data())
def test_any_k_domains_may_be_lost(policy: Policy, data: st.DataObject) -> None:
    """Brute force over irregular runs: random sets of copies for both sides of each state."""
    nodes = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=5))
    size = sum(nodes)
    labels = [data.draw(st.sampled_from(["", "rack-0", "rack-1"])) for _ in nodes]
    plain = topology(*nodes)
    where = Topology(
        nodes=[replace(n, label=label) for n, label in zip(plain.nodes, labels, strict=True)],
        ranks=plain.ranks,
    )  # fmt: skip
    k = data.draw(st.integers(0, len(set(where.domain.values())) - 1))
    by_rank: dict[int, list[Holding]] = {rank: [] for rank in range(size)}
    for number in range(data.draw(st.integers(1, 4))):
        _operator(by_rank, f"w{number}", size, data)
    found = assign(states(by_rank), where, k=k, policy=policy)
    survives_all(found)
    for part in found.parts:
        domains = {found.topology.domain[holder.node] for holder in part.holders}
        assert len(domains) == len(part.holders)
        if policy is Policy.AGENT:
            assert network(part) == max(0, k + 1 - found.topology.spans(part.sources))
        for holder in part.holders:
            assert holder.source in part.sources
            assert holder.local is (found.topology.ranks[holder.source] == holder.node)
    assert sum(s.nbytes for p in found.parts for s in p.states) >= 12 * ELEMENTS


def _operator(by_rank: dict[int, list[Holding]], name: str, size: int, data: st.DataObject) -> None:
    """One operator with a choice of its own: its parameter's copies, and its optimizer's."""
    order = data.draw(st.permutations(range(size)))
    cut = data.draw(st.integers(1, size))
    params = [frozenset(order[:cut]), frozenset(order[cut:])]
    style = data.draw(st.sampled_from(["copied", "sharded", "owned"]))
    for rank in range(size):
        own = next(ranks for ranks in params if rank in ranks)
        scoped = f"{name}.{params.index(own)}"
        at = sorted(own).index(rank)
        optimizer = {
            "copied": (WHOLE, own),
            "sharded": (shard(at, len(own)), frozenset((rank,))),
            "owned": (WHOLE, frozenset((rank,))) if at == 0 else None,
        }[style]
        if style == "sharded" and ELEMENTS % len(own):
            optimizer = (WHOLE, frozenset((rank,)))
        by_rank[rank].append(held(scoped, (WHOLE, own), optimizer))
