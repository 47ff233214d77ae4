"""Capture: hooks on the optimizer that keep what each applied update has used.

Gradients are read after the step, when they are final whatever hooks and closures did before it;
what the step itself would spoil (nesterov), and what must be rounded first (policy ``bf16``), is
staged just before it. Our post-hook is the first of all, our pre-hook the last.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from adacheck_store.format.bodies import Groups
from adacheck_store.format.errors import (
    TermError,
    UnsupportedError,
    UsageError,
)
from adacheck_store.optimizers import group_values

from .layouts import Binding
from .outside import OutsideWatch
from .stager import HostBuffer, Stager, copy, round_into, staged_dtype

FUSED_WIDTH = 16
"""Elements that the widest fused kernel takes at once (AVX-512; 8 under AVX2)."""

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


class Listener(Protocol):
    """Who is told about updates, on the training thread."""

    def before_update(self) -> None:
        """An update is about to be applied; may raise to prevent it."""
        ...

    def after_update(self) -> None:
        """An update was applied and captured."""
        ...

    def capture_failed(self, error: Exception) -> None:
        """An update was, or will be, applied that could not be captured."""
        ...


@dataclass(slots=True)
class CapturedUpdate:
    """One applied update whose gradients lie in a buffer.

    ``given[i]`` says whether trained slot i had a gradient; ``late`` maps slots to gradients
    that do not fit the staging's dtype; ``scales`` are observed clip coefficients.
    """

    groups: Groups
    given: list[bool]
    late: dict[int, torch.Tensor] = field(default_factory=dict)
    scales: list[torch.Tensor] = field(default_factory=list)


class Capture:
    """The hooks on one optimizer, from `begin` until `detach`; training thread only.

    ``held`` are the trained slots whose gradient tensor outlived the interval before the last
    update: there gradients are zeroed, not dropped, and a restored run needs zeros to go on.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, policy: str, listener: Listener) -> None:
        self._optimizer = optimizer
        self._policy = policy
        self._listener = listener
        self._pre = optimizer.register_step_pre_hook(self._before)
        self._post = optimizer.register_step_post_hook(self._after)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(self._post.id, last=False)
        self._binding: Binding | None = None
        self._stager: Stager
        self._watch: OutsideWatch
        self._buffer: HostBuffer | None = None
        self._update: CapturedUpdate | None = None
        self._scales: list[torch.Tensor] = []
        self._early: dict[int, tuple[torch.Tensor, int]] = {}
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        self.held: list[int] = []

    def begin(self, binding: Binding, stager: Stager, watch: OutsideWatch) -> None:
        """Start to capture into the stager's buffers."""
        self._binding, self._stager, self._watch = binding, stager, watch
        self._params = [slot.item.tensor for slot in binding.trained]
        self._dtypes = [staged_dtype(slot.section, self._policy) for slot in binding.trained]
        self._groups = [slot.piece.group for slot in binding.trained]
        self._order = [id(p) for g in self._optimizer.param_groups for p in g["params"]]
        self._roles = [self._roles_of(g) for g in self._optimizer.param_groups]

    def detach(self) -> None:
        """Remove the hooks."""
        self._pre.remove()
        self._post.remove()
        self._binding = None

    def observe_scale(self, coefficient: torch.Tensor) -> None:
        """Gradients of the coming update were multiplied with this coefficient."""
        self._scales.append(coefficient)

    def take(self) -> tuple[HostBuffer, CapturedUpdate | None]:
        """Hand over the buffer of this boundary with the update in it, if there was one."""
        buffer = self._buffer or self._stager.acquire()
        update, self._update, self._buffer = self._update, None, None
        hooks: Any = self._optimizer._optimizer_step_pre_hooks
        if next(reversed(hooks)) != self._pre.id:
            hooks.move_to_end(self._pre.id)
        return buffer, update

    def _roles_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        assert self._binding is not None
        return self._binding.spec.roles(group)

    def _guard(self, work: Callable[[], None]) -> None:
        """Run our own work: training goes on without it, misuse and fencing excepted."""
        try:
            work()
        except (UsageError, TermError):
            raise
        except Exception as error:
            self._early.clear()
            self._listener.capture_failed(error)

    def _before(
        self, optimizer: torch.optim.Optimizer, args: _Args, kwargs: _Kwargs
    ) -> tuple[_Args, _Kwargs] | None:
        self._listener.before_update()
        if self._binding is None:
            return None
        self._check_members()
        self._watch.note_edits()
        self._early.clear()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._guard(self._stage_early)
            return None

        def staged() -> Any:
            result = closure()
            self._guard(self._stage_early)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": staged}
        return (args[0], staged, *args[2:]), kwargs

    def _check_members(self) -> None:
        assert self._binding is not None
        groups = self._optimizer.param_groups
        if [id(p) for g in groups for p in g["params"]] != self._order:
            raise UnsupportedError(
                "the optimizer's parameters have changed since attach",
                hint="adding or removing parameters during a run is not supported yet",
            )
        if [self._roles_of(g) for g in groups] != self._roles:
            raise UnsupportedError(
                "a group's flags have changed what state the optimizer keeps (amsgrad, momentum)",
                hint="changing this during a run is not supported yet",
            )
        for slot, param in zip(self._binding.trained, self._params, strict=True):
            if slot.item.owner.get(slot.item.key) is not param:
                raise UnsupportedError(
                    f"parameter {slot.item.name!r} of the model was replaced by another tensor",
                    hint="change it in place, or start another run",
                )

    def _checked(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        param = self._params[index]
        if grad.layout != torch.strided or grad.dtype != param.dtype:
            assert self._binding is not None
            kind = "sparse" if grad.layout != torch.strided else f"of {grad.dtype}"
            raise UnsupportedError(
                f"the gradient of {self._binding.trained[index].item.name!r} is {kind}",
                hint="use dense gradients (sparse=False) of the parameter's dtype",
            )
        return grad.detach()

    def _held_buffer(self) -> HostBuffer:
        if self._buffer is None:
            self._buffer = self._stager.acquire()
        return self._buffer

    def _stage_early(self) -> None:
        """Just before the step: round in place, and copy what the step itself would change."""
        if getattr(self._optimizer, "grad_scale", None) is not None:
            return  # a fused step unscales the gradients itself: read them afterwards
        indices = []
        for index, param in enumerate(self._params):
            if param.grad is not None and (self._rounds(index) or self._spoils(index)):
                indices.append(index)
        if not indices:
            return
        buffer = self._held_buffer()
        grads = {i: self._checked(i, self._grad(i)) for i in indices}
        rounded = [i for i in indices if self._rounds(i)]
        kept = [i for i in indices if not self._rounds(i)]
        with torch.no_grad():
            if self._stager.device and rounded:
                halves = [grads[i].to(torch.bfloat16) for i in rounded]
                torch._foreach_copy_([grads[i] for i in rounded], halves)
                kept = indices
            elif rounded:
                round_into([buffer.views[i] for i in rounded], [grads[i] for i in rounded])
            copy([buffer.views[i] for i in kept], [grads[i] for i in kept])
        for index in indices:
            grad = self._grad(index)
            self._early[index] = (grad, grad._version)

    def _grad(self, index: int) -> torch.Tensor:
        grad = self._params[index].grad
        assert grad is not None
        return grad

    def _rounds(self, index: int) -> bool:
        return self._dtypes[index] != self._params[index].dtype

    def _spoils(self, index: int) -> bool:
        """Whether the step may write into this gradient (SGD nesterov, foreach)."""
        group = self._optimizer.param_groups[self._groups[index]]
        return bool(group.get("nesterov"))

    def _walks_otherwise(self, param: torch.Tensor, grad: torch.Tensor) -> bool:
        """Whether torch's fused CPU kernel meets the elements in another order than a fold.

        It walks memory, and treats the last elements of a tensor differently: in a parameter
        that does not lie in C order they are others, and a gradient must lie like its parameter.
        """
        if param.device.type != "cpu":
            return False
        if grad.stride() != param.stride() and not (grad.is_contiguous() and param.is_contiguous()):
            return True
        return not param.is_contiguous() and param.numel() % FUSED_WIDTH != 0

    def _after(self, optimizer: torch.optim.Optimizer, args: _Args, kwargs: _Kwargs) -> None:
        if self._binding is None:
            return
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf != 0):
            self._scales.clear()
            return  # the fused step has skipped itself: no update was applied
        self._guard(self._stage)
        self._watch.stepped()
        self._listener.after_update()

    def _stage(self) -> None:
        """After the step: copy the gradients that are not staged yet."""
        buffer = self._held_buffer()
        groups = tuple(group_values(group) for group in self._optimizer.param_groups)
        update = CapturedUpdate(groups, [False] * len(self._params), scales=self._scales)
        self._scales = []
        seen, self._seen, self.held = self._seen, {}, []
        fused = any(group.get("fused") for group in self._optimizer.param_groups)
        targets, sources = [], []
        for index, param in enumerate(self._params):
            grad = param.grad
            if grad is None:
                continue
            update.given[index] = True
            if index in seen and seen[index]() is grad:
                self.held.append(index)
            self._seen[index] = weakref.ref(grad)
            if fused and self._walks_otherwise(param, grad):
                self._watch.mark(index)
            early = self._early.get(index)
            if early is not None and early[0] is grad:
                if early[1] == grad._version or self._spoils(index):
                    continue
            if self._rounds(index):
                target = torch.empty(grad.shape, dtype=grad.dtype)
                update.late[index] = target
            else:
                target = buffer.views[index]
            targets.append(target)
            sources.append(self._checked(index, grad))
        copy(targets, sources)
        self._early.clear()
        self._update = update
