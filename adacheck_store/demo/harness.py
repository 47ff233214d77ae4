"""The demo's harness: starts the training processes, kills them, and holds the results together."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adacheck_store.format.errors import AdaCheckError

from .trainer import BASE_EVERY, OBJECT_LAG, WINDOW, Beat

PROCESS_S = 600.0
"""Longest time any process of the demo may take."""

POLL_S = 0.002

Progress = Callable[[str, int, int], None]
"""Called with what is going on, the steps done, and the steps in all."""


class DemoError(AdaCheckError):
    """A process of the demo failed, or a restored state differs from the reference."""

    exit_code = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One kill and what came after; steps, seconds, bytes. ``equal`` is the whole verdict."""

    killed_after: int
    killed_in: str
    restored: int
    tier: str
    restore_s: float
    certificate: str
    lost_to: int
    lost_tier: str
    lost_restore_s: float
    lost_certificate: str
    lost_behind: int
    step_s: float
    bytes_per_step: float
    background_s: float
    differences: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """True if everything compared was equal and every bound was kept."""
        return not self.differences


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """All rounds, with the reference they were held against."""

    steps: int
    parameters: int
    state_bytes: int
    reference_step_s: float
    rounds: tuple[Round, ...]


@dataclass(slots=True)
class Reference:
    """What the uninterrupted run had: digests by step, losses by step, step times."""

    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    losses: dict[int, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)


