"""Copies into host memory that the training thread makes and the writer's thread waits for.

On the CPU a copy is done when it returns. From a CUDA device it goes to pinned memory in the order
of the current stream, and an event on that stream tells when it has landed. Until then nobody may
read the memory, and nobody may write to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Event(Protocol):
    """What can be waited for."""

    def synchronize(self) -> None:
        """Wait until everything before the event is done."""
        ...


class Device:
    """What this seam asks of devices; tests put another in its place."""

    def __init__(self) -> None:
        self._sources: set[torch.device] = set()

    def remote(self, tensor: torch.Tensor) -> bool:
        """Whether reading the tensor would wait for a device."""
        return tensor.device.type != "cpu"

    def memory(self, shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        """Host memory, pinned where copies of ``like`` need it to be left alone."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=like.is_cuda)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy into host memory; other devices than CUDA are waited for."""
        if source.is_cuda:
            self._sources.add(source.device)
        target.copy_(source, non_blocking=source.is_cuda)

    def marks(self) -> list[Event]:
        """An event after all copies so far, on the current stream of each device they came from."""
        found: list[Event] = []
        for device in self._sources:
            event: Any = torch.cuda.Event(blocking=True)
            event.record(torch.cuda.current_stream(device))
            found.append(event)
        return found

    def recording(self) -> bool:
        """Whether work is being recorded into a CUDA graph, and not done."""
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


DEVICE = Device()


def remote(tensor: torch.Tensor) -> bool:
    """Whether reading the tensor would wait for a device."""
    return DEVICE.remote(tensor)


def recording() -> bool:
    """Whether work is being recorded into a CUDA graph, and not done."""
    return DEVICE.recording()


def host_memory(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Contiguous host memory of a tensor's dtype, for a copy of it."""
    return DEVICE.memory(shape, like.dtype, like)


def copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors (or pieces) into host memory, without waiting for a device."""
    if not targets:
        return
    with torch.no_grad():
        if not any(DEVICE.remote(source) for source in sources):
            torch._foreach_copy_(list(targets), list(sources))
            return
        for target, source in zip(targets, sources, strict=True):
            DEVICE.send(target, source)


def host_copy(source: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a tensor in host memory of its own, not waited for."""
    source = source.detach()
    if not DEVICE.remote(source):
        return source.clone(memory_format=torch.contiguous_format)
    target = host_memory(source.shape, source)
    copy([target], [source])
    return target


class Landing:
    """Host memory that copies are on their way to.

    `landed` is called on the training thread after copies into it, `settle` by whoever reads or
    writes it next: by two threads at once, where both read.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []

    def landed(self) -> None:
        """Mark the end of the copies made so far."""
        self._events += DEVICE.marks()

    def settle(self) -> None:
        """Wait until all marked copies have landed."""
        for event in self._events:
            event.synchronize()
        self._events = []  # not sooner: another thread would take them for landed
