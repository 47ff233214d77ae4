"""A rank that dies when the process group is there and before it attaches: by SIGKILL."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.kit import ROOT, free_port

pytestmark = pytest.mark.fault

RANK = """
import os, signal, sys
import torch, torch.distributed as dist
import adacheck_store as ada
from adacheck_store.trainer_hooks import ranks

ranks.SAY_S = 1.0
ranks.find_group.__defaults__ = (600.0, 30.0, 8.0)  # in life 180 s for the others to attach
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
with ada.attach(model, optimizer, run="r", store=sys.argv[2]) as ckpt:
    ckpt.restore()
"""


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_that_dies_before_it_attaches_is_named(tmp_path: Path, victim: int) -> None:
    """Said soon, and an error in time, on each of the others; nothing is begun."""
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    host = subprocess.Popen(
        [sys.executable, "-c", "import sys, torch.distributed as dist\n"
         "store = dist.TCPStore('127.0.0.1', int(sys.argv[1]), is_master=True, "
         "wait_for_workers=False)\nprint('up', flush=True)\nsys.stdin.read()",
         env["MASTER_PORT"]], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert host.stdout is not None
    assert host.stdout.readline() == "up\n"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(victim), (tmp_path / "store").as_uri()],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=150)[1] for process in started]
    finally:
        for process in (*started, host):
            process.kill()
            process.communicate()
    for rank, (process, text) in enumerate(zip(started, said, strict=True)):
        if rank == victim:
            assert process.returncode == -signal.SIGKILL
            continue
        assert process.returncode == 1, text
        assert f"rank {victim} of 3: not attached yet; waiting 8 s in all" in text
        assert f"rank {victim} of 3 did not come in 8 s" in text
    assert not (tmp_path / "store" / "objects" / "r").exists()
