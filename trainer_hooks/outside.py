"""Tensors that change otherwise than by the optimizer's step, and those that may have.

Version counters see only some edits: running statistics of a BatchNorm and writes through
``.data`` leave them alone. So small tensors outside the optimizer are copied at every boundary,
and the encoder drops those whose bytes are the ones stored last; large ones go by version
counter and address. Of trained parameters a change between two updates shows likewise, and then
the whole slice is kept anew. What all of this misses, the fingerprints find.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from adacheck_store.arrays import byte_view
from adacheck_store.format.errors import UnsupportedError
from adacheck_store.format.ids import block_digest

from .copies import copy, host_memory
from .layouts import Binding, Slot
from .shards import local, version
from .stager import HostBuffer, is_small

log = logging.getLogger(__name__)

Mark = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class SetCopy:
    """The bytes of a slot's role at a boundary, as a contiguous tensor of the slot's shape."""

    slot: Slot
    role: str
    data: torch.Tensor

    @property
    def key(self) -> tuple[str, int, str]:
        """Section, slice and role."""
        return (self.slot.section.name, self.slot.index, self.role)

    def digest(self) -> str:
        """Digest of the bytes."""
        return block_digest(byte_view(self.data))


def mark_of(tensor: torch.Tensor) -> Mark:
    """What of an edit can be seen without reading the tensor."""
    return (version(tensor), local(tensor).data_ptr())


def say_edited(name: str, step: int) -> None:
    """Say that a boundary that came by itself has not what the loop did afterwards."""
    log.warning(
        "parameter %r was changed after the boundary of step %d, which does not hold the "
        "change. If the loop changes weights after optimizer.step() (clipping, averaging), "
        "call track() before restore(), and end_step() after the change; what forward "
        "does (max_norm) needs nothing", name, step,
    )  # fmt: skip


def _state_mark(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The same of all of an optimizer's state, counters included; it has to be cheap."""
    marks: list[Any] = []
    for state in optimizer.state.values():
        for value in state.values():
            if type(value) is torch.Tensor:
                marks += (id(value), value._version)
            else:
                marks.append(mark_of(value) if isinstance(value, torch.Tensor) else value)
    return marks


