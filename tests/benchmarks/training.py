"""The training step that is measured, its clocks, and what others do at every step."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

from adacheck_store.demo.model import ByteGPT, LibraryText

BATCH = 4


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds per step: ``wall``, and of it the training thread's ``cpu`` and its time ``queued``
    for a processor; ``others`` is the processor time of all other threads of the process."""

    wall: float
    cpu: float
    queued: float
    others: float

    @property
    def blocked(self) -> float:
        """Seconds per step in which the training thread neither ran nor could have run."""
        return self.wall - self.cpu - self.queued


def _now() -> tuple[float, float, float, float]:
    own = time.thread_time()
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    queued = int(path.read_text().split()[1]) / 1e9 if path.exists() else 0.0
    return time.perf_counter(), own, queued, time.process_time() - own


def timed(work: Callable[[], object], steps: int) -> Clock:
    """The clock of some steps, run on this thread."""
    began = _now()
    work()
    return Clock(*((b - a) / steps for a, b in zip(began, _now(), strict=True)))


class Training:
    """The demo's model under fused AdamW, clipped, one thread."""

    def __init__(self, batch: int = BATCH) -> None:
        torch.manual_seed(3)
        self.model = ByteGPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        loader = torch.utils.data.DataLoader(LibraryText(), batch_size=batch, shuffle=True)
        self._batches = iter(loader)

    def run(self, steps: int, after_step: Callable[[], object] = lambda: None) -> None:
        """Some steps, with something done after each."""
        for _ in range(steps):
            loss = self.model(*next(self._batches))
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            after_step()

    def state(self) -> dict[str, Any]:
        """Model and optimizer state, by reference."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def flat(self) -> dict[str, torch.Tensor]:
        """The same as one flat mapping of tensors."""
        found = {f"model/{n}": p.detach() for n, p in self.model.named_parameters()}
        for name, param in self.model.named_parameters():
            for role in ("exp_avg", "exp_avg_sq"):
                found[f"optimizer/{name}/{role}"] = self.optimizer.state[param][role]
        return found


class Rivals:
    """What others do at every step, into a folder."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._training, self._folder = training, folder
        self._future: Any = None
        self._number = 0
        self.all: dict[str, Callable[[], None]] = {
            "torch.save + fsync": self.torch_save,
            "safetensors save_file": self.safetensors,
            "dcp.save": self.dcp_save,
            "dcp.async_save": self.dcp_async_save,
        }

    def torch_save(self) -> None:
        """`torch.save` with fsync."""
        with (self._folder / "rival.pt").open("wb") as file:
            torch.save(self._training.state(), file)
            file.flush()
            os.fsync(file.fileno())

    def safetensors(self) -> None:
        """`safetensors.torch.save_file`, without fsync."""
        save_file(self._training.flat(), self._folder / "rival.safetensors")

    def dcp_save(self) -> None:
        """`dcp.save` as it comes: to files, with its own fsync."""
        dcp.save(self._training.state(), checkpoint_id=self._target())

    def dcp_async_save(self) -> None:
        """`dcp.async_save`, waiting for the one before."""
        self.settle()
        self._future = dcp.async_save(self._training.state(), checkpoint_id=self._target())

    def _target(self) -> Path:
        self._number += 1
        target = self._folder / f"dcp-{self._number % 2}"
        shutil.rmtree(target, ignore_errors=True)
        return target

    def settle(self) -> None:
        """Wait for what is in flight."""
        if self._future is not None:
            self._future.result()
        self._future = None
