"""Drains of a real agent: a far tier that fails, one that hangs, one that must be spared."""

import os
import statistics
import time
from functools import partial
from pathlib import Path

from adacheck_store.agent import places
from adacheck_store.store import agent_tiers
from tests.agent.kit import Node
from tests.agent.trainer import RUN
from tests.benchmarks.resident import Flood
from tests.waits import until


def far(node: Node) -> dict[str, float]:
    """What a node tells of its drain to the far tier."""
    return node.status()["drains"]["far"]


def test_far_tier_that_fails_and_one_that_hangs(here: Node, tmp_path: Path) -> None:
    """Tries grow apart, the lag is seen, no step is slower; and all is drained in the end."""
    fails, hangs = tmp_path / "fails", tmp_path / "hangs"
    here.agent(fail=f"local.rename.before=raise-eio@{fails},local.folder.fsync.before=hang@{hangs}")
    flood = Flood(here, 1 << 10)
    fails.touch()
    flood.steps(10)
    pauses: list[float] = []

    def apart() -> bool:
        pause = far(here)["pause_s"]
        if pause and pause not in pauses:
            pauses.append(pause)
        return len(pauses) >= 2

    until(apart, "two pauses")
    assert pauses == [1.0, 2.0]
    assert "drain-far" in here.status()["errors"]
    fails.unlink()
    until(lambda: far(here)["pause_s"] == 0.0 and not here.status()["errors"], "it works again")

    def took(steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            began = time.perf_counter()
            flood.steps(1)
            found.append(time.perf_counter() - began)
        return found

    free, hanging = took(10), []  # the first ones warm up
    free.clear()
    for _ in range(3):
        hangs.touch()
        until(lambda: flood.caught_up() and far(here)["busy_s"] > 0.2, "it hangs")
        hanging += took(20)
        assert far(here)["lag_steps"] >= 20
        until(lambda: flood.session.status().behind, "the trainer is told")
        assert far(here)["lag_s"] > 0
        hangs.unlink()
        until(lambda: far(here)["busy_s"] < 0.2, "it goes on")
        free += took(20)
    # A step that waited for the far tier would take as long as that hangs: no question of a few ms.
    assert statistics.median(hanging) <= max(2.0 * statistics.median(free), 0.05)
    flood.session.flush(60.0)
    assert (far(here)["waiting_records"], far(here)["lag_steps"], far(here)["lag_s"]) == (0, 0, 0)
    assert flood.session.status().drained == flood.toy.step
    until(lambda: not flood.session.status().behind, "it is not behind any more")
    flood.session.close()


def test_drain_takes_no_more_than_it_may(here: Node) -> None:
    """The far tier gets the rate that was set, beyond one batch."""
    rate, delta = 64 << 10, 32 << 10
    here.agent("--drain-rate", str(rate))
    flood = Flood(here, 1 << 14)
    flood.steps(16)
    flood.session.flush(60.0, far=False)
    began, first = time.monotonic(), far(here)["drained_bytes"]
    until(lambda: far(here)["waiting_records"] == 0 or time.monotonic() - began > 5.0, "a while")
    passed_s, moved = time.monotonic() - began, far(here)["drained_bytes"] - first
    assert 0 < moved <= rate * passed_s + 16 * delta
    flood.session.close()


def test_drained_is_what_lies_there(here: Node, tmp_path: Path) -> None:
    """An agent that was killed and comes back says what the far tier can produce.

    A delta on the node's disk is lost before it is drained: a hole that only a base ends.
    """
    hangs = tmp_path / "hangs"
    agent = here.agent(fail=f"local.rename.before=hang@{hangs}")
    flood = Flood(here, 1 << 10)
    told = partial(here.ask, "news", part="p000000")
    until(lambda: told()["drained"] == 0, "the first base")
    hangs.touch()
    flood.steps(12)
    flood.session.flush(60.0, far=False)
    until(lambda: here.status()["drains"]["lmdb"]["waiting_records"] == 0, "all is on the disk")
    assert told()["drained"] == 0
    place = places.place_of(here.url, RUN, here.name)
    starting = places.take(place, place.starting)  # the trainer starts no agent meanwhile
    assert starting is not None
    agent.kill()
    agent.wait(60)
    lmdb, far_tier = agent_tiers(here.url, RUN, here.name)
    (lost,) = [key for key in lmdb.list(f"{RUN}/") if key.endswith("/p000000/delta/000000000010")]
    lmdb.delete([lost])
    lmdb.close()
    far_tier.close()
    here.agent()
    os.close(starting)
    flood.steps(1)  # tells the agent of the term, and is refused: nobody has the step before
    until(lambda: far(here)["waiting_records"] == 0 and told()["drained"] > 0, "it is drained")
    assert told()["drained"] == 9
    flood.steps(1)
    flood.session.flush(60.0)
    assert flood.session.status().drained == told()["drained"] == flood.toy.step == 14
    flood.session.close()
