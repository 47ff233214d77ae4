"""What is another between two steps, tensor by tensor.

The first step is folded into a file without a name, the second is compared with it window by
window: memory is that of a window, whatever ranks and shardings wrote the two.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from adacheck_store.arrays import byte_view, torch_dtype
from adacheck_store.candidates import carry_out
from adacheck_store.fetch import Fetcher
from adacheck_store.format.dtypes import item_bytes
from adacheck_store.recovery import RestorePlan
from adacheck_store.store import Store

from .export import Choice
from .restore import Opened, counters_of, open_parts, optimizers_of
from .rows import Progress, choose_run, silent
from .safetensors_file import write_at
from .whole import PieceSink, Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """A tensor of two steps: how many elements have other bits, and the largest differences.

    ``changed`` bytes of ``nbytes``. ``max_abs``, and ``max_rel`` to the larger of the two, of
    elements that are finite on both sides; ``odd`` counts the others that changed. ``only`` is
    ``first`` or ``second`` where the other step has it not, or with another dtype or shape.
    """

    run: str
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    differ: int
    nbytes: int
    changed: int
    max_abs: float = 0.0
    max_rel: float = 0.0
    odd: int = 0
    only: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDiff:
    """A counter, or a hyper-parameter of an optimizer's group, that is another; None: not there."""

    run: str
    what: str
    first: Any
    second: Any


@dataclass(slots=True)
class _Tally:
    """Differences of a tensor so far."""

    differ: int = 0
    changed: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    odd: int = 0

    def add(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Elements of the two at one place."""
        size = first.itemsize
        bytes_differ = (
            torch.frombuffer(byte_view(first), dtype=torch.uint8)
            != torch.frombuffer(byte_view(second), dtype=torch.uint8)
        ).view(-1, size)  # fmt: skip
        where = bytes_differ.any(1)
        differ = int(where.sum())
        if not differ:
            return
        self.differ += differ
        self.changed += int(bytes_differ.sum())
        wide = torch.complex128 if first.is_complex() else torch.float64
        a, b = first[where].to(wide), second[where].to(wide)
        finite = torch.isfinite(a) & torch.isfinite(b)
        self.odd += differ - int(finite.sum())
        a, b = a[finite], b[finite]
        if a.numel():
            gap = (a - b).abs()
            scale = torch.maximum(a.abs(), b.abs())
            self.max_abs = max(self.max_abs, float(gap.max()))
            self.max_rel = max(self.max_rel, float((gap / scale.clamp(min=5e-324)).max()))


@dataclass(frozen=True, slots=True)
class _Side:
    """What is small of a step: its tensors' forms, its counters and hyper-parameters."""

    tensors: Mapping[str, Whole]
    values: Mapping[str, Any]


def diff(
    store: Store, first: Choice, second: Choice, *, everything: bool = False,
    progress: Progress = silent,
) -> Iterator[TensorDiff | ValueDiff]:  # fmt: skip
    """Tensors, counters and hyper-parameters that two steps of a run have otherwise.

    With ``everything`` those that are alike too. Raises what `restore` raises for either step.
    """
    run = choose_run(store, first.run)
    with tempfile.TemporaryFile() as file:
        places: dict[str, int] = {}
        one = _take(store, run, first, file.fileno(), places, progress)
        tallies: dict[str, _Tally] = {}
        two = _compare(store, run, second, file.fileno(), (one, places), tallies, progress)
    for label in sorted(one.tensors.keys() | two.tensors.keys()):
        a, b = one.tensors.get(label), two.tensors.get(label)
        if a is not None and a == b:
            tally = tallies.get(label, _Tally())
            if tally.differ or everything:
                yield _row(run, a, tally)
        else:
            for whole, side in ((a, "first"), (b, "second")):
                if whole is not None:
                    yield _row(run, whole, _Tally(whole.elements, whole.nbytes), side)
    for what in sorted(one.values.keys() | two.values.keys()):
        old, new = one.values.get(what), two.values.get(what)
        if old != new or everything:
            yield ValueDiff(run=run, what=what, first=old, second=new)


def _take(
    store: Store, run: str, choice: Choice, file: int, places: dict[str, int], progress: Progress
) -> _Side:
    """Fold a step into the file; ``places`` becomes where each tensor begins."""

    def work(fetcher: Fetcher, plan: RestorePlan) -> _Side:
        opened = open_parts(store, fetcher, plan, choice.rank)
        places.clear()
        at = 0
        for label, whole in opened.tensors.all.items():
            places[label] = at
            at += whole.nbytes
        os.ftruncate(file, 0)
        os.ftruncate(file, at)

        def write(label: str, begin: int, elements: torch.Tensor) -> None:
            place = places[label] + begin * elements.itemsize
            write_at(file, byte_view(elements), place)

        return _folded(opened, write, f"step {plan.step}", progress)

    return carry_out(store.tiers, run, work, step=choice.step, term=choice.term).result


def _compare(
    store: Store, run: str, choice: Choice, file: int, known: tuple[_Side, Mapping[str, int]],
    tallies: dict[str, _Tally], progress: Progress,
) -> _Side:  # fmt: skip
    """Fold a step against what lies in the file."""
    side, places = known

    def work(fetcher: Fetcher, plan: RestorePlan) -> _Side:
        opened = open_parts(store, fetcher, plan, choice.rank)
        tallies.clear()

        def compare(label: str, begin: int, elements: torch.Tensor) -> None:
            whole = opened.tensors.all[label]
            if side.tensors.get(label) != whole:
                return
            size = item_bytes(whole.dtype)
            data = bytearray(elements.numel() * size)
            _read_at(file, memoryview(data), places[label] + begin * size)
            other = torch.frombuffer(data, dtype=torch_dtype(whole.dtype))
            tallies.setdefault(label, _Tally()).add(other, elements)

        return _folded(opened, compare, f"step {plan.step}", progress)

    return carry_out(store.tiers, run, work, step=choice.step, term=choice.term).result


def _folded(opened: Opened, write: Any, what: str, progress: Progress) -> _Side:
    total, done = opened.tensors.nbytes, 0

    def watched(label: str, begin: int, elements: torch.Tensor) -> None:
        nonlocal done
        if elements.numel():
            write(label, begin, elements)
        done += elements.nbytes

    for part, fold in opened.folds.items():
        for _ in fold.steps(PieceSink(part, opened.tensors, watched)):
            progress(what, done, total)
    values: dict[str, Any] = {
        name: tensor.item() for name, tensor in counters_of(opened).items()
    }  # fmt: skip
    for index, optimizer in enumerate(optimizers_of(opened)):
        for number, group in enumerate(optimizer["groups"]):
            for name, value in group.items():
                if name != "params":
                    values[f"optimizer {index} group {number} {name}"] = value
    return _Side(dict(opened.tensors.all), values)


def _read_at(file: int, data: memoryview, at: int) -> None:
    while data.nbytes:
        count = os.preadv(file, [data], at)
        data, at = data[count:], at + count


def _row(run: str, whole: Whole, tally: _Tally, only: str = "") -> TensorDiff:
    return TensorDiff(
        run=run, tensor=whole.label, dtype=whole.dtype, shape=whole.shape, elements=whole.elements,
        differ=tally.differ, nbytes=whole.nbytes, changed=tally.changed, max_abs=tally.max_abs,
        max_rel=tally.max_rel, odd=tally.odd, only=only,
    )  # fmt: skip
