"""A world in virtual time: agents' cores with simulated memory, disks, network and far tier.

One heap of events, one random generator, no threads: a seed is a history. The shell here carries
out an agent's commands as a real one would, with delays and failures.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from adacheck_store.agent import events as ev
from adacheck_store.agent.budget import Budget
from adacheck_store.agent.core import AgentCore, AgentSettings
from adacheck_store.agent.replica import FAR, LMDB, RAM
from adacheck_store.catalog import RecordRef
from tests.sim.damage import Damage
from tests.sim.far import FarDrains
from tests.sim.floors import Floors
from tests.sim.repairs import Repairs
from tests.sim.truth import Truth, Violation

CALL_S = 3.0
"""Time-out of a call to a peer."""

Reply = Callable[[Any], None]


class World:
    """Everything that exists; ``trace`` collects what happens if it is a list."""

    def __init__(self, seed: int, ranks: int, trace: list[str] | None = None) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.truth = Truth(ranks)
        self.far: dict[str, RecordRef] = {}
        self.floors = Floors(self, seed)
        self.damage = Damage(self)
        self.drains = FarDrains(self, seed)
        self.repairs = Repairs(self)
        self.claims = 0
        self.agents: dict[str, Agent] = {}
        self.cut: set[frozenset[str]] = set()
        self.loss = 0.0
        self.trace = trace
        self.job: Any = None
        self.jobs: list[Any] = []
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def say(self, *words: Any) -> None:
        """A line of the trace."""
        if self.trace is not None:
            self.trace.append(f"{self.now:8.3f} " + " ".join(map(str, words)))

    def after(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        """Do something later."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, action, args))

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Let time pass until a condition holds; False if it does not before ``limit``."""
        heap = self._heap
        while not until():
            if not heap or heap[0][0] > limit:
                return False
            self.now, _, action, args = heapq.heappop(heap)
            action(*args)
        return True

    def reaches(self, a: str, b: str) -> bool:
        """True if no cut lies between two nodes."""
        return not self.cut or frozenset((a, b)) not in self.cut

    def lost(self) -> bool:
        """True if a message between nodes is lost."""
        return self.loss > 0 and self.rng.random() < self.loss

    def delay(self) -> float:
        """How long a message takes: mostly little, sometimes much."""
        return self.rng.random() * (0.02 if self.rng.random() < 0.9 else 0.5)


class Agent:
    """An agent's shell: memory, LMDB, and the calls that wait for an answer."""

    def __init__(self, world: World, node: str, domain: str, budget: int, **settings: Any) -> None:
        self.world = world
        self.node = node
        self.domain, self.total = domain, budget
        self.disk = f"{node}/lmdb"
        self.settings = AgentSettings(**settings)
        self.ram: dict[str, RecordRef] = {}
        self.lmdb: dict[str, RecordRef] = {}
        self.disk_fails = False
        self.disk_s = 0.0
        self.alive = False
        self.boot = ""
        self.busy_until = 0.0
        self.starts = 0
        self.core: AgentCore
        self._replies: dict[str, tuple[Reply, ev.Offered | None, str]] = {}
        self._serial = 0

    # Life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process, with whatever the LMDB holds."""
        if self.alive:
            return
        self.starts += 1
        self.alive, self.boot, self.ram = True, f"{self.node}#{self.starts}", {}
        self.core = AgentCore(self.node, self.boot, Budget(self.total), self.settings)
        self.world.say("start", self.boot, f"lmdb {len(self.lmdb)}")
        if self.lmdb:
            self.tell(ev.Stored("", tuple(self.lmdb.values()), LMDB))
        self._tick(self.boot)

    def kill(self, *, disk: bool = False) -> None:
        """End the process: memory is gone, and the disk too if the node is."""
        if disk:
            self.lmdb = {}
            self.world.damage.cleared(self.disk)
        if not self.alive:
            return
        self.world.say("kill", self.boot, "with its disk" if disk else "")
        self.alive, self.ram = False, {}
        waiting, self._replies = self._replies, {}
        for reply, _, _ in waiting.values():
            self.world.after(0.01, reply, None)

    def _tick(self, boot: str) -> None:
        if self.alive and boot == self.boot:
            self.tell(ev.Tick(attended=self.world.now % 8.0 < 4.0))  # whatever trainers do
            self.world.after(0.5, self._tick, boot)

    @property
    def life(self) -> tuple[str, str]:
        """This agent since its last start."""
        return self.node, self.boot

    # Events and commands ---------------------------------------------------------------------

    def tell(self, event: ev.Event) -> None:
        """Give the core an event, and carry out what it commands."""
        for command in self.core.handle(event, self.world.now):
            _CARRY_OUT[type(command)](self, command)
        if self.core.budget.used > self.total:
            raise Violation(f"{self.boot} uses {self.core.budget.used} of {self.total} bytes")
        if isinstance(event, ev.Tick):
            self._tell_seats()

    def _tell_seats(self) -> None:
        view = self.core.view
        for chain, seat in view.seats.items():
            full = view.opened is not None and len(seat.holders) > view.opened.k
            if seat.version and full and view.agreed > 0 and chain.startswith("p"):
                number = int(chain[1:])
                self.world.truth.reseated(view.term, number, seat.holders, view.agreed)

    def later(self, delay: float, event: ev.Event) -> None:
        """Tell an event after a while, if the process still lives."""
        self.world.after(delay, self._arrive, self.boot, event)

    def _arrive(self, boot: str, event: ev.Event) -> None:
        if not self.alive or boot != self.boot:
            return
        if self.world.now < self.busy_until:
            self.later(self.busy_until - self.world.now, event)
        else:
            self.tell(event)

    def offer(
        self, refs: tuple[RecordRef, ...], term: str, conn: str, reply: Reply, peer: str = ""
    ) -> None:
        """Somebody puts records: replies "ok", a `Refuse`, or None where the process dies."""
        self._serial += 1
        token = f"put{self._serial}"
        event = ev.Offered(token, refs, term, peer)
        self._replies[token] = (reply, event, conn)
        self.tell(event)

    def ask(self, event: Any, reply: Reply) -> None:
        """A sync or opening: replies with the `Answer` or `Refuse`, None if the process dies."""
        self._replies[event.token] = (reply, None, "")
        self.tell(event)

    def _admit(self, command: ev.Admit) -> None:
        if command.place == RAM:
            self._put(command.token, RAM)
        else:
            delay = self.world.delay() + self.disk_s
            self.world.after(delay, self._put_later, self.boot, command.token)

    def _put_later(self, boot: str, token: str) -> None:
        if not self.alive or boot != self.boot or token not in self._replies:
            return
        if self.disk_fails:
            reply, _, _ = self._replies.pop(token)
            self.tell(ev.Failed(token, full=True))
            reply(ev.Refuse(token, "full", "the disk is full"))
        else:
            self._put(token, LMDB)

    def _put(self, token: str, place: int) -> None:
        reply, offer, conn = self._replies.pop(token)
        assert offer is not None
        store = self.ram if place == RAM else self.lmdb
        for ref in offer.refs:
            store[ref.key] = ref
            self.world.damage.healed(self.boot if place == RAM else self.disk, ref.key)
        self.tell(ev.Stored(token, offer.refs, place, conn))
        reply("ok")

    def _reply(self, command: ev.Refuse | ev.Answer) -> None:
        if command.token in self._replies:
            self._replies.pop(command.token)[0](command)

    def _drop(self, command: ev.Drop) -> None:
        store = self.ram if command.place == RAM else self.lmdb
        for key in command.keys:
            del store[key]
        self.world.say(self.boot, "drops", *command.keys)

    def _fold(self, command: ev.Fold) -> None:
        self.world.after(0.05 + self.world.delay(), self._folded, self.boot, command)

    def _folded(self, boot: str, command: ev.Fold) -> None:
        if not self.alive or boot != self.boot:
            return
        plan = command.plan
        if command.place == LMDB and self.disk_fails:
            self.tell(ev.Failed(command.token, full=True))
            return
        if not all(self.world.damage.whole(self, ref.key) for ref in (plan.base, *plan.deltas)):
            self.later(0.5, ev.Failed(command.token))
            return
        last = plan.deltas[-1]
        self._serial += 1
        name = f"{last.term}/{plan.part}/base/{command.step:04d}-{self.boot}.{self._serial}"
        ref = RecordRef(
            key=name, kind="base", term=last.term, part=plan.part, step=command.step, id=name,
            parent=plan.link, manifest=last.manifest, layout=plan.layout, tiers=(),
            nbytes=plan.base.nbytes, origin="replayed",
        )  # fmt: skip
        truth = self.world.truth
        truth.holds[ref.id] = truth.fold(plan.base, plan.deltas)
        (self.ram if command.place == RAM else self.lmdb)[ref.key] = ref
        self.world.say(self.boot, "folded", ref.key)
        self.tell(ev.Stored(command.token, (ref,), command.place))

    def _drain(self, command: ev.Drain) -> None:
        delay = 0.02 + self.world.delay() + self.disk_s
        if command.place == FAR:
            self.world.drains.drain(self, command, delay)
        else:
            self.world.after(delay, self._drained, self.boot, command)

    def _drained(self, boot: str, command: ev.Drain) -> None:
        if not self.alive or boot != self.boot:
            return
        if self.disk_fails:
            self.tell(ev.Drained(LMDB, (), full=True))
            return
        damage = self.world.damage
        passed = tuple(key for key in command.keys if damage.rotten(self.boot, key))
        done = tuple(key for key in command.keys if key not in passed)
        for key in done:
            if key in self.ram:
                self.lmdb[key] = self.ram[key]
                damage.healed(self.disk, key)
        self.tell(ev.Drained(LMDB, done, passed=passed))

    def _prune(self, command: ev.Prune) -> None:
        """Of each own part the last two bases up to the watermark, and what follows, stay."""
        gone: list[str] = []
        view = self.core.view
        if view.owns("p000000") and self.settings.places & FAR:
            self.world.floors.by_agent(self, command.watermark)
        for chain, replica in view.replicas.items():
            if not view.owns(chain) or not chain.startswith("p"):
                continue
            bases = sorted(
                ref.step for ref in self.lmdb.values()
                if ref.part == chain and ref.kind == "base" and ref.step <= command.watermark
                and replica.on_line(ref)
            )  # fmt: skip
            if len(bases) < 2:
                continue
            gone += [
                key for key, ref in self.lmdb.items()
                if ref.part[1:] == chain[1:] and ref.step < bases[-2] and key in self.world.far
            ]  # fmt: skip
        for key in gone:
            del self.lmdb[key]
        if gone:
            self.later(0.0, ev.Lost(LMDB, tuple(gone)))

    def _ask_base(self, command: ev.AskBase) -> None:
        raise Violation(f"{self.boot} calls {command.chain} wrong from {command.first} on")

    # Calls between agents ----------------------------------------------------------------------

    def _forward(self, command: ev.Forward) -> None:
        world = self.world
        if command.refs:
            world.say(self.boot, "->", command.peer, *(ref.key for ref in command.refs))
        term = self.core.view.term
        world.after(world.delay(), self._called, self.boot, command, term, world.now)

    def _called(self, boot: str, command: ev.Forward, term: str, since: float) -> None:
        """The call arrives at the peer, or nowhere."""
        world, peer = self.world, self.world.agents[command.peer]
        if not world.reaches(self.node, peer.node) or world.lost():
            self._fail(boot, peer.node, since + CALL_S - world.now)
        elif not peer.alive:
            self._fail(boot, peer.node, 0.05)
        elif world.now < peer.busy_until:
            wait = peer.busy_until - world.now
            if world.now + wait - since > CALL_S:
                self._fail(boot, peer.node, since + CALL_S - world.now)
                world.after(wait, peer._take, peer.boot, command, self.node, term, _ignore)
            else:
                world.after(wait, self._called, boot, command, term, since)
        else:
            answered = _Once(self, boot, peer, since)
            peer._take(peer.boot, command, self.node, term, answered)
            if not answered.done:
                world.after(since + CALL_S - world.now, answered, None)

    def _take(self, boot: str, command: ev.Forward, caller: str, term: str, reply: Reply) -> None:
        if not self.alive or boot != self.boot:
            return
        if term != self.core.view.term:
            self.tell(ev.Called(caller, term))
        if command.refs and self.world.damage.sent_rotten(caller, command.refs):
            self.world.after(0.3, reply, "what was sent does not verify")
        elif command.refs:
            self.offer(command.refs, "", "", reply, caller)
        else:
            reply("ok")

    def _fail(self, boot: str, peer: str, delay: float) -> None:
        self.world.after(max(0.0, delay), self._arrive, boot, ev.Missed(peer))

    def _learn(self, command: ev.Learn) -> None:
        self.world.after(self.world.delay(), self._learned, self.boot, command.peer)

    def _learned(self, boot: str, name: str) -> None:
        peer = self.world.agents[name]
        if not (self.alive and boot == self.boot and peer.alive):
            return
        if self.world.reaches(self.node, name):
            opened = peer.core.view.opened
            if opened is not None and opened.term > self.core.view.term:
                self.tell(_without_token(opened))


