"""Drains: which records of this node's own chains go to its LMDB and to the far tier, and when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from adacheck_store.catalog import RecordRef

from .events import Drain
from .replica import FAR, LMDB

BATCH = 64
"""Records in a drain."""


class Waiting(NamedTuple):
    """A record that waits: its step, its bytes, since when (s), and whether it is a base."""

    step: int
    nbytes: int
    since: float
    base: bool


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits for a place: records, their bytes, the oldest one's step (-1: none) and age."""

    records: int
    nbytes: int
    oldest_step: int
    oldest_s: float


@dataclass(slots=True)
class _Queue:
    """What waits for a place, by key; since when; whether a drain is under way."""

    place: int
    waiting: dict[str, Waiting] = field(default_factory=dict)
    since: float = 0.0
    busy: tuple[str, ...] = ()
    retry_at: float = 0.0


class Drains:
    """The queues of the places below memory that this agent has.

    Deltas and extras all go. Of bases those that are captured, those of multiples of
    ``base_every``, and the first: of the chain, and after a record was dropped undrained. So all
    parts have bases of the same steps below, which a floor there needs.
    """

    def __init__(self, places: int, base_every: int, lag: int, lag_s: float) -> None:
        self._queues = [_Queue(place) for place in (LMDB, FAR) if places & place]
        self._base_every = base_every
        self._lag = lag
        self._lag_s = lag_s
        self._whole: set[str] = set()
        self.hurry = False
        """True while all there is is to be drained, whatever the lag."""
        self.idle = True

    def adapt(self, base_every: int, lag: int, lag_s: float) -> None:
        """Take over other settings."""
        self._base_every, self._lag, self._lag_s = base_every, lag, lag_s

    def note(self, ref: RecordRef, places: int, now: float, *, fills: bool = False) -> None:
        """A record of an own chain is here, in those places.

        ``fills``: it is of a step that could not be produced here: others have folded over what
        leads to it, so that will not get anywhere from here.
        """
        if fills:
            self.broken(ref)
        if ref.kind == "base":
            regular = ref.origin == "captured" or ref.step % self._base_every == 0
            if not regular and ref.part in self._whole:
                return
            self._whole.add(ref.part)
        for queue in self._queues:
            if not places & queue.place:
                queue.since = queue.since if queue.waiting else now
                base = ref.kind == "base"
                queue.waiting.setdefault(ref.key, Waiting(ref.step, ref.nbytes, now, base))
                self.idle = False

    def skipped(self, ref: RecordRef) -> None:
        """A record was dropped before it was drained: the next base must be."""
        for queue in self._queues:
            if queue.waiting.pop(ref.key, None) is not None:
                self.broken(ref)

    def broken(self, ref: RecordRef) -> None:
        """A record will not get to some place: what follows there hangs on the next base."""
        self._whole.discard(ref.part)

    def done(self, place: int, keys: Iterable[str], now: float) -> None:
        """A drain has ended; what it did not bring waits a while."""
        for queue in self._queues:
            if queue.place == place:
                for key in keys:
                    queue.waiting.pop(key, None)
                queue.retry_at = now + 1.0 if set(queue.busy) & queue.waiting.keys() else now
                queue.busy, queue.since = (), now

    def due(self, now: float, known: bool = True) -> Iterable[Drain]:
        """Drains to begin: to the LMDB at once, to the far tier at half its lag, or with a base.

        To that there are none before it is ``known`` what it has.
        """
        self.idle = not self.behind
        for queue in self._queues:
            if queue.busy or not queue.waiting or now < queue.retry_at:
                continue
            if queue.place == FAR and not known:
                continue
            steps = {record.step for record in queue.waiting.values()} if queue.place == FAR else ()
            late = now - queue.since > self._lag_s
            base = any(record.base for record in queue.waiting.values())
            at_once = self.hurry or queue.place == LMDB or base
            if at_once or late or 2 * len(steps) >= self._lag:
                first = sorted(queue.waiting, key=lambda key: (queue.waiting[key].step, key))
                queue.busy = tuple(first[:BATCH])
                yield Drain(queue.place, queue.busy)

    def wants(self, key: str) -> bool:
        """True for a record that waits for some place."""
        return any(key in queue.waiting for queue in self._queues)

    @property
    def behind(self) -> int:
        """Records that wait for some place."""
        return sum(len(queue.waiting) for queue in self._queues)

    def backlog(self, place: int, now: float) -> Backlog:
        """What waits for one place."""
        waiting = [
            record for queue in self._queues if queue.place == place
            for record in queue.waiting.values()
        ]  # fmt: skip
        since = min((record.since for record in waiting), default=now)
        return Backlog(
            records=len(waiting), nbytes=sum(record.nbytes for record in waiting),
            oldest_step=min((record.step for record in waiting), default=-1),
            oldest_s=max(0.0, now - since),
        )  # fmt: skip
