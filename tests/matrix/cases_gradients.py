"""How gradients come about: accumulated, zeroed in place, missing, from closures, sparse."""

from __future__ import annotations

import torch
from torch import nn

from adacheck_store.optimizer_kit import register_optimizer
from tests.matrix.cases_layout import Counter
from tests.matrix.cases_several import net
from tests.matrix.kit import Case
from tests.optimizers.mine import Lion


class Plain(Case):
    """One fused AdamW and nothing tracked: a boundary per update."""

    ends = False
    zero = True

    def build(self) -> None:
        """A perceptron with a norm and dropout."""
        self.model = nn.Sequential(net(5, 33, 17, norm=True), nn.Dropout(0.2), nn.Linear(17, 3))
        self.make(self.model.parameters())

    def make(self, params) -> None:
        """The optimizer."""
        self.optimizers = [torch.optim.AdamW(params, lr=1e-2, fused=True)]

    def loss(self, number: int) -> torch.Tensor:
        """The loss on fresh data."""
        return self.model(torch.randn(4, 5)).square().mean()

    def step(self, number: int) -> object:
        """A step."""
        self.optimizers[0].zero_grad(set_to_none=self.zero)
        loss = self.loss(number)
        loss.backward()
        self.optimizers[0].step()
        return loss.item()


class ZeroedInPlace(Plain):
    """zero_grad(set_to_none=False), with a part of the model that gets a gradient only once."""

    zero = False

    def build(self) -> None:
        """Two heads."""
        super().build()
        self.model = nn.ModuleDict({"main": self.model, "rare": nn.Linear(3, 2)})
        self.make(self.model.parameters())

    def loss(self, number: int) -> torch.Tensor:
        """The rare head is used in step 2 alone."""
        out = self.model["main"](torch.randn(4, 5))
        return (self.model["rare"](out) if number == 2 else out).square().mean()


class ZeroedAtTheEnd(ZeroedInPlace):
    """Zeroed in place after the step, before the boundary."""

    ends = True

    def build(self) -> None:
        """With something tracked."""
        super().build()
        self.tracked = {"counter": Counter()}

    def step(self, number: int) -> object:
        """A step, and zeros."""
        loss = self.loss(number)
        loss.backward()
        self.optimizers[0].step()
        self.optimizers[0].zero_grad(set_to_none=False)
        return loss.item()


class Accumulated(Plain):
    """Three micro-batches to an update: accumulation is no update."""

    def step(self, number: int) -> object:
        """Three losses, one step."""
        self.optimizers[0].zero_grad()
        losses = []
        for _ in range(3):
            loss = self.loss(number) / 3
            loss.backward()
            losses.append(loss.item())
        self.optimizers[0].step()
        return losses


class MidAccumulation(Plain):
    """A boundary after every micro-batch; each third updates. Killed in the middle."""

    ends = True
    steps, stop = 10, 7

    def build(self) -> None:
        """With something tracked, so that end_step is the boundary."""
        super().build()
        self.tracked = {"counter": Counter()}

    def step(self, number: int) -> object:
        """A micro-batch."""
        loss = self.loss(number)
        loss.backward()
        if number % 3 == 0:
            self.optimizers[0].step()
            self.optimizers[0].zero_grad(set_to_none=self.zero)
        return loss.item()


class MidAccumulationInPlace(MidAccumulation):
    """The gradients are zeroed, not dropped; parameters lie channels-last."""

    zero = False

    def build(self) -> None:
        """A convolution."""
        super().build()
        self.model = nn.Sequential(
            nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.LazyLinear(3)
        )
        self.model(torch.zeros(1, 3, 4, 4))
        self.make(self.model.parameters())

    def loss(self, number: int) -> torch.Tensor:
        """Of images."""
        return self.model(torch.randn(2, 3, 4, 4)).square().mean()


class Experts(Plain):
    """A6: one expert of four is idle at first, one parameter is frozen."""

    def build(self) -> None:
        """Experts and a frozen gate."""
        self.model = nn.ModuleDict({"experts": nn.ModuleList(net(5, 7, 3) for _ in range(4))})
        self.model["gate"] = nn.Linear(5, 4).requires_grad_(False)
        self.make(self.model.parameters())

    def loss(self, number: int) -> torch.Tensor:
        """Expert 3 comes in from step 7 on, when the run has been restored."""
        return self.model["experts"][number % (3 if number < 7 else 4)](torch.randn(4, 5)).mean()


