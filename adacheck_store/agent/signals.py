"""Signals to an agent: told to a thread, for a handler interrupts whoever holds a lock."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable


def heed(act: Callable[[], None]) -> None:
    """Call ``act`` for each SIGTERM and SIGINT from now on, on a thread of its own.

    The system writes them to a socket by itself, whatever the main thread does or waits for, and
    what ``act`` takes or waits for cannot be what the main thread has. To be called there, once.
    """
    hears, tells = socket.socketpair()
    tells.setblocking(False)
    signal.set_wakeup_fd(tells.detach(), warn_on_full_buffer=False)  # as long as the process is

    def listen() -> None:
        while True:
            for _ in hears.recv(16):
                act()

    threading.Thread(target=listen, name="adacheck-signals", daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _nothing)


def _nothing(number: int, frame: object) -> None:
    """Without a handler in Python the signal would end the process."""
