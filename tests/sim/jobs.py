"""Jobs: a torchrun in virtual time. It claims, plans, fetches, opens, and trains in lockstep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adacheck_store.agent import events as ev
from adacheck_store.agent.marks import Seat
from adacheck_store.catalog import RecordRef
from adacheck_store.format.errors import UsageError
from adacheck_store.format.keys import part_name, rank_name
from adacheck_store.format.manifest import Manifest, PartEntry
from adacheck_store.placement import Node, place
from adacheck_store.recovery import RestorePlan
from tests.sim.trainers import BASE, DELTA, EXTRA, Rank
from tests.sim.truth import RUN, Violation
from tests.sim.world import Agent, World


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
        self._bad: set[tuple[str, str]] = set()
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
        self.world.floors.claimed(self.term)
        self._ask()

    def _ask(self) -> None:
        """Read the catalogs of all agents that answer, each at its own moment."""
        if not self.alive:
            return
        self._found: list[tuple[str, Mapping[str, RecordRef]]] = [("far", self.world.floors.left())]
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
        self._found += [(agent.boot, dict(agent.ram)), (agent.disk, dict(agent.lmdb))]
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
            catalog = truth.catalog(self._found, self._bad)
            why = f"restore of {self.term}"
            sick = {agent.life for agent in self.world.agents.values()
                    if self.world.damage.sick(agent)}  # fmt: skip
            self.plan = truth.check(
                catalog, self._lives - sick, self.world_seats(), self._promised, why
            )
            if self.world.damage.ghosts:
                catalog = truth.catalog([*self._found, ("far", self.world.floors.with_ghosts())])
            truth.check_floors(catalog, self.world.floors.floors, why)
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
                    held[agent.disk] = agent.lmdb
            refs = [ref for part in self.plan.parts for ref in (part.base, *part.deltas)]
            refs += [ref for extras in self.plan.extras.values() for ref in extras]
            for ref in refs:
                had = [name for name, store in now.items() if ref.key in store
                       and (name, ref.key) not in self._bad]  # fmt: skip
                damage = self.world.damage
                if any(ref.key in held.get(name, ()) and not damage.rotten(name, ref.key)
                       for name in had):  # fmt: skip
                    continue
                bad = {(name, ref.key) for name in had if damage.rotten(name, ref.key)}
                if bad:
                    self.world.say(self.term, "finds rotten", ref.key, "and plans again")
                    self._bad |= bad
                    self.slow_plan = 0.0
                    self._ask()
                    return
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
        self._opened: dict[str, Any] = {
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


def restart(job: Job, homes: list[str] | None = None) -> None:
    """A new job in the place of one, if that is still the newest; perhaps on other nodes."""
    if job.world.job is job:
        new = Job(job.world, homes or job.homes, job.k, job.window, job.until)
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