class Closures(Plain):
    """A3: backward runs inside of step."""

    def step(self, number: int) -> object:
        """A closure."""

        def closure() -> torch.Tensor:
            self.optimizers[0].zero_grad()
            loss = self.loss(number)
            loss.backward()
            self.rounded()
            return loss

        return self.optimizers[0].step(closure).item()

    def rounded(self) -> None:
        """What the policy does to gradients, where no checkpointer does it."""


class ClosuresNesterov(Closures):
    """The step writes into the gradients that the closure has made."""

    def make(self, params) -> None:
        """SGD."""
        self.optimizers = [
            torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True, foreach=True)
        ]


class ClosuresRounded(Closures):
    """Policy bf16: rounded after the closure, before the update."""

    def build(self) -> None:
        """The policy."""
        super().build()
        self.options = {"policy": "bf16"}

    def rounded(self) -> None:
        """To bf16 and back."""
        for param in self.model.parameters() if self.ckpt is None else ():
            param.grad.copy_(param.grad.bfloat16())


class Later(torch.optim.Adam):
    """A subclass that calls its parent's step."""

    def step(self, closure=None):
        """Adam's own step."""
        return super().step(closure)


class Subclass(Plain):
    """A4: torch's hooks fire twice for each step; nothing is folded, bases are kept."""

    exactness = "unsupported"

    def build(self) -> None:
        """Every state is kept."""
        super().build()
        self.options = {"full_every": 1}

    def make(self, params) -> None:
        """Both classes are hooked by torch."""
        torch.optim.Adam([torch.zeros(1)])
        self.optimizers = [Later(params, lr=1e-2)]


class Curvature(Closures):
    """LBFGS: several closures to one step, and a history instead of moments."""

    exactness = "unsupported"

    def build(self) -> None:
        """Every state is kept."""
        super().build()
        self.options = {"full_every": 1}

    def make(self, params) -> None:
        """LBFGS."""
        self.optimizers = [torch.optim.LBFGS(params, lr=0.1, max_iter=3, history_size=2)]


class Lookup(Plain):
    """A8: sparse gradients, in a class that takes them."""

    exactness = "unsupported"

    def build(self) -> None:
        """An embedding."""
        self.model = nn.Embedding(10, 4, sparse=True)
        self.make(self.model.parameters())
        self.options = {"full_every": 1}

    def make(self, params) -> None:
        """SparseAdam."""
        self.optimizers = [torch.optim.SparseAdam(list(params), lr=1e-2)]

    def loss(self, number: int) -> torch.Tensor:
        """An index may come twice."""
        return self.model(torch.randint(0, 10, (6,))).square().mean()


class Thawed(Plain):
    """A layer that the optimizer has from the start is frozen, thaws in step 4, freezes in 8."""

    def loss(self, number: int) -> torch.Tensor:
        """With the layer trained, or not."""
        self.model[0][0].requires_grad_(4 <= number < 8)
        return super().loss(number)


class Proven(Plain):
    """An optimizer of one's own, registered in every process."""

    def make(self, params) -> None:
        """A proof, which draws nothing and leaves no flag changed."""
        before = torch.get_rng_state(), torch.get_num_threads()
        register_optimizer(Lion, roles=["exp_avg"], scalars=["step"])
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == torch.get_num_threads()
        self.optimizers = [Lion(params, lr=1e-2, weight_decay=0.1, counted=True)]


class Unknown(Plain):
    """The same, of which nobody has proven anything: a base in every third step."""

    exactness = "unsupported"
    steps, stop = 10, 8

    def build(self) -> None:
        """Steps 3, 6 and 9 are kept, and the first."""
        super().build()
        self.options = {"full_every": 3}

    def end(self, number: int) -> None:
        """Step 6 is stored before the kill."""
        if number == 7 and self.ckpt is not None:
            assert self.ckpt._session._writer.wait_stored(60)

    def make(self, params) -> None:
        """Not registered."""
        self.optimizers = [Lion(params, lr=1e-2, counted=True)]
