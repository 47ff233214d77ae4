"""Drift: how far a fold on this machine is from what the trainer had, where arithmetic differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adacheck_store.format.layout import Layout, Section

from .arrays import torch_dtype
from .catalog import Catalog, RecordRef
from .fetch import ArrayReader, Fetcher
from .fold import Fold
from .recovery import PartPlan

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """The largest differences of any element of the state, after folding ``steps`` steps.

    ``absolute`` as numbers, ``ulps`` as places between the two in the order of their dtype's
    numbers (large near zero, where it says little).
    """

    steps: int
    absolute: float
    ulps: int

    def joined(self, other: Drift | None) -> Drift:
        """The larger of both in everything."""
        if other is None:
            return self
        return Drift(
            steps=max(self.steps, other.steps), absolute=max(self.absolute, other.absolute),
            ulps=max(self.ulps, other.ulps),
        )  # fmt: skip


class _Comparing:
    """A fold's sink that compares every window with a base, in bounded memory."""

    def __init__(self, truth: ArrayReader) -> None:
        self._truth = truth
        self._scratch: dict[tuple[str, str], torch.Tensor] = {}
        self.absolute = 0.0
        self.ulps = 0

    def window(self, section: Section, role: str, start: int, stop: int) -> torch.Tensor:
        """Scratch memory, the same for every window of the role."""
        kept = self._scratch.get((section.name, role))
        if kept is None or kept.numel() < stop - start:
            kept = torch.empty(stop - start, dtype=torch_dtype(section.dtypes[role]))
            self._scratch[section.name, role] = kept
        return kept[: stop - start]

    def done(self, section: Section, start: int, stop: int, views: Mapping[str, Any]) -> None:
        """Compare the window."""
        for role, view in views.items():
            name = f"{section.name}/{role}"
            if self._truth.info(name) is None or not view.is_floating_point():
                continue
            truth = torch.empty_like(view)
            self._truth.read_into(name, start, truth)
            if torch.equal(truth, view):
                continue
            difference = (truth.double() - view.double()).abs().nan_to_num(nan=float("inf"))
            self.absolute = max(self.absolute, float(difference.max()))
            apart = (_ordered(truth) - _ordered(view)).abs()
            self.ulps = max(self.ulps, int(apart.max()))


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Floating-point numbers as integers in the same order, neighbours one apart."""
    kind = _BITS[tensor.element_size()]
    bits = tensor.view(kind).to(torch.int64)
    lowest = torch.iinfo(kind).min
    return torch.where(bits < 0, lowest - bits, bits)


def measure(
    fetcher: Fetcher, layout: Layout, base: RecordRef, deltas: Sequence[RecordRef], truth: RecordRef
) -> Drift:
    """Fold ``base`` with ``deltas`` here, and compare with ``truth``, a base of the same step."""
    sink = _Comparing(ArrayReader(fetcher, truth))
    fold = Fold(layout, ArrayReader(fetcher, base), [ArrayReader(fetcher, ref) for ref in deltas])
    fold.run(sink)
    return Drift(steps=len(deltas), absolute=sink.absolute, ulps=sink.ulps)


def stretch(catalog: Catalog, part: PartPlan) -> tuple[RecordRef, tuple[RecordRef, ...]] | None:
    """The longest fold that ends at the base of a plan: an earlier base, and what leads up to it.

    None where the base is no truth to compare with, or nothing before it is held.
    """
    truth = part.base
    if truth.exactness != "exact" or truth.gap is not None:
        return None
    place = (truth.term, part.part)
    by_step = {ref.step: ref for ref in catalog.deltas.get(place, ())}
    deltas: list[RecordRef] = []
    step, link = truth.step, truth.parent
    while (delta := by_step.get(step)) is not None and delta.id == link:
        deltas.append(delta)
        step, link = step - 1, delta.parent
    starts = [
        ref for ref in catalog.bases.get(place, ())
        if step <= ref.step < truth.step and ref.exactness == "exact"
        and ref.layout == truth.layout
    ]  # fmt: skip
    if not starts:
        return None
    first = min(starts, key=lambda ref: ref.step)
    return first, tuple(ref for ref in reversed(deltas) if ref.step > first.step)
