"""Runs a case three times: uninterrupted, captured and killed, restored in a new process.

A case is a class with a ``build`` and a ``step``; it is named ``module:Class`` and imported in
the process that trains, a real one, so that SIGKILL is. The uninterrupted run has no store at
all: each comparison with it is also one of training with capture and without.
"""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import signal
import threading
import time
import zlib
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "adacheck_store.trainer_hooks.attach"]
)  # the list of tests/e2e/worker.py: there is one server for both


class Case:
    """A training run.

    ``build`` makes ``model`` (a module or a list), ``optimizers`` and ``tracked``; ``step`` does
    one boundary's work and returns a loss. ``at`` is the step a run is restored to (0: none),
    for cases whose groups depend on it. ``exactness`` is what certificates must say.
    """

    exactness = "exact"

    steps = 9
    stop = 6
    ends = True
    flushed = False

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.ckpt = None
        self.report = None
        self.options: dict = {}
        self.tracked: dict = {}
        self.build()

    def build(self) -> None:
        """Make the model and what trains it."""
        raise NotImplementedError

    def step(self, number: int) -> object:
        """One boundary's work but for `end_step`; returns a loss."""
        raise NotImplementedError

    def begun(self) -> None:
        """Called after restore, or at the start."""

    def end(self, number: int) -> None:
        """Close the boundary."""
        if self.ckpt is not None and self.ends:
            assert self.ckpt.end_step() == number

    @property
    def attached(self):
        """What is given to `attach`: the model, or a wrapper of it."""
        return self.model

    @property
    def explicit(self) -> bool:
        """Whether `track` is called."""
        return bool(self.tracked)

    def modules(self) -> list:
        """The modules."""
        return self.model if isinstance(self.model, list) else [self.model]


