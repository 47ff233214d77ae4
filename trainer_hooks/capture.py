"""Capture: what each applied update has used, kept in a boundary's buffer.

Gradients are read after the step, when they are final whatever hooks and closures did before it;
what the step itself would spoil (nesterov), and what must be rounded first (policy ``bf16``), is
staged just before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from adacheck_store.format.bodies import Groups
from adacheck_store.format.errors import TermError, UnsupportedError, UsageError
from adacheck_store.optimizers import group_values

from .hooks import StepHooks
from .layouts import Binding, state_roles
from .outside import OutsideWatch
from .pending import PendingGrads
from .stager import GradArea, HostBuffer, Stager, copy, round_into, staged_dtype

FUSED_WIDTH = 16
"""Elements that the widest fused kernel takes at once (AVX-512; 8 under AVX2)."""


class Listener(Protocol):
    """Who is told about updates, on the training thread."""

    def before_update(self, optimizer: int) -> None:
        """An update is about to be applied; may raise to prevent it."""
        ...

    def edited_late(self, name: str) -> None:
        """Before an update: a parameter changed since the last boundary (empty: none did)."""
        ...

    def after_update(self, optimizer: int) -> None:
        """An update was applied and captured."""
        ...

    def capture_failed(self, error: Exception) -> None:
        """An update was, or will be, applied that could not be captured."""
        ...


@dataclass(slots=True)
class CapturedUpdate:
    """One applied update of an optimizer, whose gradients lie in an area of a buffer.

    ``given`` are the trained slots that had a gradient; ``late`` maps slots to gradients that do
    not fit the staging's dtype; ``scales`` are observed clip coefficients.
    """

    optimizer: int
    groups: Groups
    area: GradArea
    given: set[int] = field(default_factory=set)
    late: dict[int, torch.Tensor] = field(default_factory=dict)
    scales: Sequence[torch.Tensor] = ()


class Capture:
    """The hooks on a run's optimizers, from `begin` until `detach`; training thread only."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], policy: str, listener: Listener
    ) -> None:
        self._optimizers = tuple(optimizers)
        self._policy = policy
        self._listener = listener
        self._hooks = {id(item): self._hook(number, item) for number, item in enumerate(optimizers)}
        self._order = register_optimizer_step_pre_hook(self._come_last)
        self._binding: Binding | None = None
        self._stager: Stager
        self._watch: OutsideWatch
        self._buffer: HostBuffer | None = None
        self._updates: list[CapturedUpdate] = []
        self._scales: list[torch.Tensor] = []
        self._early: dict[int, tuple[torch.Tensor, int]] = {}
        self._pending = PendingGrads()

    def _hook(self, number: int, optimizer: torch.optim.Optimizer) -> StepHooks:
        return StepHooks(
            optimizer, lambda: self._before(number),
            lambda: self._guard(lambda: self._stage_early(number)), lambda: self._after(number),
        )  # fmt: skip

    def _come_last(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Hooks on all optimizers are called before those on one: the moment to put ours last."""
        hooks = self._hooks.get(id(optimizer))
        if hooks is not None:
            hooks.keep_last()

    def begin(self, binding: Binding, stager: Stager, watch: OutsideWatch) -> None:
        """Start to capture into the stager's buffers, or go on with another binding."""
        if self._buffer is not None:
            self._stager.release(self._buffer)
        self._buffer, self._updates = None, []
        self._binding, self._stager, self._watch = binding, stager, watch
        self._params = [slot.item.tensor for slot in binding.trained]
        self._dtypes = [staged_dtype(slot.section, self._policy) for slot in binding.trained]
        self._mine: list[list[int]] = [[] for _ in self._optimizers]
        for index, slot in enumerate(binding.trained):
            self._mine[slot.section.optimizer].append(index)
        self.accept()

    def accept(self) -> None:
        """Take the optimizers' groups as they stand for those of the binding."""
        count = range(len(self._optimizers))
        self._members = [self._members_of(number) for number in count]
        self._roles = [self._roles_of(number) for number in count]

    def detach(self) -> None:
        """Remove the hooks."""
        self._order.remove()
        for hooks in self._hooks.values():
            hooks.detach()
        self._binding = None

    def observe_scale(self, coefficient: torch.Tensor) -> None:
        """Gradients of a coming update were multiplied with this coefficient."""
        self._scales.append(coefficient)

    def take(self) -> tuple[HostBuffer, list[CapturedUpdate]]:
        """Hand over the buffer of this boundary with the updates that lie in it."""
        buffer = self._held_buffer()
        updates, self._updates, self._buffer, self._scales = self._updates, [], None, []
        return buffer, updates

    def changes(self, number: int) -> str:
        """How an optimizer's parameters or their state differ from the binding; empty: not."""
        assert self._binding is not None
        if self._members_of(number) != self._members[number]:
            return "the optimizer's parameters or groups have changed"
        if self._roles_of(number) != self._roles[number]:
            return "a group's flags have changed what state the optimizer keeps"
        for index in self._mine[number]:
            item = self._binding.trained[index].item
            if item.owner.get(item.key) is not self._params[index]:
                return f"parameter {item.name!r} was replaced"
        return ""

    def _members_of(self, number: int) -> list[list[int]]:
        groups = self._optimizers[number].param_groups
        return [[id(param) for param in group["params"]] for group in groups]

    def _roles_of(self, number: int) -> list[tuple[str, ...]]:
        assert self._binding is not None
        spec = self._binding.specs[number]
        groups = self._optimizers[number].param_groups
        return [state_roles(spec, group, {}) for group in groups]

    def _guard(self, work: Callable[[], None]) -> None:
        """Run our own work: training goes on without it, misuse and fencing excepted."""
        try:
            work()
        except (UsageError, TermError):
            raise
        except Exception as error:
            self._early.clear()
            self._listener.capture_failed(error)

    def _before(self, number: int) -> bool:
        self._listener.before_update(number)
        if self._binding is None:
            return False
        self._watch.note_edits(self._mine[number])
        self._listener.edited_late(self._watch.edited_late())
        self._early.clear()
        return True

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

    def _area(self, number: int) -> GradArea:
        earlier = sum(update.optimizer == number for update in self._updates)
        return self._held_buffer().area(number, earlier)

    def _stage_early(self, number: int) -> None:
        """Just before the step: round in place, and copy what the step itself would change."""
        if not self._keeps_updates():
            return
        if getattr(self._optimizers[number], "grad_scale", None) is not None:
            return  # a fused step unscales the gradients itself: read them afterwards
        grads: dict[int, torch.Tensor] = {}
        for index in self._mine[number]:
            grad = self._params[index].grad
            if grad is not None:
                self._checked(index, grad)
                if self._rounds(index) or self._spoils(index):
                    grads[index] = grad
        if not grads:
            return
        views = self._area(number).views
        plain = {index: grad.detach() for index, grad in grads.items()}
        rounded = [i for i in grads if self._rounds(i)]
        kept = [i for i in grads if not self._rounds(i)]
        with torch.no_grad():
            if self._stager.device and rounded:
                halves = [plain[i].to(torch.bfloat16) for i in rounded]
                torch._foreach_copy_([plain[i] for i in rounded], halves)
                kept = list(grads)
            elif rounded:
                round_into([views[i] for i in rounded], [plain[i] for i in rounded])
            copy([views[i] for i in kept], [plain[i] for i in kept])
        for index, grad in grads.items():
            self._early[index] = (grad, grad._version)

    def _keeps_updates(self) -> bool:
        """Whether updates are kept at all: not where one of the optimizers cannot be folded."""
        return self._binding is not None and self._binding.foldable

    def _rounds(self, index: int) -> bool:
        return self._dtypes[index] != self._params[index].dtype

    def _spoils(self, index: int) -> bool:
        """Whether the step may write into this gradient (SGD nesterov, foreach)."""
        assert self._binding is not None
        return bool(self._binding.group(self._binding.trained[index]).get("nesterov"))

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

    def _after(self, number: int) -> None:
        if self._binding is None:
            return
        found_inf = getattr(self._optimizers[number], "found_inf", None)
        if found_inf is not None and bool(found_inf != 0):
            self._scales.clear()
            return  # the fused step has skipped itself: no update was applied
        self._guard(lambda: self._stage(number))
        self._watch.stepped(self._mine[number])
        self._listener.after_update(number)

    def _stage(self, number: int) -> None:
        """After the step: copy the gradients that are not staged yet."""
        self._pending.used([self._params[index] for index in self._mine[number]])
        if not self._keeps_updates():
            return
        groups = self._optimizers[number].param_groups
        fused = any(group.get("fused") for group in groups)
        update = CapturedUpdate(
            number, tuple(group_values(group) for group in groups), self._area(number),
            scales=tuple(self._scales),
        )  # fmt: skip
        targets, sources = [], []
        for index in self._mine[number]:
            param = self._params[index]
            grad = param.grad
            if grad is None:
                continue
            update.given.add(index)
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
                target = update.area.views[index]
            targets.append(target)
            sources.append(self._checked(index, grad))
        copy(targets, sources)
        self._early.clear()
        self._updates.append(update)

    def left_behind(self) -> tuple[list[int], dict[int, torch.Tensor]]:
        """Trained slots whose gradients are zeroed in place, and those with some still to use."""
        return self._pending.found(self._params)
