"""Under torchrun, with its rendezvous and its restarts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.torchrun_worker import KILLED_AT
from tests.ranks.worker import STEPS, WINDOW, Launcher

pytestmark = [pytest.mark.fault, pytest.mark.slow]


def test_torchrun_restarts_the_ranks_and_they_go_on(tmp_path):
    """One rank is killed; torchrun starts all anew; the end is the uninterrupted run's.

    It keeps its store over restarts, in which gloo now and then finds addresses of the dead, and
    then gives up: so more restarts are allowed than one.
    """
    reference = Launcher(tmp_path, "fsdp", 2).reference()
    root = Path(__file__).resolve().parents[2]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--max-restarts", "8", "-m", "tests.ranks.torchrun_worker",
        (tmp_path / "store").as_uri(), str(tmp_path / "out"),
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(root), "ADACHECK_NODE": "node-a", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for rank, known in enumerate(reference):
        attempt, start, found = (tmp_path / f"out.{rank}").read_text().split()
        assert int(attempt) >= 1
        assert KILLED_AT - (WINDOW + 1) <= int(start) <= KILLED_AT + 1
        assert found == known[STEPS][0]
