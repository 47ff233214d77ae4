"""SIGTERM to an agent with a grace: never exceeded, and the trainers' last steps are awaited."""

import os
import signal
import subprocess
import sys
import time

import pytest

from adacheck_store.restore import restore_state
from adacheck_store.store import open_store
from tests.agent.kit import ROOT, Node, Trainer
from tests.agent.trainer import RUN
from tests.waits import WAIT_S, until

HANGING = """
import sys
from pathlib import Path
from tests.e2e.worker import hang_while
hang_while(Path(sys.argv.pop(1)))
from adacheck_store.cli import main
main()
"""

HOLDING = """
import os, signal, sys, threading
from adacheck_store.agent.signals import heed
lock, acted = threading.Lock(), threading.Event()
def act():
    with lock:
        acted.set()
heed(act)
with lock:  # as an event's or a thread's start has one, for microseconds
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    assert not acted.wait(0.2)
assert acted.wait(20.0)
"""


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_signal_while_the_main_thread_holds_a_lock(number: str) -> None:
    """What is to be done about it waits, beside the main thread and not within it."""
    words = [sys.executable, "-c", HOLDING, number]
    subprocess.run(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60,
                   check=True)  # fmt: skip


def test_far_tier_that_hangs_is_left_within_the_grace(here: Node, tmp_path) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", HANGING, str(tmp_path / "hang"), "agent", here.url, "--run", RUN,
         "--node", here.name, "--grace", "4"],
        env=here.env, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    here.processes.append(agent)
    assert "agent of" in agent.stdout.readline()
    trainer = Trainer(here, 20)
    (tmp_path / "hang").touch()
    trainer.reach(20)
    trainer.kill()
    until(lambda: not here.status()["drains"]["lmdb"]["waiting_records"], "all is in the LMDB")
    before = time.monotonic()
    agent.terminate()
    assert agent.wait(60) == 3
    assert time.monotonic() - before <= 8.0  # four, and what a busy machine takes to end
    assert "records undrained" in agent.stdout.read()
    with open_store(here.url) as store:  # what the node's disk has is there
        assert restore_state(store.tiers, RUN).step == 20


def test_trainers_are_awaited(here: Node) -> None:
    agent = here.agent("--grace", "600")  # more than a busy machine takes to get there
    trainer = Trainer(here, 20)
    trainer.reach(1)
    agent.terminate()
    trainer.reach(20)

    def drained() -> bool:
        return all(place["waiting_records"] == 0 for place in here.status()["drains"].values())

    until(drained, "all is drained")
    time.sleep(1.0)
    assert here.pid() == agent.pid, "it answers still"
    trainer.kill()
    assert agent.wait(WAIT_S) == 0
    assert "ended, all is drained" in agent.stdout.read()
    with open_store(here.url) as store:
        assert restore_state([store.far], RUN).step == 20


def test_a_stop_command_does_not_wait_for_trainers(here: Node) -> None:
    """A grace begins with the signal: without one nothing would end the wait."""
    agent = here.agent("--grace", "600")
    trainer = Trainer(here, 20)
    trainer.reach(20)
    here.ask("stop")
    assert agent.wait(WAIT_S) == 0
    assert "ended, all is drained" in agent.stdout.read()
    assert trainer.process.poll() is None
    with open_store(here.url) as store:
        assert restore_state([store.far], RUN).step == 20


def test_a_stop_command_spends_none_of_the_grace(here: Node) -> None:
    """Nor does the same signal told twice: to the group, and to the process."""
    agent = here.agent("--grace", "4", "--drain-rate", "100")
    trainer = Trainer(here, 20)
    trainer.reach(20)
    here.ask("stop")
    before = time.monotonic()
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        agent.send_signal(number)  # the two in the midst are taken at one moment
    assert agent.wait(WAIT_S) == 3
    assert time.monotonic() - before > 2.5  # of three that it may take
    assert "ended with the grace" in agent.stdout.read()


def test_a_trainer_that_is_not_heard_of_is_awaited(here: Node) -> None:
    """Stopped, or without a processor, for longer than it takes to count as gone."""
    agent = here.agent("--grace", "600")
    trainer = Trainer(here, 1_000_000)
    trainer.reach(3)
    agent.terminate()
    trainer.process.send_signal(signal.SIGSTOP)

    def left_alone() -> bool:
        told = here.status()
        waiting = [place["waiting_records"] for place in told["drains"].values()]
        return not told["trainers"] and not any(waiting)

    until(left_alone, "it counts as gone, and all it has sent is drained")
    time.sleep(1.0)
    assert here.pid() == agent.pid
    trainer.process.send_signal(signal.SIGCONT)
    until(lambda: here.status()["trainers"], "it is back")
    trainer.kill()
    assert agent.wait(WAIT_S) == 0
    assert "ended, all is drained" in agent.stdout.read()
