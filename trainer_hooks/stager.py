"""The stager: preallocated host memory that a captured boundary is copied into.

The memory is pinned where tensors lie on a CUDA device; how copies get there see `copies`.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Sequence
from typing import Any

import torch

from adacheck_store import kernels
from adacheck_store.arrays import torch_dtype
from adacheck_store.format.errors import TierBusyError
from adacheck_store.format.layout import Section

from .copies import Landing, remote
from .fresh import zeros
from .layouts import Binding, Slot

SMALL_BYTES = 256 << 10
"""Tensors outside the optimizer up to this size have a preallocated place in each buffer."""

ROUNDED_TOGETHER = 1 << 18


def staged_dtype(section: Section, policy: str) -> torch.dtype:
    """Dtype in which a section's gradients are staged under a gradient policy."""
    dtype = torch_dtype(section.roles[0][1])
    return torch.bfloat16 if policy == "bf16" and dtype == torch.float32 else dtype


def is_small(slot: Slot) -> bool:
    """Whether a tensor outside the optimizer is copied at every boundary."""
    itemsize = torch_dtype(slot.section.roles[0][1]).itemsize
    return slot.piece.elements * itemsize <= SMALL_BYTES


class GradArea:
    """Memory for the gradients of one update of one optimizer.

    ``grads`` holds them by section, those of slots kept elsewhere apart from the others; ``views``
    a parameter-shaped view per captured slot of it.
    """

    def __init__(self, binding: Binding, optimizer: int, policy: str, pinned: bool) -> None:
        self.grads = {
            section.name: zeros(section.elements, staged_dtype(section, policy), pinned)
            for section in binding.layout.sections
            if section.optimizer == optimizer
        }
        kept = len(binding.trained)
        others = {slot.section.name: slot.section for slot in binding.captured[kept:]}
        elsewhere = {
            name: zeros(section.elements, staged_dtype(section, policy), pinned)
            for name, section in others.items() if section.optimizer == optimizer
        }  # fmt: skip
        self.views: dict[int, torch.Tensor] = {}
        for index, slot in enumerate(binding.captured):
            if slot.section.optimizer == optimizer:
                areas = self.grads if index < kept else elsewhere
                flat = areas[slot.section.name]
                self.views[index] = shaped(flat, slot.piece.offset, slot.shape)


