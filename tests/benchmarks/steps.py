"""A training step with a checkpoint at every step: ours at the defaults, parts of it, the rivals.

Every measurement stands between two of training alone, and its ratio is that to their mean.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import adacheck_store as ada

from .rows import Row, median
from .training import Clock, Rivals, Training, timed

ROUNDS = 3
ALONE = 8
"""Steps of training alone between two measurements."""

OURS: dict[str, tuple[dict[str, Any], int, int]] = {
    "defaults": ({}, 32, 64),
    "base_every=16": ({"base_every": 16, "object_lag": 16}, 8, 16),
    "no bases, nothing drained": ({"base_every": 1 << 20, "object_lag": 1 << 20}, 4, 16),
}
"""Settings; steps before the clock runs; steps measured, a multiple of ``base_every``.

The steps before bring the middle of what is measured, not its end, to the multiple at which a
base is made: all that it costs lies within the clock.
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """A measurement and training alone, before and after it."""

    clock: Clock
    alone: tuple[Clock, Clock]

    @property
    def ratio(self) -> float:
        """Wall time per step over that of training alone."""
        return 2 * self.clock.wall / (self.alone[0].wall + self.alone[1].wall)

    def more(self, what: str) -> float:
        """Milliseconds per step that this part of the clock has grown by."""
        alone: float = sum(getattr(clock, what) for clock in self.alone) / 2
        return 1e3 * (float(getattr(self.clock, what)) - alone)


class Ours:
    """Training under `attach`: each measurement is a run of its own, closed outside the clock."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._training, self._folder = training, folder
        self._number = 0
        self.bytes_per_step = 0.0

    def measure(self, settings: dict[str, Any], before: int, steps: int) -> Clock:
        """The clock of ``steps`` steps, after some that are not measured."""
        self._number += 1
        store = self._folder / f"store-{self._number}"
        with ada.attach(
            self._training.model, self._training.optimizer, run="bench", store=store.as_uri(),
            policy="bf16", **settings,
        ) as ckpt:  # fmt: skip
            ckpt.restore()
            ckpt.flush()
            self._training.run(before)
            clock = timed(lambda: self._training.run(steps), steps)
            ckpt.flush(far=False)
            self.bytes_per_step = ckpt.status().bytes_stored / (before + steps)
            ckpt.flush()
        shutil.rmtree(store)
        return clock


def rows() -> Iterator[Row]:
    """Step time, CPU and bytes of ours; step time of the rivals."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="adacheck-bench-", dir=os.curdir) as folder:
        root = Path(folder).absolute()
        store = distributed.FileStore(str(root / "rendezvous"), 1)
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        training = Training()
        ours, rivals = Ours(training, root), Rivals(training, root)
        samples = _samples(training, ours, rivals)
        distributed.destroy_process_group()
        per = ours.bytes_per_step / training.parameters
        yield Row(
            "bytes per step and trained parameter (policy bf16)", f"{per:.3f}", "<= 2.05",
            per <= 2.05,
            f"{ours.bytes_per_step / 1e6:.2f} MB for {training.parameters / 1e6:.2f} M parameters",
        )  # fmt: skip
        for name, found in samples.items():
            yield from _rows_of(name, found)


def _samples(training: Training, ours: Ours, rivals: Rivals) -> dict[str, list[Sample]]:
    blocks: dict[str, Callable[[], Clock]] = {
        f"adacheck-store, {name}": lambda setup=setup: ours.measure(*setup)  # type: ignore[misc]
        for name, setup in OURS.items()
    }
    for name, save in rivals.all.items():
        blocks[name] = lambda save=save: timed(  # type: ignore[misc]
            lambda: training.run(ALONE, save), ALONE
        )
    samples: dict[str, list[Sample]] = {name: [] for name in blocks}
    training.run(4)
    for _ in range(ROUNDS):
        alone = timed(lambda: training.run(ALONE), ALONE)
        for name, block in blocks.items():
            clock = block()
            rivals.settle()
            after = timed(lambda: training.run(ALONE), ALONE)
            samples[name].append(Sample(clock, (alone, after)))
            sys.stderr.write(f"{name}: {samples[name][-1].ratio:.3f}\n")
            alone = after
    return samples


def _rows_of(name: str, samples: list[Sample]) -> Iterator[Row]:
    ratio = median([sample.ratio for sample in samples])
    bar = "<= 1.03" if name.endswith("defaults") else ""
    yield Row(
        f"step time, {name} / none", f"{ratio:.3f}", bar, ratio <= 1.03 if bar else None,
        ", ".join(f"{sample.ratio:.3f}" for sample in samples)
        + f"; none {median([s.alone[0].wall for s in samples]) * 1e3:.0f} ms",
    )  # fmt: skip
    more = {what: median([s.more(what) for s in samples]) for what in ("cpu", "queued", "blocked")}
    others = median([sample.clock.others for sample in samples]) * 1e3
    yield Row(
        "  a step's training thread, and other threads", f"+{sum(more.values()):.1f} ms", "", None,
        f"runs {more['cpu']:+.1f}, queues {more['queued']:+.1f}, blocks {more['blocked']:+.1f}; "
        f"other threads run {others:.1f} ms",
    )  # fmt: skip
