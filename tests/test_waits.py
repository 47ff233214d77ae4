"""The gate holds, and what is waited for in vain is said."""

import threading
import time
from pathlib import Path

import pytest

from tests.ranks.worker import Launcher
from tests.waits import Gate, until


def test_a_gate_lets_through_what_it_was_opened_for(tmp_path: Path) -> None:
    """Where there is none all goes on; a step further waits until it is opened further."""
    gate, passed = Gate(tmp_path / "gate"), []
    gate.wait(10**6)
    gate.open(2)

    def train() -> None:
        for step in range(1, 5):
            gate.wait(step)
            passed.append(step)

    training = threading.Thread(target=train)
    training.start()
    until(lambda: passed == [1, 2], "two steps")
    time.sleep(0.05)
    assert passed == [1, 2]
    gate.open()
    training.join(60)
    assert passed == [1, 2, 3, 4]


def test_in_vain(tmp_path: Path) -> None:
    """A condition that does not come true, and a step of ranks that have ended by themselves."""
    with pytest.raises(AssertionError, match="not in time: rain"):
        until(lambda: False, "rain", 0.05)
    launcher = Launcher(tmp_path, "plain", 1)  # it serves the rendezvous as long as it is there
    attempt = launcher.start(tmp_path / "store", inspect=True)
    with pytest.raises(AssertionError, match="ended by itself"):
        attempt.until(1)
