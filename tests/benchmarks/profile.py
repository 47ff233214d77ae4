"""Where the background's time goes: processor and wall time per step, by thread and by work.

Functions are wrapped while the profile runs. Each is charged what it takes itself, without the
wrapped functions it calls; what no wrapper sees is the thread's ``rest``. One base falls into the
steps measured, as many as ``base_every``, so everything stands at its true rate.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import adacheck_store as ada
from adacheck_store import compact, fetch, fold, writer
from adacheck_store.duty import Duty
from adacheck_store.engines import StepEngine
from adacheck_store.format import head as heads
from adacheck_store.tiers import intake, lmdb_env, lmdb_pages, object_local, zarr_chunks
from adacheck_store.tiers.lmdb import LmdbTier
from adacheck_store.trainer_hooks import blocks, capture, capture_base, encode

from .rows import Row
from .training import Training, timed

STEPS = 64
LEAST_MS = 0.05

WORK: dict[str, list[tuple[Any, str]]] = {
    "capture": [
        (capture.Capture, "_stage_early"), (capture.Capture, "_stage"),
        (blocks.BlockWatch, "stage"),
    ],
    "wait for the writer": [(writer.Writer, "append")],
    "encode gradients": [(encode.Encoder, "update")],
    "fingerprints": [(blocks, "block_sum"), (fold, "block_sum")],
    "digests": [
        (intake, "block_digest"), (compact, "block_digest"), (capture_base, "block_digests"),
        (intake, "verify_block"), (fetch, "verify_block"),
    ],
    "heads": [(heads.SealedHead, "seal"), (heads.SealedHead, "open")],
    "copy into LMDB pages": [(lmdb_pages.PageWriter, "add")],
    "LMDB put": [(lmdb_pages, "put_entry")],
    "LMDB commit (write, fdatasync)": [(lmdb_env.LmdbEnv, "_transact")],
    "LMDB sync": [(lmdb_env.LmdbEnv, "sync")],
    "LMDB read": [(LmdbTier, "read")],
    "copy into zarr chunks": [(zarr_chunks.ChunkWriter, "add")],
    "zarr write": [(object_local.durable, "write_all")],
    "zarr fsync": [(object_local.durable, "fsync")],
    "zarr read": [(object_local.LocalObjects, "get")],
    "fold: copy in": [(fetch.ArrayReader, "read_into")],
    "fold: decode": [(fold, "decode")],
    "fold: apply": [(StepEngine, "apply")],
}  # fmt: skip

Cost = list[float]


class Meter:
    """Exclusive processor and wall time of wrapped functions, by thread and label."""

    def __init__(self) -> None:
        self.cost: dict[tuple[str, str], Cost] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self._stack = threading.local()
        self._undo: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, name: str, label: str) -> None:
        """Charge calls of a function to a label; a generator's call is not meant."""
        plain = owner.__dict__[name]
        inner: Callable[..., Any] = getattr(plain, "__func__", plain)

        @functools.wraps(inner)
        def timed_call(*args: Any, **kwargs: Any) -> Any:
            stack: list[Cost] = self._stack.__dict__.setdefault("open", [])
            below: Cost = [0.0, 0.0]
            stack.append(below)
            cpu, wall = time.thread_time(), time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                spent = [time.thread_time() - cpu, time.perf_counter() - wall]
                stack.pop()
                cost = self.cost[threading.current_thread().name, label]
                cost[0] += spent[0] - below[0]
                cost[1] += spent[1] - below[1]
                cost[2] += 1
                if stack:
                    stack[-1][0] += spent[0]
                    stack[-1][1] += spent[1]

        again = type(plain) if isinstance(plain, staticmethod | classmethod) else None
        setattr(owner, name, again(timed_call) if again else timed_call)
        self._undo.append((owner, name, plain))

    def restore(self) -> None:
        """Put the functions back."""
        for owner, name, plain in reversed(self._undo):
            setattr(owner, name, plain)
        self._undo.clear()


def rows() -> Iterator[Row]:
    """One row for each kind of work of each thread that takes long enough to be seen."""
    torch.set_num_threads(1)
    meter = Meter()
    for label, places in WORK.items():
        for owner, name in places:
            meter.wrap(owner, name, label)
    meter.wrap(writer.Writer, "_store", "rest")
    meter.wrap(Duty, "_try", "rest")
    try:
        with tempfile.TemporaryDirectory(prefix="adacheck-bench-", dir=os.curdir) as folder:
            wall = _train(Path(folder).absolute() / "store", meter)
    finally:
        meter.restore()
    threads: dict[str, Cost] = defaultdict(lambda: [0.0, 0.0])
    for (thread, _), (cpu, took, _) in meter.cost.items():
        threads[thread][0] += cpu
        threads[thread][1] += took
    for thread, (cpu, took) in sorted(threads.items(), key=lambda item: -item[1][0]):
        yield _row(thread, cpu, took, f"of a step of {wall * 1e3:.0f} ms")
        mine = [(label, cost) for (name, label), cost in meter.cost.items() if name == thread]
        for label, (own, spent, calls) in sorted(mine, key=lambda item: -item[1][0]):
            if max(own, spent) * 1e3 / STEPS >= LEAST_MS:
                yield _row(f"  {label}", own, spent, f"{calls / STEPS:.1f} calls a step")


def _train(store: Path, meter: Meter) -> float:
    """Wall seconds of a step, everything that follows it done within the profile."""
    training = Training()
    training.run(2)
    with ada.attach(
        training.model, training.optimizer, run="profile", store=store.as_uri(), policy="bf16"
    ) as ckpt:
        ckpt.restore()
        training.run(2)
        ckpt.flush()
        meter.cost.clear()
        clock = timed(lambda: training.run(STEPS), STEPS)
        ckpt.flush()
    shutil.rmtree(store)
    return clock.wall


def _row(what: str, cpu: float, wall: float, detail: str) -> Row:
    each = 1e3 / STEPS
    return Row(what, f"{cpu * each:.2f} ms cpu", "", None, f"{wall * each:.2f} ms wall; {detail}")
