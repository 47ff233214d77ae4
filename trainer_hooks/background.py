"""Threads that speak to the store of torch.distributed, and have left it when the process ends.

A daemon thread that comes back from C++ while the interpreter is being taken down is unwound
through frames that allow no unwinding: the process aborts, after all it was to do is done.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

LEAVE_S = 2.0
"""Longest wait, at the end of the process, for such threads."""

_ending = threading.Event()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start(name: str, work: Callable[..., None], *args: Any) -> threading.Thread:
    """Start a daemon thread; its work is to end soon once `ending` is true."""
    thread = threading.Thread(target=work, args=args, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


def ending() -> bool:
    """Whether the process is about to end."""
    return _ending.is_set()


def pause(seconds: float) -> bool:
    """Wait; True, and at once, if the process is about to end."""
    return _ending.wait(seconds)


def _end() -> None:
    _ending.set()
    until = time.monotonic() + LEAVE_S
    for thread in list(_threads):
        thread.join(timeout=max(0.0, until - time.monotonic()))


atexit.register(_end)
