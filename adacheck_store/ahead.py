"""Reading ahead: threads that fetch and verify what a fold needs next, while it folds.

What they do runs beside Python: a copy out of an agent's memory, digests, the first touch of fresh
memory. The fold itself stays on one thread, whose arithmetic is known.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

THREADS_MAX = 4
LEGS = 2
"""Legs that are read while another one is folded."""
WINDOWS = 4
"""Of a leg: reads of gradients are as long as an object, 8 MiB where they are kept in halves."""
DELTAS = 8
"""Of a leg: with `LEGS` and `WINDOWS` what bounds a fold's memory, however long a chain is."""


class Now:
    """Reads what is asked for at once; the fold needs no memory beyond a window."""

    legs = 0
    windows = 1
    deltas = 1

    def start(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Do it; raises what it raises."""
        done: Future[T] = Future()
        done.set_result(work(*args, **kwargs))
        return done


class Ahead(Now):
    """Reads in threads: a context that ends them, and what has not begun."""

    legs = LEGS
    windows = WINDOWS
    deltas = DELTAS

    def __init__(self, parallel: int = 1) -> None:
        """As many threads as there are processors, or as ``parallel`` reads that wait."""
        self.threads = max(parallel, min(THREADS_MAX, len(os.sched_getaffinity(0))))
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="adacheck-read")

    def start(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have it done; the future raises what it raises."""
        return self._pool.submit(work, *args, **kwargs)

    def __enter__(self) -> Ahead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._pool.shutdown(cancel_futures=True)


NOW = Now()
