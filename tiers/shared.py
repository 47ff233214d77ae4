"""The shared tier is a memory tier whose blocks lie in a file without a name.

Other processes of this node read them there, by a descriptor, instead of having them sent. The
file is as large as can be and hardly any of it exists: a place is used once, and gives its memory
back when its record is dropped. So whoever still has the descriptor keeps nothing in memory, and
what is read of a dropped record is zeros, never another record.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from adacheck_store.format.errors import (
    RecordNotFoundError,
    TierFullError,
)
from adacheck_store.format.record import Block, block_nbytes

from .blocks import check_length, check_range, span
from .intake import placed
from .memory import Blocks, MemoryTier, Stored
from .places import EPOCH, Memory, Places
from .transfer import copy_into

PAGE = 4096
LEAST_BYTES = 64 << 10
"""Smaller arrays are kept as bytes: a place takes whole pages."""

_SIZE = 1 << 60
_PUNCH = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@lru_cache(maxsize=1)
def _fallocate() -> Callable[[int, int, int, int], int]:
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return lambda fd, mode, at, size: int(call(fd, mode, at, size))


class _Store(Memory):
    """The writing end: places are taken one after the other, and given up."""

    def __init__(self, name: str) -> None:
        super().__init__(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(self.fd, _SIZE)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self._next = PAGE
        self._epochs = itertools.count(1)
        self._lock = threading.Lock()
        self._write(EPOCH.pack(0), 0)
        if _fallocate()(self.fd, _PUNCH, PAGE, PAGE):
            raise OSError(ctypes.get_errno(), "no holes")

    def reader(self) -> int:
        """A descriptor of its own that can only read."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def take(self, data: memoryview) -> int:
        """A place with these bytes."""
        with self._lock:
            at = self._next
            self._next += -(-len(data) // PAGE) * PAGE
        try:
            self._write(data, at)
        except OSError:
            self.give_up([(at, len(data))])
            raise
        return at

    def give_up(self, places: Sequence[tuple[int, int]]) -> None:
        """Give the memory of places back, each (place, bytes)."""
        if not places:
            return
        with self._lock:
            self._write(EPOCH.pack(next(self._epochs)), 0)
        for at, size in places:
            _fallocate()(self.fd, _PUNCH, at, -(-size // PAGE) * PAGE)

    def _write(self, data: bytes | memoryview, at: int) -> None:
        view = memoryview(data)
        while len(view):
            done = os.pwrite(self.fd, view, at)
            at, view = at + done, view[done:]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a block lies, and its bytes."""

    at: int
    size: int

    def __len__(self) -> int:
        return self.size


class SharedTier(MemoryTier):
    """A memory tier that tells other processes of this node where its blocks lie."""

    def __init__(self, name: str = "memory") -> None:
        """Raises `OSError` where the system has no such files."""
        super().__init__(name)
        self._store = _Store(f"adacheck-{name}")
        self._reader = Memory(self._store.reader())

    def places(self, key: str) -> Places | None:
        """Where a record's blocks lie; -1 stands for those that must be read as usual."""
        epoch = self._store.epoch()
        sealed, blocks = self._record(key)
        found = {
            info.name: (info.nbytes, [_at(blocks, info.name, n) for n in range(len(info.digests))])
            for info in sealed.head.arrays
        }
        return Places(self._reader, epoch, found)

    def read(self, key: str, array: str, first: int, count: int) -> bytes | memoryview:
        """Bytes of a run of blocks, not verified."""
        sealed, _ = self._record(key)
        with placed(tier=self.traits.name, key=key):
            start, stop = span(check_range(sealed, array, first, count), first, count)
        out = np.empty(stop - start, np.uint8).data
        self.read_into(key, array, first, count, out)
        return out

    def read_into(self, key: str, array: str, first: int, count: int, out: memoryview) -> None:
        """The same into memory of the caller's."""
        record = self._record(key)
        with placed(tier=self.traits.name, key=key):
            info = check_range(record[0], array, first, count)
            start, stop = span(info, first, count)
            check_length(array, first, len(out), stop - start)
            for index in range(first, first + count):
                size = block_nbytes(info, index)
                stored = self._block(record[1], info, index)
                if isinstance(stored, _Place):
                    self._store.fill(stored.at, out[:size])
                elif isinstance(stored, bytes):
                    copy_into(out, 0, stored)
                out = out[size:]
            if self._record(key) is not record:
                raise RecordNotFoundError("the record was dropped while it was read")

    def _keep(self, block: Block) -> Stored:
        size = len(block.data)
        if not block.index and size < LEAST_BYTES:
            return bytes(block.data)
        try:
            return _Place(self._store.take(block.data), size)
        except OSError as error:
            raise TierFullError(
                f"no memory: {error}", hint="give the agent less --memory than there is"
            ) from error

    def _let_go(self, records: Iterable[Blocks]) -> None:
        stored = [one for blocks in records for one in blocks.values()]
        self._store.give_up([(one.at, one.size) for one in stored if isinstance(one, _Place)])


def _at(blocks: Blocks, array: str, index: int) -> int:
    stored = blocks.get((array, index))
    return stored.at if isinstance(stored, _Place) else -1


def memory_tier(name: str) -> MemoryTier:
    """A memory tier, shared where the system lets it be."""
    try:
        return SharedTier(name)
    except (OSError, AttributeError):
        return MemoryTier(name)
