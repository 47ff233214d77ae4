"""One run under torchrun that loses, one after the other, all that it can lose.

Two nodes with a rank each, FSDP2 with uneven and empty shards, and on each node an agent that
keeps the neighbour's state too. Every chapter ends bit-equal to the uninterrupted run: parameters,
moments, counters, rates, generators, losses.
"""

import signal
import time

import pytest

from adacheck_store.catalog import read_catalog
from adacheck_store.format.keys import parse_key
from adacheck_store.recovery import plan_restore
from adacheck_store.store import open_store
from adacheck_store.tools.fsck import fsck
from tests.agent.trainer import RUN
from tests.cluster.kit import GIVEN, Cluster, Start
from tests.waits import until

pytestmark = pytest.mark.fault

SIZES = {"steps": 40, "width": 20011}
STATE = 15 * 20011 // 2 * 12
"""Bytes of a rank's state: half of the two large layers, with moments."""


@pytest.mark.parametrize("lent", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_that_loses_all_there_is_to_lose(cluster, lent):
    """Chapter by chapter, each going on where the one before has left the run."""
    made = cluster("fsdp", 2, SIZES, lent=lent)
    chapters = (
        begins, loses_a_trainer, loses_all_trainers, fails_while_recovering, loses_a_node,
        is_haunted_by_a_zombie, loses_more_than_k,
    )  # fmt: skip
    start = None
    for chapter in chapters:
        before = time.monotonic()
        start = chapter(made, start)
        print(f"{chapter.__name__}: {time.monotonic() - before:.1f} s")
    start.finish(0, SIZES["steps"])
    made.end()
    with open_store(made.config["store"]) as store:
        damage = {item.kind for item in fsck(store) if getattr(item, "severity", "") == "damage"}
    assert damage <= {"hole", "gap"}  # what a lost node had not drained: told, and behind us


def begins(made: Cluster, start: None) -> Start:
    """Agents are started by the trainers, one a node."""
    start = made.start("ab")
    assert [row["restored"] for row in start.restored(0)] == [0, 0]
    made.agents = made.pids("ab")
    return start


def loses_a_trainer(made: Cluster, start: Start) -> Start:
    """One is killed while it trains; torchrun starts the ranks of both nodes anew."""
    start.gate.open(8)
    start.one(0, 1, "step", 5)
    start.kill(0, 1)
    for row in start.restored(1):
        assert 5 - (GIVEN["window"] + 1) <= row["restored"] <= 8
    assert made.pids("ab") == made.agents
    return start


def loses_all_trainers(made: Cluster, start: Start) -> Start:
    """Each rank comes back on its node: its state is there, and crosses no network."""
    start.held(1, 12)
    made.settle("ab", 12)
    start.kill(1)
    rows = start.restored(2)
    assert [(row["restored"], row["lost"]) for row in rows] == [(12, 0)] * 2
    assert [row["tiers"] for row in rows] == [["agent a"], ["agent b"]]
    assert all(sum(row["bytes"].values()) > STATE for row in rows)
    if made.network.counts:  # what does cross: heads, plans, and reports of the agents
        assert all(row["crossed"] < STATE // 4 for row in rows), rows
    assert made.pids("ab") == made.agents
    return start


def fails_while_recovering(made: Cluster, start: Start) -> Start:
    """One rank cannot fetch; the next time it is killed at it; then rank 0 after its claim."""
    start.held(2, 15)
    start.faults({"3.1": "fail fetching", "4.1": "die fetching", "5.0": "die claimed"})
    start.kill(2)
    rows = start.every(3, "refused")
    assert [row["touched"] for row in rows] == [False, False]
    assert "no bytes for you" in rows[0]["refused"]
    assert [row["error"] for row in rows] == ["GroupError", "OSError"]
    for restart, rank in ((4, 0), (5, 1)):
        row = start.one(restart, rank, "refused")
        assert f"rank {1 - rank} of 2 gave no sign of life for 3 s" in row["refused"]
        assert row["touched"] is False
    rows = start.restored(6)
    assert [(row["restored"], row["lost"]) for row in rows] == [(15, 0)] * 2
    assert made.pids("ab") == made.agents
    start.held(6, 18)
    return start


def loses_a_node(made: Cluster, start: Start) -> Start:
    """Trainers, agent and disk of b are gone; c is empty, and a's memory has all."""
    made.host("b").lose()
    start.end()
    start = made.start("ac", zombie=True)
    rows = start.restored(0)
    assert [(row["restored"], row["lost"]) for row in rows] == [(18, 0)] * 2
    assert [row["tiers"] for row in rows] == [["agent a"], ["agent a"]]
    if made.network.counts:
        assert rows[1]["crossed"] > STATE
    assert made.pids("a") == made.agents[:1]
    start.held(0, 21)
    made.settle("ac", 21)
    return start


def is_haunted_by_a_zombie(made: Cluster, start: Start) -> Start:
    """The trainer on c stands still and is taken for dead; it wakes when d has its place."""
    zombie, undead = made.host("c"), start
    term = zombie.status()["term"]
    zombie.signal(signal.SIGSTOP)
    made.host("a").stop_training()
    start = made.start("ad")
    rows = start.restored(0)
    assert [(row["restored"], row["lost"]) for row in rows] == [(21, 0)] * 2
    start.held(0, 24)
    undead.gate.open(SIZES["steps"])
    zombie.signal(signal.SIGCONT)
    assert zombie.status()["term"] in undead.one(0, 1, "fenced")["fenced"]  # the newer one
    assert undead.row(0, 1, "alone") is not None
    start.held(0, 25)
    until(lambda: not zombie.status()["trainers"], "the zombie has gone")
    zombie.ask("flush")
    with made.tiers("c") as tiers:
        late = {
            (tier.traits.name, key.step) for tier in tiers
            for key in map(parse_key, tier.list(f"{RUN}/{term}/"))
            if key.kind in ("base", "delta", "extra") and key.step > 21
        }  # fmt: skip
    # Its own disk may have a step that the two had in hand when they woke; nobody else has any.
    assert {step for _, step in late} <= {22, 23}
    assert {name for name, _ in late} <= {"lmdb"}
    zombie.lose()
    return start


def loses_more_than_k(made: Cluster, start: Start) -> Start:
    """Both memories are gone, and d's disk: what a's disk and the far tier have is what is left."""
    step = 27
    start.held(0, step)
    while True:
        made.settle("ad", step)
        with made.tiers() as tiers:
            kept = [parse_key(key) for key in tiers[0].list(f"{RUN}/")]
        drained = max(key.step for key in kept if (key.kind, key.part) == ("delta", "p000001"))
        if drained < step:
            break
        step += 1
        start.held(0, step)
    made.host("d").lose()
    start.end()
    made.host("a").kill_agent()
    with made.tiers("a") as tiers:
        left = plan_restore(read_catalog(tiers, RUN)).step
    assert left < step
    start = made.start("ae")
    for row in start.restored(0):
        assert (row["restored"], row["lost"]) == (left, step - left)
        assert any("p000001" in reason or "r000001" in reason for reason in row["reasons"])
    return start
