"""Gradients that a boundary leaves behind: accumulated and not used yet, or zeroed in place."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch


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
        self._used: dict[int, _Used] = {}

    def used(self, params: Sequence[torch.Tensor]) -> None:
        """An update has used the gradients of these parameters."""
        for param in params:
            grad = param.grad
            if grad is None:
                self._used.pop(id(param), None)
                continue
            before = self._used.get(id(param))
            kept = before is not None and before.grad() is grad
            self._used[id(param)] = _Used(weakref.ref(grad), grad._version, kept)

    def found(self, params: Sequence[torch.Tensor]) -> tuple[list[int], dict[int, torch.Tensor]]:
        """Indices of parameters that need zero gradients, and the gradients still to be used."""
        zeroed: list[int] = []
        grads: dict[int, torch.Tensor] = {}
        for index, param in enumerate(params):
            grad = param.grad
            if grad is None:
                continue
            used = self._used.get(id(param))
            fresh = used is None or used.grad() is not grad or used.version != grad._version
            if fresh and grad.layout == torch.strided:
                grads[index] = grad.detach()
            elif used is not None and used.kept:
                zeroed.append(index)
        if grads:
            device = next(iter(grads.values())).device
            nonzero = torch.stack([_some(grad).to(device) for grad in grads.values()]).tolist()
            zeroed += [index for index, some in zip(grads, nonzero, strict=True) if not some]
            grads = {i: g for (i, g), some in zip(grads.items(), nonzero, strict=True) if some}
        return sorted(zeroed), grads


def _some(grad: torch.Tensor) -> torch.Tensor:
    """Whether a gradient is anything but positive zeros."""
    some = (grad != 0).any()
    return some if grad.is_complex() else some | torch.signbit(grad).any()
