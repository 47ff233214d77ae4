"""The demo's training step with a checkpoint at every step: ours and the rivals."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import distributed
from torch.distributed import checkpoint as dcp

import adacheck_store as ada
from adacheck_store.demo.model import ByteGPT, LibraryText

from .rows import Row, median

BLOCK = 16
ROUNDS = 3
BATCH = 4


class Training:
    """The demo's model, trained in blocks of steps."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = ByteGPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.batches = iter(
            torch.utils.data.DataLoader(LibraryText(), batch_size=BATCH, shuffle=True)
        )

    def block(self, after_step: Callable[[], object], steps: int = BLOCK) -> float:
        """Mean wall seconds per step."""
        began = time.perf_counter()
        for _ in range(steps):
            loss = self.model(*next(self.batches))
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            after_step()
        return (time.perf_counter() - began) / steps

    def state(self) -> dict[str, Any]:
        """Model and optimizer state, by reference."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def _flat(training: Training) -> dict[str, torch.Tensor]:
    found = {f"model/{n}": p.detach() for n, p in training.model.named_parameters()}
    for name, param in training.model.named_parameters():
        for role in ("exp_avg", "exp_avg_sq"):
            found[f"optimizer/{name}/{role}"] = training.optimizer.state[param][role]
    return found


class Ours:
    """A block under `attach`: each block is a run of its own, flushed outside the clock."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._training, self._folder = training, folder
        self._number = 0
        self.cpu_s: list[float] = []
        self.bytes_per_step = 0.0

    def block(self) -> float:
        """Mean wall seconds per step with capture at every step."""
        self._number += 1
        store = self._folder / f"store-{self._number}"
        with ada.attach(
            self._training.model, self._training.optimizer, run="bench", store=store.as_uri(),
            policy="bf16", base_every=BLOCK, object_lag=8,
        ) as ckpt:  # fmt: skip
            ckpt.restore()
            ckpt.flush()
            before = ckpt.status()
            took = self._training.block(lambda: None)
            ckpt.flush()
            after = ckpt.status()
        self.cpu_s.append((after.background_cpu_s - before.background_cpu_s) / BLOCK)
        self.bytes_per_step = (after.bytes_stored - before.bytes_stored) / BLOCK
        shutil.rmtree(store)
        return took


class Rivals:
    """What others do at every step."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._training, self._folder = training, folder
        self._future: Any = None
        self._number = 0

    def torch_save(self) -> None:
        """`torch.save` with fsync."""
        with (self._folder / "rival.pt").open("wb") as file:
            torch.save(self._training.state(), file)
            file.flush()
            os.fsync(file.fileno())

    def safetensors(self) -> None:
        """`safetensors.torch.save_file`, without fsync."""
        save_file(_flat(self._training), self._folder / "rival.safetensors")

    def async_save(self) -> None:
        """`dcp.async_save`, waiting for the one before."""
        self.settle()
        self._number += 1
        target = self._folder / f"dcp-{self._number % 2}"
        shutil.rmtree(target, ignore_errors=True)
        self._future = dcp.async_save(self._training.state(), checkpoint_id=target)

    def settle(self) -> None:
        """Wait for what is in flight."""
        if self._future is not None:
            self._future.result()
        self._future = None


def rows() -> Iterator[Row]:
    """Step time, CPU and bytes of ours; step time of the rivals."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="adacheck-bench-", dir=os.curdir) as folder:
        root = Path(folder).absolute()
        store = distributed.FileStore(str(root / "rendezvous"), 1)
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        training = Training()
        parameters = sum(p.numel() for p in training.model.parameters())
        ours, rivals = Ours(training, root), Rivals(training, root)
        blocks: dict[str, Callable[[], float]] = {
            "adacheck-store": ours.block,
            "torch.save + fsync": lambda: training.block(rivals.torch_save),
            "safetensors save_file": lambda: training.block(rivals.safetensors),
            "dcp.async_save": lambda: training.block(rivals.async_save),
        }
        training.block(lambda: None, 4)
        ratios: dict[str, list[float]] = {name: [] for name in blocks}
        without: list[float] = []
        cpu = time.thread_time()
        for _ in range(ROUNDS):
            for name, block in blocks.items():
                without.append(training.block(lambda: None))
                ratios[name].append(block() / without[-1])
                rivals.settle()
        cpu = time.thread_time() - cpu
        distributed.destroy_process_group()
        yield from _step_rows(ratios, without, ours, parameters)


def _step_rows(
    ratios: dict[str, list[float]], without: list[float], ours: Ours, parameters: int
) -> Iterator[Row]:
    per = ours.bytes_per_step / parameters
    yield Row(
        "bytes per step and trained parameter (policy bf16)", f"{per:.3f}", "<= 2.05",
        per <= 2.05, f"{ours.bytes_per_step / 1e6:.2f} MB for {parameters / 1e6:.2f} M parameters",
    )  # fmt: skip
    for name, values in ratios.items():
        own = name == "adacheck-store"
        ratio = median(values)
        yield Row(
            f"step time, {name} at every step / none", f"{ratio:.3f}", "<= 1.03" if own else "",
            ratio <= 1.03 if own else None,
            f"{', '.join(f'{value:.3f}' for value in values)}; none {median(without) * 1e3:.0f} ms",
        )  # fmt: skip
    yield Row(
        "background CPU per step", f"{median(ours.cpu_s) * 1e3:.0f} ms", "", None,
        f"of a step of {median(without) * 1e3:.0f} ms on the other core",
    )  # fmt: skip
