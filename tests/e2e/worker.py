"""A small deterministic training run in a process of its own, with or without a store."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import time
from pathlib import Path

from tests.ranks.worker import _context, check_rows, digest, rows_of, step, told, writes
from tests.waits import Gate, until

STEPS = 30
BASE_EVERY = 6
OBJECT_LAG = 3
WINDOW = 2
WIDTH = 5120
"""Of the model's middle: two blocks in its largest array."""


def _training(width: int):
    """Model, optimizer, schedule and loader, alike in every process."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(11)
    random.seed(11)
    model = nn.Sequential(
        nn.Linear(33, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 61),
        nn.GELU(), nn.Linear(61, 1),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    data = torch.utils.data.TensorDataset(torch.randn(16 * STEPS, 33), torch.randn(16 * STEPS, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    return model, optimizer, schedule, loader


def _reference(out: str, width: int) -> None:
    model, optimizer, schedule, loader = _training(width)
    rows = {0: (digest(model, optimizer, schedule), "")}
    for number, batch in zip(range(1, STEPS + 1), loader, strict=False):
        loss = step(model, optimizer, schedule, batch)
        rows[number] = (digest(model, optimizer, schedule), loss.hex())
    Path(out).write_text(json.dumps(rows))


def _train(out: str, store: str, options: dict) -> None:
    import warnings

    from adacheck_store.tiers import failpoints
    from adacheck_store.trainer_hooks.attach import attach

    os.environ["ADACHECK_FAILPOINT"] = options.get("failpoint", "")
    os.environ["ADACHECK_NODE"] = options.get("node", "node-a")
    warnings.simplefilter("error")
    if "hang" in options:
        hang_while(Path(options["hang"]))
    handled: list[int] = []
    if options.get("handler"):

        def handler(number, frame) -> None:
            handled.append(number)
            if options["handler"] == "raises":
                raise RuntimeError("a worker of the loader was killed by SIGTERM")

        signal.signal(signal.SIGTERM, handler)
    model, optimizer, schedule, loader = _training(options.get("width", WIDTH))
    with open(out, "w", encoding="utf-8") as journal:
        write = writes(journal)
        with attach(
            model, optimizer, run="e2e", store=store, policy=options.get("policy", "lossless"),
            window=WINDOW, base_every=options.get("base_every", BASE_EVERY),
            object_lag=options.get("object_lag", OBJECT_LAG), **options.get("given", {}),
        ) as ckpt:  # fmt: skip
            ckpt.track(schedule=schedule)
            report = ckpt.restore()
            write(**told(report, model, optimizer, schedule))
            if not report.fresh:
                write(passed_over=ckpt.status().passed_over)
            if options.get("inspect") == "die":
                os._exit(0)
            if options.get("inspect"):
                return
            if options.get("settled"):
                ckpt.flush(60)
            if options.get("fails"):
                failpoints.arm(options["fails"])
            for number, batch in enumerate(ckpt.batches(loader), report.step + 1):
                options["gate"].wait(number)
                if number > STEPS:
                    break
                loss = step(model, optimizer, schedule, batch)
                if number == options.get("poisoned"):
                    ckpt.flush(60, far=False)
                    assert options.get("by") != "assert", "loss is NaN"
                    os.kill(os.getpid(), signal.SIGKILL)
                if number == options.get("stuck"):
                    write(stuck=number)
                    select.select([], [], [], 600)
                try:
                    assert ckpt.end_step() == number
                finally:  # also where the run stops
                    write(step=number, loss=loss.hex(), handled=len(handled))
                time.sleep(options.get("pause_s", 0.0))
                if number % options.get("flush_every", STEPS) == 0:
                    ckpt.flush(60)
            fired = not failpoints._armed
            write(final=STEPS, digest=digest(model, optimizer, schedule), fired=fired)
            if options.get("flush", True):
                ckpt.flush(60)
            status = ckpt.status()
            write(stored=status.stored, drained=status.drained, error=status.last_error)


def hang_while(there: Path) -> None:
    """Make puts of objects hang while a file is there, as those of a server that is gone do."""
    from adacheck_store.tiers.object_local import LocalObjects

    put = LocalObjects.put

    def late(*args, **how):
        while there.exists():
            time.sleep(0.1)
        return put(*args, **how)

    LocalObjects.put = late


class Worker:
    """A training process; real, so that SIGKILL is.

    ``hold``: after that step it waits, to be killed or let go on.
    """

    def __init__(self, folder: Path, store: str, **options) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.gate = Gate(folder / "gate")
        self.gate.open(**({"step": options["hold"]} if "hold" in options else {}))
        options = {"gate": self.gate, **options}
        self.out = folder / "journal.jsonl"
        self.out.unlink(missing_ok=True)
        self.process = _context.Process(
            target=_train, args=(str(self.out), store, options), daemon=True
        )
        self.process.start()

    def wait(self, timeout_s: float = 120.0) -> int:
        """Exit code; negative for a signal."""
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, "the worker hangs"
        return self.process.exitcode

    def until(self, number: int) -> None:
        """Wait until it has finished a step; it is at it still, or this raises."""

        def reached() -> bool:
            found = self.last_step() >= number
            assert self.process.is_alive(), f"ended by itself: {self.process.exitcode}"
            return found

        until(reached, f"step {number}")

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(30)

    def rows(self) -> list[dict]:
        """The journal's whole lines."""
        return rows_of(self.out)

    def last_step(self) -> int:
        """The last step this process finished, -1 if none."""
        return max((row["step"] for row in self.rows() if "step" in row), default=-1)

    def row(self, name: str) -> dict:
        """The journal's row of that name."""
        return next(row for row in self.rows() if name in row)


def make_reference(folder: Path, width: int = WIDTH) -> dict[int, tuple[str, str]]:
    """Digest and loss of every step of the uninterrupted run."""
    out = folder / "reference.json"
    process = _context.Process(target=_reference, args=(str(out), width), daemon=True)
    process.start()
    process.join(120)
    assert process.exitcode == 0
    return {int(step): (row[0], row[1]) for step, row in json.loads(out.read_text()).items()}


def check_against(reference: dict[int, tuple[str, str]], worker: Worker) -> None:
    """Everything a worker reported equals the uninterrupted run."""
    check_rows(reference, worker.rows())
