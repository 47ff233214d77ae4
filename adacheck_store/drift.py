"""Drift: how far folds here are from what the trainer had, seen where a captured base tells."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adacheck_store.format.errors import ReplayMismatchError
from adacheck_store.format.layout import Layout, Section

from .arrays import byte_view, torch_dtype
from .catalog import Catalog, RecordRef
from .fetch import ArrayReader, BlocksLostError, Fetcher
from .fold import Fold
from .recovery import PartPlan

log = logging.getLogger(__name__)

WAITING_MAX = 4
"""Captured bases that may wait to be compared; one that comes in vain is said."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """The largest differences of any element of the state, after folding ``steps`` steps.

    ``absolute`` as numbers, ``ulps`` as places between the two in the order of their dtype's
    numbers (large near zero, where it says little). ``equal`` if not a byte differs.
    """

    steps: int
    absolute: float
    ulps: int
    equal: bool = False

    def joined(self, other: Drift | None) -> Drift:
        """The larger of both in everything."""
        if other is None:
            return self
        return Drift(
            steps=max(self.steps, other.steps), absolute=max(self.absolute, other.absolute),
            ulps=max(self.ulps, other.ulps), equal=self.equal and other.equal,
        )  # fmt: skip


class _Comparing:
    """A fold's sink that compares every window with a base, in bounded memory."""

    def __init__(self, truth: ArrayReader) -> None:
        self._truth = truth
        self._scratch: dict[tuple[str, str], torch.Tensor] = {}
        self.absolute = 0.0
        self.ulps = 0
        self.equal = True

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
            if self._truth.info(name) is None:
                continue
            truth = torch.empty_like(view)
            self._truth.read_into(name, start, truth)
            if byte_view(truth) == byte_view(view):
                continue
            self.equal = False
            if view.is_complex():
                truth, view = torch.view_as_real(truth), torch.view_as_real(view)
            if view.is_floating_point():
                self._compare(truth, view)

    def _compare(self, truth: torch.Tensor, folded: torch.Tensor) -> None:
        apart = (_ordered(truth) - _ordered(folded)).abs()
        difference = (truth.double() - folded.double()).abs().nan_to_num(nan=float("inf"))
        difference[apart == 0] = 0.0  # infinities and NaNs that are the same on both sides
        self.absolute = max(self.absolute, float(difference.max()))
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
    """Fold ``base`` with ``deltas`` here, and compare with ``truth``, a base of the same step.

    In bounded memory. Raises `ReplayMismatchError` for any difference in class ``exact``.
    """
    sink = _Comparing(ArrayReader(fetcher, truth))
    fold = Fold(layout, ArrayReader(fetcher, base), [ArrayReader(fetcher, ref) for ref in deltas])
    report = fold.run(sink)
    if report.exactness == "exact" and not sink.equal:
        error = ReplayMismatchError(
            "the fold of the chain is not the captured base", step=truth.step, part=truth.part,
            hint="the chain ends at the base before; a captured base follows",
        )  # fmt: skip
        error.last_match = base.step
        raise error
    return Drift(
        steps=truth.step - base.since, absolute=sink.absolute, ulps=sink.ulps, equal=sink.equal
    )


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


class CapturedBases:
    """Captured bases that the chain reaches, each to be compared with the chain's fold.

    Not thread-safe: its user holds a lock, but for `compare`. ``drift`` is what the last
    comparison found.
    """

    drift: Drift | None = None

    def __init__(self, max_drift: float) -> None:
        self._max_drift = max_drift
        self._waiting: deque[tuple[PartPlan, RecordRef]] = deque()

    def __bool__(self) -> bool:
        """True while one waits, or is being compared."""
        return bool(self._waiting)

    def add(self, plan: PartPlan | None, truth: RecordRef) -> None:
        """Take note of a captured base, and the fold that should give the same."""
        if plan is None or truth.layout != plan.layout:
            return
        if len(self._waiting) >= WAITING_MAX:
            log.warning("the captured base of step %d is not compared: folds lag", truth.step)
            return
        self._waiting.append((plan, truth))

    def floor(self) -> int | None:
        """The step from which on comparing needs records; None if it needs none."""
        return min((plan.base.step for plan, _ in self._waiting), default=None)

    def first(self) -> tuple[PartPlan, RecordRef]:
        """The one to compare now."""
        return self._waiting[0]

    def done(self) -> None:
        """The first has been compared, or will not be."""
        self._waiting.popleft()

    def compare(self, fetcher: Fetcher, layout: Layout, plan: PartPlan, truth: RecordRef) -> None:
        """Fold and compare; records that are gone are said.

        Raises `ReplayMismatchError`, whose ``last_match`` is the exact base that the fold goes
        back to, where the drift is above ``max_drift``.
        """
        try:
            drift = measure(fetcher, layout, plan.base, plan.deltas, truth)
        except BlocksLostError as error:
            log.warning("the captured base of step %d is not compared: %s", truth.step, error)
            return
        self.drift = drift
        log.info(
            "drift of %.3g (%d ulps) after %d steps, at the captured base of step %d",
            drift.absolute, drift.ulps, drift.steps, truth.step,
        )  # fmt: skip
        if drift.absolute > self._max_drift:
            raise too_much(drift, self._max_drift, plan.base.since, step=truth.step)


def too_much(drift: Drift, max_drift: float, last_match: int, **place: Any) -> ReplayMismatchError:
    """The error that says so."""
    error = ReplayMismatchError(
        f"folding here drifts by {drift.absolute:.3g} in {drift.steps} steps, more than "
        f"max_drift {max_drift:g}", hint="restore on a machine with the trainer's arithmetic, or "
        "attach with a larger max_drift", **place,
    )  # fmt: skip
    error.last_match = last_match
    return error
