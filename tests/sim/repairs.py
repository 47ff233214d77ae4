"""Repairs in a simulated world: the tool itself, on a real zarr tier that holds what the far does.

It goes on row by row, while all else happens; what the world's far tier is given or loses
meanwhile, its objects are, and the other way round. Each step is held against what was there.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

from adacheck_store.catalog import RecordRef
from adacheck_store.drain import in_batches
from adacheck_store.format import keys
from adacheck_store.format.errors import AdaCheckError, TierUnavailableError
from adacheck_store.format.keys import is_key, parse_key
from adacheck_store.format.manifest import Floor
from adacheck_store.format.record import verify_block
from adacheck_store.store import Store
from adacheck_store.tiers.zarr import ASIDE, ZarrTier
from adacheck_store.tiers.zarr_packs import expand
from adacheck_store.tools import agents, repair
from adacheck_store.tools.fsck_objects import owner_of
from tests.sim.damage import FAR_NAME
from tests.sim.records import Held, Killed, Library, MemoryObjects, flipped, floor_source
from tests.sim.truth import RUN, Violation

if TYPE_CHECKING:
    from tests.sim.world import Agent, World

SOUND, ROTTEN = "sound", "rotten"


class Repairs:
    """All repairs of a history; one at a time. ``seen`` counts what they did."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.seen: Counter[str] = Counter()
        self._library: Library | None = None
        self._running: Repair | None = None

    def begin(self, node: str, rng: random.Random) -> None:
        """A repair begins on a node, unless one is under way."""
        if self._running is not None and not self._running.over:
            return
        self._library = self._library or Library(self._world.truth)
        self._running = Repair(self._world, node, rng, self._library, self.seen)


