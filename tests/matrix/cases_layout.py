"""Parameters that come, go, thaw or are replaced during a run."""

from __future__ import annotations

import torch
from torch import nn

from tests.matrix.cases_several import net
from tests.matrix.kit import Case

ADDED, THAWED = 5, 8


class Growing(Case):
    """B6: a group is added in step 5, and a frozen layer thaws in step 8."""

    steps, stop, flushed = 11, 9, True
    fused = True

    def build(self) -> None:
        """A head and a frozen body that the optimizer does not have yet."""
        self.model = nn.ModuleDict({"body": net(5, 7), "mid": net(7, 9), "head": net(9, 3)})
        for part in ("body", "mid"):
            self.model[part].requires_grad_(False)
        head = self.model["head"].parameters()
        self.optimizers = [torch.optim.AdamW(head, lr=1e-2, fused=self.fused)]
        if self.at >= ADDED:
            self.add("mid")
        if self.at >= THAWED:
            self.add("body")

    def add(self, part: str) -> None:
        """Train a further part, at a rate of its own."""
        self.model[part].requires_grad_(True)
        self.optimizers[0].add_param_group({"params": self.model[part].parameters(), "lr": 3e-3})

    def step(self, number: int) -> object:
        """A step, of more parameters as time goes on."""
        if number == ADDED:
            self.add("mid")
        if number == THAWED:
            self.add("body")
        self.optimizers[0].zero_grad()
        hidden = self.model["mid"](self.model["body"](torch.randn(4, 5)))
        loss = self.model["head"](hidden).square().mean()
        loss.backward()
        self.optimizers[0].step()
        return loss.item()


class GrowingRounded(Growing):
    """With a schedule tracked, so that end_step is the boundary."""

    def build(self) -> None:
        """A schedule over the groups there are."""
        super().build()
        self.options = {"base_every": 3}
        self.tracked = {"counter": Counter()}


class Counter:
    """An object with a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict:
        """The count."""
        return {"count": self.count}

    def load_state_dict(self, state: dict) -> None:
        """Set the count."""
        self.count = state["count"]


class Replaced(Case):
    """A head is replaced by another of another width, with fresh optimizer state."""

    steps, stop, flushed = 9, 7, True

    def build(self) -> None:
        """A body and a head."""
        width = 4 if self.at >= 5 else 3
        self.model = nn.ModuleDict({"body": net(5, 7), "head": net(7, width)})
        self.optimizers = [
            torch.optim.SGD(self.model["body"].parameters(), lr=1e-2, momentum=0.9),
            torch.optim.AdamW(self.model["head"].parameters(), lr=1e-2, fused=True),
        ]

    def step(self, number: int) -> object:
        """A step; the fifth has a new head."""
        if number == 5:
            self.model["head"] = net(7, 4)
            optimizer = self.optimizers[1]
            optimizer.state.clear()
            optimizer.param_groups[0]["params"] = list(self.model["head"].parameters())
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.model["head"](self.model["body"](torch.randn(4, 5))).square().mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.item()


class Reset(Replaced):
    """The new head has the old one's shape: only its values and state are others."""

    def step(self, number: int) -> object:
        """A step; the fifth has a new head."""
        if number != 5:
            return super().step(number)
        self.model["head"] = net(7, 3)
        self.optimizers[1].state.clear()
        self.optimizers[1].param_groups[0]["params"] = list(self.model["head"].parameters())
        return super().step(-number)

    def build(self) -> None:
        """The same at any step."""
        at, self.at = self.at, 0
        super().build()
        self.at = at


class Flags(Case):
    """Momentum and amsgrad are switched on and off; what they leave behind stays."""

    steps, stop, flushed = 11, 9, True

    def build(self) -> None:
        """Two optimizers, to be changed."""
        self.model = net(5, 33, 3)
        params = list(self.model.parameters())
        self.optimizers = [
            torch.optim.SGD(params[:2], lr=1e-2),
            torch.optim.AdamW(params[2:], lr=1e-2, amsgrad=True),
        ]
        if self.at >= 3:
            self.optimizers[0].param_groups[0]["momentum"] = 0.9

    def step(self, number: int) -> object:
        """Momentum from step 3 to 6; amsgrad until step 5, and again from step 8."""
        sgd, adam = (optimizer.param_groups[0] for optimizer in self.optimizers)
        if number in (3, 7):
            sgd["momentum"] = 0.9 if number == 3 else 0.0
        if number in (5, 8):
            adam["amsgrad"] = number == 8
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.model(torch.randn(4, 5)).square().mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.item()


class NewBuffer(Case):
    """A module without trained parameters joins the model; it is found at a round step."""

    steps, stop, flushed = 9, 7, True

    def build(self) -> None:
        """A norm that may be missing."""
        self.model = nn.ModuleDict({"net": net(5, 33, 3)})
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)]
        if self.at >= 3:
            self.add()

    def add(self) -> None:
        """A BatchNorm that only keeps statistics."""
        self.model["norm"] = nn.BatchNorm1d(5, affine=False)

    def step(self, number: int) -> object:
        """A step, normed from step 3 on."""
        if number == 3:
            self.add()
        data = torch.randn(4, 5)
        if "norm" in self.model:
            data = self.model["norm"](data)
        self.optimizers[0].zero_grad()
        loss = self.model["net"](data).square().mean()
        loss.backward()
        self.optimizers[0].step()
        return loss.item()
