"""What a run was promised: steps that were acknowledged, and who has said that it can produce them.

Nothing of this asks the planner: promises are what trainers and agents have told before a strike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Life = tuple[str, str]
"""An agent between two starts: node and boot."""


@dataclass(frozen=True, slots=True)
class Promise:
    """A step that all ranks were told is held; ``claims``: what each agent says of each chain."""

    step: int
    claims: Mapping[Life, Mapping[str, int]]

    def kept_by(self, lives: set[Life]) -> bool:
        """Whether of each chain somebody survives who said that it can produce the step."""
        chains = {chain for told in self.claims.values() for chain in told}
        return bool(chains) and all(
            any(told.get(chain, -1) >= self.step for life, told in self.claims.items()
                if life in lives)
            for chain in chains
        )  # fmt: skip


@dataclass
class Truth:
    """Promises of the round at hand, and the newest step that the far tier is said to have."""

    promises: list[Promise] = field(default_factory=list)
    drained: int = 0
    trained: int = 0
    acknowledged: int = 0

    def least(self, lives: set[Life]) -> int:
        """The oldest step that a restore may give when these agents survive."""
        kept = [promise.step for promise in self.promises if promise.kept_by(lives)]
        return max([self.drained, *kept])
