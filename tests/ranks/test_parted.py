"""Steps at which copies have come apart: what is kept for them, and what damage means there."""

import threading

import pytest

from adacheck_store.catalog import read_catalog
from adacheck_store.format.errors import NotProvableError
from adacheck_store.restore import restore_state
from adacheck_store.store import open_store
from adacheck_store.tiers.wrappers import WrapperTier
from adacheck_store.tools.findings import Finding, Provable
from adacheck_store.tools.fsck import fsck
from adacheck_store.tools.gc import Ages, gc
from adacheck_store.tools.ls import ls
from adacheck_store.tools.show import show
from adacheck_store.tools.status import TierRow, status
from tests.ranks.worker import APART_AT, BASE_EVERY, STEPS, WINDOW, Launcher, check_against

pytestmark = pytest.mark.fault

KEPT = {rank: {"keep": 100} for rank in range(2)}


def blind(rank: int) -> None:
    """Nobody looks once the copies are about to come apart."""
    from adacheck_store.trainer_hooks.detection import Detection
    from adacheck_store.trainer_hooks.vigil import Vigil

    due = Detection.due
    Detection.due = lambda self, step: step < APART_AT and due(self, step)
    Vigil.begin = lambda self: None


def test_no_floor_passes_the_newest_step_that_a_restore_takes(tmp_path):
    """Bases of steps at which copies had come apart count for nothing; and the tools know it."""
    launcher = Launcher(tmp_path, "local", 2)
    reference = launcher.reference()
    store = tmp_path / "store"
    first = launcher.start(store, given=KEPT, before_attach=blind)
    assert first.wait() == [0, 0]
    last = BASE_EVERY * (STEPS // BASE_EVERY)
    with open_store(store.as_uri()) as opened:
        bases = {
            ref.step for refs in read_catalog([opened.far], "e2e").bases.values() for ref in refs
        }
        assert max(bases) == last > APART_AT
        assert next(ls(opened, "e2e")).provable == APART_AT - 1
        assert [next(show(opened, str(step))).provable for step in (APART_AT - 1, last)] == [
            True, False,
        ]  # fmt: skip
        rows = list(fsck(opened, "e2e"))
        told = {row.tier: row.newest for row in rows if isinstance(row, Provable)}
        assert (told["all"], told["zarr"]) == (APART_AT - 1, APART_AT - 1)
        assert [row.kind for row in rows if isinstance(row, Finding)].count("parted") == 1
        whole = [row for row in status(opened) if isinstance(row, TierRow) and row.tier == "all"]
        assert [(row.newest, row.provable) for row in whole] == [(STEPS, APART_AT - 1)]
        rows = list(gc(opened, "e2e", last=1, apply=True, ages=Ages(grace_s=0.0)))
    floors = {row.tier: row.step for row in rows if row.what == "floor"}
    assert set(floors.values()) == {APART_AT - 1}
    assert any(row.done == "deleted" for row in rows)
    second = launcher.start(store, given=KEPT)
    assert second.wait() == [0, 0]
    check_against(reference, second)
    assert second.every("restored") == [APART_AT - 1] * 2


HANGS_AT = 19
"""No rank looks from here to the end of a run, if bases do not come."""


def hang(rank: int) -> None:
    """The near tier of rank 1 does not answer from a step on, until the run is flushed."""
    from adacheck_store.writer import Writer
    from tests.core.kit import GateTier

    append, wait_stored = Writer.append, Writer.wait_stored

    def hangs(self, boundary) -> None:
        if boundary.step == HANGS_AT:
            assert wait_stored(self, 60.0)
            self._stall_timeout_s, self._near = 0.2, GateTier(self._near)
            self._near.gate.clear()
        append(self, boundary)

    def answers(self, timeout_s) -> bool:
        getattr(self._near, "gate", threading.Event()).set()
        return wait_stored(self, timeout_s)

    if rank == 1:
        Writer.append, Writer.wait_stored = hangs, answers


def test_what_a_flush_stores_after_a_stall_is_restored(tmp_path):
    """One rank has given up its last steps: what it stores in the end is what the others have."""
    launcher = Launcher(tmp_path, "ddp", 2)
    reference = launcher.reference()
    store = tmp_path / "store"
    given = {rank: {"keep": 100, "base_every": 100} for rank in range(2)}
    first = launcher.start(store, given=given, before_attach=hang)
    assert first.wait() == [0, 0]
    with open_store(store.as_uri()) as opened:
        for given_up in range(HANGS_AT + WINDOW, STEPS):
            with pytest.raises(NotProvableError):
                restore_state(opened.tiers, "e2e", step=given_up)
    second = launcher.start(store, inspect=True)
    assert second.wait() == [0, 0]
    check_against(reference, second)
    assert second.every("restored") == [STEPS] * 2


class Harmed(WrapperTier):
    """A tier in which the arrays of one record are damaged."""

    def __init__(self, inner, key: str) -> None:
        super().__init__(inner)
        self._key = key

    def read(self, key, array, first, count):
        """With a bit of that record turned over."""
        data = bytearray(self.inner.read(key, array, first, count))
        data[0] ^= key == self._key
        return bytes(data)


def test_a_damaged_witness_is_damage(tmp_path):
    """Another proof of the same step is tried: what the next term put down when it began."""
    launcher = Launcher(tmp_path, "ddp", 2)
    store = tmp_path / "store"
    first = launcher.start(store, given=KEPT, hold=9)
    first.until(9)
    first.kill(1)
    second = launcher.start(store, given=KEPT, inspect=True)
    assert second.wait() == [0, 0]
    (step,) = set(second.every("restored"))
    with open_store(store.as_uri()) as opened:
        terms = sorted({m.term for m in read_catalog(opened.tiers, "e2e").manifests.values()})
        harmed = [
            Harmed(tier, f"e2e/{terms[0]}/r000001/extra/{step:012d}") for tier in opened.tiers
        ]
        found = restore_state(harmed, "e2e")
        assert (found.step, found.plan.term) == (step, terms[1])
        assert any("digest" in reason for reason in found.reasons)
