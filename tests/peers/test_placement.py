"""Placement: distinct domains, own node first, balanced, deterministic, or refused by name."""

import random
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from adacheck_store.format.errors import UsageError
from adacheck_store.placement import Node, choose, domains, parse_labels, place


@st.composite
def clusters(draw: st.DrawFn) -> tuple[dict[int, str], list[Node], int]:
    """Ranks on nodes, nodes on hosts, some of them labelled, and k."""
    count = draw(st.integers(1, 8))
    hosts = draw(st.lists(st.integers(0, 7), min_size=count, max_size=count))
    labels = draw(st.lists(st.sampled_from(["", "", "a", "b", "c"]), min_size=count,
                           max_size=count))  # fmt: skip
    nodes = [
        Node(name=f"n{i}", boot_id=f"boot{host}" if host else "", label=label)
        for i, (host, label) in enumerate(zip(hosts, labels, strict=True))
    ]
    try:
        domains(nodes)
    except UsageError:  # an unlabelled node among labelled ones: a case of its own
        assume(False)
    places = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=12))
    ranks = {rank: f"n{node}" for rank, node in enumerate(places)}
    return ranks, nodes, draw(st.integers(0, 3))


def apart(a: Node, b: Node) -> bool:
    """Whether two nodes may be called different failure domains at all."""
    if a.label and b.label:
        return a.label != b.label
    return not a.boot_id or a.boot_id != b.boot_id


@given(clusters())
def test_holders_are_of_distinct_domains_own_node_first(cluster) -> None:
    ranks, nodes, k = cluster
    by_name = {node.name: node for node in nodes}
    domain = domains(nodes)
    found = place(ranks, nodes, k, allow_degraded=True)
    assert found.holders.keys() == ranks.keys()
    want = min(k + 1, len(set(domain.values())))
    for rank, holders in found.holders.items():
        assert holders[0] == ranks[rank]
        assert len(holders) == want
        assert len({domain[name] for name in holders}) == want
        for name, other in combinations(holders, 2):
            assert apart(by_name[name], by_name[other])


@given(clusters(), st.randoms())
def test_the_order_of_the_input_does_not_matter(cluster, rng: random.Random) -> None:
    ranks, nodes, k = cluster
    first = place(ranks, nodes, k, allow_degraded=True)
    shuffled = list(ranks.items())
    rng.shuffle(shuffled)
    rng.shuffle(nodes)
    assert place(dict(shuffled), nodes, k, allow_degraded=True) == first


@given(clusters())
def test_too_few_domains_are_refused_by_name(cluster) -> None:
    ranks, nodes, k = cluster
    count = len(set(domains(nodes).values()))
    degraded = place(ranks, nodes, k, allow_degraded=True)
    if count > k:
        assert degraded.missing == ""
        assert place(ranks, nodes, k) == degraded
        return
    with pytest.raises(UsageError, match=f"k={k} needs {k + 1} failure domains") as caught:
        place(ranks, nodes, k)
    assert degraded.missing == caught.value.message
    assert all(node.name in caught.value.message for node in nodes)


@given(st.integers(2, 9), st.integers(1, 4), st.integers(1, 4))
def test_equal_nodes_carry_equal_loads(count: int, per_node: int, k: int) -> None:
    assume(k < count)
    nodes = [Node(name=f"n{i}", boot_id=f"b{i}") for i in range(count)]
    ranks = {rank: f"n{rank // per_node}" for rank in range(count * per_node)}
    holders = place(ranks, nodes, k).holders
    load = Counter(name for names in holders.values() for name in names[1:])
    assert set(load.values()) == {per_node * k}


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.integers(3, 6))
def test_sizes_are_balanced_within_the_largest(sizes: list[int], count: int) -> None:
    nodes = [Node(name=f"n{i}") for i in range(count)]
    ranks = dict.fromkeys(range(len(sizes)), "n0")
    holders = place(ranks, nodes, 1, sizes=dict(enumerate(sizes))).holders
    load = {f"n{i}": 0 for i in range(1, count)}
    for rank, names in holders.items():
        load[names[1]] += sizes[rank]
    assert max(load.values()) - min(load.values()) <= max(sizes)


def test_one_host_is_one_domain_unless_labels_say_otherwise() -> None:
    twins = [Node(name="a", boot_id="x"), Node(name="b", boot_id="x")]
    with pytest.raises(UsageError, match="there are 1: a and b \\(host x\\)"):
        place({0: "a"}, twins, 1)
    labelled = [Node(name="a", boot_id="x", label="r1"), Node(name="b", boot_id="x", label="r2")]
    assert place({0: "a"}, labelled, 1).holders == {0: ("a", "b")}
    with pytest.raises(UsageError, match="there are 1"):  # said of one of them only
        place({0: "a"}, [labelled[0], twins[1]], 1)
    racked = [Node(name="a", boot_id="x", label="r1"), Node(name="b", boot_id="y", label="r1")]
    with pytest.raises(UsageError, match="a and b \\(label r1\\)"):
        place({0: "a"}, racked, 1)


def test_a_node_that_may_be_anywhere_is_named() -> None:
    labels = {"a": "r1", "b": "r2", "c": ""}
    nodes = [Node(name=name, boot_id="x", label=label) for name, label in labels.items()]
    with pytest.raises(UsageError, match=r"c has no label, and .* several: r1, r2"):
        domains(nodes)


def test_a_rank_without_agent_is_named() -> None:
    with pytest.raises(UsageError, match="no agent on c"):
        place({0: "a", 1: "c"}, [Node(name="a"), Node(name="b")], 1)


def test_a_spare_takes_a_seat() -> None:
    domain = domains([Node(name=name) for name in "abcd"])
    assert choose(["a", "b"], domain, {"a": 1, "b": 1, "c": 2, "d": 1}) == "d"
    assert choose(["a", "b"], domain, {"a": 1, "b": 1}) is None


def test_labels_are_read_or_refused() -> None:
    assert parse_labels("# racks\nn1 z/r1/n1\n\nn2\tz/r2/n2  # new\n") == {
        "n1": "z/r1/n1", "n2": "z/r2/n2"
    }  # fmt: skip
    with pytest.raises(UsageError, match="line 2: not a node and a label"):
        parse_labels("n1 a\nn2\n")
    with pytest.raises(UsageError, match="line 2: a node named twice"):
        parse_labels("n1 a\nn1 b\n")
