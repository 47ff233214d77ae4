"""Several optimizers: GANs, one optimizer per parameter, schedules of their own."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from tests.matrix.kit import Case


def net(*sizes: int, norm: bool = False) -> nn.Sequential:
    """A small perceptron of odd sizes."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    if norm:
        layers.insert(1, nn.BatchNorm1d(sizes[1]))
    return nn.Sequential(*layers[:-1])


class Gan(Case):
    """Five updates of the critic and one of the generator in each boundary."""

    critic_updates = 5
    policy = "lossless"

    def build(self) -> None:
        """A generator and a critic with optimizers of different kinds."""
        self.generator, self.critic = net(3, 17, 5, norm=True), net(5, 19, 1)
        self.model = nn.ModuleDict({"generator": self.generator, "critic": self.critic})
        self.optimizers = [
            torch.optim.AdamW(self.generator.parameters(), lr=1e-2, fused=True),
            torch.optim.SGD(self.critic.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
        ]
        self.options = {"policy": self.policy}

    def critic_step(self) -> torch.Tensor:
        """One update of the critic."""
        self.optimizers[1].zero_grad()
        fake = self.generator(torch.randn(6, 3)).detach()
        loss = (self.critic(fake) - self.critic(torch.randn(6, 5))).mean()
        loss.backward()
        self.optimizers[1].step()
        return loss

    def generator_step(self) -> torch.Tensor:
        """One update of the generator, which leaves gradients in the critic."""
        self.optimizers[0].zero_grad()
        loss = -self.critic(self.generator(torch.randn(6, 3))).mean()
        loss.backward()
        self.optimizers[0].step()
        return loss

    def step(self, number: int) -> object:
        """A round."""
        losses = [self.critic_step().item() for _ in range(self.critic_updates)]
        return [*losses, self.generator_step().item()]


class GanRounded(Gan):
    """Gradients are rounded before each of the updates."""

    policy = "bf16"

    def begun(self) -> None:
        """Without a checkpointer rounding is the case's own."""
        if self.ckpt is None:
            for optimizer in self.optimizers:
                optimizer.register_step_pre_hook(_round)


def _round(optimizer, args, kwargs) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.copy_(param.grad.bfloat16())


class GanRates(Gan):
    """A boundary after every update of the critic; the generator steps in every fifth."""

    steps, stop = 14, 8

    def step(self, number: int) -> object:
        """A critic's step, and sometimes the generator's."""
        loss = self.critic_step().item()
        return (loss, self.generator_step().item()) if number % 5 == 0 else loss


class Schedules(Case):
    """Each optimizer has a schedule; one of them cycles its betas."""

    def build(self) -> None:
        """Two halves of a model, trained apart."""
        self.model = net(5, 33, 17, 3)
        params = list(self.model.parameters())
        self.optimizers = [
            torch.optim.AdamW(params[:2], lr=1e-2, amsgrad=True, fused=True),
            torch.optim.Adam(params[2:], lr=1e-2, foreach=True),
        ]
        schedules = torch.optim.lr_scheduler
        self.tracked = {
            "cosine": schedules.CosineAnnealingLR(self.optimizers[0], 5),
            "cycle": schedules.OneCycleLR(self.optimizers[1], 0.05, total_steps=10),
        }

    def step(self, number: int) -> object:
        """Both step; in every third boundary neither does."""
        if number % 3 == 0:
            return torch.rand(()).item()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.model(torch.randn(4, 5)).square().mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        for schedule in self.tracked.values():
            schedule.step()
        return loss.item()


class InBackward(Case):
    """One optimizer per parameter, each stepping in backward as its gradient is ready."""

    def build(self) -> None:
        """Hooks on every parameter."""
        self.model = net(5, 33, 17, 3, norm=True)
        self.optimizers = []
        for param in self.model.parameters():
            optimizer = torch.optim.AdamW([param], lr=1e-2, fused=True)
            self.optimizers.append(optimizer)
            param.register_post_accumulate_grad_hook(lambda p, o=optimizer: _step_now(o))

    def step(self, number: int) -> object:
        """Backward is the update."""
        loss = self.model(torch.randn(4, 5)).square().mean()
        loss.backward()
        return loss.item()


def _step_now(optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()
