"""What a benchmark reports."""

from __future__ import annotations

import mmap
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
    first: Callable[[], object], second: Callable[[], object], rounds: int, memory: int = 0
) -> tuple[float, float, float]:
    """Median seconds of both, and the median ratio first/second, run in turn after a warm-up; so
    many bytes of ``memory`` are `at_hand` for each."""

    def timed(action: Callable[[], object]) -> float:
        if memory:
            at_hand(memory)
        return seconds(action)

    first(), second()
    pairs = [(timed(first), timed(second)) for _ in range(rounds)]
    ratio = statistics.median(a / b for a, b in pairs)
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs), ratio


def at_hand(nbytes: int) -> None:
    """Have the machine hold so many bytes of free memory, in large pages.

    A virtual machine gives memory that is free back to its host, and then each first touch of a
    page is the host's to serve: seconds for a gigabyte at one time, a tenth of that at another.
    """
    # Private: shared memory comes in small pages, and frees none that a large one is made of.
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        memory[:: mmap.PAGESIZE] = bytes(-(-nbytes // mmap.PAGESIZE))


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)
