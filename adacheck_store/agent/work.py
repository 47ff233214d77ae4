"""Work: the threads of an agent that carry a command of one kind out, one after the other."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from adacheck_store.duty import BACKOFF_S, NICE, give_way
from adacheck_store.format.errors import AdaCheckError

C = TypeVar("C")

log = logging.getLogger(__name__)

WAITING = 64
"""Commands of a kind that may wait; the core has one under way at most, of each."""


class Work(Generic[C]):
    """A thread that carries commands out. ``act`` does one, and tells the core what came of it.

    What ``act`` raises is kept in ``error``, logged, and given to ``failed`` with the command,
    after a pause that grows with the failures (``backoff``); without it at once.
    """

    def __init__(
        self, name: str, act: Callable[[C], None], failed: Callable[[C, Exception], None], *,
        backoff: bool = False, nice: int = NICE,
    ) -> None:  # fmt: skip
        self._act, self._failed, self._backoff, self._nice = act, failed, backoff, nice
        self._commands: queue.Queue[C] = queue.Queue(maxsize=WAITING)
        self.ending = threading.Event()
        self.error: AdaCheckError | None = None
        self.last: tuple[float, AdaCheckError] | None = None
        """The last error, and when it was (s)."""
        self.busy_since: float | None = None
        self._pause_s = BACKOFF_S[0]
        self.pausing_s = 0.0
        """The pause that is being made after a failure; it grows from one to the next."""
        self.thread = threading.Thread(target=self._run, name=f"adacheck-{name}", daemon=True)
        self.thread.start()

    def give(self, command: C) -> None:
        """Have a command carried out; raises `queue.Full`, which would be a bug of the core."""
        self._commands.put_nowait(command)

    def end(self) -> None:
        """Stop after what is being done."""
        self.ending.set()

    def _run(self) -> None:
        give_way(self._nice)
        while not self.ending.is_set():
            try:
                command = self._commands.get(timeout=0.2)
            except queue.Empty:
                continue
            self.busy_since = time.monotonic()
            try:
                self._act(command)
                self.error, self._pause_s, self.pausing_s = None, BACKOFF_S[0], 0.0
            except Exception as error:
                self._note(error)
                if self._backoff:
                    self.pausing_s = self._pause_s
                    self.ending.wait(self._pause_s)
                    self._pause_s = min(2 * self._pause_s, BACKOFF_S[1])
                self._failed(command, error)
            finally:
                self.busy_since = None

    def _note(self, error: Exception) -> None:
        if isinstance(error, AdaCheckError):
            log.warning("%s: %s", self.thread.name, error)
            self.error = error
        else:
            log.error("%s failed", self.thread.name, exc_info=error)
            self.error = AdaCheckError(f"{type(error).__name__}: {error}")
        self.last = (time.monotonic(), self.error)
