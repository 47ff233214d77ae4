"""Flights: puts and gets of one call that are under way beside each other, so many at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TypeVar

from adacheck_store.format.errors import RecordNotFoundError
from adacheck_store.format.ids import Buffer

from .objects import Objects
from .workers import Workers

T = TypeVar("T")
R = TypeVar("R")


class Runway:
    """Runs jobs on objects, ``objects.parallel`` at once whoever starts them; waits for room."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.width = objects.parallel
        self._slots = threading.BoundedSemaphore(self.width)
        self._workers = Workers("adacheck-objects", self.width, self.width)

    def start(self, job: Callable[[], T]) -> Future[T]:
        """Begin a job, as soon as there is room; of width 1 it is done when this returns."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except BaseException as exc:
                future.set_exception(exc)

        if self.width == 1:
            run()
            return future
        self._slots.acquire()

        def work() -> None:
            try:
                run()
            finally:
                self._slots.release()

        self._workers.submit(work)
        return future

    def each(self, act: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """What an act gives for each item, in their order; the first error is raised."""
        if len(items) < 2:
            return [act(item) for item in items]
        futures = [self.start(lambda item=item: act(item)) for item in items]  # type: ignore[misc]
        _settle(futures)
        return [future.result() for future in futures]


class Batch:
    """The puts of one call. Leaving the block waits for all of them, and raises the first error.

    After an error nothing more is begun, and nothing is under way when the block is left.
    """

    def __init__(self, runway: Runway) -> None:
        self.objects = runway.objects
        self.at_once = runway.width == 1
        """Whether a put is done when `put` returns, and its buffers may be reused."""
        self._runway = runway
        self._futures: list[Future[None]] = []

    def put(self, name: str, data: Buffer, *, if_differs: bool = False) -> None:
        """Put an object, if it does not stand there as it should, where that is asked for."""

        def job() -> None:
            if not (if_differs and self._stands(name, data)):
                self.objects.put(name, [data])

        self._futures.append(self._runway.start(job))
        for future in [future for future in self._futures if future.done()]:
            self._futures.remove(future)
            future.result()

    def _stands(self, name: str, data: Buffer) -> bool:
        try:
            return self.objects.get(name) == data
        except RecordNotFoundError:
            return False

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        futures, self._futures = self._futures, []
        _settle(futures)
        if error is None:
            for future in futures:
                future.result()


def _settle(futures: Iterable[Future[T]]) -> None:
    """Wait until all are done; every call of an object store ends by itself."""
    for future in futures:
        future.exception()
