"""Floors of the far tier in a simulated world: agents raise them, and whoever collects garbage.

The log is a list of claims and floors, each with its place. What a floor may be is the product's
`choose_floor`; when it may be written is what `terms.put_floor` asks of the log.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from adacheck_store.catalog import Catalog, RecordRef
from adacheck_store.format.manifest import Floor
from adacheck_store.retention import FloorChoice, choose_floor
from tests.sim.truth import RUN

if TYPE_CHECKING:
    from tests.sim.world import Agent, World

KEEP = 1
"""Bases that stay: as few as can be, so that there are floors in short histories."""

GRACE_S = 1.0
"""How old a floor is before what it covers goes."""


class Floors:
    """The far tier's log, and who deletes by it. It has a generator of its own."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._rng = random.Random(f"floors {seed}")
        self._claims: list[str] = []
        self.floors: list[Floor] = []

    def claimed(self, term: str) -> None:
        """A term has been claimed: older ones raise no floor from now on."""
        self._claims.append(term)

    def left(self) -> dict[str, RecordRef]:
        """What a reader sees in the far tier: what lies below a floor is as good as gone."""
        far = self._world.far
        if not self.floors:
            return dict(far)
        return {
            key: ref for key, ref in far.items()
            if not any(floor.covers(ref.term, ref.kind, ref.step) for floor in self.floors)
        }  # fmt: skip

    def by_agent(self, agent: Agent, watermark: int) -> None:
        """As `agent.prune` does it: never above the watermark, nor while a restore is planned."""
        boot, view = agent.boot, agent.core.view

        def may() -> bool:
            return agent.boot == boot and agent.alive and not agent.core.lease.frozen(
                self._world.now
            )  # fmt: skip

        self._plan(view.term, min(watermark, view.watermark), may)

    def by_tool(self) -> None:
        """As `gc` does it, in the name of the newest term that has begun; agents cap it."""
        begun = self._world.truth.manifests.values()
        if not begun:
            return
        views = [agent.core.view for agent in self._world.agents.values() if agent.alive]
        cap = min((view.watermark for view in views if view.opened is not None), default=None)
        self._plan(max(manifest.term for manifest in begun), cap, lambda: True)

    def catalog(self) -> Catalog:
        """The far tier's catalog, with its floors."""
        found = self._world.truth.catalog([("far", self.left())])
        return replace(found, floors={"far": tuple(self.floors)})

    def with_ghosts(self) -> dict[str, RecordRef]:
        """What a reader would see there had no damage been done."""
        ghosts = self._world.damage.ghosts
        if not ghosts:
            return self.left()
        seen = {
            key: ref for key, ref in ghosts.items()
            if not any(floor.covers(ref.term, ref.kind, ref.step) for floor in self.floors)
        }  # fmt: skip
        return seen | self.left()

    def _plan(self, term: str, cap: int | None, may: Callable[[], bool]) -> None:
        if self._newer(term):
            return
        choice, known = choose_floor(self.catalog(), KEEP, cap), len(self.floors)
        if choice is None or any(self._world.damage.rotten("far", ref.key)
                                 for ref in choice.bases):  # fmt: skip
            return  # its bases are read back
        if all(floor.step < choice.step for floor in self.floors):
            self._world.after(self._rng.random() * 0.5, self._write, term, choice, known, may)

    def _newer(self, term: str) -> bool:
        return any(claim > term for claim in self._claims)

    def _write(self, term: str, choice: FloorChoice, known: int, may: Callable[[], bool]) -> None:
        """The log takes a floor unless it has a newer claim, or a floor that was not known of."""
        if not may() or self._newer(term) or len(self.floors) > known:
            return
        self.floors.append(choice.floor("far", RUN))
        self._world.say(term, "floor", choice.step)
        self._check("when the floor is written")
        self._world.after(GRACE_S, self._bury, self.floors[-1])

    def _bury(self, floor: Floor) -> None:
        far = self._world.far
        for key, ref in list(far.items()):
            if floor.covers(ref.term, ref.kind, ref.step):
                self._world.say("buries", key)
                del far[key]
                self._world.damage.rot.discard(("far", key))
        self._check("when what the floor covers is gone")

    def _check(self, why: str) -> None:
        """The far tier has by itself the step of its floor, or a later one, but for damage."""
        found = self._world.truth.catalog([("far", self.with_ghosts())])
        self._world.truth.check_floors(found, self.floors, why)
