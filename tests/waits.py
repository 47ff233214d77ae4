"""What is waited for: by a test a condition, with a deadline; by training processes a gate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAIT_S = 120.0
"""Costs nothing where all goes well: a busy machine only takes longer."""


def until(condition: Callable[[], Any], what: str, wait_s: float = WAIT_S) -> Any:
    """Wait for something to be so; what it gave."""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"not in time: {what}")


@dataclass(frozen=True)
class Gate:
    """A file that says up to which step processes may train; where there is none they may."""

    path: Path

    def open(self, step: int = 10**9) -> None:
        """Let processes train up to a step, and no further; by itself to the end."""
        draft = self.path.with_suffix(".tmp")
        draft.write_text(str(step))
        draft.replace(self.path)

    def lets(self, step: int) -> bool:
        """Whether a step may be trained."""
        return not self.path.exists() or step <= int(self.path.read_text())

    def wait(self, step: int) -> None:
        """In a process that trains: go on when a step may be trained."""
        while not self.lets(step):
            time.sleep(0.005)
