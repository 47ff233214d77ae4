"""`plan`: counted by hand, against the product's own assignment, and by brute force."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adacheck_store.format.errors import UsageError
from adacheck_store.format.rank_sets import runs_of
from adacheck_store.redundancy.assign import Policy, assign
from adacheck_store.redundancy.costs import MOST_RANKS, exchange_bytes
from adacheck_store.redundancy.states import states
from adacheck_store.tools import plan_show, plan_survival
from adacheck_store.tools.plan import CostRow, PlanRow, ReachRow, Settings, SurvivalRow, plan
from adacheck_store.tools.plan_diff import UnsafeRow, nodes_of
from adacheck_store.tools.plan_looks import LookRow
from adacheck_store.tools.plan_models import Model, Tensor, model, shipped
from adacheck_store.tools.plan_records import base_head, delta_head, extra
from adacheck_store.tools.plan_strategy import (
    OPTIMIZERS,
    Strategy,
    holdings,
    items,
    merged,
    place,
)
from adacheck_store.tools.plan_survival import safe_sets, simulate, survivals
from adacheck_store.tools.plan_topology import FOLD_ELEMENTS_PER_S, Cluster, cluster
from adacheck_store.tools.plan_ways import ways
from tests.docs.pages import ROOT, blocks
from tests.redundancy.kit import ddp, topology, zero1, zero3
from tests.redundancy.ring import ring
from tests.redundancy.test_exchange import find, token
from tests.tools.stores import cli, cli_json

CLUSTER: dict[str, Any] = {
    "nodes": 4, "ranks_per_node": 2, "step_s": 2.0, "network_gbit_s": 8, "disk_gb_s": 1,
    "object_gb_s": 1, "memory_gib": 1, "disk_gib": 1, "cores": 1, "node_failures_per_day": 0.5,
}  # fmt: skip
WEIGHT = Model(name="w", tensors=(Tensor(name="w0", shape=(96,)),), cuts=True)
SMALL = {
    "family": "mixtral", "layers": 2, "hidden": 16, "inner": 24, "heads": 4, "kv_heads": 2,
    "vocab": 40, "experts": 4,
}  # fmt: skip
EACH = {
    "ddp": Strategy(kind="ddp"), "zero1": Strategy(kind="zero1"), "zero3": Strategy(kind="zero3"),
    "hsdp": Strategy(kind="hsdp", shard=2), "tp": Strategy(kind="tp-fsdp", tp=2),
    "ep": Strategy(kind="ep-zero1", ep=2), "tp-ep": Strategy(kind="ep-zero1", ep=2, tp=2),
    "pp": Strategy(kind="zero1", pp=2), "pp-tp": Strategy(kind="tp-fsdp", pp=2, tp=2),
}  # fmt: skip


def asked(strategy: Strategy, of: Model = WEIGHT, **more: Any) -> Settings:
    """A plan on the small cluster."""
    have = cluster(CLUSTER | more.pop("cluster", {}))
    return Settings(
        model=of, strategy=strategy, cluster=have, items=items("mixed", "lossless"),
        **{"trials": 50} | more,
    )  # fmt: skip


def costs(of: Settings, *names: str) -> list[CostRow]:
    """Costs of these ways: under agent, and live, if none is named."""
    found = {row.policy: row for row in plan(of) if isinstance(row, CostRow)}
    assert list(found) == ["off", "auto", "agent", "live"]
    return [found[name] for name in names or ("agent", "live")]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A Mixtral of a few thousand parameters, from a file."""
    path = tmp_path_factory.mktemp("plan") / "small.json"
    path.write_text(json.dumps(SMALL))
    return model(str(path))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2-124m", 124_439_808), ("gpt2-1.5b", 1_557_611_200), ("llama-7b", 6_738_415_616),
        ("llama-30b", 32_528_943_616), ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496), ("mixtral-8x7b", 46_702_792_704),
    ],
)  # fmt: skip
def test_shipped_models_have_their_published_parameters(name: str, parameters: int) -> None:
    """To the last one; and no model is shipped without a count here."""
    assert model(name).elements == parameters
    assert len(shipped()) == 7


