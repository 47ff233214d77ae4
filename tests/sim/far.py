"""The way to the far tier in a simulated world.

Drains fail, half or whole, come late, and end unheard.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from adacheck_store.agent import events as ev
from adacheck_store.agent.replica import FAR
from adacheck_store.catalog import RecordRef
from tests.sim.damage import FAR_NAME

if TYPE_CHECKING:
    from tests.sim.world import Agent, World

PAUSE_S = 0.2
"""After a failure, before the core is told: `Work` makes one."""


class FarDrains:
    """The way to the far tier, and what is wrong with it. It has a generator of its own.

    ``fails``: nothing gets there. ``deaf``: a drain ends with an error though some or all of it
    has got there. ``slow``: it takes long, and ends even if who began it has died.
    """

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._rng = random.Random(f"drains {seed}")
        self.wrong = {"fails": 0, "deaf": 0, "slow": 0}
        self._missed: set[tuple[str, str]] = set()
        self.seen: Counter[str] = Counter()

    def begin(self, what: str, lasts: float) -> None:
        """Something goes wrong for some time."""
        self.wrong[what] += 1
        self._world.after(lasts, self._end, what)

    def _end(self, what: str) -> None:
        self.wrong[what] = max(0, self.wrong[what] - 1)

    def heal(self) -> None:
        """Nothing is wrong any more."""
        self.wrong = dict.fromkeys(self.wrong, 0)

    def drain(self, agent: Agent, command: ev.Drain, delay: float) -> None:
        """An agent begins to drain."""
        slow = bool(self.wrong["slow"])
        late = self._rng.uniform(0.5, 6.0) if slow else 0.0
        sent = [(key, agent.ram.get(key) or agent.lmdb.get(key)) for key in command.keys]
        self._world.after(delay + late, self._arrive, agent, agent.boot, sent, slow)

    def _arrive(
        self, agent: Agent, boot: str, sent: Sequence[tuple[str, RecordRef | None]], slow: bool
    ) -> None:  # fmt: skip
        """What was sent gets there, as far as it does; the agent hears of it, if it does."""
        alive = agent.alive and agent.boot == boot
        if not alive and not slow:
            return
        damage = self._world.damage
        if alive:  # what has gone or rots by now was read before, or is not
            sent = [(key, agent.ram.get(key) or agent.lmdb.get(key)) for key, _ in sent]
        bad = [key for key, ref in sent if ref is not None and not damage.whole(agent, key)]
        passed = bad if alive else []
        taken = [ref for key, ref in sent if ref is not None and key not in passed]
        heard = alive
        if self.wrong["fails"]:
            taken, heard = [], False
            self.seen["failed drains"] += alive
        elif self.wrong["deaf"] or not alive:
            if self._rng.random() < 0.5:
                taken = taken[: self._rng.randint(0, len(taken))]
                self.seen["drains cut off"] += alive
            else:
                self.seen["drains unheard"] += alive
            heard = False
        self.seen["late drains of the dead"] += not alive and bool(taken)
        for ref in taken:
            self._world.far[ref.key] = ref
            damage.healed(FAR_NAME, ref.key)
            if (agent.node, ref.key) in self._missed:
                self._missed.discard((agent.node, ref.key))
                self.seen["records drained again"] += 1
        if not heard:
            self._missed |= {(agent.node, key) for key, _ in sent}
            if alive:
                agent.later(PAUSE_S, ev.Drained(FAR, ()))
            return
        done = tuple(key for key, _ in sent if key not in passed)
        agent.tell(ev.Drained(FAR, done, passed=tuple(passed)))

    def survey(self, agent: Agent, command: ev.Survey) -> None:
        """An agent reads what is there of its own chains: heads, so rot is not seen."""
        world = self._world
        world.after(0.02 + world.delay(), self._surveyed, agent, agent.boot, command)

    def _surveyed(self, agent: Agent, boot: str, command: ev.Survey) -> None:
        if agent.alive and boot == agent.boot:
            seen = self._world.floors.left().values()
            there = tuple(ref for ref in seen if ref.part in command.chains)
            failed = self._world.rng.random() < 0.1
            agent.tell(ev.Surveyed(command.term, None if failed else there))
