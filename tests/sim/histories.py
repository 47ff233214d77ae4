"""Random histories: a cluster, a run and its faults, all from one seed; healed at the end."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field, replace

from adacheck_store.agent.budget import BEYOND_WINDOW
from adacheck_store.agent.replica import FAR, LMDB
from tests.sim.jobs import Job, newest_seats, restart
from tests.sim.trainers import BASE, DELTA, EXTRA
from tests.sim.truth import Violation
from tests.sim.world import Agent, World

FAULTS = (
    "kill trainers", "kill trainers", "kill agent", "kill agent", "lose node", "lose nodes",
    "lose too many", "cut", "cut holders", "pause", "full disk", "zombie", "slow plan",
    "late answer", "late answer", "kill home", "lossy", "slow disk",
)  # fmt: skip


DRAINS = {"drains fail": "fails", "drains end unheard": "deaf", "drains are late": "slow"}
HARMS = (*DRAINS, "far rots", "far rots", "far loses", "holder rots", "holder rots")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong: when, what, on which node, and for how long."""

    at: float
    kind: str
    pick: int
    lasts: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A history before it happens: everything but what the world's own generator decides."""

    seed: int
    nodes: int
    homes: tuple[int, ...]
    k: int
    window: int
    fold_every: int
    places: int
    slack: float
    steps: int
    step_s: float = 0.1
    away_s: float = 30.0
    faults: tuple[Fault, ...] = ()
    probes: tuple[float, ...] = ()

    @property
    def ranks(self) -> int:
        """How many trainers."""
        return len(self.homes)


@dataclass(slots=True)
class Outcome:
    """What a history came to."""

    steps: int = 0
    restores: int = 0
    promises: int = 0
    drained: int = 0
    floors: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    """What drains to the far tier, and repairs, came to."""


def make_plan(seed: int) -> Plan:
    """The history of a seed."""
    rng = random.Random(f"plan {seed}")
    nodes = rng.choice([2, 3, 3, 3, 4])
    k = 2 if nodes > 2 and rng.random() < 0.2 else 1
    steps = rng.randint(3, 6)
    step_s = rng.choice([0.1, 0.1, 0.1, 0.1, 0.1, 0.7])
    end = 0.4 + steps * step_s * 1.5
    times = [round(rng.uniform(0.1, end), 3) for _ in range(rng.choice([1, 1, 2, 2, 3, 4]))]
    faults = tuple(
        Fault(at, rng.choice(FAULTS), rng.randrange(64),
              round(rng.choice([0.2, 1.0, 4.0]) * (0.5 + rng.random()), 3))
        for at in sorted(times)
    )  # fmt: skip
    first, count = rng.randrange(nodes), rng.choice([1, 2, 2, 3])
    homes = [(first + rank * rng.choice([1, 1, 1, 2, 0])) % nodes for rank in range(count)]
    probes = [rng.uniform(0.3, end + 1.0) for _ in range(2)]
    probes += [at + rng.random() * 8 * step_s for at in times]
    places = rng.choice([0, 0, LMDB, LMDB | FAR])
    slack = rng.choice([0.0, 1.0]) if places else 3.0  # without disk memory holds what comes
    faults, steps = _more(seed, faults, steps, end, bool(places & FAR))
    return Plan(
        seed=seed, nodes=nodes, homes=tuple(homes), k=k, window=rng.choice([1, 2]),
        fold_every=rng.choice([1, 1, 2, 4]), places=places, slack=slack, steps=steps, step_s=step_s,
        away_s=rng.choice([4.0, 30.0]), faults=faults,
        probes=tuple(round(at, 3) for at in sorted(probes)),
    )  # fmt: skip


