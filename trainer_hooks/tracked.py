"""Tracked objects: schedulers and whatever else has a state that a step depends on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from adacheck_store.format.errors import ModelMismatchError, OrderError, UnsupportedError

from .copies import host_copy, remote
from .extras import LateNumber, freeze, thaw
from .hooks import scaler_at_work
from .names import Model, modules_of, walk
from .rng import rng_state

log = logging.getLogger(__name__)


def state_of(value: Any) -> Any:
    """An object's ``state_dict()``; that of torch's scaler without its two waits for the device."""
    cls = torch.amp.GradScaler
    scale = getattr(value, "_scale", None)
    own = isinstance(value, cls) and type(value).state_dict is cls.state_dict
    if not own or not isinstance(scale, torch.Tensor) or not remote(scale):
        return value.state_dict()
    unread = cls.__new__(cls)
    vars(unread).update(vars(value), _scale=None, _growth_tracker=None)
    return {
        **unread.state_dict(),
        "scale": LateNumber(float, host_copy(scale)),
        "_growth_tracker": LateNumber(int, host_copy(value._growth_tracker)),
    }


class Tracked:
    """Objects by name, and the modules that keep an extra state; they become the extra's trees."""

    def __init__(
        self, model: Model, optimizers: Sequence[torch.optim.Optimizer], *, explicit: bool = False
    ) -> None:
        self._optimizers = optimizers
        self._called = explicit or len(optimizers) > 1
        self._objects: dict[str, Any] = {}
        self._scaler_settled = False
        self._modules = {
            path.rstrip("."): module
            for root in modules_of(model)
            for path, module in walk(root)
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state
        }
        for path, module in self._modules.items():
            freeze(module.get_extra_state(), f"extra state of module {path!r}")

    @property
    def explicit(self) -> bool:
        """True where `end_step` is the boundary."""
        return self._called

    def add(self, objects: Mapping[str, Any]) -> None:
        """Track further objects; all are checked before any is taken."""
        taken = {name: value for name, value in objects.items() if value is not None}
        for name, value in taken.items():
            if name in self._objects:
                raise OrderError(f"{name!r} is tracked already")
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise UnsupportedError(
                    f"{name!r} is a {type(value).__qualname__} without state_dict()",
                    hint="give it state_dict() and load_state_dict()",
                )
            freeze(value.state_dict(), name)
        self._objects |= taken
        self._called = self._called or bool(taken) or not objects

    def check_scheduler(self) -> None:
        """Raise `OrderError` if an optimizer has a scheduler and none of its own is tracked."""
        schedulers = [
            value for value in self._objects.values()
            if isinstance(value, torch.optim.lr_scheduler.LRScheduler)
        ]  # fmt: skip
        for number, optimizer in enumerate(self._optimizers):
            if not getattr(optimizer.step, "_wrapped_by_lr_sched", False):
                continue
            if not any(getattr(item, "optimizer", optimizer) is optimizer for item in schedulers):
                which = "the optimizer" if len(self._optimizers) == 1 else f"optimizer {number}"
                raise OrderError(
                    f"{which} has a learning rate scheduler that is not tracked",
                    hint="call track(scheduler=...) before restore(), and end_step() after every "
                    "step",
                )

    def note_scaler(self, number: int) -> None:
        """Say once that a gradient scaler is at work whose state nobody keeps.

        Called from an optimizer's hooks. It is a warning, not an error as for a scheduler: a scale
        that starts anew costs a few skipped steps, and a run that tracks nothing has its
        boundaries by itself.
        """
        if self._scaler_settled:
            return
        optimizer: Any = self._optimizers[number]
        scaler = scaler_at_work()
        fed = any(
            getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")
        )
        if not fed and (scaler is None or not scaler.is_enabled()):
            return
        self._scaler_settled = True
        schedulers = torch.optim.lr_scheduler.LRScheduler
        mine = [item for item in self._objects.values() if not isinstance(item, schedulers)]
        if any(item is scaler for item in mine) if scaler is not None else mine:
            return
        log.warning(
            "%s is stepped by a gradient scaler that is not tracked: its scale is not in the steps "
            "that are kept, so a restored run starts with its first scale and may skip other "
            "steps. Call track(scaler=...) before restore(), and end_step() after every step",
            "the optimizer" if len(self._optimizers) == 1 else f"optimizer {number}",
        )

    def trees(self) -> dict[str, Any]:
        """Frozen trees of the generators, the objects and the modules' extra states."""
        return {
            "rng": rng_state(),
            "tracked": {
                name: freeze(state_of(value), name) for name, value in self._objects.items()
            },
            "modules": {
                path: freeze(module.get_extra_state(), f"extra state of module {path!r}")
                for path, module in self._modules.items()
            },
        }

    def check(self, trees: Mapping[str, Any]) -> None:
        """Raise `ModelMismatchError` if other objects are tracked than in the chain.

        A step that was saved from outside a training (see `saving`) knows of none.
        """
        for what, mine in (("tracked", self._objects), ("modules", self._modules)):
            if what not in trees:
                continue
            theirs = sorted(trees[what])
            if theirs != sorted(mine):
                noun = "objects tracked" if what == "tracked" else "modules with an extra state"
                raise ModelMismatchError(
                    f"{noun}: the chain has {theirs}, this run {sorted(mine)}",
                    hint="call track() with the same names before restore(); nothing was changed",
                )

    def load(self, trees: Mapping[str, Any]) -> None:
        """Give every object and module its state back."""
        if "tracked" not in trees:
            left = sorted((*self._objects, *self._modules))
            if left:
                log.warning("this step has no state of %s: left as it is", ", ".join(left))
            return
        for path, module in self._modules.items():
            module.set_extra_state(thaw(trees["modules"][path]))
        for name, value in self._objects.items():
            value.load_state_dict(thaw(trees["tracked"][name]))
