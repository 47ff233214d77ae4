"""Copies on the ranks of two nodes are kept once, by agents too; a lost node's are found."""

import pytest

from adacheck_store.catalog import read_catalog
from adacheck_store.store import open_store
from tests.agent.trainer import RUN

pytestmark = pytest.mark.fault

SIZES = {"steps": 16, "width": 503}


def test_what_a_lost_node_has_written_of_all_is_with_the_other(cluster):
    """DDP: each rank writes half. All trainers are killed, then a node is lost with its agent."""
    made = cluster("ddp", 2, SIZES)
    start = made.start("ab")
    start.held(0, 5)
    start.kill(0)
    rows = start.restored(1)
    assert [(row["restored"], row["lost"]) for row in rows] == [(5, 0)] * 2
    assert [row["tiers"] for row in rows] == [["agent a"], ["agent b"]]
    start.held(1, 11)
    made.host("b").lose()
    start.end()
    start = made.start("ac")
    rows = start.restored(0)
    assert [(row["restored"], row["lost"]) for row in rows] == [(11, 0)] * 2
    assert [row["tiers"] for row in rows] == [["agent a"]] * 2
    start.finish(0, SIZES["steps"])
    made.end()
    with open_store(made.config["store"]) as store:
        catalog = read_catalog([store.far], RUN)
    sharing = [each for each in catalog.manifests.values() if each.redundancy is not None]
    assert len({each.term for each in sharing}) == 3
    for each in sharing:  # nine tensors of both ranks once, and a BatchNorm's statistics of each
        counts = [len(part.states) // 2 for part in each.redundancy.parts]
        assert sum(counts) == 9 + 4
        assert min(counts) >= 2 + 1
