"""Fresh memory for capture: zeroed, its pages made by a thread while training begins.

To make a page takes longer than to fill it, and where the host of a virtual machine has to give the
memory ten times longer. Capture needs twice the state's bytes: training would begin seconds later.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque

import torch

from adacheck_store.duty import NICE, give_way
from adacheck_store.tiers.transfer import populate

LEAST_BYTES = 1 << 20
"""Less is made at once."""

_PIECE_BYTES = 4 << 20


class _Pages:
    """The thread that makes pages, there as long as there are some to make.

    What is written to meanwhile keeps its bytes, and what nobody has any more is passed over.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[weakref.ref[mmap.mmap]] = deque()
        self._running = False

    def add(self, memory: mmap.mmap) -> None:
        """Have its pages made, after those that were asked for before."""
        with self._lock:
            self._waiting.append(weakref.ref(memory))
            if not self._running:
                self._running = True
                threading.Thread(target=self._make, name="adacheck-pages", daemon=True).start()

    def _make(self) -> None:
        give_way(NICE)
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                found = self._waiting.popleft()
            at = 0
            while (memory := found()) is not None and at < len(memory):
                populate(memoryview(memory)[at : at + _PIECE_BYTES])
                at += _PIECE_BYTES
                del memory


_PAGES = _Pages()


def zeros(elements: int, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
    """Zeros in host memory that only this process writes to, its children included."""
    nbytes = elements * dtype.itemsize
    if pinned or nbytes < LEAST_BYTES:
        return torch.zeros(elements, dtype=dtype, pin_memory=pinned)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _PAGES.add(memory)
    return torch.frombuffer(memory, dtype=dtype)
