"""One run under torchrun that loses, one after the other, all that it can lose.

Two nodes with a rank each, FSDP2, and an agent a node that keeps its neighbour's state too. Every
loss ends bit-equal to the uninterrupted run: parameters, moments, counters, rates, generators,
losses.
"""

import pytest

from tests.cluster.kit import Cluster

pytestmark = pytest.mark.fault

SIZES = {"steps": 48, "width": 20011}


def test_story(cluster):
    """All of it: each chapter goes on where the one before has left the run."""
    import time
    t0 = time.monotonic()
    made = cluster("fsdp", 2, SIZES)
    print("made", time.monotonic() - t0)
    start = made.start("ab")
    assert [row["restored"] for row in start.restored(0)] == [0, 0]
    print("begun", time.monotonic() - t0)
    start.gate(8)
    start.one(0, 1, "step", 5)
    start.kill(0, 1)
    rows = start.restored(1)
    print("killed one", time.monotonic() - t0, rows)
    start.held(1, 12)
    agents = made.pids("ab")
    made.settle("ab", 12)
    start.kill(1)
    rows = start.restored(2)
    print("killed all", time.monotonic() - t0, rows)
    assert made.pids("ab") == agents
    start.held(2, 15)
    made.host("b").lose()
    start.end()
    start = made.start("ac")
    rows = start.restored(0)
    print("lost b", time.monotonic() - t0, rows)
    start.finish(0, 48)
    print("end", time.monotonic() - t0)
