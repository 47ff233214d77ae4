"""What a training loop keeps besides tensors: rates, loaders, generators, batches fetched ahead."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.matrix.cases_gradients import Plain
from tests.matrix.cases_several import net


class TensorRate(Plain):
    """A learning rate that is a tensor, scheduled."""

    ends = True

    def make(self, params) -> None:
        """Not foreach, which takes no such rate."""
        rate = torch.tensor(1e-2, dtype=torch.float64)
        self.optimizers = [torch.optim.AdamW(params, lr=rate, foreach=False)]
        self.tracked = {"rate": torch.optim.lr_scheduler.ExponentialLR(self.optimizers[0], 0.9)}

    def step(self, number: int) -> object:
        """A step of both."""
        loss = super().step(number)
        self.tracked["rate"].step()
        return loss


class Groups(TensorRate):
    """amsgrad in one group only; a cycle that moves the betas."""

    def make(self, params) -> None:
        """Three groups."""
        params = list(params)
        groups = [
            {"params": params[:2], "amsgrad": True},
            {"params": params[2:4], "weight_decay": 0.3},
            {"params": params[4:], "maximize": True},
        ]
        self.optimizers = [torch.optim.AdamW(groups, lr=1e-2, fused=True)]
        rates = torch.optim.lr_scheduler.OneCycleLR(self.optimizers[0], 0.03, total_steps=12)
        self.tracked = {"rate": rates}


class ByHand(Plain):
    """B4: rate, decay and betas are changed by hand between steps."""

    def step(self, number: int) -> object:
        """Another value now and then."""
        group = self.optimizers[0].param_groups[0]
        if number == 3:
            group["lr"] *= 0.5
        if number == 5:
            group["weight_decay"] = 0.3
        if number == 7:
            group["betas"] = (0.8, 0.95)
        return super().step(number)


class Noisy(Plain):
    """Python's, numpy's and torch's generators are drawn from in every step."""

    def loss(self, number: int) -> torch.Tensor:
        """Noise from all three."""
        noise = random.random() + np.random.randn() + random.gauss(0, 1)
        return super().loss(number) * noise


class Rematerialised(Plain):
    """Activations are computed again in backward, under dropout."""

    reentrant = False

    def loss(self, number: int) -> torch.Tensor:
        """Through `torch.utils.checkpoint`."""
        data = torch.randn(4, 5, requires_grad=True)
        hidden = checkpoint(self.model[0], data, use_reentrant=self.reentrant)
        hidden = checkpoint(self.model[1], hidden, use_reentrant=self.reentrant)
        return self.model[2](hidden).square().mean()


class RematerialisedReentrant(Rematerialised):
    """The older way, which runs backward within backward."""

    reentrant = True


class Loaded(Plain):
    """A loader with workers that fetch ahead, over passes of an odd length."""

    workers = 2

    def begun(self) -> None:
        """Passes without end."""
        data = torch.arange(5 * 22, dtype=torch.float32).view(22, 5).sin()
        loader = DataLoader(
            TensorDataset(data), batch_size=4, shuffle=True, num_workers=self.workers,
            prefetch_factor=2 if self.workers else None, multiprocessing_context="fork"
            if self.workers else None,
        )  # fmt: skip
        self.fetched = self.passes(loader)

    def passes(self, loader):
        """Batches, pass after pass."""
        while True:
            yield from self.ckpt.batches(loader) if self.ckpt else loader

    def loss(self, number: int) -> torch.Tensor:
        """Of the next batch."""
        (batch,) = next(self.fetched)
        return self.model(batch).square().mean() + 0 * batch.sum()


class Augmented(torch.utils.data.Dataset):
    """Items with noise that the workers draw."""

    def __len__(self) -> int:
        """An odd length."""
        return 22

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        """One item."""
        return (torch.full((5,), float(index)).sin() + 0.1 * torch.randn(5),)


class LoadedNoisy(Loaded):
    """Workers that live on from pass to pass, draw noise and fetch far ahead."""

    def begun(self) -> None:
        """Passes without end."""
        loader = DataLoader(
            Augmented(), batch_size=4, shuffle=True, num_workers=2, prefetch_factor=3,
            persistent_workers=True, multiprocessing_context="fork",
        )  # fmt: skip
        self.fetched = self.passes(loader)


class FetchedAhead(Plain):
    """The next batch is drawn from the global generator before the step, and carried."""

    def begun(self) -> None:
        """The first batch, or the one that was carried."""
        self.batch = self.report.carried if self.report else None
        if self.batch is None:
            self.batch = self.fetch()

    def fetch(self) -> dict:
        """A batch."""
        return {"x": torch.randn(4, 5), "at": (random.random(), None)}

    def loss(self, number: int) -> torch.Tensor:
        """Of the batch at hand; the next is fetched before backward."""
        loss = self.model(self.batch["x"]).square().mean() * self.batch["at"][0]
        self.batch = self.fetch()
        if self.ckpt:
            self.batch = self.ckpt.carry(self.batch)
        return loss


class LoadedAhead(Loaded):
    """A batch of a loader is carried: what the loader has given counts as consumed."""

    workers = 0

    def begun(self) -> None:
        """One batch ahead."""
        super().begun()
        self.batch = self.report.carried if self.report else None
        if self.batch is None:
            self.batch = next(self.fetched)

    def loss(self, number: int) -> torch.Tensor:
        """Of the batch at hand."""
        (batch,) = self.batch
        loss = self.model(batch).square().mean()
        self.batch = next(self.fetched)
        if self.ckpt:
            self.ckpt.carry(self.batch)
        return loss


class Tied(Plain):
    """One matrix at both ends, and a buffer that no state_dict has."""

    def build(self) -> None:
        """A language model of sorts."""
        self.model = nn.ModuleDict({"emb": nn.Embedding(11, 6), "body": net(6, 6)})
        self.model["head"] = nn.Linear(6, 11, bias=False)
        self.model["head"].weight = self.model["emb"].weight
        self.model.register_buffer("seen", torch.zeros(11, dtype=torch.int64), persistent=False)
        self.make(self.model.parameters())

    def loss(self, number: int) -> torch.Tensor:
        """Next token."""
        tokens = torch.randint(0, 11, (9,))
        self.model.seen += torch.bincount(tokens, minlength=11)
        out = self.model["head"](self.model["body"](self.model["emb"](tokens[:-1])))
        return torch.nn.functional.cross_entropy(out, tokens[1:])