class Repair:
    """One repair, by somebody on a node; killed sometimes, and then begun again."""

    def __init__(
        self, world: World, node: str, rng: random.Random, library: Library, seen: Counter[str]
    ) -> None:  # fmt: skip
        self._world, self._node, self._rng = world, node, rng
        self._library, self._seen = library, seen
        self._objects = MemoryObjects()
        self._mirror = Mirror(world, self._objects, library, rng)
        self.over = False
        self._deaths = rng.choice([0, 0, 1, 1, 2])
        self._begin()

    # What it does ----------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._world.far and self._world.truth.manifests:
            self._world.say("repair on", self._node)
            self._seen["repairs"] += 1
            self._known: list[Agent] = []
            self._whole = True
            self._wrong: set[str] | None = None
            self._left: set[str] = set()
            self._floors = list(self._world.floors.floors)
            self._held_first = {
                (key, agent.boot) for agent in self._world.agents.values()
                for key in (*agent.ram, *agent.lmdb)
            }  # fmt: skip
            far = ZarrTier(self._objects, FAR_NAME, listing_s=0.0)
            self._store = Store("sim:", far, far)
            self._rows = repair.repair(self._store, RUN)
            self._go_on()
        else:
            self.over = True

    def _go_on(self) -> None:
        """To the next row, or the end, or its death; names of packs are the history's too."""
        with patch.object(keys, "new_nonce", lambda: f"{self._rng.getrandbits(64):016x}"):
            self._step()

    def _step(self) -> None:
        self._mirror.follow()
        was = self._mirror.state()
        if self._wrong is None:
            self._wrong = {key for key, state in was.items() if state == ROTTEN}
        if self._deaths and self._rng.random() < 0.6:
            self._deaths -= 1
            self._objects.left = self._rng.randrange(12)
        row: repair.RepairRow | None = None
        ended = ""
        try:
            with patch.object(repair.agents, "meet", self._meet):
                row = next(self._rows)
        except StopIteration:
            ended = "done"
        except Killed:
            ended = "killed"
        except TierUnavailableError:
            ended = "gave up"
        self._objects.left = None
        if row is not None:
            if row.done == repair.LEFT:
                self._left.add(row.key)
            self._seen[f"{row.was}, {row.done}"] += 1
            self._world.say("repair:", row.was, row.done, row.key, row.why[:120])
        self._judge(was, row)
        if not ended:
            self._world.after(self._rng.random() * 0.4, self._go_on)
            return
        self._world.say("repair is", ended)
        self._seen[f"repairs {ended}"] += 1
        if ended == "done":
            self._judge_end()
            self.over = True
        else:
            self._world.after(self._rng.random(), self._begin)

    @contextmanager
    def _meet(self, url: str, run: str) -> Iterator[agents.Met]:
        """Agents as the tool meets them: by the one of its own node, if that lives."""
        world, met = self._world, agents.Met()
        own = world.agents[self._node]
        if own.lmdb:
            met.memories.append(self._held(f"own {own.disk}", own, disk=True, own=True))
        if own.alive:
            self._known = list(world.agents.values())
            for agent in self._known:
                try:
                    self._there(agent, agent.boot)
                except TierUnavailableError as error:
                    met.silent[agent.node] = error
                    continue
                (met.memories if agent is own else met.others).append(
                    self._held(agent.boot, agent, disk=False)
                )
                if agent is not own:
                    met.others.append(self._held(agent.disk, agent, disk=True))
        self._whole = not met.silent
        yield met

    def _held(self, name: str, agent: Agent, *, disk: bool, own: bool = False) -> Held:
        boot, damage = agent.boot, self._world.damage

        def look() -> tuple[Mapping[str, RecordRef], object]:
            if not own:
                self._there(agent, boot)
            place = agent.disk if disk else boot
            return agent.lmdb if disk else agent.ram, lambda key: damage.rotten(place, key)

        return Held(name, self._library, look)  # type: ignore[arg-type]

    def _there(self, agent: Agent, boot: str) -> None:
        """Raises if an agent does not answer here and now."""
        world = self._world
        there = agent.alive and agent.boot == boot and world.now >= agent.busy_until
        if not there or (agent.node != self._node and not world.reaches(self._node, agent.node)):
            raise TierUnavailableError("it does not answer", tier=f"agent {agent.node}")

    # What it must not do -----------------------------------------------------------------------

    def _judge(self, was: Mapping[str, str], row: repair.RepairRow | None) -> None:
        """Nothing that was right is gone or wrong; what is new is right, and above floors."""
        world = self._world
        before = world.truth.plan(world.truth.catalog([(FAR_NAME, world.floors.left())],
                                                      world.damage.rot))  # fmt: skip
        now = self._mirror.state()
        for key in self._mirror.touched():
            had, has = was.get(key), now.get(key)
            ref = self._library.refs.get(key)
            if ref is None:
                raise Violation(f"a repair made up {key}")
            if had == SOUND and has != SOUND and not self._covered(ref, world.floors.floors):
                raise Violation(f"{ref.key} was right in the far tier; a repair made it {has}")
            if had is None and has == ROTTEN:
                raise Violation(f"a repair has put {ref.key}, and it does not verify")
            if had == ROTTEN and has is None:
                self._judge_aside(ref)
            if self._wrong and has != ROTTEN:
                self._wrong.discard(key)
        if row is not None and row.done == repair.REBUILT:
            self._judge_rebuilt(row, now)
        self._mirror.lead(now)
        world.floors._check("after a repair's step")
        after = world.truth.plan(world.truth.catalog([(FAR_NAME, world.floors.left())],
                                                     world.damage.rot))  # fmt: skip
        if before is not None and (after is None or after.step < before.step):
            raise Violation(f"the far tier gave step {before.step} before a repair's step")

    def _judge_aside(self, ref: RecordRef) -> None:
        """What is set aside no agent that the repair knows of has right."""
        self._seen["records set aside"] += 1
        for agent in self._known:
            if agent.alive and self._world.damage.whole(agent, ref.key):
                raise Violation(f"{ref.key} was set aside, and {agent.boot} has it right")

    def _judge_rebuilt(self, row: repair.RepairRow, now: Mapping[str, str]) -> None:
        """It is right, and was not below a floor when the repair began, if it was not there."""
        key = parse_key(row.key)
        for text in expand([key]) if key.kind == "pack" else [row.key]:
            ref = self._library.refs.get(text)
            if ref is None:  # a document
                continue
            # Of a batch that was missing the rows come one by one, after it was put.
            put = row.was == "damaged" or text in self._mirror.touched()
            if put and now.get(text) != SOUND:
                raise Violation(f"{ref.key} is told to be rebuilt, and is {now.get(text)}")
            if row.was == "missing" and self._covered(ref, self._floors):
                raise Violation(f"{ref.key} is below a floor, and a repair brings it back")

    @staticmethod
    def _covered(ref: RecordRef, floors: Iterable[Floor]) -> bool:
        return any(floor.covers(ref.term, ref.kind, ref.step) for floor in floors)

    def _judge_end(self) -> None:
        """What was rotten, and whoever was met has had right all along, was mended."""
        now, left = self._mirror.state(), {*self._left}
        for unit in map(parse_key, self._left):
            left.update(expand([unit]) if unit.kind == "pack" else ())
        for key in (self._wrong or set()) - left if self._whole else ():
            if now.get(key) != ROTTEN:
                continue
            ref = self._library.refs[key]
            if self._covered(ref, self._world.floors.floors):
                continue
            for agent in self._known:
                if (ref.key, agent.boot) in self._held_first and agent.alive:
                    if self._world.damage.whole(agent, ref.key):
                        raise Violation(f"{ref.key} is left rotten, and {agent.boot} has it right")


