"""Gradients that a boundary leaves behind: accumulated and not used yet, or zeroed in place."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .copies import host_copy, remote
from .layouts import Binding
from .shards import local, version

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Used:
    """A parameter's gradient as its last update found it; ``kept`` if it was there before."""

    grad: weakref.ref[torch.Tensor]
    version: int
    kept: bool


class PendingGrads:
    """Tells a gradient that the next update builds on from one that an update has used up.

    A gradient that outlives the interval before an update is zeroed there, not dropped, and a
    restored run needs zeros to go on. One that was written to since its last update, or that no
    update has seen, is state: a boundary may fall between two micro-batches.
    """

    def __init__(self) -> None:
        self._params: list[torch.Tensor] = []
        self._mine: dict[int, list[torch.Tensor]] = {}
        self._used: dict[int, _Used] = {}
        self._recent: set[int] = set()
        self._left: dict[int, weakref.ref[torch.Tensor]] = {}
        self._told = False

    def begin(self, binding: Binding) -> None:
        """These are the trained parameters from here on, whoever updates and keeps them."""
        self._params = [slot.item.tensor for slot in binding.given]
        self._mine = {
            number: [param for group in optimizer.param_groups for param in group["params"]]
            for number, optimizer in enumerate(binding.optimizers)
        }

    def used(self, optimizer: int) -> None:
        """An update has used the gradients of this optimizer's parameters."""
        params = self._mine.get(optimizer, [])
        if self._left and not self._told:
            self._say_dropped(params)
        self._recent.update(map(id, params))
        for param in params:
            grad = param.grad
            if grad is None:
                self._used.pop(id(param), None)
                continue
            before = self._used.get(id(param))
            kept = before is not None and before.grad() is grad
            self._used[id(param)] = _Used(weakref.ref(grad), version(grad), kept)

    def _say_dropped(self, params: Sequence[torch.Tensor]) -> None:
        """Say once that boundaries keep gradients which the loop then drops.

        A generator's backward leaves some in its critic. Nothing tells them from accumulated ones
        before they are gone, so they are kept; a loop that drops them sooner saves the bytes.
        """
        found = [(param, self._left.pop(id(param), None)) for param in params]
        dropped = [p for p, left in found if left is not None and left() is not p.grad]
        if dropped:
            self._told = True
            log.warning(
                "the gradients of %d parameters (the first of shape %s, %.1f MB in all) stood at "
                "the last boundary, which keeps them, and were dropped unused. Where that is "
                "usual, as for a critic after its generator's backward, call zero_grad() before "
                "end_step(): the steps are smaller then", len(dropped), tuple(dropped[0].shape),
                sum(p.numel() * p.element_size() for p in dropped) / 1e6,
            )  # fmt: skip

    def found(self) -> tuple[list[int], dict[int, torch.Tensor]]:
        """Indices of parameters that need zero gradients, and copies of those still to be used.

        Whether gradients on a device are zeros is not known yet: see `sort_out`.
        """
        zeroed: list[int] = []
        grads: dict[int, torch.Tensor] = {}
        for index, param in enumerate(self._params):
            grad = param.grad
            if grad is None:
                continue
            used = self._used.get(id(param))
            fresh = used is None or used.grad() is not grad or used.version != version(grad)
            if fresh and grad.layout == torch.strided:
                inner = local(grad).detach()
                if remote(inner) or _some(inner):
                    grads[index] = host_copy(inner)
                    if id(param) in self._recent:  # else an update was skipped
                        self._left[id(param)] = weakref.ref(grad)
                else:
                    zeroed.append(index)
            elif used is not None and used.kept:
                zeroed.append(index)
        self._recent.clear()
        return zeroed, grads


def sort_out(extras: Mapping[str, Any]) -> Mapping[str, Any]:
    """The extra's trees with gradients that are zeros named among those ``held``, not kept.

    On the writer's thread: the copies have landed.
    """
    grads = extras.get("grads") or {}
    zeroed = [name for name, grad in grads.items() if not _some(grad)]
    if not zeroed:
        return extras
    kept = {name: grad for name, grad in grads.items() if name not in zeroed}
    return {**extras, "held": [*extras["held"], *zeroed], "grads": kept}


def _some(grad: torch.Tensor) -> bool:
    """Whether a gradient is anything but positive zeros."""
    if bool((grad != 0).any()):
        return True
    return not grad.is_complex() and bool(torch.signbit(grad).any())
