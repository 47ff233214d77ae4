"""A look that fails on some ranks, or on one, takes nothing away: all look again, and go on."""

import time

import pytest

from tests.ranks.test_shared import FOUND_AT, KEPT, revisions, watch_closely
from tests.ranks.worker import STEPS, Launcher, check_against

pytestmark = pytest.mark.fault

LATE_AT = 4
LOST_AT = 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """DDP on two ranks, and its end."""
    launcher = Launcher(tmp_path_factory.mktemp("looks"), "ddp", 2)
    return launcher, launcher.reference()


def late_once(rank: int) -> None:
    """Rank 1 comes too late to the look after `LATE_AT`, and loses the boundary `LOST_AT`."""
    from adacheck_store.trainer_hooks.capture import Capture
    from adacheck_store.trainer_hooks.detection import Detection
    from adacheck_store.trainer_hooks.ranks import StoreGroup

    watch_closely(rank)
    exchange, look, take = StoreGroup.exchange, Detection.look, Capture.take
    taken: list[int] = []

    def hasty(self, messages, timeout_s):
        return exchange(self, messages, 1.0)

    def late(self, step, *args):
        if step == LATE_AT:
            time.sleep(3.0)
        look(self, step, *args)

    def lost(self):
        taken.append(1)
        if len(taken) == LOST_AT:
            raise RuntimeError("not captured")
        return take(self)

    StoreGroup.exchange = hasty
    if rank == 1:
        Detection.look, Capture.take = late, lost


def no_room_once(rank: int) -> None:
    """Rank 1 has no memory for its new buffers when they are wanted first."""
    from adacheck_store.trainer_hooks.assemble import Assembly

    watch_closely(rank)
    narrowed = Assembly.narrowed
    tried: list[int] = []

    def refuses(self, binding):
        tried.append(1)
        self.stager.drop()
        if len(tried) == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return narrowed(self, binding)

    if rank == 1:
        Assembly.narrowed = refuses


def deaf_once(rank: int) -> None:
    """Rank 1 does not hear that all are ready to follow the first assignment; rank 0 does."""
    from adacheck_store.format.errors import GroupError
    from adacheck_store.trainer_hooks.ranks import StoreGroup

    watch_closely(rank)
    gather = StoreGroup.gather
    missed: list[int] = []

    def deaf(self, data, timeout_s=None):
        found = gather(self, data, timeout_s)
        if not missed and b"announce %d" % FOUND_AT in data:
            missed.append(1)
            raise GroupError("rank 0 did not come")
        return found

    if rank == 1:
        StoreGroup.gather = deaf


def run_and_restore(trained, store, before_attach, damaged: int = 0) -> list:
    """Train, kill late, and go on; the revisions before."""
    launcher, reference = trained
    given = {rank: {"keep": 100, "base_every": 12} for rank in range(2)}
    first = launcher.start(
        store, given=given, before_attach=before_attach, pause_s=0.1, hold=STEPS - 2
    )
    first.until(STEPS - 2)
    first.kill(1)
    check_against(reference, first)
    found = revisions(store, damaged=damaged)
    second = launcher.start(store, given=KEPT)
    assert second.wait() == [0, 0]
    check_against(reference, second)
    assert min(second.every("restored")) >= STEPS - 5
    assert second.every("final", "digest") == [known[STEPS][0] for known in reference]
    return found


def test_a_rank_that_is_late_once_and_then_loses_a_step(tmp_path, trained):
    """The look after that finds all equal again: steps from there on are restored."""
    found = run_and_restore(trained, tmp_path / "store", late_once)
    assert [each.redundancy is not None for each in found] == [False, True]
    assert found[-1].step == FOUND_AT


def test_a_rank_without_room_keeps_all_as_they_are(tmp_path, trained):
    """None follows; at the next look, when there is room, all do."""
    found = run_and_restore(trained, tmp_path / "store", no_room_once)
    assert [each.redundancy is not None for each in found] == [False, True]
    assert found[-1].step > FOUND_AT


def test_a_rank_that_alone_did_not_follow(tmp_path, trained):
    """It is told again what the other writes by, and both follow that; steps between are lost."""
    found = run_and_restore(trained, tmp_path / "store", deaf_once, damaged=1)
    assert [each.redundancy is not None for each in found] == [False, True, True]
    assert found[-1].step > FOUND_AT
    assert found[1].previous == found[0].seal().id
    assert found[2].previous == found[1].seal().id
