"""Runs a case three times: uninterrupted, captured and killed, restored in a new process.

A case is a class with a ``build`` and a ``step``; it is named ``module:Class`` and imported in
the process that trains, a real one, so that SIGKILL is.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "adacheck_store.trainer_hooks.attach"]
)  # the list of tests/e2e/worker.py: there is one server for both


class Case:
    """A training run.

    ``build`` makes ``model`` (a module or a list), ``optimizers`` and ``tracked``; ``step`` does
    one boundary's work and returns a loss. ``at`` is the step a run is restored to (0: none),
    for cases whose groups depend on it.
    """

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

    import numpy as np
    import torch

    from adacheck_store.arrays import byte_view
    from adacheck_store.format.ids import record_id

    def raw(tensor) -> str:
        data = bytes(byte_view(tensor.detach().contiguous()))
        return f"{tensor.dtype} {tuple(tensor.shape)} {record_id(data)[:16]}"

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
                    found[f"optimizer {number} group {index} {key}"] = repr(value)
            for param in group["params"]:
                for key, value in sorted(optimizer.state.get(param, {}).items()):
                    text = raw(value) if isinstance(value, torch.Tensor) else repr(value)
                    found[f"state {names[id(param)]} {key}"] = text
    for name, item in case.tracked.items():
        found[f"tracked {name}"] = repr(sorted(item.state_dict().items(), key=str))
    words = repr((random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]))
    found["generators"] = raw(torch.get_rng_state()) + record_id(words.encode())[:16]
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
        case.ckpt = ckpt = attach(case.attached, case.optimizers, run="m", store=store, **options)
        if case.explicit:
            ckpt.track(**case.tracked)
        case.report = ckpt.restore(at)
        case.begun()
        write(restored=case.report.step, state=state_of(case), why=list(case.report.reasons),
              certificate=str(case.report.certificate))  # fmt: skip
        train(case.report.step + 1, case.stop if mode == "captured" else case.steps)
        if mode == "captured" and case.flushed:
            ckpt.flush(60)
        if mode == "captured":
            journal.flush()
            os.kill(os.getpid(), signal.SIGKILL)
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
        assert (last["error"], last["gap"]) == ("", ""), last
        if at is None:
            newest = rows
            least = case.stop - (0 if case.flushed else 3)
            assert least <= restored["restored"] <= case.stop, restored
        else:
            assert restored["restored"] == at
    return newest
