"""Further clusters: other kinds of runs, more nodes, no agents, and nodes of other makes."""

import pytest

from tests.cluster.kit import GIVEN

pytestmark = [pytest.mark.fault, pytest.mark.slow]

SIZES = {"steps": 24, "width": 2003}


def test_a_node_without_agents(cluster):
    """Two ranks of one node and its LMDBs: one rank is killed, torchrun starts both anew."""
    made = cluster("fsdp", 2, SIZES, agents=None)
    start = made.start("a", faults={"0.1": "die at 10"})
    start.gate.open(SIZES["steps"])
    for row in start.restored(1):
        assert 10 - (GIVEN["window"] + 1) <= row["restored"] <= 10
    start.finish(1, SIZES["steps"])


@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 2), ("fsdp", 4), ("hsdp", 4)])
def test_ranks_on_two_nodes(cluster, kind, ranks):
    """A trainer, all trainers, then a node.

    DDP on more than two ranks is not the same run after a restart, with or without a store: torch
    adds gradients up in another order before it has rebuilt its buckets than after.
    """
    made = cluster(kind, ranks, SIZES)
    start = made.start("ab")
    start.restored(0)
    agents = made.pids("ab")
    start.gate.open(7)
    start.one(0, ranks - 1, "step", 5)
    start.kill(0, ranks - 1)
    assert all(2 <= row["restored"] <= 7 for row in start.restored(1))
    start.held(1, 10)
    start.kill(1)
    rows = start.restored(2)
    assert [(row["restored"], row["lost"]) for row in rows] == [(10, 0)] * ranks
    half = ranks // 2
    assert [row["tiers"] for row in rows] == [["agent a"]] * half + [["agent b"]] * half
    assert made.pids("ab") == agents
    start.held(2, 14)
    made.host("b").lose()
    start.end()
    start = made.start("ac")
    rows = start.restored(0)
    assert [(row["restored"], row["lost"]) for row in rows] == [(14, 0)] * ranks
    assert [row["tiers"] for row in rows] == [["agent a"]] * ranks
    start.finish(0, SIZES["steps"])


def test_two_of_three_nodes_with_two_neighbours_each(cluster):
    """k=2: two domains are lost together, and nothing with them."""
    made = cluster("fsdp", 3, SIZES, given={**GIVEN, "k": 2})
    start = made.start("abc")
    start.restored(0)
    start.held(0, 9)
    made.host("a").lose()
    made.host("c").lose()
    start.end()
    start = made.start("bde")
    rows = start.restored(0)
    assert [(row["restored"], row["lost"]) for row in rows] == [(9, 0)] * 3
    assert [row["tiers"] for row in rows] == [["agent b"]] * 3
    start.finish(0, SIZES["steps"])


@pytest.mark.parametrize("way", [(("-Urn",),), ()])
def test_nodes_where_less_is_allowed(cluster, way):
    """In a user namespace, and on addresses of the loopback where the kernel allows neither."""
    made = cluster("fsdp", 2, SIZES, ways=way)
    assert made.network.how.startswith("network namespaces" if way else "addresses of the loop")
    start = made.start("ab")
    start.held(0, 7)
    start.kill(0)
    rows = start.restored(1)
    assert [(row["restored"], row["lost"]) for row in rows] == [(7, 0)] * 2
    assert [row["tiers"] for row in rows] == [["agent a"], ["agent b"]]
    start.finish(1, SIZES["steps"])
