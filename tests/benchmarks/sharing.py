"""What sharing copies costs a step: two ranks that share what they have, and that do not, in turn.

A trainer sleeps through three fifths of each step, as one does that waits for a GPU. Nothing is
drained and no base made on the clock: these cost less where less is written. Called by itself too:
``python -m tests.benchmarks.sharing ddp`` measures that alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import adacheck_store as ada
from adacheck_store.demo.model import VOCABULARY, ByteGPT
from tests.agent.kit import free_port

from .rows import Row, median

RANKS, WIDTH, LENGTH = 2, 640, 32
KINDS = ("ddp", "fsdp2")
ROUNDS, ALONE, STEPS = 3, 6, 22
WAYS = ("off", "auto")
LOOKS, STEADY = (15, 16), (9, 10, 11, 12, 13, 14, 17, 18, 19, 20, 21, 22)
"""Steps at which ranks look, and such at which nothing but training and saving happens. They look
at 1 to 4, 7 and 8 too, and go over to shared parts at 2."""

SLEEP, LIMIT, WAIT_S = 0.6, 1.02, 1800.0
SETTINGS: dict[str, Any] = {
    "policy": "bf16", "base_every": 1 << 20, "object_lag": 1 << 20,
}  # fmt: skip


class Trainer:
    """One rank's training: a GPT over bytes that repeat, with fused AdamW."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(3)
        plain = ByteGPT(WIDTH)
        self.parameters = sum(p.numel() for p in plain.parameters())
        if kind == "fsdp2":
            mesh = init_device_mesh("cpu", (RANKS,))
            for layer in plain.layers:
                fully_shard(layer, mesh=mesh)
            self.model: torch.nn.Module = fully_shard(plain, mesh=mesh)
        else:
            self.model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.sleep_s = 0.0

    def step(self) -> None:
        """One, and its sleep."""
        text = torch.randint(VOCABULARY, (1, LENGTH + 1))
        self.model(text[:, :-1], text[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        time.sleep(self.sleep_s)

    def alone(self) -> list[float]:
        """Seconds of some steps without a store."""
        return [_seconds(self.step) for _ in range(ALONE)]

    def settle_sleep(self) -> None:
        """Find the sleep that makes up its share of a step of both trainers."""
        found: list[Any] = [None] * RANKS
        dist.all_gather_object(found, median(self.alone()))
        self.sleep_s = max(found) * SLEEP / (1 - SLEEP)

    def saved(self, store: Path, redundancy: str) -> dict[str, Any]:
        """Seconds of each step of a run of its own, and processor seconds of other threads."""
        ckpt = ada.attach(
            self.model, self.optimizer, run="bench", store=store.as_uri(), redundancy=redundancy,
            **SETTINGS,
        )  # fmt: skip
        ckpt.restore()

        def step() -> None:
            self.step()
            ckpt.end_step()

        walls = [_seconds(step) for _ in range(STEADY[0] - 1)]
        used = time.process_time() - time.thread_time()
        walls += [_seconds(step) for _ in range(STEPS - len(walls))]
        used = time.process_time() - time.thread_time() - used
        ckpt.flush(300.0, far=False)
        status = ckpt.status()
        ckpt.close()
        said, stored = status.redundancy, status.bytes_stored
        return {"walls": walls, "others": used, "said": said, "stored": stored}


def _seconds(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(folder: Path, kind: str) -> None:
    """Be a rank: measure, and write down what came out."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainer = Trainer(kind)
    trainer.alone()
    trainer.settle_sleep()
    rows = []
    for number in range(ROUNDS):
        row: dict[str, Any] = {"none": trainer.alone()}
        for way in WAYS if number % 2 else reversed(WAYS):
            store = folder / f"store-{number}-{way}"
            row[way] = trainer.saved(store, way)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(store)
            dist.barrier()
        rows.append(row | {"parameters": trainer.parameters})
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def rows(kinds: tuple[str, ...] = KINDS) -> Iterator[Row]:
    """For each way to train: the ratio, what looks cost, and other threads' time."""
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="adacheck-bench-", dir=os.curdir) as name:
            folder = Path(name).absolute()
            there = {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                "WORLD_SIZE": str(RANKS), "GLOO_SOCKET_IFNAME": "lo",
            }  # fmt: skip
            command = [sys.executable, "-m", "tests.benchmarks.sharing", str(folder), kind]
            running = [
                subprocess.Popen(
                    command, env=os.environ | there | {"RANK": str(r), "LOCAL_RANK": str(r)}
                )
                for r in range(RANKS)
            ]
            for process in running:
                assert process.wait(WAIT_S) == 0, "a trainer has failed: see what it said"
            told = [json.loads((folder / f"rank{r}.json").read_text()) for r in range(RANKS)]
            yield from _rows_of(kind, told)


def _rows_of(kind: str, told: list[list[dict[str, Any]]]) -> Iterator[Row]:
    found = told[0]  # ranks wait for each other in every step

    def walls(row: dict[str, Any], way: str, steps: tuple[int, ...]) -> list[float]:
        return [row[way]["walls"][step - 1] for step in steps]

    def steady(row: dict[str, Any], way: str) -> float:
        return sum(walls(row, way, STEADY)) / len(STEADY)

    ratios = [steady(row, "auto") / steady(row, "off") for row in found]
    none = median([median(row["none"]) for row in found])
    ratio = median(ratios)
    yield Row(
        f"step time, {kind} on {RANKS} ranks, copies shared / not", f"{ratio:.3f}",
        f"<= {LIMIT}", ratio <= LIMIT,
        ", ".join(f"{each:.3f}" for each in ratios)
        + f"; not shared / no store {median([steady(r, 'off') for r in found]) / none:.3f}; none "
        f"{none * 1e3:.0f} ms, of which {SLEEP:.0%} asleep; "
        f"{found[0]['parameters'] / 1e6:.1f} M parameters; {found[0]['auto']['said']}",
    )  # fmt: skip
    more = {
        what: 1e3 * median([
            (sum(walls(row, "auto", at)) - len(at) * steady(row, "auto")) / count for row in found
        ])
        for what, at, count in (("look", LOOKS, 1), ("switch", (2,), 1))
    }  # fmt: skip
    yield Row(
        "  a look at two boundaries takes, together", f"+{more['look']:.0f} ms", "", None,
        f"the step at which ranks go over to shared parts {more['switch']:+.0f} ms",
    )  # fmt: skip
    for what, key, unit in (("processor time of other threads", "others", "ms"),
                            ("bytes stored", "stored", "MB")):  # fmt: skip
        by_way = {
            way: median([sum(rank[n][way][key] for rank in told) for n in range(len(found))])
            for way in WAYS
        }
        scale = 1e3 / (STEPS - STEADY[0] + 1) if key == "others" else 1e-6 / STEPS
        yield Row(
            f"  {what}, a step, both ranks, shared / not",
            f"{by_way['auto'] / by_way['off']:.2f}", "", None,
            f"{by_way['auto'] * scale:.1f} and {by_way['off'] * scale:.1f} {unit}",
        )  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(Path(sys.argv[1]), sys.argv[2])
    else:
        for line in rows(tuple(sys.argv[1:]) or KINDS):
            print(line.what, line.figure, line.bar, line.detail, sep=" | ", flush=True)