class Child:
    """A training process of the demo and what it reports."""

    def __init__(self, role: str, folder: Path, *, steps: int, seed: int, **options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.role = role
        (folder / "beat").unlink(missing_ok=True)
        arguments = [f"--{name}={value}" for name, value in options.items()]
        self._log = (folder / "output.txt").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "adacheck_store.demo.trainer", role, f"--folder={folder}",
             f"--steps={steps}", f"--seed={seed}", *arguments],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._beat: Beat | None = None

    def beat(self) -> tuple[int, str]:
        """Last finished step and phase."""
        if self._beat is None:
            path = self.folder / "beat"
            if not path.exists() or path.stat().st_size < 16:
                return -1, "start"
            self._beat = Beat(path, create=False)
        return self._beat.read()

    def until(self, reached: Callable[[int, str], bool], tell: Callable[[int], None]) -> None:
        """Wait until ``reached(step, phase)``; raises `DemoError` if the process ends before."""
        deadline = time.monotonic() + PROCESS_S
        while True:
            step, phase = self.beat()
            tell(max(step, 0))
            if reached(step, phase):
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise self.failure()
            time.sleep(POLL_S)

    def wait(self, tell: Callable[[int], None]) -> None:
        """Wait for the process to end well."""
        deadline = time.monotonic() + PROCESS_S
        while self.process.poll() is None and time.monotonic() < deadline:
            tell(max(self.beat()[0], 0))
            time.sleep(0.05)
        if self.process.poll() != 0:
            self.kill()
            raise self.failure()

    def kill(self) -> None:
        """SIGKILL, whatever the process is doing."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=60)

    def failure(self) -> DemoError:
        """What the process printed last, as an error."""
        text = (self.folder / "output.txt").read_text(errors="replace")[-2000:]
        return DemoError(
            f"the {self.role} process ended with {self.process.returncode}:\n{text}",
            path=str(self.folder),
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        """The journal; a line cut off by the kill is left out."""
        for line in (self.folder / "journal.jsonl").read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return


def run_demo(
    work: Path, store: str, *, steps: int, rounds: int, seed: int, progress: Progress
) -> DemoResult:
    """Run the whole demo: the reference once, then ``rounds`` kills."""
    reference, state_bytes, parameters = _run_reference(work, steps, seed, progress)
    choose = random.Random(seed)
    results = []
    for number in range(1, rounds + 1):
        moment = choose.uniform(0.1, 0.9) * steps
        folder = work / f"round-{number}"
        results.append(
            _run_round(folder, store, f"demo-{os.getpid()}-{number}", reference, moment,
                       steps=steps, seed=seed, progress=progress)
        )  # fmt: skip
    return DemoResult(
        steps=steps, parameters=parameters, state_bytes=state_bytes,
        reference_step_s=statistics.median(reference.seconds), rounds=tuple(results),
    )  # fmt: skip


def _run_reference(
    work: Path, steps: int, seed: int, progress: Progress
) -> tuple[Reference, int, int]:
    child = Child("reference", work / "reference", steps=steps, seed=seed)
    child.wait(lambda step: progress("reference, uninterrupted and without a store", step, steps))
    reference = Reference()
    sizes = {"state_bytes": 0, "parameters": 0}
    for row in child.rows():
        sizes.update({name: row[name] for name in sizes if name in row})
        if "step" in row:
            reference.digests[row["step"]] = row["digests"]
        if "loss" in row:
            reference.losses[row["step"]] = row["loss"]
            reference.seconds.append(row["seconds"])
    return reference, sizes["state_bytes"], sizes["parameters"]


def _run_round(
    folder: Path, store: str, run: str, reference: Reference, moment: float, *,
    steps: int, seed: int, progress: Progress,
) -> Round:  # fmt: skip
    options = {"run": run, "store": store, "cache": str(folder / "lmdb")}
    typical_s = statistics.median(reference.seconds)

    first = Child("train", folder / "first", steps=steps, seed=seed, **options)
    first.until(
        lambda step, phase: step >= int(moment) or (int(moment) == 0 and phase != "start"),
        lambda step: progress("training, about to be killed", step, steps),
    )
    time.sleep(moment % 1.0 * typical_s)
    first.kill()
    killed_after, killed_in = first.beat()
    killed_after = max(killed_after, 0)

    second = Child("train", folder / "second", steps=steps, seed=seed, **options)
    second.until(
        lambda step, phase: phase == "done",
        lambda step: progress("restored, and training to the end", step, steps),
    )
    second.kill()  # and with it goes the machine: nothing was flushed
    shutil.rmtree(folder / "lmdb")

    third = Child("inspect", folder / "third", steps=steps, seed=seed, **options)
    third.wait(lambda step: progress("the machine is lost: restored from objects alone", 0, steps))
    return _judge(reference, steps, (killed_after, killed_in), first, second, third)


def _judge(
    reference: Reference, steps: int, killed: tuple[int, str], first: Child, second: Child,
    third: Child,
) -> Round:  # fmt: skip
    differences: list[str] = []
    resumed = list(second.rows())
    restored = next(row for row in resumed if "restored" in row)
    final = next(row for row in resumed if "final" in row)
    lost = next(row for row in third.rows() if "restored" in row)
    times = [row["seconds"] for row in (*first.rows(), *resumed) if "loss" in row]

    _compare(reference, restored["restored"], restored["digests"], "restored", differences)
    _compare(reference, steps, final["digests"], "final", differences)
    _compare(reference, lost["restored"], lost["digests"], "lost machine", differences)
    for row in (*first.rows(), *resumed):
        if "loss" in row and row["loss"] != reference.losses[row["step"]]:
            differences.append(f"loss of step {row['step']}")
    if not killed[0] - (WINDOW + 1) <= restored["restored"] <= killed[0] + 1:
        differences.append(f"restored to {restored['restored']}, killed after {killed[0]}")
    if lost["restored"] < steps - (OBJECT_LAG + WINDOW + 1):
        differences.append(f"objects alone gave step {lost['restored']}")

    status = final["status"]
    taken = max(1, status["stored"] - restored["restored"])
    return Round(
        killed_after=killed[0], killed_in=killed[1], restored=restored["restored"],
        tier=_names(restored["tiers"]), restore_s=restored["seconds"],
        certificate=restored["certificate"], lost_to=lost["restored"],
        lost_tier=_names(lost["tiers"]), lost_restore_s=lost["seconds"],
        lost_certificate=lost["certificate"], lost_behind=steps - lost["restored"],
        step_s=statistics.median(times), bytes_per_step=status["bytes_stored"] / taken,
        background_s=status["background_cpu_s"] / taken, differences=tuple(differences),
    )  # fmt: skip


def _names(tiers: dict[str, int]) -> str:
    return " + ".join(sorted(tiers)) or "none"


def _compare(
    reference: Reference, step: int, digests: dict[str, str], what: str, differences: list[str]
) -> None:
    expected = reference.digests[step]
    wrong = [name for name in {*expected, *digests} if expected.get(name) != digests.get(name)]
    differences.extend(f"{what}, step {step}: {name}" for name in sorted(wrong))


def settings_line() -> str:
    """The cadence the demo runs with, for people."""
    return f"base_every={BASE_EVERY}, object_lag={OBJECT_LAG}, window={WINDOW}"