def huge() -> torch.nn.Module:
    """Petabytes, were it not on the meta device; frozen in part."""
    built = torch.nn.Sequential(torch.nn.Linear(1 << 24, 1 << 24), torch.nn.Linear(2, 3))
    built[1].bias.requires_grad_(False)
    return built


def test_a_factory_is_built_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained parameters alone; experts by their names."""
    monkeypatch.setitem(sys.modules, "plan_factory", sys.modules[__name__])
    found = model("plan_factory:huge")
    assert [tensor.shape for tensor in found.tensors] == [(1 << 24, 1 << 24), (1 << 24,), (3, 2)]


def test_zero1_by_hand() -> None:
    """96 parameters of 2 + 12 bytes on 4 nodes of 2 ranks: 8 shards of 12 parameters."""
    agent, live = costs(asked(Strategy(kind="zero1")))
    rate = FOLD_ELEMENTS_PER_S * 2.0
    roles = 12 * 2, 12 * 4, 12 * 4, 12 * 4
    head, own = delta_head(1, 24, roles), extra(0)
    step, base = 24 + head, 168 + base_head(1, roles)
    assert agent == CostRow(
        policy="agent", parts=8, step=192, step_rank=2 * 24, base=96 * 14, base_rank=12 * 14,
        heads=8 * head, head_rank=head, extras=8 * own, extra_rank=own,
        network=8 * (step + own), network_node=2 * (step + own),
        ram_node=4 * base + 4 * 4 * (step + own) + base,
        nvme_node=3 * 2 * base + 2 * 64 * 2 * (step + own),
        object=3 * 8 * base + 2 * 64 * 8 * (step + own), cores_node=4 * 12 / rate,
    )  # fmt: skip
    assert live == replace(
        agent, policy="live", step_rank=24, ram_node=2 * base + 4 * (2 * step + 4 * own) + base,
        cores_node=2 * 12 / rate,
    )  # fmt: skip


def test_ddp_by_hand() -> None:
    """Agents hold it twice and the network carries extras alone; live keeps nothing but these."""
    agent, live = costs(asked(Strategy(kind="ddp")))
    roles = 96 * 2, 96 * 4, 96 * 4, 96 * 4
    head, base, own = delta_head(1, 192, roles), base_head(1, roles), extra(1)
    assert (agent.step, agent.step_rank, agent.base) == (192, 192, 1344)
    assert (agent.heads, agent.extras, agent.network) == (head, 8 * own, 8 * own)
    assert agent.ram_node == 2 * (1344 + base) + 4 * (192 + head + 4 * own)
    assert (live.step, live.base, live.heads) == (0, 0, 0)
    assert (live.network, live.ram_node) == (8 * own, 4 * 4 * own)
    assert live.base_rank == 1344
    assert live.object == 3 * (1344 + base) + 2 * 64 * 8 * own


def test_reach_by_hand() -> None:
    """8 Gbit/s are 10^9 bytes/s: a node sends a quarter of a step, and drains it."""
    big = Model(name="w", tensors=(Tensor(name="w", shape=(8 * 10**8,)),), cuts=True)
    rich = {"memory_gib": 100, "disk_gib": 1000}
    found = plan(asked(Strategy(kind="zero1"), big, cluster=rich))
    agent = next(r for r in found if isinstance(r, ReachRow) and r.policy == "agent")
    roles = 2 * 10**8, 4 * 10**8, 4 * 10**8, 4 * 10**8
    more = 2 * (delta_head(1, 2 * 10**8, roles) + extra(0))
    assert 40_000 < more < 80_000
    sent = 0.4e9 + more
    drained = sent + (2.8e9 + 2 * base_head(1, roles)) / 64
    assert agent.network == pytest.approx((sent + drained) / 2e9)
    assert agent.disk == pytest.approx(drained / 2e9)
    assert agent.object == pytest.approx(4 * drained / 2e9)
    assert agent.every_step
    assert (agent.interval, agent.t_ckpt_s) == (1, pytest.approx(sent / 1e9))
    assert agent.lost_s == pytest.approx(sent / 1e9 + 1)
    assert agent.lost_s_per_day == pytest.approx((sent / 1e9 + 1) * 4 * 0.5)
    slow = plan(asked(Strategy(kind="zero1"), big, cluster=rich | {"object_gb_s": 0.5}))
    agent = next(r for r in slow if isinstance(r, ReachRow) and r.policy == "agent")
    assert not agent.every_step
    assert (agent.t_ckpt_s, agent.interval) == (pytest.approx(22.4, rel=1e-4), 12)
    assert agent.lost_s == agent.t_ckpt_s + 12


def test_what_a_run_does_by_hand() -> None:
    """Off, every rank writes what it has: under ZeRO-1 192 bytes of parameter, of its own 12 the
    gradient instead. Shared, each is written once. Both go to the own node and to another one."""
    off, auto, agent = costs(asked(Strategy(kind="zero1")), "off", "auto", "agent")
    assert (off.parts, off.step, off.base) == (8, 8 * 192, 8 * (192 + 12 * 12))
    head = delta_head(2, 192, (192, 48, 48, 48))
    assert (off.heads, off.extras) == (8 * head, 8 * extra(0))
    assert off.network == off.step + off.heads + off.extras
    assert (off.step_rank, off.network_node) == (2 * 192, off.network // 4)
    assert replace(auto, policy="agent", step_rank=agent.step_rank) == agent
    off, auto = costs(asked(Strategy(kind="ddp")), "off", "auto")
    assert (off.step, off.base) == (8 * 192, 8 * 1344)
    assert (auto.parts, auto.step, auto.base) == (8, 192, 1344)
    assert (off.extra_rank, auto.extra_rank) == (extra(0), extra(1))
    assert auto.network == auto.step + auto.heads + auto.extras
    off, auto, agent = costs(asked(Strategy(kind="zero3")), "off", "auto", "agent")
    assert replace(off, policy="auto") == auto
    assert replace(auto, policy="agent") == agent


@pytest.mark.parametrize("name", EACH)
def test_what_a_look_sends(name: str, small: Model) -> None:
    """As much as the exchange itself and the paper's ring do, of tokens that lie so."""
    strategy, world = EACH[name], 8
    placed = place(small, strategy, world)
    (row,) = (r for r in plan(asked(strategy, small)) if isinstance(r, LookRow))
    tokens: list[list[bytes]] = [[] for _ in range(world)]
    for number, each in enumerate(placed):
        for role, cells in (("param", each.params), *((f"m{i}", each.optimizer) for i in range(3))):
            for shard, copies in enumerate(cells):
                for rank in copies:
                    tokens[rank].append(token(f"{number}/{role}/{shard}"))
    found, traffic = find(tokens)
    assert row.tensors == max(map(len, tokens))
    assert len(set(map(len, tokens))) == 1 or "pp" in name
    told = [{ranks for ranks in own.values() if 1 < len(ranks) < world} for own in found]
    sets, runs = (
        sum(count(ranks) for own in told for ranks in own)
        for count in (lambda ranks: 1, lambda ranks: len(runs_of(ranks)) // 3)
    )  # fmt: skip
    total = exchange_bytes(tokens=sum(map(len, tokens)), sets=sets, runs=runs).payload
    assert traffic.payload == total <= world * row.exchange < 1.3 * total
    assert row.exchange * world == total or "pp" in name
    assert row.counts == traffic.rounds * 8 * world
    groups = [frozenset().union(*each.params) for each in placed]
    assert ring(tokens, groups)[1] <= world * row.ring
    assert row.ring * world == ring(tokens, groups)[1] or "pp" in name


def test_more_ranks_than_are_compared_share_nothing() -> None:
    """A run says so too."""
    many = {"nodes": 2, "ranks_per_node": MOST_RANKS // 2 + 1}
    wide = asked(Strategy(kind="ddp"), cluster=many, failures=2)
    off, auto = costs(wide, "off", "auto")
    assert replace(auto, policy="off") == off
    assert not any(isinstance(row, LookRow) for row in plan(wide))


@pytest.mark.parametrize(
    ("strategy", "made"),
    [
        ("ddp", ddp(8)), ("zero1", zero1(8)), ("zero3", zero3(8)), ("hsdp", zero3(8, replicas=4)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("number", range(2), ids=["agent", "live"])
def test_totals_are_those_of_an_assignment_made_otherwise(
    strategy: str, made: dict[int, Any], number: int
) -> None:
    """Of holdings that the redundancy's own tests make."""
    found = costs(asked(EACH[strategy]))[number]
    parts = assign(states(made), topology(2, 2, 2, 2), policy=list(Policy)[number]).parts
    steps = [part.step_bytes(2) for part in parts]
    remote = [sum(not holder.local for holder in part.holders) for part in parts]
    assert found.parts == len(parts)
    assert found.step == sum(steps)
    heads = found.heads // len(parts) if found.heads else 0  # parts are all alike
    assert found.network == found.extras + sum(
        (step + heads) * far for step, far in zip(steps, remote, strict=True)
    )
    held = [sum(s.nbytes for s in part.states) for part in parts if part.holders]
    assert found.base == sum(held)


@pytest.mark.parametrize("name", EACH)
def test_tensors_alike_as_one_cost_the_same(name: str, small: Model) -> None:
    """Every row but the one that says how it was counted; shards are uneven on 6 or 12 ranks."""
    nodes = 6 if "-" in name else 3
    uneven = {"nodes": nodes, "nodes_per_rack": 1, "rack_failures_per_day": 0.1}
    each = asked(EACH[name], small, cluster=uneven, failures=3)
    first, *rest = plan(each)
    short, *same = plan(replace(each, enumerate_max=0))
    assert isinstance(first, PlanRow)
    assert isinstance(short, PlanRow)
    assert rest == same
    assert (first.counted, short.counted) == (
        "every tensor of every rank", "tensors of equal placement as one"
    )  # fmt: skip
    assert first.state_bytes == short.state_bytes == 14 * small.elements


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3", "hsdp", "tp", "ep", "tp-ep"])
def test_a_rank_holds_its_share(name: str, small: Model) -> None:
    """Elements of parameters and of the optimizer on every rank of 8."""
    cut = sum(tensor.elements for tensor in small.tensors if tensor.cut >= 0)
    expert = sum(tensor.elements for tensor in small.tensors if tensor.expert >= 0)
    every = small.elements
    params, optimizer = {
        "ddp": (every, every), "zero1": (every, every / 8), "zero3": (every / 8, every / 8),
        "hsdp": (every / 2, every / 2), "tp": (cut / 8 + (every - cut) / 4,) * 2,
        "ep": (every - expert + expert / 2, (every - expert) / 8 + expert / 8),
        "tp-ep": (
            every - cut + (cut - expert) / 2 + expert / 4,
            every / 8,
        ),
    }[name]  # fmt: skip
    found = holdings(place(small, EACH[name], 8), items("fp32", "lossless"))
    assert sorted(found) == list(range(8))
    for held in found.values():
        assert sum(h.param.nbytes for h in held if h.param) == 4 * params
        assert sum(h.optimizer.nbytes for h in held if h.optimizer) == 8 * optimizer


def test_what_tensor_parallelism_leaves_whole_has_copies_beside_it(small: Model) -> None:
    """With --tp 2 the shards of norms are on neighbours, and cuts on every second rank alone."""
    placed = place(small, EACH["tp"], 8)
    norm = next(each for each in placed if each.name == "norm")
    assert norm.params == tuple(frozenset((at, at + 1)) for at in range(0, 8, 2))
    head = [each for each in placed if each.name == "lm_head"]
    assert [each.scope for each in head] == ["tp0", "tp1"]
    assert head[1].params == tuple(frozenset((at,)) for at in range(1, 8, 2))


def test_stages_hold_layers_of_their_own(small: Model) -> None:
    """Two layers on two stages of four ranks; what is before goes to the first, the head to the
    last; in a stage all is as it would be on its ranks alone."""
    placed = {(p.name, p.scope): p for p in place(small, EACH["pp"], 8)}
    first, last = frozenset(range(4)), frozenset(range(4, 8))
    for name, ranks in (
        ("embed_tokens", first), ("layers.0.w", first), ("layers.1.w", last), ("lm_head", last)
    ):  # fmt: skip
        found = [p for (each, _), p in placed.items() if each.startswith(name[:9])]
        assert found
        assert {p.params for p in found} == {(ranks,)}, name
        assert {p.optimizer for p in found} == {tuple(frozenset((r,)) for r in sorted(ranks))}
    inner = place(small, Strategy(kind="tp-fsdp", tp=2), 4)
    for one, other in zip(inner, place(small, EACH["pp-tp"], 8), strict=True):
        shift = 4 * (min(map(min, other.params)) >= 4)
        moved = tuple(frozenset(rank + shift for rank in cell) for cell in one.params)
        assert (one.name, moved) == (other.name, other.params)


def names(count: int) -> list[str]:
    """Nodes."""
    return [f"n{number:03}" for number in range(count)]


def split(count: int, k: int) -> list[list[str]]:
    """Nodes in groups of k."""
    return [names(count)[at : at + k] for at in range(0, count, k)]


@pytest.mark.parametrize(
    ("count", "k", "failures", "full", "ring", "pairs"),
    [
        (32, 2, 4, 0.8098, 0.8098, 0.8098), (32, 4, 4, 0.9998, 0.6509, 0.4983),
        (64, 4, 4, 1.0, 0.8187, 0.7333), (128, 2, 4, 0.9529, 0.9529, 0.9529),
        (128, 8, 4, 1.0, 0.9077, 0.6988), (128, 4, 8, 0.9998, 0.6271, 0.4821),
    ],
)  # fmt: skip
def test_published_schemes(
    count: int, k: int, failures: int, full: float, ring: float, pairs: float
) -> None:
    """Groups lost whole, by two neighbours on a ring of each, by any two; and pairs by formula."""
    groups = split(count, k)
    rings = [frozenset((g[i], g[(i + 1) % k])) for g in groups for i in range(k)]
    twos = [frozenset(two) for g in groups for two in itertools.combinations(g, 2)]
    for kind, wanted in ([frozenset(g) for g in groups], full), (rings, ring), (twos, pairs):
        found = survivals(names(count), kind, failures)
        assert found is not None
        assert found[failures] == pytest.approx(wanted, abs=5e-5)
        if k == 2:
            half = count // 2
            exact = math.comb(half, failures) * 2**failures / math.comb(count, failures)
            assert found[failures] == pytest.approx(exact, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_counting_against_brute_force(data: st.DataObject) -> None:
    """Any groups whatever on up to 9 nodes."""
    nodes = names(data.draw(st.integers(1, 9)))
    groups = data.draw(st.lists(st.frozensets(st.sampled_from(nodes), min_size=1), max_size=7))
    found = safe_sets(nodes, groups, len(nodes))
    for lost, count in enumerate(found or ()):
        sets = map(frozenset, itertools.combinations(nodes, lost))
        assert count == sum(not any(group <= each for group in groups) for each in sets)
    assert found is not None


def test_too_much_to_count_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pairs of halves that are far apart: nothing is finished before the middle."""
    monkeypatch.setattr(plan_survival, "CASES_MAX", 5000)
    nodes = names(80)
    groups = [frozenset((a, b)) for a, b in zip(nodes[:40], nodes[40:], strict=True)]
    groups.append(frozenset(nodes[:40]))
    groups += [frozenset((a, b)) for a, b in itertools.pairwise(nodes[40:])]
    assert safe_sets(nodes, groups, 40) is None


@pytest.mark.parametrize("failures", [2, 3, 4])
def test_simulation_agrees_where_racks_never_fail(failures: int) -> None:
    """Within four standard errors of the exact probability, for a ring of 16."""
    nodes = names(16)
    ring = [frozenset((nodes[at], nodes[at - 1])) for at in range(16)]
    exact = survivals(nodes, ring, failures)
    units = dict.fromkeys((frozenset((node,)) for node in nodes), 0.1)
    units[frozenset(nodes[:4])] = 0.0
    found = simulate(units, ring, failures, trials=4000, seed=1)
    assert exact is not None
    assert found.error > 0
    assert abs(found.share - exact[failures]) < 4 * found.error
    assert found == simulate(units, ring, failures, trials=4000, seed=1)
    assert found != simulate(units, ring, failures, trials=4000, seed=2)


def test_racks_that_fail_take_their_pairs_with_them() -> None:
    """4 nodes and 2 racks at one rate, a pair in each rack: one failure in three is a rack."""
    groups = [frozenset(pair) for pair in split(4, 2)]
    units = dict.fromkeys([frozenset((node,)) for node in names(4)] + groups, 1.0)
    found = simulate(units, groups, 1, trials=6000, seed=3)
    assert abs(found.share - 2 / 3) < 4 * found.error
    apart = [frozenset(pair) for pair in (("n000", "n002"), ("n001", "n003"))]
    assert simulate(units, apart, 1, trials=500, seed=3).share == 1


def test_racks_as_domains_outlive_a_rack() -> None:
    """Holders are in other racks then, so no single failure loses anything."""
    racks = {"nodes_per_rack": 2, "rack_failures_per_day": 5.0}
    for domains, safe in ("node", False), ("rack", True):
        each = asked(Strategy(kind="zero3"), cluster=racks | {"domains": domains}, trials=300)
        for one in plan(each):
            if isinstance(one, SurvivalRow) and one.failures == 1:
                assert one.exact == 1
                assert (one.racks == 1) is safe


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("way", ["off", "auto", "agent", "live"])
@pytest.mark.parametrize("merge", [False, True], ids=["each", "merged"])
def test_what_another_topology_makes_unsafe(name: str, way: str, merge: bool, small: Model) -> None:
    """Just the bytes that some loss of k domains there takes, by losing each set of them."""
    racks = {"nodes_per_rack": 2, "domains": "rack"}
    for change in racks, {"nodes": 3}, racks | {"nodes": 3}, {}:
        other = cluster(CLUSTER | change)
        each = asked(EACH[name], small, other=other, enumerate_max=0 if merge else 10**6)
        rows = [row for row in plan(each) if isinstance(row, UnsafeRow)]
        placed = place(small, EACH[name], 8)
        of = merged(placed, each.items) if merge else states(holdings(placed, each.items))
        found = ways(tuple(of), each.cluster.topology(), each.k)[way]
        domain = other.topology().domain
        lost = 0
        for part in found.parts:
            there = {domain[node] for node in nodes_of(part, found) if node in domain}
            taken = any(there <= {gone} for gone in domain.values())
            lost += sum(state.nbytes for state in part.states) if taken else 0
        assert sum(row.bytes for row in rows if row.policy == way) == lost
        assert all(row.after < min(each.k, row.before) for row in rows)
        assert change or not rows


def test_unsafe_tensors_are_named(tmp_path: Path) -> None:
    """Of holders in pairs of neighbours, racks of two take both: which tensors, how many bytes."""
    paths = [tmp_path / "now.json", tmp_path / "then.json"]
    for path, change in zip(paths, ({}, {"nodes_per_rack": 2, "domains": "rack"}), strict=True):
        path.write_text(json.dumps(CLUSTER | change))
    words = "gpt2-124m", paths[0], "--strategy", "zero3", "--trials", 1
    code, document = cli_json("plan", *words, "--diff", paths[1])
    assert code == 0
    found = {row["policy"]: row for row in document["rows"] if row["row"] == "UnsafeRow"}
    assert list(found) == ["off", "auto", "agent", "live"]
    agent = found["agent"]
    assert (agent["before"], agent["after"]) == (1, 0)
    assert agent["tensors"].startswith("h.0.attn.c_attn.bias, ")
    assert agent["tensors"].endswith(" and 145 more")
    shown = cli("plan", *words, "--diff", paths[1]).stdout
    assert "less safe" in shown
    assert "less safe" not in cli("plan", *words, "--diff", paths[0]).stdout


GOOD = "gpt2-124m", "--strategy", "zero1"


@pytest.mark.parametrize(
    ("arguments", "change", "words"),
    [
        (("gpt5",), {}, "no such model: 'gpt5'"),
        (("no.json",), {}, "no dimensions of a model"),
        (("nowhere_at_all:f",), {}, "no factory"),
        (("json:dumps",), {}, "json:dumps failed: TypeError"),
        (("builtins:dict",), {}, "returned a dict"),
        ((*GOOD[:2], "magic"), {}, "strategy 'magic'"),
        ((*GOOD[:2], "ddp", "--tp", "2"), {}, "ddp has no --tp"),
        ((*GOOD, "--tp", "2"), {}, "wte of (50257, 768)"),
        (("gpt2-124m", "--strategy", "hsdp", "--shard", "3"), {}, "--shard 3"),
        (("gpt2-124m", "--strategy", "hsdp"), {}, "--shard 0"),
        (("gpt2-124m", "--strategy", "tp-fsdp", "--tp", "2"), {}, "wte of (50257, 768)"),
        (("gpt2-124m", "--strategy", "ep-zero1", "--ep", "2"), {}, "0 experts"),
        (("mixtral-8x7b", "--strategy", "ep-zero1", "--ep", "3"), {}, "--ep 3"),
        ((*GOOD, "--pp", "3"), {}, "zero1 on 8 ranks with --pp 3"),
        ((*GOOD, "--pp", "2", "--tp", "8"), {}, "zero1 on 4 ranks with --tp 8"),
        (("plan_factory:huge", "--pp", "4"), {}, "2 numbered layers, --pp is 4"),
        (("plan_factory:huge", "--tp", "2"), {}, "does not say how"),
        ((*GOOD, "--optimizer", "magic"), {}, "optimizer 'magic'"),
        ((*GOOD, "--gradients", "int8"), {}, "gradients 'int8'"),
        ((*GOOD, "--k", "4"), {}, "k=4 needs 5 failure domains"),
        ((*GOOD, "--k", "-1"), {}, "k is -1"),
        ((*GOOD, "--window", "0"), {}, "window is 0"),
        ((*GOOD, "--failures", "5"), {}, "5 failures of 4 nodes"),
        (GOOD, {"nodes": 0}, "nodes is 0"),
        (GOOD, {"nodes": 2.5}, "nodes is 2.5"),
        (GOOD, {"nodes": True}, "nodes is True"),
        (GOOD, {"step_s": "5"}, "step_s is '5'"),
        (GOOD, {"step_s": math.nan}, "step_s is nan"),
        (GOOD, {"gpus": 8}, "unknown in the topology: gpus"),
        (GOOD, {"cores": None}, "cores is None"),
        (GOOD, {"domains": "zone"}, "domains is 'zone'"),
        (GOOD, {"domains": "rack"}, "nodes_per_rack is not given"),
        (GOOD, {"nodes_per_rack": 5}, "nodes_per_rack is more than nodes"),
    ],
)  # fmt: skip
def test_bad_input(
    arguments: tuple[str, ...],
    change: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 2, one line that says what is wrong and what to do."""
    monkeypatch.setitem(sys.modules, "plan_factory", sys.modules[__name__])
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(CLUSTER | change))
    result = cli("plan", arguments[0], path, *arguments[1:])
    assert result.exit_code == 2
    assert words in result.stderr
    assert " -> " in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [("nodes = ", "no topology"), (None, "no topology"), ("nodes = 4", "missing in the topology")],
)
def test_bad_topology_file(text: str | None, words: str, tmp_path: Path) -> None:
    """Not TOML, not there, half of it; as JSON where JSON is asked for."""
    path = tmp_path / "cluster.toml"
    if text is not None:
        path.write_text(text)
    code, document = cli_json("plan", "gpt2-124m", path)
    assert code == 2
    assert words in json.dumps(document)
    assert str(path) in json.dumps(document)


def test_the_example_of_the_docs_is_what_comes_out(tmp_path: Path) -> None:
    """The page's topology gives the page's tables; with --json the same numbers."""
    given_text, command, shown = (block.text for block in blocks(ROOT / "docs" / "plan.md")[:3])
    path = tmp_path / "cluster.toml"
    path.write_text(given_text)
    words = [str(path) if word == "cluster.toml" else word for word in command.split()[1:]]
    result = cli(*words)
    assert result.exit_code == 0, result.output
    assert result.stdout == shown
    code, document = cli_json(*words, "--trials", 1)
    assert code == 0
    assert {row["row"] for row in document["rows"]} == {
        "PlanRow", "LookRow", "CostRow", "ReachRow", "SurvivalRow"
    }  # fmt: skip
    (agent,) = (r for r in document["rows"] if r["row"] == "ReachRow" and r["policy"] == "agent")
    assert re.search(rf"lost by a failure .* {agent['lost_s']:.2f} s ", shown)


def test_plot_without_matplotlib_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the extra to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"adacheck-store\[plot\]"):
        plan_show.plot([], "x.png")


def test_plot(tmp_path: Path) -> None:
    """A picture, or an error for a name that is none."""
    pytest.importorskip("matplotlib")
    rows = list(plan(asked(Strategy(kind="zero3"))))
    plan_show.plot(rows, str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="no picture"):
        plan_show.plot(rows, str(tmp_path / "plan.nothing"))


def test_bytes_per_element() -> None:
    """Half with masters 14 and a seventh of it; all of 4 bytes 12, and a sixth as bf16."""
    mixed, full = items("mixed", "lossless"), items("fp32", "bf16")
    assert (mixed.param + mixed.optimizer) / mixed.gradient == 7
    assert (full.param + full.optimizer) / full.gradient == 6
    assert items("fp32", "lossless").gradient == 4
    state = {name: items(name, "lossless") for name in OPTIMIZERS}
    assert {name: each.param + each.optimizer for name, each in state.items()} == {
        "mixed": 14, "fp32": 12, "amsgrad": 16, "momentum": 8, "sgd": 4
    }  # fmt: skip


def test_units_and_names() -> None:
    """The last rack may be smaller; rates of a rack of one node and of the node add up."""
    have = Cluster(**CLUSTER | {"nodes": 5, "nodes_per_rack": 2, "rack_failures_per_day": 0.25})
    assert [len(rack) for rack in have.racks] == [2, 2, 1]
    assert have.units[frozenset(("n4",))] == 0.75
    assert sum(have.units.values()) == pytest.approx(5 * 0.5 + 3 * 0.25)