class Mirror:
    """The objects of the far tier beside what the world says it holds."""

    def __init__(
        self, world: World, objects: MemoryObjects, library: Library, rng: random.Random
    ) -> None:  # fmt: skip
        self._world, self._objects, self._library, self._rng = world, objects, library, rng
        self._known: dict[str, bool] = {}
        self._floors = 0

    def _tier(self) -> ZarrTier:
        """The tier as another process sees it, which remembers nothing."""
        return ZarrTier(self._objects, FAR_NAME, listing_s=0.0)

    def follow(self) -> None:
        """Do to the objects what has happened in the world."""
        world, tier, library = self._world, self._tier(), self._library
        documents = library.documents()
        there = set(tier.list(f"{RUN}/"))
        tier.put([library.source(key) for key in documents if key not in there])
        for index, floor in enumerate(world.floors.floors[self._floors :], self._floors):
            tier.put([floor_source(floor, index)])
        self._floors = len(world.floors.floors)
        wanted = {library.key(ref): ref for ref in world.far.values()}
        tier.delete(key for key in self._known if key not in wanted)
        fresh = [key for key in wanted if key not in self._known]
        for batch in in_batches(fresh, self._rng.randint(1, 6)):
            tier.put([library.source(key) for key in batch])
            self._known |= dict.fromkeys(batch, False)
        self._known = {key: rotten for key, rotten in self._known.items() if key in wanted}
        for key, ref in wanted.items():
            rotten = world.damage.rotten(FAR_NAME, ref.key)
            if rotten != self._known[key]:
                self._flip(tier, key, ref, rotten)
                self._known[key] = rotten
        self._objects.touched.clear()

    def _flip(self, tier: ZarrTier, key: str, ref: RecordRef, rotten: bool) -> None:
        """A bit of a record's bytes is another, wherever they lie; or is right again."""
        (data,) = map(bytes, self._library.record(ref).arrays.values())
        old, new = (data, flipped(data)) if rotten else (flipped(data), data)
        places = [key] if ref.kind == "base" else map(str, tier.holding(key))
        for place in places:
            for name in list(self._objects.list(f"{place}/")):
                held = self._objects.held[name]
                if old in held:
                    self._objects.held[name] = held.replace(old, new)

    def touched(self) -> list[str]:
        """Records whose objects, or whose pack's, were changed since `follow`."""
        found: set[str] = set()
        for name in self._objects.touched:
            owner = owner_of(name)
            if not name.startswith(ASIDE) and owner and is_key(owner):
                key = parse_key(owner)
                if key.kind in ("base", "pack"):
                    found.update(expand([key]) if key.kind == "pack" else [owner])
        return sorted(found)

    def state(self) -> dict[str, str]:
        """Of each record there whether it verifies, and is what was written."""
        tier = self._tier()
        found = {}
        for key in tier.list(f"{RUN}/"):
            if parse_key(key).kind in ("base", "delta", "extra"):
                found[key] = self._look(tier, key)
        return found

    def _look(self, tier: ZarrTier, key: str) -> str:
        expected = self._library.record(self._library.refs[key]).sealed
        try:
            if tier.head(key).id != expected.id:
                raise Violation(f"{key} in the far tier is another record than was written")
            for info in expected.head.arrays:
                for index in range(len(info.digests)):
                    verify_block(info, index, tier.read(key, info.name, index, 1))
        except AdaCheckError:
            return ROTTEN
        return SOUND

    def lead(self, now: Mapping[str, str]) -> None:
        """Do to the world what has happened to the objects."""
        world = self._world
        for key in self.touched():
            ref, state = self._library.refs[key], now.get(key)
            if state is None:
                if ref.key in world.far:
                    world.damage.lost([ref.key])
                self._known.pop(key, None)
                continue
            below = any(floor.covers(ref.term, ref.kind, ref.step)
                        for floor in world.floors.floors)  # fmt: skip
            if ref.key not in world.far and not below:
                world.far[ref.key] = ref
            if state == SOUND:
                world.damage.healed(FAR_NAME, ref.key)
            if ref.key in world.far:
                self._known[key] = state == ROTTEN
