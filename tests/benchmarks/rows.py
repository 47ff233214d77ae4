"""What a benchmark reports."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One line: what was measured, the ratio or figure, its bar (empty: none), and how."""

    what: str
    figure: str
    bar: str
    met: bool | None
    detail: str


def seconds(action: Callable[[], object]) -> float:
    """Wall seconds of a call."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def paired(
    first: Callable[[], object], second: Callable[[], object], rounds: int
) -> tuple[float, float, float]:
    """Median seconds of both, and the median ratio first/second, run in turn after a warm-up."""
    first(), second()
    pairs = [(seconds(first), seconds(second)) for _ in range(rounds)]
    ratio = statistics.median(a / b for a, b in pairs)
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs), ratio


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)
