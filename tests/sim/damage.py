"""Damage in a simulated world: records that rot where they lie, and such as the far tier loses.

Rot is in blocks: heads, and so catalogs, do not show it; whoever reads or verifies sees it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from adacheck_store.catalog import RecordRef

if TYPE_CHECKING:
    from tests.sim.world import Agent, World

FAR_NAME = "far"


class Damage:
    """What is damaged, by the name of the place and the record's key.

    ``ghosts`` are what the far tier had and has no more, or has rotten: what it was told to have
    it would have with them.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.rot: set[tuple[str, str]] = set()
        self.ghosts: dict[str, RecordRef] = {}
        self.struck = 0

    def rotten(self, place: str, key: str) -> bool:
        """Whether a record does not verify there."""
        return (place, key) in self.rot

    def healed(self, place: str, key: str) -> None:
        """A record was put there."""
        if self.rot or self.ghosts:
            self.rot.discard((place, key))
            if place == FAR_NAME:
                self.ghosts.pop(key, None)

    def cleared(self, place: str) -> None:
        """All of a place is gone."""
        self.rot = {pair for pair in self.rot if pair[0] != place}

    def sick(self, agent: Agent) -> bool:
        """Whether something rots with an agent: it can produce less than it says."""
        if not self.rot:
            return False
        places = {agent.boot: agent.ram, agent.disk: agent.lmdb}
        return any(place in places and key in places[place] for place, key in self.rot)

    def whole(self, agent: Agent, key: str) -> bool:
        """Whether an agent has a record right anywhere."""
        return any(
            key in held and not self.rotten(place, key)
            for place, held in ((agent.boot, agent.ram), (agent.disk, agent.lmdb))
        )

    def sent_rotten(self, node: str, refs: Iterable[RecordRef]) -> bool:
        """Whether some records that an agent sends, from its memory if they are there, rot."""
        agent = self._world.agents[node]
        return bool(self.rot) and any(
            self.rotten(agent.boot if ref.key in agent.ram else agent.disk, ref.key) for ref in refs
        )

    # Strikes ---------------------------------------------------------------------------------

    def rot_far(self, rng: random.Random) -> None:
        """Some records of the far tier rot."""
        far = self._world.far
        self._rot(FAR_NAME, far, rng)
        self.ghosts.update({key: far[key] for place, key in self.rot
                            if place == FAR_NAME and key in far})  # fmt: skip

    def rot_at(self, agent: Agent, rng: random.Random) -> None:
        """Some records of an agent rot, in its memory or on its disk."""
        on_disk = not agent.alive or rng.random() < 0.5
        place, held = (agent.disk, agent.lmdb) if on_disk else (agent.boot, agent.ram)
        self._rot(place, held, rng)

    def _rot(self, place: str, held: Mapping[str, RecordRef], rng: random.Random) -> None:
        for key in rng.sample(sorted(held), min(len(held), rng.choice([1, 1, 2, 3]))):
            self._world.say("rots in", place, key)
            self.rot.add((place, key))
            self.struck += 1

    def lose_far(self, rng: random.Random) -> None:
        """The far tier loses a base, or some consecutive records of a chain, as a pack goes."""
        far = self._world.far
        if not far:
            return
        first = far[rng.choice(sorted(far))]
        most = rng.choice([1, 2, 4])

        def goes(ref: RecordRef) -> bool:
            if first.kind == "base":
                return ref.key == first.key
            same = (ref.kind, ref.term, ref.part) == (first.kind, first.term, first.part)
            return same and first.step <= ref.step < first.step + most

        self.lost(key for key, ref in far.items() if goes(ref))

    def lost(self, keys: Iterable[str]) -> None:
        """The far tier has lost some records."""
        for key in list(keys):
            self._world.say("the far tier loses", key)
            self.ghosts[key] = self._world.far.pop(key)
            self.rot.discard((FAR_NAME, key))
            self.struck += 1