def _more(
    seed: int, faults: tuple[Fault, ...], steps: int, end: float, far: bool
) -> tuple[tuple[Fault, ...], int]:
    """Some nodes that are lost do not come back in time.

    Of a far tier garbage is collected, drains fail, what lies there rots or goes, and so does what
    lies with agents; and it is repaired.
    """
    rng = random.Random(f"more {seed}")
    moved = [
        replace(fault, kind="move home") if fault.kind == "lose node" and rng.random() < 0.5
        else fault for fault in faults
    ]  # fmt: skip
    for _ in range(rng.choice([0, 1, 2]) if far else 0):
        moved.append(Fault(round(rng.uniform(0.3, end + 1.0), 3), "gc", 0, 0.0))
    rng = random.Random(f"harm {seed}")
    for _ in range(rng.choice([0, 1, 1, 2, 3]) if far else 0):
        at, kind = rng.uniform(0.3, end + 2.0), rng.choice(HARMS)
        lasts = round(rng.choice([0.5, 2.0, 6.0]) * (0.5 + rng.random()), 3)
        moved.append(Fault(round(at, 3), kind, rng.randrange(64), lasts))
        if kind == "drains are late" and rng.random() < 0.6:
            moved.append(Fault(round(at + rng.random(), 3), "kill home", rng.randrange(64), lasts))
        if kind not in DRAINS and rng.random() < 0.7:
            after = round(at + rng.choice([0.05, 0.5, 2.0]) * rng.random(), 3)
            moved.append(Fault(after, "repair", rng.randrange(64), 0.0))
            if rng.random() < 0.4:  # those who were met when it began are not there any more
                kind, soon = rng.choice(["cut", "pause", "kill agent"]), 0.3 * rng.random()
                moved.append(Fault(round(after + soon, 3), kind, rng.randrange(64), lasts))
    return tuple(moved), steps + rng.choice([0, 4]) * far


def build(plan: Plan, trace: list[str] | None = None) -> World:
    """The world of a plan, its faults and probes due, its first job claimed."""
    world = World(plan.seed, plan.ranks, trace)
    room = plan.window + BEYOND_WINDOW
    need = plan.ranks * (BASE + room * (DELTA + EXTRA)) + BASE
    for number in range(plan.nodes):
        node = f"n{number}"
        world.agents[node] = Agent(
            world, node, node, int(need * (1 + plan.slack)), places=plan.places,
            window=plan.window, fold_every=plan.fold_every, base_every=4, object_lag=6,
            object_lag_s=3.0, away_s=plan.away_s,
        )  # fmt: skip
        world.agents[node].start()
    homes = [f"n{node}" for node in plan.homes]
    world.job = Job(world, homes, plan.k, plan.window, plan.steps)
    world.job.step_s = plan.step_s
    return world


def run(plan: Plan, trace: list[str] | None = None) -> Outcome:
    """Let a history happen; raises `Violation`."""
    world = build(plan, trace)
    outcome = Outcome()
    for fault in plan.faults:
        world.after(fault.at, _strike, world, plan, fault, outcome)
    for at in plan.probes:
        world.after(at, probe, world, plan)
    ends = max([0.0, *(fault.at for fault in plan.faults)]) + 0.5
    world.run(lambda: world.now >= ends and _done(world.job), ends + 8.0)
    heal(world)
    settle(world, plan)
    everything(world, plan, "in the end")
    flush(world, plan)
    outcome.steps = world.job.ranks[0].step
    outcome.restores = world.claims - 1
    outcome.promises, outcome.drained = len(world.truth.promises), world.truth.count
    outcome.floors = len(world.floors.floors)
    outcome.seen = world.drains.seen + world.repairs.seen
    outcome.seconds = world.now
    return outcome


def _done(job: Job) -> bool:
    return job.alive and job.training and all(rank.step >= job.until for rank in job.ranks)


