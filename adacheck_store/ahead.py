"""Reading ahead: threads that fetch and verify what a fold needs next, while it folds.

What they do runs beside Python: a copy out of an agent's memory, digests, the first touch of fresh
memory. The fold itself stays on one thread, whose arithmetic is known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

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
    threads = 0

    def start(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Do it; raises what it raises."""
        done: Future[T] = Future()
        done.set_result(work(*args, **kwargs))
        return done


class Ahead(Now):
    """Reads in threads: a context that ends them, and what has not begun."""

    legs, windows, deltas = LEGS, WINDOWS, DELTAS

    def __init__(self, parallel: int = 1) -> None:
        """As many threads as there are processors, or as ``parallel`` reads that wait."""
        self.threads = max(parallel, min(THREADS_MAX, len(os.sched_getaffinity(0))))
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="adacheck-read")

    def start(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have it done; the future raises what it raises."""
        return self._pool.submit(work, *args, **kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._pool.shutdown(cancel_futures=True)


class Streamed(Ahead):
    """For a sink that lets go of its windows: of one leg and the next, so memory stays bounded."""

    legs, windows, deltas = 1, 2, 4


@contextmanager
def streamed(parallel: int) -> Iterator[Now]:
    """Reads as a fold that streams wants them: ahead where they wait, as for an object store."""
    if parallel == 1:
        yield NOW
        return
    with Streamed(parallel) as reader:
        yield reader


NOW = Now()
