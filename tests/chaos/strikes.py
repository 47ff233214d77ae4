"""Strikes: what a seed has in store for each round, decided before anything runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = (
    "kill trainer", "kill trainers", "kill agent", "kill agents", "kill node", "kill all",
    "empty agent", "lose node", "stop agent", "cut link", "full disk",
)  # fmt: skip
"""``node``: its trainer and its agent. ``all``: both nodes. An ``empty agent`` has lost its disk
with its memory; a lost node its trainer too."""

NODES = "ab"


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault: its kind, the node it hits, after how many steps (and seconds) it comes."""

    kind: str
    node: str
    steps: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """The strikes of a round; ``lasts_s`` is how long stops, cuts and full disks last after the
    last strike, ``heals`` whether training then has to be saved again before all is killed."""

    number: int
    strikes: tuple[Strike, ...]
    lasts_s: float
    heals: bool

    @property
    def steps(self) -> int:
        """How far training may go."""
        return sum(strike.steps for strike in self.strikes) + 4


def rounds(seed: int) -> Iterator[Round]:
    """The rounds of a seed, without end; every kind comes once before any comes again."""
    rng = random.Random(f"chaos {seed}")
    deck: list[str] = []
    number = 0
    while True:
        struck = []
        for _ in range(rng.choice([1, 1, 2, 2, 3])):
            deck = deck or rng.sample(KINDS, len(KINDS))
            pause_s = rng.choice([0.0, 0.0, 0.3, 1.5]) * rng.random()
            struck.append(Strike(deck.pop(), rng.choice(NODES), rng.randint(1, 3), pause_s))
        lasts_s = rng.choice([0.0, 0.5, 4.0]) * (0.5 + rng.random())
        yield Round(number, tuple(struck), round(lasts_s, 2), rng.random() < 0.4)
        number += 1
