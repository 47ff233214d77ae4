"""A device in name only: every tensor is one of its own, and copies land when they are waited for.

Until then the host memory is poison. So on a CPU it shows who reads too early, who writes to
memory that a copy is on its way to, and who waits on the training thread.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from adacheck_store.trainer_hooks.copies import Device

POISON = 0xA5

READS = {
    "item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__",
    "__complex__", "__array__", "__format__", "__repr__", "equal", "allclose", "nonzero",
    "is_nonzero", "unique", "masked_select",
}  # fmt: skip
"""What of torch's Python interface waits for a device, by the function's name."""

DISPATCHED = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select"}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)


class _Copy:
    """One copy on its way."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.target, self.source = target, source.detach().clone()
        raw(target).fill_(POISON)

    def land(self) -> None:
        """Arrive; nobody may have written meanwhile."""
        assert bool((raw(self.target) == POISON).all()), "memory was written to before it landed"
        self.target.copy_(self.source)


class _Mark:
    """An event: waiting for it lets all copies before it land."""

    def __init__(self, device: LateDevice, count: int) -> None:
        self.device, self.count = device, count

    def synchronize(self) -> None:
        """Let them land."""
        self.device.land(self.count)


class LateDevice(Device):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._queue: list[_Copy] = []
        self._landed = self.sent = 0
        self.tape: Tape | None = None
        self.watched: int | None = None

    def remote(self, tensor: torch.Tensor) -> bool:
        """All are."""
        return True

    def memory(self, shape: Any, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        """There is nothing to pin it with."""
        return torch.empty(tuple(shape), dtype=dtype)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Note what the source is now, and spoil the target."""
        assert self.tape is None, "a copy to the host was recorded into a graph"
        with self._lock, unread():
            self._queue.append(_Copy(target, source))
            self.sent += 1

    def marks(self) -> list[Any]:
        """An event after all copies so far."""
        return [_Mark(self, self.sent)]

    def recording(self) -> bool:
        """While a tape runs."""
        return self.tape is not None

    def land(self, count: int) -> None:
        """Let the first ``count`` copies of all land."""
        assert threading.get_ident() != self.watched, "the training thread waits for a device"
        with self._lock:
            while self._landed < count:
                self._queue.pop(0).land()
                self._landed += 1


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        words = [str(word) for word in (*args[1:], *(kwargs or {}).values())]
        reads = name in READS or (name == "to" and "cpu" in words)
        assert not reads, f"the training thread reads a tensor: {name}"
        return func(*args, **(kwargs or {}))


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        assert name not in DISPATCHED, f"the training thread reads a tensor: {name}"
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_reads() -> Any:
    """Raise where this thread does what would wait for a device."""
    with _Functions(), _Dispatch():
        yield


@contextlib.contextmanager
def unread() -> Any:
    """Within `no_reads`: what stands for the device's own work."""
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        yield


class Tape(TorchDispatchMode):
    """A graph in name only: what is done under it is undone at its end, and done by `replay`.

    As in a CUDA graph, operations are fixed with the very tensors and the numbers they had, and a
    replay leaves version counters alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func._schema.name not in DISPATCHED, f"{func} cannot be recorded"
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for item in _tensors(value):
                    if id(item) not in self._before:
                        self._before[id(item)] = (item, item.clone(), item._version)
        out = func(*args, **kwargs)
        self._steps.append((func, args, kwargs, out))
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with torch.no_grad():
            for item, value, version in reversed(self._before.values()):  # aliases came later
                item.copy_(value)
                _set_version(item, version)

    def replay(self) -> None:
        """Do it all again, into the same memory."""
        versions = [(item, item._version) for item, _, _ in self._before.values()]
        with torch.no_grad():
            for func, args, kwargs, out in self._steps:
                again = func(*args, **kwargs)
                for mine, new in zip(_tensors(out), _tensors(again), strict=True):
                    if mine.data_ptr() != new.data_ptr():
                        mine.copy_(new)
        for item, version in versions:
            _set_version(item, version)


def _tensors(value: Any) -> list[torch.Tensor]:
    items = value if isinstance(value, list | tuple) else [value]
    return [item for item in items if isinstance(item, torch.Tensor)]


def _set_version(tensor: torch.Tensor, version: int) -> None:
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
