"""The demo's training process. Run as a module by the harness; it may be killed at any moment.

It reports through a file that outlives it: the phase it is in and the last finished step in a
small shared memory map, and one JSON line per step.
"""

from __future__ import annotations

import argparse
import json
import mmap
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from adacheck_store.arrays import byte_view
from adacheck_store.format.ids import block_digest
from adacheck_store.trainer_hooks.attach import Checkpointer, attach

from .model import ByteGPT, LibraryText

PHASES = ("start", "data", "forward", "backward", "clip", "optimizer", "end_step", "done")
BATCH = 4
CLIP_NORM = 1.0
BASE_EVERY = 16
OBJECT_LAG = 8
WINDOW = 2

_BEAT = struct.Struct("<qq")


class Beat:
    """A 16-byte file shared with the harness: last finished step and phase."""

    def __init__(self, path: Path, *, create: bool) -> None:
        if create:
            path.write_bytes(_BEAT.pack(-1, 0))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BEAT.size)
        self._step = -1

    def phase(self, name: str) -> None:
        """Enter a phase."""
        self._map[:] = _BEAT.pack(self._step, PHASES.index(name))

    def finished(self, step: int) -> None:
        """A step is finished."""
        self._step = step
        self._map[:] = _BEAT.pack(step, PHASES.index("data"))

    def read(self) -> tuple[int, str]:
        """Last finished step and the phase entered last."""
        step, phase = _BEAT.unpack(self._map[:])
        return step, PHASES[phase]


class Run:
    """Model, optimizer, schedule and data, made anew and alike in every process."""

    def __init__(self, seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        self.steps = steps
        self.model = ByteGPT()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, weight_decay=0.1, fused=True
        )
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=1e-3, total_steps=steps + 1
        )
        self.loader = DataLoader(LibraryText(), batch_size=BATCH, shuffle=True)

    def round_gradients(self) -> None:
        """What policy ``bf16`` does, for the reference that runs without a store."""
        for param in self.model.parameters():
            if param.grad is not None:
                param.grad.copy_(param.grad.bfloat16())

    def step(self, batch: Any, beat: Beat, clip: Callable[..., Any], *, rounding: bool) -> float:
        """One training step; returns the loss."""
        beat.phase("forward")
        loss = self.model(*batch)
        beat.phase("backward")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        beat.phase("clip")
        clip(self.model.parameters(), CLIP_NORM)
        beat.phase("optimizer")
        if rounding:
            self.round_gradients()
        self.optimizer.step()
        self.schedule.step()
        beat.phase("end_step")
        return float(loss.item())

    def digests(self) -> dict[str, str]:
        """A digest of every parameter, optimizer state, hyper-parameter and RNG state."""
        found = {}
        names = {id(p): name for name, p in self.model.named_parameters()}
        for name, tensor in self.model.state_dict().items():
            found[f"model/{name}"] = _digest(tensor)
        for param, state in self.optimizer.state.items():
            for role, value in state.items():
                found[f"optimizer/{names[id(param)]}/{role}"] = _digest(value)
        groups = [
            {k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups
        ]
        found["hyper-parameters"] = block_digest(repr(groups).encode())
        found["schedule"] = block_digest(repr(sorted(_plain(self.schedule))).encode())
        found["rng"] = _digest(torch.get_rng_state())
        return found


def _plain(schedule: Any) -> list[tuple[str, str]]:
    return [(key, repr(value)) for key, value in schedule.state_dict().items()]


def _digest(tensor: torch.Tensor) -> str:
    return block_digest(byte_view(tensor.detach().contiguous()))


class Journal:
    """JSON lines about the run, one file per process."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, **row: Any) -> None:
        """Append a row; it survives the death of the process."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def reference(run: Run, beat: Beat, journal: Journal) -> None:
    """Train without a store; write the digests of every step."""
    journal.write(step=0, digests=run.digests())
    parameters = sum(param.numel() for param in run.model.parameters())
    journal.write(parameters=parameters, state_bytes=parameters * 3 * 4)
    batches: Iterator[Any] = iter(run.loader)
    for step in range(1, run.steps + 1):
        began = time.perf_counter()
        beat.phase("data")
        clip = torch.nn.utils.clip_grad_norm_
        loss = run.step(next(batches), beat, clip, rounding=True)
        took = time.perf_counter() - began
        journal.write(step=step, loss=loss.hex(), seconds=took, digests=run.digests())
        beat.finished(step)


@contextmanager
def attached(run: Run, options: argparse.Namespace) -> Iterator[Checkpointer]:
    """Attach a store to the run, as a user would."""
    with attach(
        run.model, run.optimizer, run=options.run, store=options.store, cache=options.cache,
        policy="bf16", window=WINDOW, base_every=BASE_EVERY, object_lag=OBJECT_LAG,
    ) as ckpt:  # fmt: skip
        ckpt.track(schedule=run.schedule)
        yield ckpt


def train(run: Run, beat: Beat, journal: Journal, options: argparse.Namespace) -> None:
    """Restore what there is and train on, with a checkpoint at every step."""
    with attached(run, options) as ckpt:
        _restore(run, ckpt, journal)
        for step, batch in enumerate(ckpt.batches(run.loader), ckpt.step + 1):
            began = time.perf_counter()
            loss = run.step(batch, beat, ckpt.clip_grad_norm_, rounding=False)
            ckpt.end_step()
            took = time.perf_counter() - began
            journal.write(step=step, loss=loss.hex(), seconds=took)
            beat.finished(step)
            if step == run.steps:
                break
        journal.write(final=run.steps, digests=run.digests(), status=_status(ckpt))
        beat.phase("done")
        while True:  # the machine is lost now, before anything is flushed: the harness kills us
            time.sleep(1.0)


def inspect(run: Run, journal: Journal, options: argparse.Namespace) -> None:
    """Restore and report, without training."""
    with attached(run, options) as ckpt:
        _restore(run, ckpt, journal)


def _restore(run: Run, ckpt: Checkpointer, journal: Journal) -> None:
    began = time.perf_counter()
    report = ckpt.restore()
    took = time.perf_counter() - began
    journal.write(
        restored=report.step, seconds=took, digests=run.digests(),
        certificate=str(report.certificate or "fresh run"), tiers=dict(report.tiers or {}),
        lost=report.lost,
    )  # fmt: skip


def _status(ckpt: Checkpointer) -> dict[str, Any]:
    status = ckpt.status()
    return {name: getattr(status, name) for name in type(status).__dataclass_fields__}


def main() -> None:
    """Entry point of ``python -m adacheck_store.demo.trainer``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("reference", "train", "inspect"))
    for name in ("folder", "run", "store", "cache"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(options.folder)
    beat = Beat(folder / "beat", create=True)
    journal = Journal(folder / "journal.jsonl")
    run = Run(options.seed, options.steps)
    if options.role == "reference":
        reference(run, beat, journal)
    elif options.role == "train":
        train(run, beat, journal, options)
    else:
        inspect(run, journal, options)


if __name__ == "__main__":
    main()
