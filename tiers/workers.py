"""Workers: a bounded number of threads that take jobs, and end when there are none."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_IDLE_S = 2.0
_SPARE = 4
"""Threads that stay for the next job; they end too when none comes for `_IDLE_S`."""

_log = logging.getLogger(__name__)


class Workers:
    """Runs jobs on at most ``threads`` threads, each started when needed.

    At most ``waiting`` jobs wait for one; whoever submits sees to that.
    """

    def __init__(self, name: str, threads: int, waiting: int) -> None:
        self._name = name
        self._most = threads
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue(maxsize=waiting)
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._open = 0
        """Jobs submitted and not ended."""

    def submit(self, job: Callable[[], None]) -> None:
        """Have a job done; raises `queue.Full`."""
        with self._lock:
            self._jobs.put_nowait(job)
            self._open += 1
            if self._open > len(self._threads) < self._most:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._threads.add(thread)
                thread.start()

    def waiting(self) -> int:
        """Jobs that no thread has taken yet."""
        return self._jobs.qsize()

    def busy(self) -> int:
        """Jobs submitted and not ended."""
        return self._open

    def _work(self) -> None:
        while True:
            job = None
            with suppress(queue.Empty):
                job = self._jobs.get(timeout=_IDLE_S)
            if job is None:
                with self._lock:
                    if self._open >= len(self._threads):
                        continue  # a job was submitted meanwhile, and counts on this thread
                    self._threads.discard(threading.current_thread())
                    return
            try:
                job()
            except Exception:
                _log.exception("a job failed")
            finally:
                with self._lock:
                    self._open -= 1
                    spare = len(self._threads) - self._open > _SPARE
                    if spare:
                        self._threads.discard(threading.current_thread())
            if spare:
                return

    def join(self, timeout_s: float) -> bool:
        """Wait until all jobs have ended; False if they have not in time."""
        end = time.monotonic() + timeout_s
        while self._open and time.monotonic() < end:
            time.sleep(0.005)
        return not self._open