def heal(world: World) -> None:
    """All faults end: every agent runs, every link carries, a job trains some steps more."""
    world.say("heal")
    world.cut.clear()
    world.loss = 0.0
    world.drains.heal()
    for agent in world.agents.values():
        if world.damage.sick(agent):  # what rots with an agent nobody but a new one mends
            agent.kill(disk=any(world.damage.rotten(agent.disk, key) for key in agent.lmdb))
        agent.disk_fails, agent.disk_s, agent.busy_until = False, 0.0, 0.0
        agent.start()
    job = world.job
    job.step_s = 0.1
    job.until += 2
    if not job.alive:
        restart(job)
    elif job.training and all(rank.step >= job.until - 2 for rank in job.ranks):
        job._next()


def settle(world: World, plan: Plan) -> None:
    """Nothing is stuck: the run ends, whole, acknowledged by k+1, and the watermark follows."""

    def quiet() -> bool:
        job = world.job
        if not _done(job):
            return False
        acked = all(rank.acked == job.until and not rank.acked_short for rank in job.ranks)
        acked = acked and not any(old.alive for old in world.jobs if old is not job)
        if acked and all(
            agent.core.view.watermark >= job.until - 1 and agent.core.view.term == job.term
            for agent in world.agents.values()
        ):
            return True
        if all(rank.acked == job.until or not rank._storing for rank in job.ranks):
            if world.now - job.idle_since > 1.0:  # a gap to close, a base to settle: go on
                job.until += 1
                job._next()
        return False

    if not world.run(quiet, world.now + 90.0):
        job = world.job
        raise Violation(
            f"deadlock: {job.term} at "
            f"{[(r.step, r.acked, r.acked_short, r.gap) for r in job.ranks]} of {job.until}, "
            f"watermarks {[(a.node, a.core.view.watermark) for a in world.agents.values()]}"
        )


def flush(world: World, plan: Plan) -> None:
    """In the end all is drained, and the far tier has the watermark's step.

    Not where something was damaged, or went before it was drained, and no base has come since.
    """
    agents = world.agents.values()
    if not plan.places & FAR:
        return
    for agent in agents:
        agent.core.drains.hurry = True
    if not world.run(lambda: not any(agent.core.drains.behind for agent in agents),
                     world.now + 30.0):  # fmt: skip
        raise Violation(f"drains end at {[(a.node, a.core.drains.behind) for a in agents]}")
    broken = any(r.part not in r.agent.core.drains._whole for r in world.job.ranks)
    if broken or world.damage.struck:
        return
    found = world.truth.plan(world.truth.catalog([("far", world.floors.with_ghosts())]))
    watermark = min(agent.core.view.watermark for agent in agents)
    if found is None or found.step < watermark:
        raise Violation(f"all is drained to {watermark}, and there is {found and found.step}")


def probe(world: World, plan: Plan) -> None:
    """What if some k domains were lost at this moment?"""
    names = sorted(world.agents)
    _lose_on_paper(world, plan, set(world.rng.sample(names, plan.k)), "probe")


def everything(world: World, plan: Plan, why: str) -> None:
    """What if any k domains were lost?"""
    for lost in itertools.combinations(sorted(world.agents), plan.k):
        _lose_on_paper(world, plan, set(lost), why)


def _lose_on_paper(world: World, plan: Plan, lost: set[str], why: str) -> None:
    truth = world.truth
    if not truth.manifests:
        return
    for rank in world.job.ranks:
        rank.news()
    floors, damage = world.floors.floors, world.damage
    stores = [("far", world.floors.left())]
    lives = set()
    for agent in world.agents.values():
        if agent.node not in lost:
            stores.append((agent.disk, agent.lmdb))
            if agent.alive:
                stores.append((agent.boot, agent.ram))
                if not damage.sick(agent):
                    lives.add(agent.life)
    why = f"{why} at {world.now:.3f}"
    undamaged = ("far", world.floors.with_ghosts())
    catalog = truth.catalog([undamaged])
    truth.check_drained(catalog, f"{why}, all but far lost")
    truth.check_floors(catalog, floors, f"{why}, all but far lost")
    why = f"{why}, without {sorted(lost)}"
    catalog = truth.catalog([undamaged, *stores] if damage.ghosts else stores)
    truth.check_drained(catalog, why)
    truth.check_floors(catalog, floors, why)
    if damage.rot or damage.ghosts:
        catalog = truth.catalog(stores, damage.rot)
    truth.check(catalog, lives, newest_seats(world, plan.ranks), truth.promises, why)