class OutsideWatch:
    """Finds edits on the training thread; copies what must be kept into a boundary's buffer.

    ``binding`` is what is captured of the ``whole`` that the rank holds. ``replayed`` is set where
    CUDA graphs are replayed: they change buffers, and leave the version counters alone.
    """

    def __init__(self, binding: Binding, whole: Binding) -> None:
        self._binding = binding
        self._trained, self._watched = binding.captured, binding.watched
        seen = {slot.item.name for slot in (*self._trained, *self._watched)}
        self._apart = [slot for slot in whole.slots if slot.item.name not in seen]
        self._params = [slot.item.tensor for slot in self._trained]
        self._marks: list[Mark] = []
        self._edited: set[int] = set()
        self._outside: list[Mark] = []
        self._frozen = [slot for slot in self._watched if slot.item.parameter]
        self._states: list[list[Any]] = [[] for _ in binding.optimizers]
        self._touched = False
        self._large = [number for number, slot in enumerate(self._watched) if not is_small(slot)]
        self._settled: list[Mark] = []
        self.replayed = False
        self.rebase()

    def rebase(self) -> None:
        """Take everything as it stands for known: it is in a base, or has been loaded."""
        self._edited.clear()
        self._marks = [mark_of(param) for param in self._params]
        for number in range(len(self._states)):
            self.note_state(number)
        self._touched = False
        self._outside = [mark_of(slot.item.tensor) for slot in self._watched]
        self._settle()

    def _settle(self) -> None:
        self._settled, self._settled_apart = self._frozen_marks(), self._apart_marks()

    def _apart_marks(self) -> list[Mark]:
        return [mark_of(slot.item.tensor) for slot in self._apart]

    def _frozen_marks(self) -> list[Mark]:
        return [mark_of(slot.item.tensor) for slot in self._frozen]

    def stepped(self, number: int, indices: Iterable[int]) -> None:
        """An optimizer has updated these trained slots."""
        for index in indices:
            self._marks[index] = mark_of(self._params[index])
        before = self._touched
        self.note_state(number)
        self._touched = before

    def mark(self, index: int) -> None:
        """Keep this trained slot anew at the coming boundary: its update cannot be folded."""
        self._edited.add(index)

    def note_edits(self, indices: Iterable[int]) -> list[int]:
        """Remember and give those trained slots that were changed since their last update."""
        found = []
        for index in indices:
            mark = mark_of(self._params[index])
            if mark != self._marks[index]:
                self._marks[index] = mark
                self._edited.add(index)
                found.append(index)
        return found

    def note_state(self, number: int) -> None:
        """Remember whether an optimizer's state was changed since its step."""
        if self._binding.foldable:
            mark = _state_mark(self._binding.keepers[number])
            self._touched |= mark != self._states[number]
            self._states[number] = mark

    def state_touched(self) -> bool:
        """Whether optimizers' state was changed by others since this was asked last.

        A delta cannot tell counters. Not seen where steps are recorded: that counts as changes.
        """
        touched, self._touched = self._sees_state_touched(), False
        return touched

    def _sees_state_touched(self) -> bool:
        for number in range(len(self._states)):
            self.note_state(number)
        return self._touched and not self.replayed

    def edited_late(self) -> str:
        """A parameter that was changed since the last boundary, and not by an optimizer."""
        marks = zip(self._frozen, self._frozen_marks(), self._settled, strict=True)
        late = [slot for slot, now, then in marks if now != then]
        late += [self._trained[index] for index in sorted(self._edited)]
        return late[0].item.name if late else ""

    def changed(self) -> bool:
        """Whether something was changed since the last boundary that it has no copy of."""
        trained = (
            any(
                mark_of(param) != mark
                for param, mark in zip(self._params, self._marks, strict=True)
            )
            or self._sees_state_touched()
        )
        tensors = {number: self._watched[number].item.tensor for number in self._large}
        large = any(mark_of(tensor) != self._outside[number] for number, tensor in tensors.items())
        return trained or large or bool(self._edited)

    def changed_apart(self) -> bool:
        """Whether so was something that is here, and that nothing here captures."""
        return self._apart_marks() != self._settled_apart

    def stage(self, buffer: HostBuffer | None) -> list[SetCopy]:
        """Copies of what may have changed otherwise since the last boundary, in the buffer."""
        self.note_edits(range(len(self._params)))
        kept: list[SetCopy] = []
        targets, sources = [], []
        for number, slot in enumerate(self._watched):
            tensor = _checked(slot)
            target = buffer.outside.get(number) if buffer is not None else None
            if target is None and number not in self._large:
                target = host_memory(slot.shape, tensor)
            if target is None:
                mark = mark_of(slot.item.tensor)
                unseen = slot.item.elsewhere or (self.replayed and not slot.item.parameter)
                if mark == self._outside[number] and not unseen:
                    continue
                self._outside[number] = mark
                target = host_memory(slot.shape, tensor)
            targets.append(target)
            sources.append(tensor.detach())
            kept.append(SetCopy(slot, slot.section.main_role, target))
        for index in sorted(self._edited):
            slot = self._trained[index]
            state = self._binding.state(slot)
            tensors: dict[str, Any] = {slot.section.main_role: slot.item.local}
            tensors |= {role: state.get(role) for role in slot.section.state_roles}
            for role, source in tensors.items():
                if isinstance(source, torch.Tensor):
                    target = host_memory(slot.shape, source)
                    targets.append(target)
                    sources.append(source.detach())
                    kept.append(SetCopy(slot, role, target))
        self._edited.clear()
        self._settle()
        copy(targets, sources)
        return kept


def _checked(slot: Slot) -> torch.Tensor:
    tensor = slot.item.local
    if slot.item.tensor.shape != slot.piece.shape or tensor.layout != torch.strided:
        raise UnsupportedError(
            f"{slot.section.main_role} {slot.item.name!r} has shape {tuple(tensor.shape)} now, "
            f"it had {slot.piece.shape}",
            hint="tensors of a run cannot change their shape; start another run",
        )
    return tensor


class Stored:
    """Digests of the bytes stored last, per slot outside the optimizer (writer's thread)."""

    def __init__(self) -> None:
        self._digests: dict[tuple[str, int, str], str] = {}

    def rebase(self, copies: list[SetCopy]) -> None:
        """A base holds these bytes."""
        self._digests = {item.key: item.digest() for item in copies}

    def changed(self, copies: list[SetCopy]) -> list[SetCopy]:
        """Those of the copies whose bytes are not the ones stored last; they are from now on."""
        found = []
        for item in copies:
            if item.slot.section.optimizer >= 0:
                found.append(item)
                continue
            digest = item.digest()
            if self._digests.get(item.key) != digest:
                self._digests[item.key] = digest
                found.append(item)
        return found
