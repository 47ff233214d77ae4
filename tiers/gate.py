"""A gate that many pass together, or one alone: a lock for readers and writers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_POLL_S = 60.0


class Gate:
    """Many threads pass `shared` at a time; `alone` waits until they are out and keeps others off.

    A thread must not ask for `alone` while it is inside `shared`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._alone = False

    def enter(self) -> None:
        """Enter together with others."""
        with self._changed:
            while self._alone:
                self._changed.wait(timeout=_POLL_S)
            self._inside += 1

    def leave(self) -> None:
        """Leave after `enter`."""
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only one inside."""
        with self._changed:
            while self._alone:
                self._changed.wait(timeout=_POLL_S)
            self._alone = True
            while self._inside:
                self._changed.wait(timeout=_POLL_S)
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()
