"""The demo's harness: what is lost and when, and how what came back compares with the reference."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adacheck_store.catalog import read_catalog
from adacheck_store.store import open_for_reading

from .cluster import Node, Start
from .trainer import BASE_EVERY, OBJECT_LAG, WINDOW, Job

Progress = Callable[[str, int, int], None]
"""Called with what is going on, the steps done, and the steps in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What was lost: when, and how far the store was as ranks had told.

    ``after`` is the last step that all ranks had finished, ``phase`` where a rank that was killed
    was, ``kept`` the last step that is not to be lost, ``at`` the moment (monotonic seconds).
    """

    what: str
    after: int
    phase: str
    kept: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What came back after a loss: of all ranks, in steps, bytes by tier, and seconds.

    ``restore_s`` is the slowest rank's `restore`; ``back_s`` the time from the loss until all
    ranks had finished the next step, with the start of processes and agents in it.
    """

    loss: Loss
    restored: int
    tiers: dict[str, int]
    restore_s: float
    back_s: float
    certificate: str
    reasons: tuple[str, ...]

    @property
    def steps_lost(self) -> int:
        """How many finished steps had to be made again."""
        return max(0, self.loss.after - self.restored)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Every recovery, what a step takes, and whatever was not equal: nothing, if all is well.

    ``bytes_per_step`` is of all ranks, each record counted once; times are medians.
    """

    nodes: int
    ranks_per_node: int
    steps: int
    parameters: int
    state_bytes: int
    bytes_per_step: float
    step_s: float
    reference_step_s: float
    recoveries: tuple[Recovery, ...]
    differences: tuple[str, ...]


@dataclass(slots=True)
class Reference:
    """What a rank of the uninterrupted run had: digests by step, losses by step, step times."""

    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    losses: dict[int, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    parameters: int = 0

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> Reference:
        """From the journal of the run without a store."""
        found = cls()
        for row in rows:
            found.digests[row["step"]] = row["digests"]
            found.parameters = row.get("parameters", found.parameters)
            if "loss" in row:
                found.losses[row["step"]] = row["loss"]
                found.seconds.append(row["seconds"])
        return found

    def differences(self, rows: list[dict[str, Any]]) -> Iterator[str]:
        """What of a rank's journal is not as it was here."""
        for row in rows:
            if "loss" in row:
                if row["loss"] != self.losses[row["step"]]:
                    yield f"step {row['step']}: the loss"
                continue
            step = row["restored" if "restored" in row else "final"]
            expected, found = self.digests[step], row["digests"]
            for name in sorted({*expected, *found}):
                if expected.get(name) != found.get(name):
                    yield f"step {step}: {name}"


@dataclass(frozen=True, slots=True)
class _Moment:
    """So long after a step; and not before a step newer than ``since`` is kept."""

    step: int
    wait_s: float
    since: int


def run_demo(work: Path, job: Job, progress: Progress) -> DemoResult:
    """Run the whole demo in a folder; ``job`` is what all starts have in common."""
    demo = _Demo(work, job, progress)
    try:
        return demo.run()
    finally:
        demo.end()


