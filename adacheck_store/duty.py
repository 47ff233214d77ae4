"""A duty: a background thread that does one kind of work whenever it is due."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from adacheck_store.format.errors import AdaCheckError, TierError

log = logging.getLogger(__name__)

IDLE_S = 1.0
BACKOFF_S = (1.0, 30.0)
"""First and longest pause after a failure."""


NICE = 10
"""By how much these threads, and the writer's, rank behind training where processors are short."""


def give_way(rank: int) -> None:
    """Let the calling thread run behind others by so much (Linux alone)."""
    if sys.platform == "linux":  # elsewhere this would be the whole process
        thread = threading.get_native_id()
        with suppress(OSError):
            nice = os.getpriority(os.PRIO_PROCESS, thread) + rank
            os.setpriority(os.PRIO_PROCESS, thread, min(nice, 19))


class Duty:
    """A thread that does one kind of work whenever it is due, and tries again after a failure."""

    def __init__(
        self, name: str, changed: threading.Condition, due: Callable[[], bool],
        work: Callable[[], None], failed: Callable[[AdaCheckError], None],
    ) -> None:  # fmt: skip
        self._changed, self._due, self._work, self._failed = changed, due, work, failed
        self._ending = False
        self.hurry = False
        self.busy_since: float | None = None
        self.failures = 0
        self.cpu_s = 0.0
        self.error: AdaCheckError | None = None
        self.thread = threading.Thread(target=self._loop, name=f"adacheck-{name}", daemon=True)

    @property
    def resting(self) -> bool:
        """True if nothing is being done, nor due (what failed is not waited for)."""
        return self.busy_since is None and (self.error is not None or not self._due())

    def end(self) -> None:
        """Stop after what is being done; the caller holds the condition."""
        self._ending = True
        self._changed.notify_all()

    def _loop(self) -> None:
        give_way(NICE)
        pause_s = BACKOFF_S[0]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ending or self._due(), timeout=IDLE_S)
                if self._ending:
                    return
                if not self._due():
                    continue
                self.busy_since = time.monotonic()
            before = time.thread_time()
            error = self._try()
            with self._changed:
                self.cpu_s += time.thread_time() - before
                self.error = error
                self.busy_since, self.hurry = None, False
                self.failures += error is not None
                self._changed.notify_all()
                if error is not None:
                    self._failed(error)
                    self._changed.wait_for(lambda: self._ending or self.hurry, timeout=pause_s)
            pause_s = BACKOFF_S[0] if error is None else min(2 * pause_s, BACKOFF_S[1])

    def _try(self) -> AdaCheckError | None:
        try:
            self._work()
        except AdaCheckError as error:
            return error
        except Exception as error:
            log.exception("background work failed")
            return TierError(f"background work failed: {type(error).__name__}: {error}")
        return None
