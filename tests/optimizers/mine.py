"""Home-made optimizers: one that can be folded, and some that cannot."""

from __future__ import annotations

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Evolved sign momentum: elementwise, one state tensor."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0, counted: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "counted": counted}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update; with ``counted`` a number counts them."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    if group["counted"]:
                        state["step"] = 0
                if group["counted"]:
                    state["step"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"].lerp(p.grad, 1 - first).sign_()
                p.add_(update, alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 1 - second)
        return loss


class Normed(Lion):
    """Divides by the norm of the whole tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("exp_avg", torch.zeros_like(p)).add_(p.grad)
                    p.sub_(group["lr"] * p.grad / (p.grad.norm() + 1e-6))


class Noisy(Lion):
    """Draws random numbers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("exp_avg", torch.zeros_like(p)).add_(p.grad)
                    p.add_(torch.randn_like(p), alpha=group["lr"])


class Secretive(Lion):
    """Counts its steps where nobody looks."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update."""
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("exp_avg", torch.zeros_like(p)).add_(p.grad)
                    p.sub_(p.grad, alpha=group["lr"] / self.count)


class InGroup(Lion):
    """Counts its steps in the group, which then no longer says what was used."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("exp_avg", torch.zeros_like(p)).add_(p.grad)
                    p.sub_(p.grad, alpha=group["lr"] / (1 + group.get("k", 0)))
            group["k"] = group.get("k", 0) + 1


class Slowed(torch.optim.AdamW):
    """Knows better than its parent."""

    def step(self, closure: Any = None) -> Any:
        """The parent's update, half undone."""
        before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        loss = super().step(closure)
        after = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            for p, old in zip(after, before, strict=True):
                p.add_(old).mul_(0.5)
        return loss
