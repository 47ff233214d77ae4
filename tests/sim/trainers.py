"""Trainers: ranks in lockstep, each with the flow control of `adacheck_store.writer`, and restarts.

`Rank` has the writer's rules, as a state machine: boundaries are stored in order, one at a time;
at W in flight the rank waits ``STALL_S`` and goes on exposed; a save that fails opens a gap, which
the next boundary that may (after a pause, one at a time) closes with a captured base; what falls
into a gap is given up. `Job` is a torchrun: claim, plan, fetch, open, train.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from adacheck_store.agent import events as ev
from adacheck_store.catalog import RecordRef
from adacheck_store.format.keys import part_name, rank_name
from tests.sim.truth import Violation
from tests.sim.world import Agent

if TYPE_CHECKING:
    from tests.sim.jobs import Job

STALL_S = 3.0
PUT_S = 2.5
PAUSE_S = 0.5

BASE, DELTA, EXTRA = 100, 10, 1
"""Sizes of records, in bytes."""


class Rank:
    """One trainer process: the flow of its boundaries into its own node's agent."""

    def __init__(self, job: Job, number: int, agent: Agent, step: int, value: object) -> None:
        self.job, self.world, self.number, self.agent = job, job.world, number, agent
        self.part, self.name = part_name(number), rank_name(number)
        self.conn = f"{job.term}/{self.name}"
        self.boot = ""
        self.step = self.linked = step
        self.value = value
        self.link = job.manifest_id
        self.flight: deque[tuple[int, int | None, object, object]] = deque()
        self.in_flight = 0
        self.gap: int | None = None
        self.next_gap: int | None = None
        self.closer: int | None = None
        self.exposed = self.offered = False
        self.retry_at = 0.0
        self.blocked = False
        self.fail_next = False
        self.acked = step
        self.acked_short = False
        self.failures: list[str] = []
        self._wait = 0

    # Training side ---------------------------------------------------------------------------

    def train(self) -> None:
        """One step, and its boundary; the job goes on when it is handed over."""
        self.step += 1
        self.value = (self.job.term, self.part, self.step)
        self.world.truth.values[self.job.term, self.part, self.step] = self.value
        self._append(False)

    def _append(self, timed_out: bool) -> None:
        room = self.in_flight < self.job.window
        if not room and not self.exposed and not timed_out:
            self.blocked = True
            self._wait += 1
            self.world.after(STALL_S, self._stalled, self._wait)
            return
        base = self._wants_base()
        self.blocked = False
        if room:
            if base is not None:
                self.closer, self.offered, self.exposed = self.step, False, False
            self.in_flight += 1
            before = self._before
            self.flight.append((self.step, base, before, self.value))
            self._before = self.value
            if len(self.flight) == 1 and not self._storing:
                self._store_next()
        else:
            self._before = self.value
            self.exposed = True
            if self.closer is None:
                self._open_gap(self.step)
            elif self.next_gap is None:
                self.next_gap = self.step
        self.job.handed_over()

    _before: object = None
    _storing = False

    def _stalled(self, wait: int) -> None:
        if self.blocked and wait == self._wait and self.job.alive:
            self.world.say(self.conn, "stalls at", self.step)
            self._append(True)

    def _wants_base(self) -> int | None:
        if self.gap is None or self.closer is not None or self.in_flight >= self.job.window:
            return None
        return self.gap if self.world.now >= self.retry_at else None

    def _open_gap(self, step: int) -> None:
        self.gap = step if self.gap is None else min(self.gap, step)

    # Storing side ----------------------------------------------------------------------------

    def _store_next(self) -> None:
        self._storing = True
        step, base, before, value = self.flight.popleft()
        self._at = step
        if self.gap is None and step != self.linked + 1:
            self._open_gap(self.linked + 1)
        gap = self.gap if self.gap is not None and step >= self.gap else None
        if gap is not None and (base is None or base > gap):
            self._done(step)
            return
        refs = self._records(step, gap, before, value)
        self._serial += 1
        token = f"{self.conn}/{self._serial}"
        self.world.after(PUT_S, self._timed_out, token)
        self._token = token
        self.world.after(0.002, self._put, token, step, gap, refs)

    _token = ""
    _serial = 0

    def _records(
        self, step: int, gap: int | None, before: object, value: object
    ) -> tuple[RecordRef, ...]:
        truth, term = self.world.truth, self.job.term
        place: dict[str, Any] = {
            "term": term, "step": step, "manifest": self.job.manifest_id, "layout": "layout",
            "tiers": (),
        }  # fmt: skip
        extra = RecordRef(
            key=f"{term}/{self.name}/extra/{step:04d}", kind="extra", part=self.name,
            id=f"e.{term}.{self.name}.{step}", parent="", nbytes=EXTRA, **place,
        )  # fmt: skip
        if gap is None:
            key = f"{term}/{self.part}/delta/{step:04d}"
            truth.edges[key] = (before, value)
            return (RecordRef(key=key, kind="delta", part=self.part, id=key, parent=self.link,
                              nbytes=DELTA, **place), extra)  # fmt: skip
        key = f"{term}/{self.part}/base/{step:04d}-captured"
        truth.holds[key] = value
        base = RecordRef(key=key, kind="base", part=self.part, id=key, nbytes=BASE,
                         parent=self.job.manifest_id, origin="captured",
                         gap={"from": gap, "reason": "sim"} if gap <= step else None,
                         **place)  # fmt: skip
        return (base, extra)

    def _put(self, token: str, step: int, gap: int | None, refs: tuple[RecordRef, ...]) -> None:
        if not self.job.alive or token != self._token:
            return
        if not self.agent.alive:
            self._failed(token, step, "no agent")
            return

        def stored(answer: Any) -> None:
            if token != self._token or not self.job.alive:
                return
            if answer != "ok":
                self._failed(token, step, answer)
            elif self.agent.alive:
                sync = ev.Sync(token + "s", self.conn, self.world.now + PUT_S)
                self.agent.ask(sync, synced)

        def synced(answer: Any) -> None:
            if token != self._token or not self.job.alive:
                return
            if self.fail_next:
                self.fail_next, answer = False, None
            if isinstance(answer, ev.Answer):
                self._stored(step, gap, refs, answer)
            else:
                self._failed(token, step, answer)

        if self.boot != self.agent.boot:  # a new connection begins with the opening
            self.boot = self.agent.boot
            self.agent.ask(self.job.opening(f"{token}o"), _nothing)
        self.agent.offer(refs, self.job.term, self.conn, stored)

    def _timed_out(self, token: str) -> None:
        if token == self._token and self.job.alive and self._storing:
            self._failed(token, self._at, "time")

    _at = 0

    def _stored(
        self, step: int, gap: int | None, refs: tuple[RecordRef, ...], answer: ev.Answer
    ) -> None:
        self.link = refs[0].id if gap is None else refs[0].parent
        self.linked = step
        if gap is not None:
            self.gap, self.next_gap = self.next_gap, None
            if self.gap is not None and self.gap <= step:
                self.gap = None
            self.closer, self.exposed = None, False
        if self.agent.core.view.term > self.job.term:
            raise Violation(f"{self.conn} is acknowledged step {step}, and its term is past")
        self.acked, self.acked_short = step, answer.short
        if not answer.short:
            self.world.truth.acknowledged(self.job.term, step, self.number, answer.holders)
        self.world.say(self.conn, "acked", step, "short" if answer.short else "")
        self.news()
        self._done(step)

    def news(self) -> None:
        """What the agent says is drained, as far as the trainer believes it."""
        if self.job.alive and self.agent.alive and self.agent.core.view.term == self.job.term:
            spans = self.agent.core.far.spans(self.part)
            steps = {step for first, last in spans for step in range(first, last + 1)}
            told = self.world.truth.drained[self.job.term][self.number]
            told |= {step for step in steps if step <= self.acked}

    def _failed(self, token: str, step: int, why: Any) -> None:
        self._token = ""
        said = why.why if isinstance(why, ev.Refuse) else str(why)
        self.world.say(self.conn, "failed", step, said)
        if said == "term":
            self.job.fenced()
            return
        self.failures.append(said)
        self._open_gap(step)
        self.retry_at = self.world.now + PAUSE_S
        self._done(step)

    def _done(self, step: int) -> None:
        self._token = ""
        self._storing = False
        self.in_flight -= 1
        if self.closer == step:
            self.closer = None
        if self.flight:
            self._store_next()
        if self.blocked and self.in_flight < self.job.window:
            self._append(False)


def _nothing(answer: Any) -> None:
    pass
