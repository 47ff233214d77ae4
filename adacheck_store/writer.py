"""The writer: takes closed boundaries in order, stores them in the near tier, acknowledges.

One thread encodes and puts. At most W boundaries are in flight; at W the trainer waits, at most
``stall_timeout_s``, and then goes on *exposed*: boundaries are given up until the tier answers
again, and a captured base closes the gap. A failed save never stops training.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from adacheck_store.format.errors import AdaCheckError, BaseNeededError, TierError
from adacheck_store.format.keys import base_key, delta_key, extra_key, parse_key
from adacheck_store.format.layout import Layout
from adacheck_store.format.record import Record
from adacheck_store.tiers.base import RecordSource, Tier

from .boundary import Boundary, Link
from .catalog import RecordRef, make_ref
from .duty import NICE, give_way

log = logging.getLogger(__name__)

UNANSWERED = "the tier did not answer in time"

BACKOFF_S = (1.0, 60.0)
"""First and longest pause before another captured base is asked for."""


class Writer:
    """Stores boundaries in the order they come.

    ``append`` is called by the training thread, everything else by any thread. ``on_stored`` is
    called on the writer's thread with the step and the references of what became durable.
    Errors never come out of ``append``; they are in ``error`` and in the gap asked to be closed.
    ``linked`` is the last step stored, ``busy_since`` when the boundary at hand was begun.
    ``layout`` is that of the link; for a boundary of another one ``revise`` gives a link.
    ``documents`` gives layouts and manifest revisions that are to be put with the next records.
    """

    def __init__(
        self, near: Tier, link: Link, step: int, *, window: int, stall_timeout_s: float,
        on_stored: Callable[[int, list[RecordRef]], None], layout: Layout | None = None,
        revise: Callable[[Link, Layout, int], Link] | None = None,
        documents: Callable[[], list[RecordSource]] = list,
    ) -> None:  # fmt: skip
        self._layout = layout
        self._revise = revise
        self._documents = documents
        self._near = near
        self._link = link
        self.linked = step
        self._window = window
        self._stall_timeout_s = stall_timeout_s
        self._on_stored = on_stored
        self._queue: deque[Boundary] = deque()
        self._in_flight = 0
        self._gap: dict[str, Any] | None = None
        self._next_gap: dict[str, Any] | None = None
        self._retry_at = 0.0
        self._pause_s = BACKOFF_S[0]
        self._closing = False
        self._offered = False
        self._closer: int | None = None
        self._changed = threading.Condition()
        self.error: AdaCheckError | None = None
        self.exposed = False
        self.cpu_s = 0.0
        self.bytes_put = 0
        self.busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="adacheck-writer", daemon=True)
        self._thread.start()

    @property
    def in_flight(self) -> int:
        """Boundaries handed over and not yet stored or given up."""
        return self._in_flight

    @property
    def gap(self) -> Mapping[str, Any] | None:
        """Why and from which step on nothing is stored until a captured base comes."""
        return self._gap

    def append(self, boundary: Boundary) -> None:
        """Hand a boundary over; waits only while W are in flight and training is not exposed."""
        with self._changed:
            if self._in_flight >= self._window and not self.exposed:
                self._changed.wait_for(
                    lambda: self._in_flight < self._window, timeout=self._stall_timeout_s
                )
            if self._in_flight < self._window:
                if self._offered:  # the tier answers again: wait for it as before
                    self._closer, self._offered, self.exposed = boundary.step, False, False
                self._in_flight += 1
                self._queue.append(boundary)
                self._changed.notify_all()
                return
            if not self.exposed:
                self.exposed = True
                self._note(
                    TierError(
                        f"the tier has not answered for {self._stall_timeout_s:g} s; training "
                        "goes on without it", tier=self._near.traits.name, step=boundary.step,
                        run=self._link.run, hint="a captured base follows when it answers",
                    )
                )  # fmt: skip
            if self._closer is None:
                self._open_gap(UNANSWERED, boundary.step)
            elif self._next_gap is None:
                # The base on its way closes the gap before it, but this boundary comes after it.
                self._next_gap = {"reason": UNANSWERED, "from": boundary.step}
        boundary.release()

    def wants_base(self, *, now: bool = False) -> dict[str, Any] | None:
        """The gap that the next boundary should close with a captured base, if it is time.

        ``now`` does not wait for the pause after a failure to pass. While a boundary that was to
        bring one is in flight, no other is asked for.
        """
        with self._changed:
            if self._gap is None or self._closer is not None:
                return None
            early = not now and time.monotonic() < self._retry_at
            if self._in_flight >= self._window or early:
                return None
            self._offered = True
            return dict(self._gap)

    def ask_for_base(self, reason: str, first: int) -> None:
        """Declare the chain unprovable from step ``first`` on, until a captured base comes."""
        with self._changed:
            self._open_gap(reason, first)

    def wait_stored(self, timeout_s: float | None) -> bool:
        """Wait until nothing is in flight; False if the time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: self._in_flight == 0, timeout=timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Store what is in flight and stop the thread; False if the time ran out."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=timeout_s)
        return not self._thread.is_alive()

    def _open_gap(self, reason: str, first: int) -> None:
        if self._gap is not None:
            first = min(first, self._gap["from"])
        self._gap = {"reason": reason, "from": first}

    def _note(self, error: AdaCheckError) -> None:
        self.error = error
        log.warning("%s", error)

    def _run(self) -> None:
        give_way(NICE)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing, timeout=1.0)
                if not self._queue:
                    if self._closing:
                        return
                    continue
                boundary = self._queue.popleft()
            before, self.busy_since = time.thread_time(), time.monotonic()
            try:
                stored = self._store(boundary)
                if stored:  # before it leaves the flight: a flush must find it in what follows
                    self._on_stored(boundary.step, stored)
            except Exception as error:
                self._failed(boundary, error)
            finally:
                boundary.release()
                self.cpu_s += time.thread_time() - before
                self.busy_since = None
                with self._changed:
                    self._in_flight -= 1
                    if self._closer == boundary.step:
                        self._closer = None
                    self._changed.notify_all()

    def _failed(self, boundary: Boundary, error: Exception) -> None:
        if not isinstance(error, AdaCheckError):
            log.error("saving step %s failed", boundary.step, exc_info=error)
            error = TierError(f"saving failed: {type(error).__name__}: {error}")
        with self._changed:
            self._note(error.at(run=self._link.run, term=self._link.term, step=boundary.step))
            self._open_gap(error.message, boundary.step)
            if isinstance(error, BaseNeededError):  # the tier answers, and asks for just that
                self._retry_at = 0.0
            else:
                self._retry_at = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, BACKOFF_S[1])

    def _store(self, boundary: Boundary) -> list[RecordRef] | None:
        """Encode, put and sync one boundary; None if a gap before it makes it useless."""
        layout: Layout | None = getattr(boundary, "layout", None)
        moved = layout is not None and layout is not self._layout and layout != self._layout
        gap = self._gap_at(boundary, moved)
        link = self._link
        delta: Record | None = None
        if layout is not None and moved and self._revise is not None:
            link = self._revise(link, layout, boundary.step)
        if gap is not None:
            link = dataclasses.replace(link, parent=link.manifest)
        else:
            delta = boundary.delta(link)
        if delta is not None:
            link = dataclasses.replace(link, parent=delta.sealed.id)
        base = boundary.base(link)
        if gap is not None and not _closes(base, gap):
            return None
        if delta is None and base is None:
            raise TierError("a boundary with neither delta nor base", step=boundary.step)
        if base is not None and delta is None:
            link = dataclasses.replace(link, parent=base.sealed.head.parent)
        refs = self._put(boundary, link, delta, base)
        with self._changed:
            self._link = link
            self._layout = layout or self._layout
            self.linked = boundary.step
            if gap is not None:
                self._gap, self._next_gap = self._next_gap, None
                if self._gap is not None and self._gap["from"] <= boundary.step:
                    self._gap = None
                self._closer = self.error = None
                self.exposed = False
                self._pause_s = BACKOFF_S[0]
        return refs

    def _gap_at(self, boundary: Boundary, moved: bool) -> dict[str, Any] | None:
        """The gap a boundary falls into.

        A step that does not follow the last one opens one, and so does another layout. Where the
        boundary brings the base itself no other is asked for meanwhile.
        """
        step = boundary.step
        with self._changed:
            if self._gap is None and moved:
                self._open_gap("the layout changed", min(step, self.linked + 1))
                self._closer = step
            if self._gap is None and step != self.linked + 1:
                self._open_gap(f"step {step} came after step {self.linked}", self.linked + 1)
                if getattr(boundary, "gap", None) is not None:
                    self._closer = step
            return self._gap if self._gap and step >= self._gap["from"] else None

    def _put(
        self, boundary: Boundary, link: Link, delta: Record | None, base: Record | None
    ) -> list[RecordRef]:
        step, documents = boundary.step, self._documents()
        place = (link.run, link.term, link.part)
        records: list[tuple[str, Record]] = []
        if delta is not None:
            records.append((str(delta_key(*place, step)), delta))
        if base is not None:
            records.append((str(base_key(*place, step)), base))
        if step > self.linked:  # else a base for a step that is stored, and has its extra
            key = str(extra_key(link.run, link.term, link.rank, step))
            records.append((key, boundary.extra(link)))
        self._near.put([*documents, *(RecordSource(key, record) for key, record in records)])
        self._near.sync()
        name = self._near.traits.name
        records = [(item.key, item.record) for item in documents] + records
        refs = [make_ref(parse_key(key), record.sealed, (name,)) for key, record in records]
        self.bytes_put += sum(ref.nbytes for ref in refs if ref.kind != "base")
        return refs


def _closes(base: Record | None, gap: Mapping[str, Any]) -> bool:
    """Whether a base says of the gap at least what is known of it by now."""
    said = base.sealed.head.body.get("gap") if base is not None else None
    return isinstance(said, Mapping) and said["from"] <= gap["from"]
