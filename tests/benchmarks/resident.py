"""What an agent's process has in memory while a trainer floods it, against its budget.

``python -m tests.benchmarks resident`` tells it for deltas by the thousand; `watched` is for tests.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from adacheck_store.config import memory_resident
from adacheck_store.format.errors import AdaCheckError
from adacheck_store.session import RunSession
from tests.agent.kit import Node
from tests.agent.trainer import open_session
from tests.core.kit import Journal, begin, make_toy
from tests.core.toy import Toy
from tests.waits import until

from .rows import Row

MEBI = 1 << 20
EVERY_S = 0.02
RESTS = 20
"""How often a flood rests until all is drained: what is in memory then is no record that waits."""


@dataclass(slots=True)
class Watch:
    """Samples of a process's memory: when (s) and how much (bytes)."""

    samples: list[tuple[float, int]] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """The most there was."""
        return max(size for _, size in self.samples)


@contextmanager
def watched(pid: int) -> Iterator[Watch]:
    """Watch a process from another thread."""
    watch, ending = Watch(), threading.Event()

    def look() -> None:
        while not ending.is_set():
            watch.samples.append((time.monotonic(), memory_resident(pid)))
            ending.wait(EVERY_S)

    thread = threading.Thread(target=look, name="resident", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        ending.set()
        thread.join(timeout=10.0)


class Flood:
    """A trainer that puts a delta after the other, and trains no more than it must.

    ``elements`` parameters of float32 with AdamW: a base is 12 bytes of each, a delta about 2.
    """

    def __init__(self, node: Node, elements: int, session: RunSession | None = None) -> None:
        self.session = session or open_session(node.url)
        self.toy: Toy = make_toy([(elements,)], absent=0.0)
        begin(self.session, self.toy, Journal())

    def steps(self, count: int) -> None:
        """So many steps, each with its delta; failed ones are made good by a captured base."""
        for _ in range(count):
            self.session.check()
            gap = self.session.wants_base()
            self.toy.train()
            self.session.append(self.toy.boundary(gap))

    def caught_up(self) -> bool:
        """One step more; True if all are stored by then."""
        self.steps(1)
        with suppress(AdaCheckError):
            self.session.flush(5.0, far=False)
        return self.session.status().stored == self.toy.step


def rows(steps: int = 10_000, elements: int = 1 << 14) -> Iterator[Row]:
    """10 000 deltas through an agent: its peak against its budget, its rests against each other."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="adacheck-") as folder:
        node = Node(Path(folder), "a")
        try:
            with pytest.MonkeyPatch.context() as patch:
                node.here(patch)
                node.agent(program=True)
                yield from _through(node, steps, elements)
        finally:
            node.end()


def _through(node: Node, steps: int, elements: int) -> Sequence[Row]:
    limit = node.status()["memory"]["limit"]
    flood = Flood(node, elements)
    flood.steps(steps // 10)
    until(lambda: node.status()["chains"]["p000000"]["replica_step"] > 0, "torch loaded", 120.0)
    at_rest: list[int] = []
    with watched(node.pid()) as watch:
        for _ in range(RESTS):
            flood.steps(steps // RESTS)
            flood.session.flush(120.0)
            at_rest.append(memory_resident(node.pid()))
    stored = flood.session.status().stored
    flood.session.close()
    tenth = RESTS // 10
    share, drift = watch.peak / limit, sum(at_rest[-tenth:]) / sum(at_rest[:tenth])
    said = f"{watch.peak / MEBI:.0f} of {limit / MEBI:.0f} MiB, step {stored}"
    rests = f"{at_rest[0] / MEBI:.0f} MiB to {at_rest[-1] / MEBI:.0f} MiB, all drained"
    return [
        Row(f"memory of an agent, {steps} deltas / its budget", f"{share:.2f}", "<= 1", share <= 1,
            said),
        Row("at rest, its last tenth / its first", f"{drift:.2f}", "<= 1.05", drift <= 1.05, rests),
    ]  # fmt: skip
