"""Playing a seed: rounds in a row on one run, a new run every so many; and what came of it."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.chaos import MORE_STEPS, Chaos
from tests.chaos.strikes import KINDS, Round, rounds
from tests.cluster.kit import GIVEN, Cluster
from tests.cluster.network import network
from tests.ranks.worker import Launcher

ROUNDS_A_RUN = 20
"""A run's store grows with its steps, and fsck reads all of it after each round."""


@dataclass
class Result:
    """What came of a seed."""

    seed: int
    rounds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    wall_s: float = 0.0

    def __str__(self) -> str:
        """Rounds, faults by kind, steps lost, recovery times."""
        faults = ", ".join(f"{kind} {self.counts[kind]}" for kind in KINDS if self.counts[kind])
        checks = ", ".join(f"{key} {n}" for key, n in self.counts.items() if key not in KINDS)
        times = sorted(self.recoveries) or [0.0]
        return (
            f"chaos {self.seed}: {self.rounds} rounds in {self.wall_s:.0f} s; {faults}; {checks}; "
            f"steps lost {sum(self.lost)} (most in a round {max(self.lost, default=0)}); "
            f"recovery P50 {times[len(times) // 2]:.2f} s, "
            f"P99 {times[min(len(times) - 1, len(times) * 99 // 100)]:.2f} s"
        )


def play(seed: int, count: int, folder: Path, say: Callable[[str], None]) -> Result:
    """Play so many rounds of a seed; raises `AssertionError`, saying how to see it again."""
    result, began = Result(seed), time.monotonic()
    plans = iter(list(itertools.islice(rounds(seed), count)))
    number = 0
    while some := list(itertools.islice(plans, ROUNDS_A_RUN)):
        place = folder / f"run{number}"
        place.mkdir()
        _play_run(some, place, result, say)
        number += 1
    result.wall_s = time.monotonic() - began
    return result


def _play_run(plans: list[Round], folder: Path, result: Result, say: Callable[[str], None]) -> None:
    steps = sum(plan.steps + MORE_STEPS for plan in plans) + 8
    sizes, given = {"steps": steps, "width": 37}, {**GIVEN, "k": 1}
    with ExitStack() as stack:
        net = stack.enter_context(network())
        reference = Launcher(folder, "fsdp", 2).reference(**sizes)
        cluster = Cluster(folder, net, "fsdp", sizes, reference, given=given, silent_s=30.0)
        stack.callback(cluster.end)
        chaos = Chaos(cluster)
        stack.callback(chaos.end)
        for plan in plans:
            try:
                say(f"round {plan.number}: {chaos.round(plan)}")
            except BaseException:
                say(f"round {plan.number}: {plan}")
                say(f"again: python -m tests.chaos {result.seed} {plan.number + 1}")
                raise
            result.rounds += 1
        say(f"in the end: {chaos.finish()}")
        result.counts += chaos.counts
        result.recoveries += chaos.recoveries
        result.lost += chaos.lost
