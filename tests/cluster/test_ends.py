"""Ends that a run is meant for: a step that kills every attempt, and a SIGTERM to all of a job."""

import os
import signal
import time

import psutil
import pytest

from adacheck_store.catalog import read_catalog
from adacheck_store.format.errors import AdaCheckError
from adacheck_store.recovery import plan_restore
from tests.agent.trainer import MEMORY, RUN
from tests.cluster.kit import GIVEN
from tests.waits import until

pytestmark = pytest.mark.fault

GRACE_S, SHORT_S = 60.0, 10.0


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


def told_to_end(cluster, grace_s, drain_rate):
    """A job that gets SIGTERM at step 5, between two steps, agents, torchrun and trainers alike."""
    made = cluster(
        "fsdp", 2, {"steps": 400, "width": 203},
        agents={"memory": MEMORY, "grace_s": grace_s, "drain_rate": drain_rate},
        given={**GIVEN, "k": 1, "sigterm_grace_s": grace_s, "object_lag": 1000},
    )  # fmt: skip
    start = made.start("ab")
    start.held(0, 5)
    agents = made.pids("ab")
    began = time.monotonic()
    for agent in agents:
        os.kill(agent, signal.SIGTERM)
    for torchrun in start.processes:
        torchrun.terminate()
    return made, start, agents, began


def ended(start, agents, began):
    """Wait until trainers and agents have; seconds since, and at what step the ranks stopped."""
    trainers = [row["pid"] for row in start.every(0, "pid")]
    until(lambda: all(map(gone, [*trainers, *agents])), "trainers and agents have ended")
    took = time.monotonic() - began
    for torchrun in start.processes:
        assert torchrun.wait(120) != 0
    start.check(0)
    last = start.every(0, "stopped")
    step = last[0]["stopped"]
    assert step == last[1]["stopped"] < 400
    assert [row["digest"] for row in last] == [known[step][0] for known in start.reference]
    return took, step


def gone(pid):
    """Whether a process has ended, whoever is to learn of it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def waiting(host, place):
    """Records that wait for a place below an agent's memory."""
    return host.status()["drains"][place]["waiting_records"]


def test_sigterm_to_a_whole_job(cluster):
    """Agents have drained all there is, and wait for the trainers' last step: then that too.

    All ranks stop at one boundary. The far tier is slow: what has to get there takes seconds.
    """
    made, start, agents, began = told_to_end(cluster, GRACE_S, 16 << 10)
    until(lambda: all(waiting(host, "far") == 0 for host in start.hosts), "all there is is drained")
    assert time.monotonic() - began > 1.0
    time.sleep(1.0)
    assert made.pids("ab") == agents
    start.gate.open(400)
    took, step = ended(start, agents, began)
    assert took <= GRACE_S
    assert step == 6
    with made.tiers() as tiers:
        assert plan_restore(read_catalog(tiers, RUN)).step == step


@pytest.mark.slow
def test_a_grace_is_not_exceeded(cluster):
    """The far tier takes far longer than there is: all end in time, and the disks have the step."""
    made, start, agents, began = told_to_end(cluster, SHORT_S, 64)
    start.gate.open(400)
    took, step = ended(start, agents, began)
    assert took <= SHORT_S
    for host in start.hosts:
        (log,) = host.runtime.rglob("agent.log")
        assert "ended with the grace" in log.read_text()
    with made.tiers("a", "b") as tiers:
        assert plan_restore(read_catalog(tiers, RUN)).step == step
        with pytest.raises(AdaCheckError):
            plan_restore(read_catalog(tiers[:1], RUN))
