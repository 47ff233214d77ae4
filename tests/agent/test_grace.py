"""SIGTERM to an agent with a grace: never exceeded, and the trainers' last steps are awaited."""

import subprocess
import sys
import time

from adacheck_store.restore import restore_state
from adacheck_store.store import open_store
from tests.agent.kit import ROOT, Node, Trainer, until
from tests.agent.trainer import RUN

HANGING = """
import sys
from pathlib import Path
from tests.e2e.worker import hang_while
hang_while(Path(sys.argv.pop(1)))
from adacheck_store.cli import main
main()
"""


def test_far_tier_that_hangs_is_left_within_the_grace(here: Node, tmp_path) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", HANGING, str(tmp_path / "hang"), "agent", here.url, "--run", RUN,
         "--node", here.name, "--grace", "8"],
        env=here.env, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    here.processes.append(agent)
    assert "agent of" in agent.stdout.readline()
    trainer = Trainer(here, 20)
    (tmp_path / "hang").touch()
    trainer.reach(20)
    trainer.kill()
    before = time.monotonic()
    agent.terminate()
    assert agent.wait(60) == 3
    assert time.monotonic() - before <= 8.0
    assert "records undrained" in agent.stdout.read()
    with open_store(here.url) as store:  # what the node's disk has is there
        assert restore_state(store.tiers, RUN).step == 20


def test_trainers_are_awaited(here: Node) -> None:
    agent = here.agent("--grace", "60")
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
    assert agent.wait(60) == 0
    assert "ended, all is drained" in agent.stdout.read()
    with open_store(here.url) as store:
        assert restore_state([store.far], RUN).step == 20
