"""Moving many bytes: copies that other threads run beside, files written around the page cache."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from adacheck_store.format.ids import Buffer

ALIGNMENT = 4096
"""What direct writes want of memory and sizes on every disk we know; others refuse them."""

DIRECT_BYTES = 1 << 20
"""Files from this size on are written around the page cache."""

HUGE_BYTES = 2 << 20
"""A large page; less memory is not asked to have any, for it may lie amid other things."""

_HUGEPAGE = 14  # MADV_HUGEPAGE
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14

_DIRECT = getattr(os, "O_DIRECT", 0)


def copy_into(target: Buffer, at: int, data: Buffer) -> None:
    """Copy bytes into writable memory from place ``at`` on, letting other threads run meanwhile.

    A slice assignment would hold Python's lock for the length of it, and training wait for that.
    """
    size = memoryview(data).nbytes
    if size:
        np.frombuffer(target, np.uint8, size, at)[:] = np.frombuffer(data, np.uint8)


def aligned(nbytes: int) -> memoryview:
    """Fresh memory that may be written directly."""
    return memoryview(mmap.mmap(-1, max(1, nbytes)))[:nbytes]


@lru_cache(maxsize=1)
def _madvise() -> Callable[[int, int, int], int] | None:
    call = getattr(ctypes.CDLL(None), "madvise", None)
    if call is not None:
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call


def populate(view: memoryview) -> None:
    """Have the system make all pages of fresh writable memory at once, large ones where it can.

    That takes it less time than to make each when it is first written.
    """
    call, start = _madvise(), np.frombuffer(view, np.uint8).ctypes.data
    first, last = -(-start // ALIGNMENT) * ALIGNMENT, (start + len(view)) // ALIGNMENT * ALIGNMENT
    if call is not None and first < last:
        if last - first >= HUGE_BYTES:
            call(first, last - first, _HUGEPAGE)
        call(first, last - first, _POPULATE_WRITE)  # what it cannot do is done page by page


def write_direct(file: int, view: memoryview) -> int:
    """Write as much of large memory as can go to a new file around the page cache.

    Returns the bytes written, from the file's position on: 0 where the file system, or memory
    that is not `aligned`, is not made for it. The rest is to be written as usual.
    """
    whole = view.nbytes - view.nbytes % ALIGNMENT
    if not _DIRECT or whole < DIRECT_BYTES:
        return 0
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | _DIRECT)
    except OSError:
        return 0
    done = 0
    try:
        while done < whole and done % ALIGNMENT == 0:
            done += os.write(file, view[done:whole])
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
    return done
