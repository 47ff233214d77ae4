"""What a boundary keeps of an update: its gradients, and the numbers it was made with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from adacheck_store.format.errors import OrderError

from .held import HeldGroups
from .stager import GradArea

FUSED_WIDTH = 16
"""Elements that the widest fused kernel takes at once (AVX-512; 8 under AVX2)."""


@dataclass(slots=True)
class CapturedUpdate:
    """One applied update of an optimizer, whose gradients lie in an area of a buffer.

    ``given`` are the trained slots that had a gradient; ``late`` maps slots to gradients that do
    not fit the staging's dtype; ``scales`` are observed clip coefficients. Where only a device
    knows whether the update was applied, ``counts`` are copies of how many times the step was
    made and how many of these it skipped; ``beside`` is True for a replay in an interval that has
    a step of the optimizer besides. All of it may be read once the boundary has landed.
    """

    optimizer: int
    groups: HeldGroups
    area: GradArea
    given: set[int] = field(default_factory=set)
    late: dict[int, torch.Tensor] = field(default_factory=dict)
    scales: Sequence[torch.Tensor] = ()
    counts: torch.Tensor | None = None
    beside: bool = False

    def applied(self) -> bool:
        """Whether the update was applied; raises where there was another (writer's thread)."""
        if self.counts is None:
            return True
        made, skipped = self.counts.tolist()
        if made > 1 or (made and self.beside):
            also = " beside a step that is not recorded," if self.beside else ""
            raise OrderError(
                f"{made} replays of a recorded step{also} without end_step()",
                hint="call end_step() after every replay",
            )
        return bool(made - skipped)


def walks_otherwise(param: torch.Tensor, grad: torch.Tensor) -> bool:
    """Whether torch's fused CPU kernel meets the elements in another order than a fold.

    It walks memory, and treats the last elements of a tensor differently: in a parameter
    that does not lie in C order they are others, and a gradient must lie like its parameter.
    """
    if param.device.type != "cpu":
        return False
    if grad.stride() != param.stride() and not (grad.is_contiguous() and param.is_contiguous()):
        return True
    return not param.is_contiguous() and param.numel() % FUSED_WIDTH != 0
