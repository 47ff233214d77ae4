"""Hooks on one optimizer's step: told once per applied update, whatever wraps or nests the call.

Our post-hook is the first of all, our pre-hook the last, so that what others do to gradients
before the step is seen, and what they do after it is not taken for the step's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]

SCALER_DEPTH = 24
"""Frames between a hook and the scaler that calls the step: a dozen, with wrappers of others."""


class StepHooks:
    """Pre- and post-hook of an optimizer.

    ``before`` is called first, with whether a compiler makes the step, and may raise to prevent
    the update; ``ready`` when gradients are final, after a closure if there is one; ``after`` once
    the step was made. The step of a subclass that calls ``super().step()`` fires torch's hooks
    twice: the inner call counts not.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, before: Callable[[bool], bool],
        ready: Callable[[], None], after: Callable[[], None],
    ) -> None:  # fmt: skip
        self.optimizer = optimizer
        quiet: Any = torch.compiler.disable  # a compiled step must not be compiled with us
        self._tell_before, self._tell_ready = quiet(before), quiet(ready)
        self._tell_after = quiet(after)
        self._pre = optimizer.register_step_pre_hook(self._before)
        self._post = optimizer.register_step_post_hook(self._after)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(self._post.id, last=False)

    def detach(self) -> None:
        """Remove the hooks."""
        self._pre.remove()
        self._post.remove()

    def keep_last(self) -> None:
        """Put our pre-hook behind those registered since; not while these are being called."""
        hooks: Any = self.optimizer._optimizer_step_pre_hooks
        if next(reversed(hooks)) != self._pre.id:
            hooks.move_to_end(self._pre.id)

    def _before(
        self, optimizer: torch.optim.Optimizer, args: _Args, kwargs: _Kwargs
    ) -> tuple[_Args, _Kwargs] | None:
        compiled = torch.compiler.is_compiling()
        if nested(optimizer) or not self._tell_before(compiled):
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._tell_ready()
            return None

        def told() -> Any:
            result = closure()
            self._tell_ready()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": told}
        return (args[0], told, *args[2:]), kwargs

    def _after(self, optimizer: torch.optim.Optimizer, args: _Args, kwargs: _Kwargs) -> None:
        if not nested(optimizer):
            self._tell_after()


def attached(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks of ours are on the optimizer."""
    return any(
        isinstance(getattr(hook, "__self__", None), StepHooks)
        for hook in optimizer._optimizer_step_pre_hooks.values()
    )


def nested(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of the optimizer was called from within its own step.

    Read from the stack: a count kept by the hooks would be wrong for ever after a step that
    raised. Classes of torch do not nest, and are not looked at.
    """
    if type(optimizer).__module__.startswith("torch.optim."):
        return False
    wrap: Any = torch.optim.Optimizer.profile_hook_step
    wrapper = wrap(_no_step).__code__
    depth = 0
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is wrapper and frame.f_locals.get("self") is optimizer:
            depth += 1
        frame = frame.f_back
    return depth > 1


def scaler_at_work() -> torch.amp.GradScaler | None:
    """The gradient scaler by which the step was called that calls us, read from the stack.

    A scaler knows its optimizers, but they do not know it. It calls the step itself, so it
    stands a few frames above the hooks.
    """
    frame: Any = sys._getframe(1)
    for _ in range(SCALER_DEPTH):
        if frame is None:
            break
        if frame.f_code.co_name in ("step", "_maybe_opt_step"):
            found = frame.f_locals.get("self")
            if isinstance(found, torch.amp.GradScaler):
                return found
        frame = frame.f_back
    return None


def _no_step() -> None:
    """What torch's wrapper is made around to learn its code."""
