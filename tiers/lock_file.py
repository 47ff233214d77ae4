"""The lock file of a folder that one process at a time may write to."""

from __future__ import annotations

import fcntl
import os

from .medium import busy, translate

LOCK_FILE = "writer.lock"
_TEXT_BYTES_MAX = 4096


def acquire(folder: str, tier: str, name: str = LOCK_FILE) -> int:
    """Lock a folder for this process and write its pid and command line into the lock file.

    Returns the descriptor that holds the lock until it is closed. Raises `TierBusyError` naming
    the process that holds it.
    """
    path = os.path.join(folder, name)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as exc:
        raise translate(exc, tier, path) from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {os.getpid()}: {_command()}\n".encode()[:_TEXT_BYTES_MAX], 0)
    except BlockingIOError as exc:
        holder = os.pread(fd, _TEXT_BYTES_MAX, 0).decode(errors="replace").strip()
        os.close(fd)
        raise busy(tier, folder, holder) from exc
    except OSError as exc:
        os.close(fd)
        raise translate(exc, tier, path) from exc
    return fd


def holder(folder: str) -> str:
    """Pid and command line of the process that holds a folder's lock; empty if none does."""
    try:
        fd = os.open(os.path.join(folder, LOCK_FILE), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return ""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, _TEXT_BYTES_MAX, 0).decode(errors="replace").strip() or "unknown"
    finally:
        os.close(fd)
    return ""


def _command() -> str:
    try:
        with open("/proc/self/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "unknown"
