"""Weights that change otherwise than by the optimizer, and modules that are not plain."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.matrix.cases_gradients import Plain
from tests.matrix.cases_several import net


class Clipped(Plain):
    """Weights are clipped after the step: end_step comes after that."""

    ends = explicit = True

    def edit(self) -> None:
        """Clip."""
        with torch.no_grad():
            for param in self.model.parameters():
                param.clamp_(-0.2, 0.2)

    def step(self, number: int) -> object:
        """A step, and the edit."""
        loss = super().step(number)
        self.edit()
        return loss


class DataEdited(Clipped):
    """Written to through ``.data`` in step 3: no counter tells, the fold to step 4 does."""

    edited = (3,)
    steps, stop, flushed = 11, 8, True

    def build(self) -> None:
        """An error of saving is expected."""
        super().build()
        self.options = {"strict": False}

    def step(self, number: int) -> object:
        """A step, and the edit where it is due."""
        self.due = number in self.edited
        return super().step(number)

    def end(self, number: int) -> None:
        """After step 4 wait for its fold, so that the next step brings a base."""
        super().end(number)
        late = time.monotonic() + 60
        while number == 4 and self.ckpt and self.report.fresh and not self.ckpt.status().mismatch:
            assert time.monotonic() < late
            time.sleep(0.01)

    def edit(self) -> None:
        """As loops do that were written long ago."""
        for param in self.model.parameters() if self.due else ():
            param.data.clamp_(-0.2, 0.2)


class DataClipped(DataEdited):
    """The WGAN's classic: ``p.data.clamp_`` in every step."""

    edited = range(100)


class QkClipped(Clipped):
    """Two projections are scaled down where their product grows too large."""

    def edit(self) -> None:
        """Scale."""
        with torch.no_grad():
            first, second = self.model[0][0].weight, self.model[2].weight
            limit = 0.1 / first.norm().clamp(min=0.1)
            first.mul_(limit.sqrt())
            second.mul_(limit.sqrt())


class MaxNorm(Plain):
    """An embedding that renorms rows in forward."""

    def build(self) -> None:
        """Rows start outside the norm."""
        self.model = nn.Sequential(nn.Embedding(11, 5, max_norm=0.9), net(5, 7, 3))
        self.make(self.model.parameters())

    def loss(self, number: int) -> torch.Tensor:
        """Some rows."""
        return self.model(torch.randint(0, 11, (6,))).square().mean()


class Averaged(Plain):
    """An exponential moving average beside the model."""

    ends = explicit = True
    average = staticmethod(
        lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    )

    def build(self) -> None:
        """Both modules are attached."""
        super().build()
        self.inner = self.model
        self.model = [self.inner, self.average(self.inner)]

    def loss(self, number: int) -> torch.Tensor:
        """The model's, and then the average's."""
        return self.inner(torch.randn(4, 5)).square().mean()

    def step(self, number: int) -> object:
        """A step, the average of it, and what the average gives."""
        loss = super().step(number)
        self.model[1].update_parameters(self.inner)
        return loss, self.model[1](torch.ones(4, 5)).sum().item()


class AveragedEqually(Averaged):
    """SWA."""

    average = staticmethod(AveragedModel)


class WeightNorm(Plain):
    """A parametrized weight."""

    def build(self) -> None:
        """Norm and direction are the parameters."""
        super().build()
        parametrizations.weight_norm(self.model[2])
        self.make(self.model.parameters())


class SpectralNorm(Plain):
    """Power iteration moves buffers in every forward pass."""

    def build(self) -> None:
        """New style, and the old one."""
        super().build()
        parametrizations.spectral_norm(self.model[2])
        self.model[0].append(nn.utils.spectral_norm(nn.Linear(17, 17)))
        self.make(self.model.parameters())


class LowRank(nn.Module):
    """Adds a product of two thin matrices to a weight."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.zeros(rows, 2))
        self.right = nn.Parameter(torch.randn(2, columns))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The sum."""
        return weight + self.left @ self.right


class Lora(Plain):
    """The weight is frozen, its low-rank part is trained."""

    def build(self) -> None:
        """A parametrization per layer."""
        super().build()
        self.model.requires_grad_(False)
        nn.utils.parametrize.register_parametrization(self.model[2], "weight", LowRank(3, 17))
        self.make(p for p in self.model.parameters() if p.requires_grad)


class Dtypes(Plain):
    """Parameters and buffers of every kind."""

    def build(self) -> None:
        """0-dim, empty, transposed, channels-last; halves, doubles, complex; fp8 buffers."""
        self.model = nn.Module()
        shapes = {"scalar": (), "empty": (0, 3), "plain": (7, 5), "image": (3, 4, 5, 2)}
        for name, shape in shapes.items():
            value = torch.randn(shape)
            if name == "image":
                value = value.to(memory_format=torch.channels_last)
            self.model.register_parameter(name, nn.Parameter(value))
        self.model.transposed = nn.Parameter(torch.randn(5, 9).t())
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64):
            name = "param_" + str(dtype).removeprefix("torch.")
            self.model.register_parameter(name, nn.Parameter(torch.randn(9, 7, dtype=dtype)))
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.bool):
            name = "buffer_" + str(dtype).removeprefix("torch.")
            self.model.register_buffer(name, torch.randn(65).to(dtype))
        self.make(self.model.parameters())

    def make(self, params) -> None:
        """Not fused: complex numbers are not."""
        self.optimizers = [torch.optim.AdamW(params, lr=1e-2)]

    def loss(self, number: int) -> torch.Tensor:
        """Every parameter gets a gradient, every buffer a new value."""
        total = torch.zeros(())
        for param in self.model.parameters():
            noise = torch.randn(param.shape)
            total = total + ((param - noise).abs() ** 2).sum().float()
        for buffer in self.model.buffers():
            buffer.copy_(torch.randn(65).to(buffer.dtype))
        return total
