"""Failpoints are named places where a test may stop the process or make it fail.

They stand before and after every step that makes something durable or visible. Nothing is armed
unless `arm` was called; an unarmed failpoint costs a set lookup.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time

from adacheck_store.format.errors import UsageError

POINTS = (
    "lmdb.marker",
    "lmdb.create",
    "lmdb.page",
    "lmdb.head",
    "lmdb.delete",
    "lmdb.sweep",
    "lmdb.sync",
    "lmdb.quarantine",
    "local.file.fsync",
    "local.rename",
    "local.link",
    "local.unlink",
    "local.folder.fsync",
)
"""Steps that have a failpoint on either side, ``<step>.before`` and ``<step>.after``."""

ACTIONS = {"kill": 0, "hang": 0, "raise": errno.ENOSPC, "raise-eio": errno.EIO}
"""What an armed failpoint does, and the error number it raises."""

_HANG_S = 0.05
"""How often who hangs looks whether it may go on."""

_names = frozenset(f"{point}.{side}" for point in POINTS for side in ("before", "after"))
_lock = threading.Lock()
_armed: dict[str, tuple[int, str, str]] = {}
_seen: set[str] = set()


def names() -> tuple[str, ...]:
    """Every failpoint's name."""
    return tuple(f"{point}.{side}" for point in POINTS for side in ("before", "after"))


def arm(spec: str) -> None:
    """Arm a failpoint: ``name[:count][=action[@file]]``.

    At the ``count``-th hit from now (default the first) ``kill`` (default) sends SIGKILL to this
    process; ``raise`` and ``raise-eio`` raise `OSError` (ENOSPC, EIO) once; ``hang`` does not
    return. With a file the action is that of every hit while the file exists, and what hangs
    goes on when it is gone. Raises `UsageError`.
    """
    rest, _, what = spec.partition("=")
    action, _, file = what.partition("@")
    name, _, count = rest.partition(":")
    if name not in _names or (action or "kill") not in ACTIONS or not (count or "1").isdigit():
        raise UsageError(
            f"not a failpoint: {spec[:100]!r}",
            hint="write name[:count][=kill|raise|raise-eio|hang[@file]]; failpoints.names() lists "
            "the names",
        )
    with _lock:
        _armed[name] = (max(1, int(count or "1")), action or "kill", file)


def disarm() -> None:
    """Disarm every failpoint and forget which were seen."""
    with _lock:
        _armed.clear()
        _seen.clear()


def seen() -> frozenset[str]:
    """Names hit since the start or the last `disarm`."""
    return frozenset(_seen)


def hit(name: str) -> None:
    """Pass a failpoint."""
    if name not in _seen:
        _note(name)
    if _armed and name in _armed:
        _count_down(name)


def _note(name: str) -> None:
    if name not in _names:
        raise UsageError(f"no failpoint is named {name!r}", hint="add it to failpoints.POINTS")
    with _lock:
        _seen.add(name)


def _count_down(name: str) -> None:
    with _lock:
        left, action, file = _armed.get(name, (0, "", ""))
        if left > 1:
            _armed[name] = (left - 1, action, file)
        elif not file:
            _armed.pop(name, None)
    if left != 1 or (file and not os.path.exists(file)):
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while action == "hang":
        if file and not os.path.exists(file):
            return
        time.sleep(_HANG_S)
    raise OSError(ACTIONS[action], f"failpoint {name}")
