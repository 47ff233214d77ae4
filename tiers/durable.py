"""Primitives that make a file or a name durable, each between two failpoints.

``point`` is the step's name in `failpoints.POINTS`. Nothing else in tiers/ calls fsync, rename
or link (a test walks the syntax trees).
"""

from __future__ import annotations

import os

from . import failpoints
from .transfer import write_direct


def fsync(fd: int, point: str) -> None:
    """Flush a file or folder to the medium."""
    failpoints.hit(f"{point}.before")
    os.fsync(fd)
    failpoints.hit(f"{point}.after")


def rename(
    source: str, target: str, point: str, *, source_dir: int | None = None,
    target_dir: int | None = None,
) -> None:  # fmt: skip
    """Give a file its final name, replacing what had it."""
    failpoints.hit(f"{point}.before")
    os.rename(source, target, src_dir_fd=source_dir, dst_dir_fd=target_dir)
    failpoints.hit(f"{point}.after")


def link(
    source: str, target: str, point: str, *, source_dir: int | None = None,
    target_dir: int | None = None,
) -> bool:  # fmt: skip
    """Give a file a further name unless that is taken: False if it is."""
    failpoints.hit(f"{point}.before")
    try:
        os.link(source, target, src_dir_fd=source_dir, dst_dir_fd=target_dir, follow_symlinks=False)
    except FileExistsError:
        return False
    failpoints.hit(f"{point}.after")
    return True


def unlink(name: str, point: str, *, folder: int) -> None:
    """Take a file's name away; ``folder`` is the descriptor of the folder it lies in."""
    failpoints.hit(f"{point}.before")
    os.unlink(name, dir_fd=folder)
    failpoints.hit(f"{point}.after")


def write_all(fd: int, buffers: list[memoryview]) -> None:
    """Write buffers one after another, however short single writes are.

    A single large one goes around the page cache where it can.
    """
    queue = [view for view in buffers if view.nbytes]
    if len(queue) == 1:
        queue = [view for view in (queue[0][write_direct(fd, queue[0]) :],) if view.nbytes]
    while queue:
        done = os.writev(fd, queue[:512])
        while queue and done >= queue[0].nbytes:
            done -= queue.pop(0).nbytes
        if done:
            queue[0] = queue[0][done:]


def fsync_path(path: str, point: str) -> None:
    """Flush a folder named by its path."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fsync(fd, point)
    finally:
        os.close(fd)