def state_of(case: Case) -> dict[str, str]:
    """Digests of every parameter, buffer, moment, hyper-parameter, tracked state and generator."""
    import random
    import warnings

    import numpy as np
    import torch

    from adacheck_store.arrays import byte_view
    from adacheck_store.format.ids import record_id

    def raw(value) -> object:
        """Every bit of a value, whatever is in it."""
        if isinstance(value, torch.Tensor):
            kind = (value.layout, value.dtype, tuple(value.shape), value.device.type)
            if value.layout == torch.sparse_coo:
                return repr((kind, raw(value._indices()), raw(value._values())))
            data = bytes(byte_view(value.detach().contiguous()))
            strides = value.stride() if value.numel() > 1 else ()
            return repr((kind, strides, record_id(data)[:16]))
        if isinstance(value, dict):
            return repr([(str(key), raw(item)) for key, item in sorted(value.items(), key=str)])
        if isinstance(value, list | tuple):
            return repr((type(value).__name__, [raw(item) for item in value]))
        return repr(value)

    found = {}
    names = {}
    for number, module in enumerate(case.modules()):
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            found[f"{number}.{name}"] = raw(value)
            names.setdefault(id(value), f"{number}.{name}")
    for number, optimizer in enumerate(case.optimizers):
        for index, group in enumerate(optimizer.param_groups):
            for key, value in sorted(group.items()):
                if key != "params":
                    found[f"optimizer {number} group {index} {key}"] = raw(value)
            for param in group["params"]:
                for key, value in sorted(optimizer.state.get(param, {}).items()):
                    found[f"state {names[id(param)]} {key}"] = raw(value)
        for key, value in optimizer.state.items():
            if not isinstance(key, torch.Tensor):
                found[f"optimizer {number} shared {key}"] = raw(value)
    for name, item in case.tracked.items():
        found[f"tracked {name}"] = raw(item.state_dict())
    words = repr((random.getstate(), raw(list(np.random.get_state()))))
    words += repr(np.random.get_state()[1].tolist())
    found["generators"] = raw(torch.get_rng_state()) + record_id(words.encode())[:16]
    found["flags"] = repr((
        torch.get_num_threads(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(),
        torch.get_default_device(), torch.get_float32_matmul_precision(),
        torch.is_autocast_enabled("cpu"), torch.is_anomaly_enabled(), warnings.filters,
        torch.backends.mkldnn.enabled, (torch.full((), 2.0**-126) * 0.5).item(),
    ))  # fmt: skip
    return found


def _build(name: str, seed: int, at: int = 0) -> Case:
    import random
    import warnings

    import numpy as np
    import torch

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    module, _, kind = name.partition(":")
    return getattr(importlib.import_module(module), kind)(at)


def _work(name: str, out: str, store: str, mode: str, at: int | None) -> None:
    from adacheck_store.format.errors import NotProvableError
    from adacheck_store.trainer_hooks.attach import attach

    case = _build(name, 1 if mode != "resumed" else 99, at or 0)
    with open(out, "w", encoding="utf-8") as journal:

        def write(**row) -> None:
            journal.write(json.dumps(row) + "\n")
            journal.flush()

        def train(first: int, last: int) -> None:
            for number in range(first, last + 1):
                loss = case.step(number)
                case.end(number)
                write(step=number, loss=repr(loss), state=state_of(case))

        if mode == "reference":
            case.begun()
            write(step=0, loss="", state=state_of(case))
            train(1, case.steps)
            return
        options = {"base_every": 4, "keep": 100, "strict": True, **case.options}
        die = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
        case.ckpt = ckpt = attach(case.attached, case.optimizers, run="m", store=store, **options)
        if case.explicit:
            ckpt.track(**case.tracked)
        try:
            case.report = ckpt.restore(at)
        except NotProvableError as error:
            if mode != "looked":
                raise
            write(why=[str(error)])
            return
        case.begun()
        write(restored=case.report.step, state=state_of(case), why=list(case.report.reasons),
              certificate=str(case.report.certificate))  # fmt: skip
        if mode == "looked":
            return
        train(case.report.step + 1, case.stop if mode == "captured" else case.steps)
        if mode == "captured" and case.flushed:
            ckpt.flush(60)
        if mode == "captured":
            # Somewhere in the next step, or at its end; where, differs from case to case.
            moment = zlib.crc32(name.encode()) % 30 / 10_000
            threading.Thread(target=lambda: (time.sleep(moment), die()), daemon=True).start()
            case.step(case.stop + 1)
            case.end(case.stop + 1)
            die()
        ckpt.flush(60, far=False)
        write(error=ckpt.status().last_error, gap=ckpt.status().gap)
        ckpt.close()


def run(folder: Path, name: str, mode: str, store: str = "", at: int | None = None) -> list[dict]:
    """Run a case in a process of its own to its end; the rows of its journal."""
    out = folder / f"{mode}{'' if at is None else at}.jsonl"
    process = _context.Process(target=_work, args=(name, str(out), store, mode, at))
    process.start()
    process.join(120)
    process.kill()
    expected = -signal.SIGKILL if mode == "captured" else 0
    assert process.exitcode == expected, f"{name} {mode}: exit code {process.exitcode}"
    return [json.loads(line) for line in out.read_text().splitlines()]


def compare(rows: list[dict], reference: dict[int, dict]) -> None:
    """Every state and loss a run reports is that of the uninterrupted run."""
    for row in rows:
        at = row.get("step", row.get("restored"))
        if at is None:
            continue
        theirs, mine = reference[at]["state"], row["state"]
        wrong = sorted(k for k in theirs.keys() | mine.keys() if theirs.get(k) != mine.get(k))
        assert not wrong, f"{'step' if 'step' in row else 'restored to'} {at}: {wrong}"
        if "step" in row:
            assert row["loss"] == reference[at]["loss"], f"loss of step {at}"


def prove(folder: Path, case: type, steps: tuple[int, ...] = ()) -> list[dict]:
    """Captured, killed and restored, a case has at every step the bits of the uninterrupted run.

    Restored to the newest step and trained to the end; then to each of ``steps``, likewise.
    Returns the rows of the newest restore.
    """
    name = f"{case.__module__}:{case.__name__}"
    reference = {row["step"]: row for row in run(folder, name, "reference")}
    store = (folder / "store").as_uri()
    compare(run(folder, name, "captured", store), reference)
    newest: list[dict] = []
    for at in (None, *steps):
        rows = run(folder, name, "resumed", store, at)
        compare(rows, reference)
        restored, last = rows[0], rows[-1]
        assert case.exactness in restored["certificate"], restored
        assert (last["error"], last["gap"]) == ("", ""), last
        if at is None:
            newest = rows
            least = case.stop - (0 if case.flushed else 3)
            assert least <= restored["restored"] <= case.stop + 1, restored
        else:
            assert restored["restored"] == at
    return newest
