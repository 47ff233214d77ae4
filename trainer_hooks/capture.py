"""Capture: what each applied update has used, kept in a boundary's buffer.

Gradients are read after the step, when they are final whatever hooks and closures did before it;
what the step itself would spoil (nesterov), and what must be rounded first (policy ``bf16``), is
staged just before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from adacheck_store.format.errors import (
    OrderError,
    TermError,
    UnsupportedError,
    UsageError,
)
from adacheck_store.optimizers import shared_half

from .copies import copy, host_copy, host_memory, recording, remote
from .graphs import Recording
from .held import held_groups
from .hooks import StepHooks
from .layouts import Binding, state_roles
from .outside import OutsideWatch
from .pending import PendingGrads
from .shards import local, odd_gradient, version
from .stager import GradArea, HostBuffer, Stager, round_into, staged_dtype
from .updates import CapturedUpdate, walks_otherwise


class Listener(Protocol):
    """Who is told about updates, on the training thread."""

    @property
    def explicit(self) -> bool:
        """Whether a boundary is closed by a call, not by an update."""
        ...

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
        self._recordings: dict[int, Recording] = {}
        self._pending = PendingGrads()

    def _hook(self, number: int, optimizer: torch.optim.Optimizer) -> StepHooks:
        return StepHooks(
            optimizer, lambda compiled: self._before(number, compiled),
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
        self._pending.begin(binding)
        self._slots = binding.captured
        self._params = [slot.item.tensor for slot in self._slots]
        self._halves = {i for i, param in enumerate(self._params) if shared_half(param)}
        self._dtypes = [staged_dtype(slot.section, self._policy) for slot in self._slots]
        self._mine: list[list[int]] = [[] for _ in self._optimizers]
        for index, slot in enumerate(self._slots):
            number, param = slot.section.optimizer, slot.item.tensor
            self._mine[number].append(index)
            if remote(param) and number not in self._recordings:
                counts = torch.zeros(2, dtype=torch.int64, device=param.device)
                self._recordings[number] = Recording(counts)
        watch.replayed = any(made.made for made in self._recordings.values())
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
        for number, made in self._recordings.items():
            if made.made and self._keeps_updates():
                self._stage_replay(number, made)
        updates, self._updates, self._buffer, self._scales = self._updates, [], None, []
        return buffer, updates

    def drop(self) -> None:
        """Forget what was captured: it is no part of the boundary that is closed now."""
        self._updates, self._scales = [], []
        for made in self._recordings.values():
            made.forget()

    def replayed(self) -> bool:
        """Whether a recorded step was replayed since the last boundary; waits for the device."""
        return any(made.replays for made in self._recordings.values())

    def changes(self, number: int) -> str:
        """How an optimizer's parameters or their state differ from the binding; empty: not."""
        assert self._binding is not None
        if self._members_of(number) != self._members[number]:
            return "the optimizer's parameters or groups have changed"
        if self._roles_of(number) != self._roles[number]:
            return "a group's flags have changed what state the optimizer keeps"
        for index in self._mine[number]:
            item = self._slots[index].item
            if item.current is not self._params[index]:
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

    def _before(self, number: int, compiled: bool) -> bool:
        if recording():
            self._check_recording(number)
            return True
        self._listener.before_update(number)
        if compiled and self._keeps_updates():
            raise UnsupportedError(
                f"the step of optimizer {number} is compiled: a compiler has an arithmetic of its "
                "own, which cannot be folded",
                hint="compile the model, and call optimizer.step() eagerly",
            )
        if self._binding is None:
            return False
        self._watch.note_edits(self._mine[number])
        self._watch.note_state(number)
        self._listener.edited_late(self._watch.edited_late())
        self._early.clear()
        return True

    def _check_recording(self, number: int) -> None:
        """A recorded step is seen once; what it needs must be there by then."""
        if self._binding is None or not self._listener.explicit:
            raise OrderError(
                "an optimizer's step is recorded into a graph before restore(), or without track()",
                hint="call track() and restore(), then record, and end_step() after every replay",
            )
        if any(self._spoils(index) for index in self._mine[number]):
            raise UnsupportedError(
                "a recorded step that writes into its gradients (nesterov)",
                hint="use nesterov=False, or make the step outside of the graph",
            )
        self._early.clear()

    def _checked(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """The gradient's local tensor, if it is one that can be kept."""
        param = self._params[index]
        kind = odd_gradient(param, grad)
        if kind:
            raise UnsupportedError(
                f"the gradient of {self._slots[index].item.name!r} is {kind}",
                hint="use dense gradients (sparse=False) of the parameter's dtype and sharding",
            )
        return local(grad).detach()

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
        plain = {index: local(grad).detach() for index, grad in grads.items()}
        rounded = [i for i in grads if self._rounds(i)]
        kept = [i for i in grads if not self._rounds(i)]
        with torch.no_grad():
            if self._stager.device and rounded:
                halves = [plain[i].to(torch.bfloat16) for i in rounded]
                torch._foreach_copy_([plain[i] for i in rounded], halves)
                kept = list(grads)
            if not recording():  # else the rounding is in the graph, and nothing is there yet
                views = self._area(number).views
                if rounded and not self._stager.device:
                    round_into([views[i] for i in rounded], [plain[i] for i in rounded])
                copy([views[i] for i in kept], [plain[i] for i in kept])
        for index, grad in grads.items():
            self._early[index] = (grad, version(grad))

    def _keeps_updates(self) -> bool:
        """Whether updates are kept at all: not where one of the optimizers cannot be folded."""
        return self._binding is not None and self._binding.foldable

    def _rounds(self, index: int) -> bool:
        return self._dtypes[index] != self._params[index].dtype

    def _spoils(self, index: int) -> bool:
        """Whether the step may write into this gradient (SGD nesterov, foreach)."""
        assert self._binding is not None
        return bool(self._binding.group(self._slots[index]).get("nesterov"))

    def _after(self, number: int) -> None:
        if self._binding is None:
            return
        found_inf = getattr(self._optimizers[number], "found_inf", None)
        if recording():
            self._record(number, found_inf)
            return
        later = found_inf is not None and remote(found_inf) and self._listener.explicit
        if found_inf is not None and not later and bool(found_inf != 0):
            self._scales.clear()
            self._watch.stepped(number, self._mine[number])
            return  # the fused step has skipped itself: no update was applied
        self._guard(lambda: self._stage(number, found_inf if later else None))
        self._watch.stepped(number, self._mine[number])
        self._listener.after_update(number)

    def _record(self, number: int, found_inf: torch.Tensor | None) -> None:
        """After a step that was recorded, not made: have the graph copy what the step consumes."""
        scales, self._scales = self._scales, []
        self._recordings[number].count(found_inf)
        if not self._keeps_updates():
            return
        grads: dict[int, torch.Tensor] = {}
        for index in self._mine[number]:
            grad = self._params[index].grad
            if grad is not None:
                grads[id(self._params[index])] = self._checked(index, grad)
                if self._rounds(index) and not self._is_staged(index, grad):
                    self._recordings[number].unrounded.add(id(self._params[index]))
        with torch.no_grad():
            groups = self._optimizers[number].param_groups
            self._recordings[number].record(grads, groups, scales)
        self._watch.replayed = True

    def _stage_replay(self, number: int, made: Recording) -> None:
        """At a boundary: copy what the last replay of a recorded step has left, if there was one.

        Whether there was one is known when the counts have landed.
        """
        update = CapturedUpdate(
            number, held_groups(made.groups), self._area(number),
            scales=tuple(host_copy(scale) for scale in made.scales),
            counts=host_copy(made.counts),
            beside=any(earlier.optimizer == number for earlier in self._updates),
        )  # fmt: skip
        made.forget()
        for index in self._unsteady(number):
            self._watch.mark(index)
        targets, sources = [], []
        for index in self._mine[number]:
            grad = made.grads.get(id(self._params[index]))
            if grad is None:
                continue
            update.given.add(index)
            if id(self._params[index]) in made.unrounded:
                update.late[index] = host_copy(grad)
            else:
                targets.append(update.area.views[index])
                sources.append(grad)
        copy(targets, sources)
        self._updates.append(update)

    def _stage(self, number: int, found_inf: torch.Tensor | None) -> None:
        """After the step: copy the gradients that are not staged yet."""
        self._pending.used(number)
        if not self._keeps_updates():
            return
        groups = self._optimizers[number].param_groups
        fused = any(group.get("fused") for group in groups)
        update = CapturedUpdate(
            number, held_groups(groups), self._area(number),
            scales=tuple(host_copy(scale) for scale in self._scales),
        )  # fmt: skip
        if found_inf is not None:
            made = torch.ones((), dtype=torch.int64, device=found_inf.device)
            update.counts = host_copy(torch.stack([made, (found_inf != 0).sum()]))
        targets, sources = [], []
        unsteady = self._unsteady(number)
        for index in self._mine[number]:
            param = self._params[index]
            grad = param.grad
            if grad is None:
                continue
            update.given.add(index)
            if index in unsteady or (fused and walks_otherwise(local(param), local(grad))):
                self._watch.mark(index)
            if self._is_staged(index, grad):
                continue
            if self._rounds(index):
                target = host_memory(local(grad).shape, local(grad))
                update.late[index] = target
            else:
                target = update.area.views[index]
            targets.append(target)
            sources.append(self._checked(index, grad))
        copy(targets, sources)
        self._held_buffer().landed()
        self._early.clear()
        self._updates.append(update)

    def _unsteady(self, number: int) -> set[int]:
        """Slots whose update cannot be folded since a flag of their group was changed."""
        assert self._binding is not None
        check = self._binding.specs[number].check
        mine = self._halves.intersection(self._mine[number])
        if not mine or check is None:
            return set()
        bad = [bool(check(group)) for group in self._optimizers[number].param_groups]
        return {index for index in mine if bad[self._slots[index].piece.group]}

    def _is_staged(self, index: int, grad: torch.Tensor) -> bool:
        """Whether what was staged before the step is the gradient that it has used."""
        early = self._early.get(index)
        if early is None or early[0] is not grad:
            return False
        return early[1] == version(grad) or self._spoils(index)

    def left_behind(self) -> tuple[list[int], dict[int, torch.Tensor]]:
        """Of all trained slots here: gradients zeroed in place, and those still to be used."""
        return self._pending.found()
