"""Moving many bytes: copies that other threads run beside, files written around the page cache."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import numpy as np

from adacheck_store.format.ids import Buffer

ALIGNMENT = 4096
"""What direct writes want of memory and sizes on every disk we know; others refuse them."""

DIRECT_BYTES = 1 << 20
"""Files from this size on are written around the page cache."""

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