class _Demo:
    """The nodes, and one start of all ranks after another."""

    def __init__(self, work: Path, job: Job, progress: Progress) -> None:
        self._work, self._job, self._progress = work, job, progress
        self._nodes = [Node(work / f"node-{number}") for number in range(1, job.nodes + 1)]
        self._choose = random.Random(job.seed)
        self._starts: list[Start] = []

    def run(self) -> DemoResult:
        """The reference, and then a run that loses a rank, a node, and all but the zarr tier."""
        losses = [self._lose_rank, self._lose_node, self._lose_all]
        if self._job.nodes == 1:
            losses.remove(self._lose_node)  # it would be all
        self._start("").finish(self._tell("reference, uninterrupted and without a store"))
        references = [Reference.of(rows) for rows in self._starts[0].journals()]
        typical_s = statistics.median(references[0].seconds)
        start = self._start(self._job.store)
        recoveries: list[Recovery] = []
        for number, lose in enumerate(losses, 1):
            part = (number + self._choose.uniform(-0.3, 0.3)) / (len(losses) + 1)
            step, rest = divmod(self._job.steps * part, 1.0)
            since = recoveries[-1].restored if recoveries else 0
            loss = lose(start, _Moment(int(step), rest * typical_s, since))
            start = self._start(self._job.store)
            recoveries.append(self._recovery(start, loss))
        start.finish(self._tell("training to the end"))
        return self._result(references, recoveries)

    def end(self) -> None:
        """End everything."""
        for start in self._starts:
            start.kill(range(self._job.size))
        for node in self._nodes:
            node.kill_agent()

    def _start(self, store: str) -> Start:
        folder = self._work / f"start-{len(self._starts)}"
        job = dataclasses.replace(self._job, folder=folder, store=store)
        self._starts.append(Start(job, self._nodes))
        return self._starts[-1]

    def _tell(self, what: str) -> Callable[[int], None]:
        return lambda step: self._progress(what, step, self._job.steps)

    def _lose_rank(self, start: Start, when: _Moment) -> Loss:
        rank = self._choose.randrange(self._job.size)
        return self._lose(start, f"rank {rank}", [rank], [], self._held, when)

    def _lose_node(self, start: Start, when: _Moment) -> Loss:
        number = self._choose.randrange(self._job.nodes)
        here = self._job.ranks_per_node
        ranks = range(number * here, (number + 1) * here)
        node = self._nodes[number]
        return self._lose(start, node.name, ranks, [node], self._held, when)

    def _lose_all(self, start: Start, when: _Moment) -> Loss:
        def drained() -> int:
            return start.drained() - 1  # the extras of a step may come a drain later

        everyone = range(self._job.size)
        return self._lose(start, "all but zarr", everyone, self._nodes, drained, when)

    def _held(self) -> int:
        """The newest step that the agents say k+1 of them have."""
        return max(node.watermark(self._job.run) for node in self._nodes)

    def _lose(
        self, start: Start, what: str, ranks: Sequence[int], nodes: Sequence[Node],
        kept: Callable[[], int], when: _Moment,
    ) -> Loss:  # fmt: skip
        """Let ranks and nodes die in the middle of a step, once something newer has been kept."""
        start.until(
            lambda: start.finished() >= when.step and kept() > when.since,
            f"the moment to lose {what}", self._tell(f"training, about to lose {what}"),
        )  # fmt: skip
        time.sleep(when.wait_s)
        least, phase, moment = kept(), start.phase(ranks[0]), time.monotonic()
        start.kill(ranks)
        for node in nodes:
            node.lose()
        return Loss(what=what, after=start.finished(), phase=phase, kept=least, at=moment)

    def _recovery(self, start: Start, loss: Loss) -> Recovery:
        """What the ranks say of their restore, once all have made a step."""
        tell = self._tell(f"{loss.what} lost, recovering")
        start.until(lambda: all(_stepped(rows) for rows in start.journals()), "a step", tell)
        journals = start.journals()
        reports = [next(row for row in rows if "restored" in row) for rows in journals]
        back = max(next(row["at"] for row in rows if "at" in row) for rows in journals)
        tiers: Counter[str] = Counter()
        for report in reports:
            tiers.update(report["tiers"])
        return Recovery(
            loss=loss, restored=reports[0]["restored"], tiers=dict(sorted(tiers.items())),
            restore_s=max(report["restore_s"] for report in reports), back_s=back - loss.at,
            certificate=reports[0]["certificate"], reasons=tuple(reports[0]["reasons"]),
        )  # fmt: skip

    def _result(self, references: list[Reference], recoveries: list[Recovery]) -> DemoResult:
        differences, times, job = [], [], self._job
        for number, start in enumerate(self._starts[1:], 1):
            for rank, rows in enumerate(start.journals()):
                found = references[rank].differences(rows)
                differences += [f"start {number}, rank {rank}, {what}" for what in found]
                times += [row["seconds"] for row in rows if "seconds" in row]
        for each in recoveries:
            if not each.loss.kept <= each.restored <= each.loss.after + 1:
                differences.append(f"restored to step {each.restored} after {each.loss}")
        finals = [row for rows in self._starts[-1].journals() for row in rows if "final" in row]
        if len(finals) < job.size:
            differences.append("not all ranks have come to the end")
        parameters = references[0].parameters
        return DemoResult(
            nodes=job.nodes, ranks_per_node=job.ranks_per_node, steps=job.steps,
            parameters=parameters, state_bytes=parameters * 3 * 4,
            bytes_per_step=_bytes_per_step(job.store, job.run, job.size),
            step_s=statistics.median(times),
            reference_step_s=statistics.median(s for each in references for s in each.seconds),
            recoveries=tuple(recoveries), differences=tuple(differences),
        )  # fmt: skip


def _bytes_per_step(url: str, run: str, ranks: int) -> float:
    """What a step takes in the far tier: a delta and an extra of each rank, as the mean is."""
    store = open_for_reading(url)
    try:
        catalog = read_catalog([store.far], run)
    finally:
        store.close()
    kinds = (catalog.deltas, catalog.extras)
    sizes = [[ref.nbytes for refs in kind.values() for ref in refs] for kind in kinds]
    return ranks * sum(statistics.mean(each) for each in sizes)


def settings_line() -> str:
    """The cadence the demo runs with, for people."""
    return f"base_every={BASE_EVERY}, object_lag={OBJECT_LAG}, window={WINDOW}"


def _stepped(rows: list[dict[str, Any]]) -> bool:
    """Whether a rank has noted a step of its own since it was started."""
    return any("at" in row for row in rows)
