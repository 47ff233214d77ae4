"""Ends that a run is meant for: a step that kills every attempt, and a SIGTERM to all of a job."""

import signal
import time

import pytest

from adacheck_store.catalog import read_catalog
from adacheck_store.recovery import plan_restore
from tests.agent.trainer import MEMORY, RUN
from tests.cluster.kit import GIVEN
from tests.waits import until

pytestmark = pytest.mark.fault

GRACE_S = 60.0


def test_poisoned_step_is_passed_over(cluster):
    """All holders have step 7, and whoever makes step 8 from it dies; said, and gone round."""
    steps = 14
    made = cluster(
        "fsdp", 2, {"steps": steps, "width": 2003}, lent=True,
        given={**GIVEN, "k": 1, "max_deaths": 2},
    )  # fmt: skip
    start = made.start("ab", faults={f"{restart}.1": "poisoned at 8" for restart in range(3)})
    start.held(0, 7)
    start.gate.open(steps)
    for restart in (1, 2):
        assert [row["restored"] for row in start.restored(restart)] == [7, 7]
    rows = start.restored(3)
    assert [row["restored"] for row in rows] == [6, 6]
    why = "steps after 6 are passed over: 2 attempts in a row have died without getting past step 7"
    assert [row["reasons"] for row in rows] == [[why], [why]]
    start.finish(3, steps)


def test_sigterm_to_a_whole_job(cluster):
    """Torchrun passes it on. All ranks stop at one boundary, agents drain that step, in time."""
    made = cluster(
        "fsdp", 2, {"steps": 400, "width": 203},
        agents={"memory": MEMORY, "grace_s": GRACE_S},
        given={**GIVEN, "k": 1, "sigterm_grace_s": GRACE_S, "object_lag": 1000},
    )  # fmt: skip
    start = made.start("ab")
    start.held(0, 5)
    start.gate.open(400)
    began = time.monotonic()
    for host in start.hosts:
        host.signal(signal.SIGTERM, agents=True)
    for torchrun in start.processes:
        torchrun.terminate()
    for torchrun in start.processes:
        assert torchrun.wait(120) != 0
    until(lambda: not any(host.pids(agents=True) for host in start.hosts), "the agents have ended")
    assert time.monotonic() - began <= GRACE_S
    start.check(0)
    last = start.every(0, "stopped")
    step = last[0]["stopped"]
    assert step == last[1]["stopped"] < 400
    assert [row["digest"] for row in last] == [known[step][0] for known in start.reference]
    with made.tiers() as tiers:
        assert plan_restore(read_catalog(tiers, RUN)).step == step
