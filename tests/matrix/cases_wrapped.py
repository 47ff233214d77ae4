"""Models and steps inside of what wraps them: compilers, DDP, hooks of others."""

from __future__ import annotations

import warnings

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.matrix.cases_gradients import Plain


class Compiled(Plain):
    """Compiled before attach, which is given the compiled model."""

    def build(self) -> None:
        """Backend eager: the wrapper is what matters."""
        super().build()
        self.called = torch.compile(self.model, backend="eager")

    @property
    def attached(self):
        """The compiled model."""
        return self.called

    def loss(self, number: int) -> torch.Tensor:
        """Through the wrapper."""
        return self.called(torch.randn(4, 5)).square().mean()


class CompiledLater(Compiled):
    """Compiled after attach and restore, which have the plain model: names are the same."""

    def build(self) -> None:
        """Not yet compiled."""
        Plain.build(self)

    def begun(self) -> None:
        """Now."""
        self.called = torch.compile(self.model, backend="eager")

    @property
    def attached(self):
        """The plain model."""
        return self.model


class Inductor(CompiledLater):
    """Compiled to code of its own: forward and backward are, the step is not."""

    def begun(self) -> None:
        """With the default backend."""
        warnings.simplefilter("ignore")  # the compiler's own
        self.called = torch.compile(self.model)


class CompiledInPlace(Plain):
    """`module.compile()` after restore."""

    def begun(self) -> None:
        """Compile the forward in place."""
        self.model.compile(backend="eager")


class Ddp(Plain):
    """A5: gradients are views of buckets that the next backward overwrites."""

    def build(self) -> None:
        """Wrapped before attach."""
        super().build()
        self.wrap()

    def wrap(self) -> None:
        """One process, gloo."""
        if not torch.distributed.is_initialized():
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        self.called = DistributedDataParallel(self.model, gradient_as_bucket_view=True)

    @property
    def attached(self):
        """The wrapper."""
        return self.called

    def loss(self, number: int) -> torch.Tensor:
        """Through the wrapper."""
        return self.called(torch.randn(4, 5)).square().mean()


class DdpLater(Ddp):
    """Attached to the model, which is wrapped after restore."""

    def build(self) -> None:
        """Not yet wrapped."""
        Plain.build(self)

    def begun(self) -> None:
        """Now."""
        self.wrap()

    @property
    def attached(self):
        """The plain model."""
        return self.model


class Hooked(Plain):
    """Hooks registered before ours and after ours change the gradients."""

    def build(self) -> None:
        """The first hook is there before attach."""
        super().build()
        self.optimizers[0].register_step_pre_hook(_halve)

    def begun(self) -> None:
        """The second comes after it."""
        self.optimizers[0].register_step_pre_hook(_clip)


def _halve(optimizer, args, kwargs) -> None:
    for param in optimizer.param_groups[0]["params"]:
        param.grad.mul_(0.3)


def _clip(optimizer, args, kwargs) -> None:
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.02)


class HookedRounded(Hooked):
    """Policy bf16: what comes after our pre-hook at first is before it from then on."""

    def build(self) -> None:
        """Gradients of the reference are rounded by the last hook."""
        super().build()
        self.options = {"policy": "bf16"}

    def begun(self) -> None:
        """The second hook, and the rounding where no checkpointer does it."""
        super().begun()
        if self.ckpt is None:
            self.optimizers[0].register_step_pre_hook(_round)


def _round(optimizer, args, kwargs) -> None:
    for param in optimizer.param_groups[0]["params"]:
        param.grad.copy_(param.grad.bfloat16())


class HookedAfter(Plain):
    """Hooks of others after the step, registered before ours and after: in the step's boundary."""

    ends = explicit = True

    def build(self) -> None:
        """One that clips weights is there before attach."""
        super().build()
        self.optimizers[0].register_step_post_hook(_shrink)

    def begun(self) -> None:
        """One on all optimizers spoils the gradients, one drops them."""
        register_optimizer_step_post_hook(_spoil)
        self.optimizers[0].register_step_post_hook(lambda opt, *args: opt.zero_grad())


def _shrink(optimizer, args, kwargs) -> None:
    with torch.no_grad():
        for param in optimizer.param_groups[0]["params"]:
            param.clamp_(-0.2, 0.2)


def _spoil(optimizer, args, kwargs) -> None:
    for param in optimizer.param_groups[0]["params"]:
        if param.grad is not None:
            param.grad.fill_(7.0)


class Detached(Plain):
    """The checkpointer is closed after step 4, and training goes on without it."""

    stop = 6

    def step(self, number: int) -> object:
        """A step; before the fifth everything is let go."""
        if number == 5 and self.ckpt is not None and self.report.fresh:
            self.ckpt.close()
            assert not self.optimizers[0]._optimizer_step_pre_hooks
            assert not self.optimizers[0]._optimizer_step_post_hooks
        return super().step(number)