class HostBuffer(Landing):
    """Memory for one boundary in flight.

    ``area`` gives memory for each update's gradients; ``blocks`` are the pieces of fingerprinted
    blocks, of which ``sums`` are those known by now; ``outside`` holds a view per small slot
    outside the optimizer. ``scratch`` keeps what the encoder needs between boundaries. One side at
    a time owns a buffer: the training thread until the boundary is handed over, then the writer
    until it is released.
    """

    def __init__(self, binding: Binding, policy: str, block_bytes: int, pinned: bool) -> None:
        super().__init__()
        self.pinned = pinned
        self._binding, self._policy = binding, policy
        self._areas = [
            [GradArea(binding, number, policy, pinned)] if binding.foldable else []
            for number in range(len(binding.optimizers))
        ]
        self.blocks = self._zeros(block_bytes, torch.uint8)
        self.sums: dict[int, int] = {}
        self.outside: dict[int, torch.Tensor] = {}
        for number, slot in enumerate(binding.watched):
            dtype = torch_dtype(slot.section.roles[0][1])
            if is_small(slot):
                self.outside[number] = self._zeros(slot.piece.elements, dtype).view(slot.shape)
        self.scratch: dict[Any, Any] = {}

    def _zeros(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return zeros(elements, dtype, self.pinned)

    def area(self, optimizer: int, number: int) -> GradArea:
        """Memory for an optimizer's update ``number`` of this boundary; kept once it was needed."""
        areas = self._areas[optimizer]
        while len(areas) <= number:
            areas.append(GradArea(self._binding, optimizer, self._policy, self.pinned))
        return areas[number]


def shaped(flat: torch.Tensor, offset: int, shape: Sequence[int]) -> torch.Tensor:
    """A view of a flat array as a tensor of ``shape``, from element ``offset``."""
    elements = 1
    for size in shape:
        elements *= size
    return flat[offset : offset + elements].view(tuple(shape))


def round_into(targets: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
    """Round CPU gradients to the targets' dtype in place, and keep them there.

    In one pass where there is a loop for it; else a megabyte or so at a time, so that the way back
    finds both in the processor's cache.
    """
    pairs = zip(targets, grads, strict=True)
    rest = [(target, grad) for target, grad in pairs if not kernels.round_half(grad, target)]
    some: list[tuple[torch.Tensor, torch.Tensor]] = []
    elements = 0
    for number, pair in enumerate(rest, 1):
        some.append(pair)
        elements += pair[1].numel()
        if elements >= ROUNDED_TOGETHER or number == len(rest):
            halves, whole = map(list, zip(*some, strict=True))
            torch._foreach_copy_(halves, whole)
            torch._foreach_copy_(whole, halves)
            some.clear()
            elements = 0


class StateArea(Landing):
    """Memory for a part's whole state: a flat zero-padded array per ``<section>/<role>``."""

    def __init__(self, binding: Binding, pinned: bool) -> None:
        super().__init__()
        self.arrays: dict[str, torch.Tensor] = {}
        for section in binding.layout.sections:
            for role, dtype in section.roles:
                flat = zeros(section.elements, torch_dtype(dtype), pinned)
                self.arrays[f"{section.name}/{role}"] = flat
        self.views = {
            (slot.section.name, slot.index, role): shaped(
                self.arrays[f"{slot.section.name}/{role}"], slot.piece.offset, slot.shape
            )
            for slot in binding.slots
            for role, _ in slot.section.roles
        }


class Stager:
    """W+1 host buffers, and as many state areas as were ever needed at once.

    ``acquire`` and ``drop`` are called on the training thread, ``release`` on any.
    """

    def __init__(
        self, binding: Binding, *, policy: str, window: int, block_bytes: int, timeout_s: float
    ) -> None:
        here = (*binding.slots, *binding.captured)
        self.device = any(remote(slot.item.local) for slot in here)
        self._pinned = any(slot.item.local.is_cuda for slot in here)
        self._binding, self._policy, self._block_bytes = binding, policy, block_bytes
        self._timeout_s = timeout_s
        self._missing = 0
        self._free: queue.LifoQueue[HostBuffer] = queue.LifoQueue(maxsize=window + 1)
        self._areas: queue.LifoQueue[StateArea] = queue.LifoQueue(maxsize=window + 2)
        for _ in range(window + 1):
            self._free.put_nowait(self._new())

    def _new(self) -> HostBuffer:
        return HostBuffer(self._binding, self._policy, self._block_bytes, self._pinned)

    def drop(self) -> None:
        """Give the memory of what is free back; what is needed after all is made anew."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._free.get_nowait()
                self._missing += 1
        with contextlib.suppress(queue.Empty):
            while True:
                self._areas.get_nowait()

    def acquire(self) -> HostBuffer:
        """A free buffer; raises `TierBusyError` if none is released in time.

        One that was given up unread may have copies on their way: those are waited for here.
        """
        try:
            buffer = self._free.get(timeout=0 if self._missing else self._timeout_s)
        except queue.Empty:
            if self._missing:
                buffer = self._new()
                self._missing -= 1
                return buffer
            raise TierBusyError(
                f"no capture buffer was released within {self._timeout_s:g} s",
                hint="the tier is too slow; this step is not kept",
            ) from None
        buffer.settle()
        return buffer

    def release(self, buffer: HostBuffer) -> None:
        """Give a buffer back."""
        self._free.put_nowait(buffer)

    def area(self) -> StateArea:
        """A state area, a new one if none is free (there are never more than buffers)."""
        try:
            area = self._areas.get_nowait()
        except queue.Empty:
            return StateArea(self._binding, self._pinned)
        area.settle()
        return area

    def release_area(self, area: StateArea) -> None:
        """Give a state area back; one too many is dropped."""
        with contextlib.suppress(queue.Full):
            self._areas.put_nowait(area)
