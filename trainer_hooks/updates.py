"""What a boundary keeps of an update: its gradients, and the numbers it was made with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from adacheck_store.format.errors import OrderError

from .held import HeldGroups
from .stager import GradArea


@dataclass(slots=True)
class CapturedUpdate:
    """One applied update of an optimizer, whose gradients lie in an area of a buffer.

    ``given`` are the trained slots that had a gradient; ``late`` maps slots to gradients that do
    not fit the staging's dtype; ``scales`` are observed clip coefficients. Where only a device
    knows whether the update was applied, ``counts`` are copies of how many times the step was
    made and how many of these it skipped. All of it may be read once the boundary has landed.
    """

    optimizer: int
    groups: HeldGroups
    area: GradArea
    given: set[int] = field(default_factory=set)
    late: dict[int, torch.Tensor] = field(default_factory=dict)
    scales: Sequence[torch.Tensor] = ()
    counts: torch.Tensor | None = None

    def applied(self) -> bool:
        """Whether the update was applied; raises where it was more than one (writer's thread)."""
        if self.counts is None:
            return True
        made, skipped = self.counts.tolist()
        if made > 1:
            raise OrderError(
                f"{made} replays of a recorded step without end_step()",
                hint="call end_step() after every replay",
            )
        return bool(made - skipped)