def _strike(world: World, plan: Plan, fault: Fault, outcome: Outcome) -> None:
    """A fault happens."""
    rng = random.Random(f"{plan.seed} {fault}")
    names = sorted(world.agents)
    node = names[fault.pick % len(names)]
    agent, job = world.agents[node], world.job
    outcome.faults[fault.kind] += 1
    world.say("FAULT", fault.kind, node, fault.lasts)
    match fault.kind:
        case "kill trainers" | "slow plan":
            job.kill()
            world.after(fault.lasts / 4, restart, job)
        case "zombie":
            if job.training:
                restart(job)
                idle = _done(job)
                job.until = 10**6  # the old one trains on until an agent refuses it
                if idle:
                    job._next()
        case "kill agent":
            agent.kill()
            world.after(fault.lasts, agent.start)
        case "kill home":
            world.agents[job.homes[fault.pick % plan.ranks]].kill()
            world.after(fault.lasts, world.agents[job.homes[fault.pick % plan.ranks]].start)
        case "lose node" | "lose nodes" | "lose too many":
            many = {"lose node": 1, "lose nodes": plan.k, "lose too many": plan.k + 1}[fault.kind]
            for name in rng.sample(names, many):
                world.agents[name].kill(disk=True)
                world.after(fault.lasts * (0.5 + rng.random()), world.agents[name].start)
            job.kill()
            world.after(fault.lasts / 2, restart, job)
        case "move home":  # a node is lost, and its ranks begin anew on another one
            lost = job.homes[fault.pick % plan.ranks]
            there = rng.choice([name for name in names if name != lost])
            world.agents[lost].kill(disk=True)
            world.after(fault.lasts, world.agents[lost].start)
            job.kill()
            homes = [there if home == lost else home for home in job.homes]
            world.after(fault.lasts / 2, restart, job, homes)
        case "gc":
            world.floors.by_tool()
        case "drains fail" | "drains end unheard" | "drains are late":
            world.drains.begin(DRAINS[fault.kind], fault.lasts)
        case "far rots":
            world.damage.rot_far(rng)
        case "far loses":
            world.damage.lose_far(rng)
        case "holder rots":
            world.damage.rot_at(agent, rng)
        case "repair":
            world.repairs.begin(node, rng)
        case "cut":
            pair = frozenset(rng.sample(names, 2))
            world.cut.add(pair)
            world.after(fault.lasts, world.cut.discard, pair)
        case "cut holders":
            seat = newest_seats(world, plan.ranks)[fault.pick % plan.ranks]
            pair = frozenset(rng.sample(sorted(seat), min(2, len(seat))))
            world.cut.add(pair)
            world.after(fault.lasts, world.cut.discard, pair)
        case "pause":
            agent.busy_until = world.now + fault.lasts
        case "full disk":
            agent.disk_fails = True
            world.after(4 * fault.lasts, setattr, agent, "disk_fails", False)
        case "lossy":
            world.loss = 0.3
            world.after(fault.lasts, setattr, world, "loss", 0.0)
        case "slow disk":
            agent.disk_s = 1.0
            world.after(4 * fault.lasts, setattr, agent, "disk_s", 0.0)
        case "late answer":
            if job.training:
                job.ranks[fault.pick % plan.ranks].fail_next = True
    if fault.kind == "slow plan":
        world.after(fault.lasts / 4 + 1e-6, _slow, world, rng.choice([2.0, 2.0, 2.0, 70.0]))


def _slow(world: World, seconds: float) -> None:
    world.job.slow_plan = seconds
