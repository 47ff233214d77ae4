"""What upkeep tells of its own progress."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from adacheck_store.config import Settings
from adacheck_store.format.keys import parse_key
from adacheck_store.session import RunSession
from adacheck_store.upkeep import Upkeep
from tests.core.kit import Journal, begin, make_toy, train

LAST = 20
SETTINGS = Settings(base_every=16, object_lag=64, grace_s=0.0)


def test_a_base_drained_after_later_deltas_takes_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is folded while they are on their way, and is then the last that is drained."""
    draining = threading.Event()
    due, batch = Upkeep._compact_due, Upkeep._drain_batch

    def when_draining(self: Upkeep) -> bool:
        return draining.is_set() and due(self)

    def awaits_the_base(self: Upkeep, keys: list[str]) -> None:
        batch(self, keys)
        if parse_key(keys[-1]).step != LAST:
            return
        with self._changed:
            draining.set()
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._progress.base == 16, 60)

    monkeypatch.setattr(Upkeep, "_compact_due", when_draining)
    monkeypatch.setattr(Upkeep, "_drain_batch", awaits_the_base)
    session = RunSession.open(f"file://{tmp_path}/store", "run", settings=SETTINGS)
    toy = make_toy()
    begin(session, toy, Journal())
    train(session, toy, Journal(), LAST)
    session.flush(60)
    status = session.status()
    session.close()
    assert (status.compactions, status.drained) == (1, LAST)
