"""A training script as torchrun starts it. The first attempt dies: one rank by SIGKILL."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path

import torch.distributed as dist

import adacheck_store as ada
from tests.ranks.worker import BASE_EVERY, STEPS, build, digest, step

KILLED_AT = 10


def main() -> None:
    """Train to the end, and write this rank's digest."""
    store, out = sys.argv[1:]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model, optimizer, schedule, loader = build("fsdp", rank, dist.get_world_size())
    warnings.simplefilter("error")
    with ada.attach(model, optimizer, run="e2e", store=store, base_every=BASE_EVERY) as ckpt:
        ckpt.track(schedule=schedule)
        start = ckpt.restore().step
        for number, batch in enumerate(ckpt.batches(loader), start + 1):
            if number > STEPS:
                break
            step(model, optimizer, schedule, batch)
            ckpt.end_step()
            if (rank, attempt, number) == (1, 0, KILLED_AT):
                os.kill(os.getpid(), signal.SIGKILL)
        found = f"{attempt} {start} {digest(model, optimizer, schedule)}"
        Path(f"{out}.{rank}").write_text(found, encoding="ascii")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
