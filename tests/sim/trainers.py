"""Trainers: ranks in lockstep, each with the flow control of `adacheck_store.writer`, and restarts.

`Rank` has the writer's rules, as a state machine: boundaries are stored in order, one at a time;
at W in flight the rank waits ``STALL_S`` and goes on exposed; a save that fails opens a gap, which
the next boundary that may (after a pause, one at a time) closes with a captured base; what falls
into a gap is given up. `Job` is a torchrun: claim, plan, fetch, open, train.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from adacheck_store.agent import events as ev
from adacheck_store.agent.marks import Seat
from adacheck_store.catalog import Catalog, RecordRef
from adacheck_store.format.errors import UsageError
from adacheck_store.format.keys import part_name, rank_name
from adacheck_store.format.manifest import Manifest, PartEntry
from adacheck_store.placement import Node, place
from adacheck_store.recovery import RestorePlan
from tests.sim.truth import RUN, Promise, Violation
from tests.sim.world import Agent, World

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


class Job:
    """All ranks of a run between two restarts: claim, plan, fetch, open, train ``until``."""

    def __init__(self, world: World, homes: list[str], k: int, window: int, until: int) -> None:
        self.world, self.homes, self.k, self.window, self.until = world, homes, k, window, until
        self.alive = True
        self.term = self.manifest_id = ""
        self.ranks: list[Rank] = []
        self.plan: RestorePlan | None = None
        self.restored = -1
        self.step_s = 0.1
        self.slow_plan = 0.0
        self.idle_since = 0.0
        self._busy = 0
        self._opening = 0
        world.jobs.append(self)
        world.after(world.delay(), self._claim)

    def kill(self) -> None:
        """All ranks die."""
        if self.alive:
            self.world.say("job", self.term, "dies")
        self.alive = False
        for rank in self.ranks:
            if rank.agent.alive:
                rank.agent.later(0.01, ev.Closed(rank.conn))

    def fenced(self) -> None:
        """An agent has refused this job's term."""
        if self.world.job is self:
            raise Violation(f"{self.term} is fenced, and no newer job exists")
        self.kill()

    # Restore ---------------------------------------------------------------------------------

    def _claim(self) -> None:
        if not self.alive:
            return
        self.world.claims += 1
        number = self.world.claims
        self.term, self.manifest_id = f"t{number:06d}-{'0' * 16}", f"m{number}"
        self._ask()

    def _ask(self) -> None:
        """Read the catalogs of all agents that answer, each at its own moment."""
        if not self.alive:
            return
        self._found: list[tuple[str, Mapping[str, RecordRef]]] = [("far", dict(self.world.far))]
        self._lives: set[tuple[str, str]] = set()
        self._promised = list(self.world.truth.promises)
        last = 0.0
        for agent in self.world.agents.values():
            at = self.world.delay() * (4 if self.slow_plan else 1)
            last = max(last, at)
            self.world.after(at, self._read, agent)
        self.world.after(last + 0.01, self._make_plan)

    def _read(self, agent: Agent) -> None:
        if not self.alive or not agent.alive or not self.world.reaches(self.homes[0], agent.node):
            return
        agent.tell(ev.Asked(self.term))
        self._found += [(agent.boot, dict(agent.ram)), (f"{agent.node}/lmdb", dict(agent.lmdb))]
        self._lives.add(agent.life)

    def _make_plan(self) -> None:
        if not self.alive:
            return
        if len(self._lives) < min(self.k + 1, len(self.world.agents)) and self.k:
            self.world.after(0.3, self._ask)  # attach would refuse: wait for agents
            return
        truth = self.world.truth
        self.plan = None
        if truth.manifests:
            catalog = truth.catalog(self._found)
            self.plan = truth.check(
                catalog, self._lives, self.world_seats(), self._promised, f"restore of {self.term}"
            )
        self.world.say(self.term, "plans", self.plan.step if self.plan else "nothing")
        delay = self.world.delay() + self.slow_plan
        self._renew(delay)
        self.world.after(delay, self._fetch)

    def _renew(self, left: float) -> None:
        for agent in self.world.agents.values():
            if agent.alive and self.world.reaches(self.homes[0], agent.node):
                agent.later(0.0, ev.Asked(self.term))
        if left > 20.0:
            self.world.after(20.0, self._renew, left - 20.0)

    def world_seats(self) -> dict[int, frozenset[str]]:
        """The newest seats that any live agent knows, by rank."""
        return newest_seats(self.world, len(self.homes))

    def _fetch(self) -> None:
        """Every record of the plan is read from who holds it, if that one still lives."""
        if not self.alive:
            return
        if self.plan is not None:
            now = dict(self._found)
            held: dict[str, Mapping[str, RecordRef]] = {"far": self.world.far}
            for agent in self.world.agents.values():
                if agent.alive:
                    held[agent.boot] = agent.ram
                    held[f"{agent.node}/lmdb"] = agent.lmdb
            refs = [ref for part in self.plan.parts for ref in (part.base, *part.deltas)]
            refs += [ref for extras in self.plan.extras.values() for ref in extras]
            for ref in refs:
                had = [name for name, store in now.items() if ref.key in store]
                if any(ref.key in held.get(name, ()) for name in had):
                    continue
                kept = [name for name in had if name in held and "#" in name]
                if kept:
                    raise Violation(
                        f"{ref.key} was planned with by {self.term}, and {kept} has dropped it"
                    )
                self.world.say(self.term, "misses", ref.key, "and plans again")
                self.slow_plan = 0.0
                self._ask()
                return
        self._open()

    def _open(self) -> None:
        """Place, write the manifest, tell every rank's agent."""
        world = self.world
        nodes = [Node(name=a.node, boot_id=a.domain) for a in world.agents.values()
                 if a.alive and world.reaches(self.homes[0], a.node)]  # fmt: skip
        try:
            placed = place(dict(enumerate(self.homes)), nodes, self.k)
        except UsageError:
            world.after(0.3, self._ask)
            return
        plan = self.plan
        step = plan.step if plan else 0
        parts = tuple(PartEntry(name=part_name(n), layout="layout") for n in range(len(self.homes)))
        manifest = Manifest(
            run=RUN, term=self.term, step=step, parts=parts,
            ranks=tuple(rank_name(n) for n in range(len(self.homes))),
            parent_term=plan.term if plan else "", fork_step=step if plan else 0,
            tips={part.part: part.link for part in plan.parts} if plan else {},
        )  # fmt: skip
        if self.manifest_id not in world.truth.manifests:
            world.truth.manifests[self.manifest_id] = manifest
        for number in range(len(self.homes)):
            part = part_name(number)
            world.truth.values[self.term, part, step] = self._value(part, step)
        self.restored = step
        seats = {
            name(n): Seat(0, holders)
            for n, holders in placed.holders.items() for name in (part_name, rank_name)
        }  # fmt: skip
        reserve = {name: (BASE, DELTA) if name.startswith("p") else (0, EXTRA) for name in seats}
        self._opened = {
            "term": self.term, "manifests": dict(world.truth.manifests), "seats": seats,
            "domains": {a.node: a.domain for a in world.agents.values()}, "k": self.k,
            "reserve": reserve,
        }  # fmt: skip
        world.say(self.term, "opens at", step, placed.holders)
        self.ranks = [
            Rank(self, n, world.agents[home], step,
                 world.truth.values[self.term, part_name(n), step])
            for n, home in enumerate(self.homes)
        ]  # fmt: skip
        self._opening = len(self.ranks)
        for rank in self.ranks:
            rank._before = rank.value
            world.after(world.delay(), self._tell, rank)

    def opening(self, token: str) -> ev.Opened:
        """What every new connection to an agent begins with."""
        return ev.Opened(token=token, **self._opened)

    def _value(self, part: str, step: int) -> object:
        if self.plan is None:
            return (self.term, part, step)
        return self.world.truth.values[self.plan.term, part, step]

    def _tell(self, rank: Rank) -> None:
        """A rank tells its agent of the term; a fresh run puts its first base."""
        if not self.alive:
            return
        if not rank.agent.alive:
            self._again("no agent")
            return

        def told(answer: Any) -> None:
            if not self.alive:
                return
            if not isinstance(answer, ev.Answer):
                self._again(answer.why if answer else "no agent")
            elif self.plan is None:
                refs = rank._records(rank.step, rank.step + 1, None, rank.value)
                rank.agent.offer(refs, self.term, rank.conn, put)
            else:
                self._ready()

        def put(answer: Any) -> None:
            if not self.alive:
                return
            if answer != "ok" or not rank.agent.alive:
                self._again("the first base is not stored")
            else:
                sync = ev.Sync(f"{rank.conn}/first", rank.conn, self.world.now + 10.0)
                rank.agent.ask(sync, synced)

        def synced(answer: Any) -> None:
            if not self.alive:
                return
            if isinstance(answer, ev.Answer):
                if not answer.short:
                    self.world.truth.acknowledged(self.term, rank.step, rank.number, answer.holders)
                self._ready()
            else:
                self._again("the first base is not held")

        rank.boot = rank.agent.boot
        rank.agent.ask(self.opening(f"{rank.conn}/open"), told)

    def _again(self, why: str) -> None:
        """Opening failed: the process ends, and is started again."""
        self.world.say(self.term, "does not open:", why)
        self.kill()
        self.world.after(0.5, restart, self)

    def _ready(self) -> None:
        self._opening -= 1
        if not self._opening:
            self._next()

    # Training --------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        """True once every rank has opened."""
        return bool(self.ranks) and not self._opening

    def _next(self) -> None:
        """A step begins when every rank has handed over the one before."""
        if not self.alive or self._busy or self.ranks[0].step >= self.until:
            return
        self._busy = len(self.ranks)
        self.idle_since = self.world.now
        for rank in self.ranks:
            self.world.after(self.step_s * (0.5 + self.world.rng.random()), self._train, rank)

    def _train(self, rank: Rank) -> None:
        if self.alive:
            rank.train()

    def handed_over(self) -> None:
        """A rank's boundary is with its writer, or given up."""
        self._busy -= 1
        if not self._busy:
            self._next()


def _nothing(answer: Any) -> None:
    pass


def restart(job: Job) -> None:
    """A new job in the place of one, if that is still the newest."""
    if job.world.job is job:
        new = Job(job.world, job.homes, job.k, job.window, job.until)
        new.step_s = job.step_s
        job.world.job = new


def newest_seats(world: World, ranks: int) -> dict[int, frozenset[str]]:
    """The seats of every rank's part, as the newest that a live agent knows."""
    found: dict[int, tuple[tuple[str, int], frozenset[str]]] = {}
    for agent in world.agents.values():
        if not agent.alive:
            continue
        view = agent.core.view
        for number in range(ranks):
            seat = view.seats.get(part_name(number))
            if seat is not None:
                rank = (view.term, seat.version)
                if number not in found or rank > found[number][0]:
                    found[number] = rank, frozenset(seat.holders)
    everybody = frozenset(world.agents)
    return {n: found[n][1] if n in found else everybody for n in range(ranks)}


__all__ = ["Job", "Rank", "newest_seats", "restart", "Catalog", "Promise"]
