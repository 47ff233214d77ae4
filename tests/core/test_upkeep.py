"""What upkeep does behind a writer, and what it tells of its own progress."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from adacheck_store.config import Settings
from adacheck_store.drain import copy_records
from adacheck_store.format.errors import DigestMismatchError
from adacheck_store.format.keys import parse_key
from adacheck_store.format.manifest import Floor
from adacheck_store.policy import Retention
from adacheck_store.session import RunSession
from adacheck_store.store import Store
from adacheck_store.terms import put_tag, read_log
from adacheck_store.tiers.memory import MemoryTier
from adacheck_store.tools import tag as tags
from adacheck_store.tools.findings import DAMAGE, Finding
from adacheck_store.tools.fsck import fsck
from adacheck_store.upkeep import Upkeep
from tests.core.kit import QUICK, GateTier, Journal, KeptTier, begin, make_toy, session_on, train
from tests.core.toy import Toy
from tests.waits import until

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


@pytest.mark.parametrize("tiers", [1, 2])
def test_pruning_rests_though_a_tag_holds_the_floor(tiers: int) -> None:
    """Where one tier is near and far the floor that it could bear is no reason to try again."""
    far = KeptTier("far")
    near: MemoryTier = KeptTier("near") if tiers == 2 else far
    settings = Settings(base_every=4, object_lag=2, keep_bases=3, grace_s=0.0)
    session = session_on(near, far, settings)
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    trained(session, toy, journal, 9)
    put_tag(far, "run", term=session.status().term, name="good", step=4)
    (based,) = [key for key in far.list("run/") if "/base/" in key and parse_key(key).step == 4]
    far.delete([based])
    trained(session, toy, journal, 8)
    upkeep = session._upkeep
    assert upkeep is not None
    assert "tag good" in upkeep.notice
    assert upkeep.progress.far_floor < 4
    session.close()


def test_a_record_is_drained_from_who_has_it_right() -> None:
    """It is damaged in the nearest tier, and not in the next one."""
    near, other, far = KeptTier("lmdb"), KeptTier("other"), KeptTier("zarr")
    session, toy, journal = session_on(near, far), make_toy(), Journal()
    begin(session, toy, journal)
    train(session, toy, journal, 2)
    session.flush(60.0)
    session.close()
    keys = [key for key in near.list("") if "/log/" not in key]
    copy_records([near], other, keys)
    (key,) = [key for key in keys if key.endswith("/delta/000000000002")]
    _, blocks = near._records[key]
    for place, held in blocks.items():
        blocks[place] = bytes([held[0] ^ 1]) + held[1:]
    far.delete([key])
    with pytest.raises(DigestMismatchError):
        copy_records([near], far, [key])
    with pytest.raises(DigestMismatchError):
        copy_records([near, KeptTier("empty")], far, [key])
    assert copy_records([near, other], far, [key]) > 0
    assert far.head(key).id == other.head(key).id


def test_a_far_tier_that_does_not_keep_up_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Once it is more than ``object_lag`` steps behind what is stored, until it is not any more."""
    far = GateTier(KeptTier("zarr"))
    session, toy, journal = session_on(KeptTier("lmdb"), far), make_toy(), Journal()
    begin(session, toy, journal)
    train(session, toy, journal, 2)
    session.flush(60.0)
    assert (session.status().stored, session.status().drained) == (2, 2)
    far.gate.clear()
    for further in range(1, 2 * QUICK.object_lag):
        train(session, toy, journal, 1)
        session.flush(60.0, far=False)
        status = session.status()
        assert (status.stored, status.drained) == (2 + further, 2)
        assert status.behind == (further > QUICK.object_lag)
    far.gate.set()
    session.flush(60.0)
    assert not session.status().behind
    session.close()
    told = [record.message for record in caplog.records if "object_lag" in record.message]
    assert len(told) == 1
    assert "5 steps behind, more than object_lag (4)" in told[0]


def trained(session: RunSession, toy: Toy, journal: Journal, steps: int) -> None:
    """So many steps, with all that is due done after each."""
    upkeep = session._upkeep
    assert upkeep is not None
    for _ in range(steps):
        train(session, toy, journal, 1)
        session.flush(60)
        until(lambda: upkeep.resting, "upkeep rests")


def go_on(
    far: MemoryTier, journal: Journal, steps: int, every: int | None, *, tag: int = 0, **how: int
) -> list[Floor]:
    """Restore and train; ``every`` so many steps are kept, or what was (None). The new floors."""
    settings = Settings(base_every=4, object_lag=2, grace_s=0.0, keep_bases=2,
                        retention=Retention(last=2, every=every) if every else None)  # fmt: skip
    session, toy = session_on(far, far, settings), make_toy()
    begin(session, toy, journal, seed=7 if how else None, **how)
    term = session.status().term
    for _ in range(steps):
        trained(session, toy, journal, 1)
        if toy.step == tag:
            put_tag(far, "run", term=term, name="good", step=tag)
    session.close()
    floors = [entry for entry in read_log(far, "run") if isinstance(entry, Floor)]
    return [floor for floor in floors if floor.term == term]


def test_a_floor_of_another_branch_does_not_hold_this_ones_down() -> None:
    """It has left nothing below it of what both have, and that ends where the fork is."""
    far, journal = KeptTier("far"), Journal()
    assert [floor.step for floor in go_on(far, journal, 20, 8)] == [16]
    assert go_on(far, journal, 8, 8, step=8)[-1].step == 12


def test_a_tag_below_a_floor_of_another_branch_keeps_its_chain() -> None:
    """That floor has not passed it: its chain is still there, and stays."""
    far, journal = KeptTier("far"), Journal()
    go_on(far, journal, 20, 8)
    assert go_on(far, journal, 20, 8, tag=11, step=8)[-1].step == 8
    session = session_on(far, far)
    restored = session.restore(step=11)
    session.close()
    assert restored is not None
    journal.assert_same(restored)


def test_a_step_that_another_branch_kept_and_this_one_let_go_is_not_kept() -> None:
    """A floor tells of no step that is gone: fsck would call it lost."""
    far, journal = KeptTier("far"), Journal()
    assert go_on(far, journal, 28, 8)[-1].kept == (0, 8, 16)
    assert go_on(far, journal, 16, 20, step=8)[-1].kept == (0,)
    assert go_on(far, journal, 8, None)[-1].kept == (0,)


def test_a_tag_of_another_branch_is_not_missed_in_this_one() -> None:
    """It stays, and has this line's extras of its number stay: nothing is lost."""
    far, journal = KeptTier("far"), Journal()
    store = Store("memory://given", far, far)
    go_on(far, journal, 14, None)
    tags.add(store, "good", "run", step=11)
    assert go_on(far, journal, 20, None, step=10)[-1].kept == (11,)
    rows = list(fsck(store, "run"))
    assert not [row for row in rows if isinstance(row, Finding) and row.severity == DAMAGE]
    assert any(key.endswith("extra/000000000011") and "/t000002" in key for key in far.list("run/"))