class _Once:
    """A call's answer: the first thing that happens to it."""

    def __init__(self, caller: Agent, boot: str, peer: Agent, since: float) -> None:
        self.caller, self.boot, self.peer, self.since = caller, boot, peer, since
        self.done = False

    def __call__(self, answer: Any) -> None:
        if self.done:
            return
        self.done = True
        caller, peer, world = self.caller, self.peer, self.caller.world
        if answer is None:
            caller._fail(self.boot, peer.node, 0.0)
        elif not world.reaches(caller.node, peer.node) or world.lost():
            caller._fail(self.boot, peer.node, self.since + CALL_S - world.now)
        else:
            report = peer.core.view.report()
            world.after(world.delay(), caller._arrive, self.boot, ev.Heard(report))


def _ignore(answer: Any) -> None:
    pass


def _without_token(opened: ev.Opened) -> ev.Opened:
    return ev.Opened(
        term=opened.term, manifests=opened.manifests, seats=opened.seats, domains=opened.domains,
        k=opened.k, reserve=opened.reserve,
    )  # fmt: skip


_CARRY_OUT: dict[type[Any], Callable[[Agent, Any], None]] = {
    ev.Admit: Agent._admit, ev.Refuse: Agent._reply, ev.Answer: Agent._reply,
    ev.Forward: Agent._forward, ev.Learn: Agent._learn, ev.Fold: Agent._fold,
    ev.Drop: Agent._drop, ev.Drain: Agent._drain,
    ev.Survey: lambda agent, command: agent.world.drains.survey(agent, command),
    ev.Prune: Agent._prune,
    ev.AskBase: Agent._ask_base,
}  # fmt: skip
