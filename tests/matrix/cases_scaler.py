"""Mixed precision's gradient scaler, whose step may be skipped."""

from __future__ import annotations

import torch

from tests.matrix.cases_several import net
from tests.matrix.kit import Case

INFINITE = (2, 5, 6)
"""Steps whose loss overflows."""


class Scaled(Case):
    """A tracked scaler that grows, and backs off where the loss overflows."""

    fused = False
    clip = 0.0

    def build(self) -> None:
        """Growth every other step, so that the scale moves."""
        self.model = net(5, 33, 3, norm=True)
        params = self.model.parameters()
        self.optimizers = [
            torch.optim.AdamW(params, lr=1e-2, fused=True)
            if self.fused
            else torch.optim.AdamW(params, lr=1e-2)
        ]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        self.tracked = {"scaler": self.scaler}

    def loss(self) -> torch.Tensor:
        """On fresh data."""
        return self.model(torch.randn(4, 5)).square().mean()

    def step(self, number: int) -> object:
        """Scale, unscale, clip, step, update."""
        (optimizer,) = self.optimizers
        optimizer.zero_grad()
        loss = self.loss()
        factor = float("inf") if number in INFINITE else 1.0
        self.scaler.scale(loss * factor).backward()
        if self.clip:
            self.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(optimizer)
        self.scaler.update()
        return loss.item(), self.scaler.get_scale()


class ScaledFused(Scaled):
    """The kernel unscales, and skips itself."""

    fused = True


class ScaledClip(Scaled):
    """Unscaled by hand and clipped."""

    clip = 0.05


class ScaledFusedClip(Scaled):
    """Unscaled by hand and clipped; the fused kernel still skips itself."""

    fused, clip = True, 0.05


class ScaledNesterov(Scaled):
    """The step writes into the gradients."""

    def build(self) -> None:
        """SGD in place of AdamW."""
        super().build()
        self.optimizers = [
            torch.optim.SGD(
                self.model.parameters(), lr=1e-2, momentum=0.9, nesterov=True, foreach=True
            )
        ]


class Autocast(Scaled):
    """Forward in bf16, unscaled and clipped by hand, fused."""

    fused, clip = True, 0.05

    def loss(self) -> torch.Tensor:
        """In mixed precision."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(torch.randn(4, 5)).float().square().mean()
