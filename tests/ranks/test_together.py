"""All ranks or none: what one rank lacks, or does otherwise, is said by all and changes nothing."""

import pytest

from adacheck_store.format.keys import parse_key
from adacheck_store.store import open_store
from adacheck_store.tiers.lmdb import LmdbTier
from adacheck_store.tools.fsck import fsck
from tests.ranks.worker import GROWN_AT, STEPS, Launcher, check_against

pytestmark = pytest.mark.fault


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Two ranks with models of their own: same names, other values, own seeds (C2, C5)."""
    launcher = Launcher(tmp_path_factory.mktemp("plain"), "plain", 2)
    return launcher, launcher.reference()


@pytest.fixture
def killed(tmp_path, plain):
    """A store of two ranks that were killed after some steps."""
    launcher, reference = plain
    attempt = launcher.start(tmp_path / "store", hold=9)
    attempt.until(9)
    attempt.kill(1)
    check_against(reference, attempt)
    return tmp_path / "store"


def break_fetch(rank: int) -> None:
    """Rank 1 cannot fetch."""
    from adacheck_store import restore

    def refuse(*args):
        raise OSError("no bytes for you")

    if rank == 1:
        restore.fetch_parts = refuse


def break_fit(rank: int) -> None:
    """Rank 1 finds that the state is not its model's."""
    from adacheck_store.format.errors import ModelMismatchError
    from adacheck_store.trainer_hooks import adopt

    def refuse(*args, **place):
        raise ModelMismatchError("not mine", hint="look elsewhere")

    if rank == 1:
        adopt.fitting = refuse


@pytest.mark.parametrize(
    ("broken", "said", "error"),
    [(break_fetch, "rank 1: OSError: no bytes for you", "GroupError"),
     (break_fit, "rank 1: not mine", "ModelMismatchError")],
)  # fmt: skip
def test_where_one_rank_fails_no_rank_is_changed(plain, killed, broken, said, error):
    """Its error is everyone's, and the next try restores."""
    launcher, reference = plain
    attempt = launcher.start(killed, before_restore=broken)
    attempt.wait()
    refused = attempt.every("refused")
    assert said in refused[0]
    assert attempt.every("refused", "error")[0] == error
    assert attempt.every("refused", "touched")[0] is False
    if refused[1] is None:  # an error that is none of ours ends the process as it is
        assert attempt.processes[1].exitcode == 1
    else:
        assert attempt.every("refused", "touched") == [False, False]
    after = launcher.start(killed)
    assert after.wait() == [0, 0]
    check_against(reference, after)
    assert after.every("final", "digest") == [known[STEPS][0] for known in reference]


def test_same_names_and_other_values_go_back_to_the_right_rank(plain, killed):
    """Ranks may change their places on the host; what is told apart is the rank of the run."""
    launcher, reference = plain
    attempt = launcher.start(killed, local={0: 1, 1: 0})
    assert attempt.wait() == [0, 0]
    check_against(reference, attempt)
    assert attempt.every("restored")[0] >= 6
    assert attempt.every("final", "digest") == [known[STEPS][0] for known in reference]
    assert reference[0][STEPS] != reference[1][STEPS]


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_is_refused_where_each_has_its_own(plain, killed, ranks):
    """What differs between ranks is nobody else's: one clear error on all, nothing is touched."""
    launcher, _ = plain
    attempt = launcher.start(killed, ranks=ranks)
    assert attempt.wait() == [0] * ranks
    for text in attempt.every("refused"):
        assert "'0.weight' is not the same on all ranks that wrote the chain" in text
    assert attempt.every("refused", "error") == ["ModelMismatchError"] * ranks
    assert attempt.every("refused", "touched") == [False] * ranks


@pytest.mark.parametrize(
    ("odd", "said"),
    [({"run": "other"}, "run is 'e2e' on rank 0, 'other' on rank 1"),
     ({"base_every": 5}, "base_every is 6 on rank 0, 5 on rank 1"),
     ({"start_step": 3}, "start_step is 0 on rank 0, 3 on rank 1")],
)  # fmt: skip
def test_ranks_that_do_not_agree_are_refused(tmp_path, plain, odd, said):
    """All say who differs, and no store is made."""
    launcher, _ = plain
    attempt = launcher.start(tmp_path / "store", given={1: odd})
    assert attempt.wait() == [0, 0]
    assert all(said in text for text in attempt.every("refused"))
    assert attempt.every("refused", "error") == ["GroupError", "GroupError"]
    assert not (tmp_path / "store").exists()


def test_a_rank_that_does_not_come_is_named(tmp_path, plain):
    """The others do not wait for ever."""
    launcher, _ = plain
    attempt = launcher.start(tmp_path / "store", absent=[1], timeout_s=2.0)
    assert attempt.wait() == [0, 0]
    assert "rank 1 of 2 did not come in 2 s" in attempt.every("refused")[0]


def test_a_model_that_grows_on_all_ranks_at_one_step(tmp_path):
    """They agree on the new layouts at that boundary, and the run goes on; later it restores."""
    launcher = Launcher(tmp_path, "grow", 2)
    reference = launcher.reference()
    store = tmp_path / "store"
    first = launcher.start(store, hold=GROWN_AT + 5)
    first.until(GROWN_AT + 5)
    first.kill(0)
    check_against(reference, first)
    second = launcher.start(store, grown=True)
    assert second.wait() == [0, 0]
    check_against(reference, second)
    assert second.every("restored")[0] > GROWN_AT
    assert second.every("final", "digest") == [known[STEPS][0] for known in reference]
    with open_store(store.as_uri()) as opened:
        found = [item for item in fsck(opened) if getattr(item, "severity", "") == "damage"]
    assert found == []


def test_uneven_and_empty_shards_and_a_rank_that_lags(tmp_path):
    """Five rows on four ranks, and one row (C1); one rank is behind at the kill (F2)."""
    launcher = Launcher(tmp_path, "fsdp", 4)
    reference = launcher.reference()
    store = tmp_path / "store"
    first = launcher.start(store, hold=8)
    first.until(8)
    first.kill(2)
    check_against(reference, first)
    common = min(_newest(store, rank) for rank in range(4))
    while _newest(store, 2) >= common:
        _drop_newest(store, 2)
    newest = [_newest(store, rank) for rank in range(4)]  # rank 2 may have been ahead of all
    second = launcher.start(store)
    assert second.wait() == [0, 0, 0, 0]
    check_against(reference, second)
    assert second.every("restored") == [_at_least(common - 1, second)] * 4
    lost = second.every("restored", "lost")
    assert lost == [max(newest) - second.every("restored")[0]] * 4
    assert second.every("final", "digest") == [known[STEPS][0] for known in reference]


def _at_least(step, attempt):
    """The step restored: what a rank had lost may have been drained."""
    found = attempt.every("restored")[0]
    assert found >= step
    return found


def _newest(store, rank: int) -> int:
    tier = LmdbTier(store / "lmdb" / f"node-a.r{rank}", readonly=True)
    steps = [parse_key(key).step for key in tier.list("e2e/") if parse_key(key).kind == "delta"]
    tier.close()
    return max(steps, default=-1)


def _drop_newest(store, rank: int) -> None:
    """Delete what a rank has of its newest step, as if it had been a step behind."""
    newest = _newest(store, rank)
    tier = LmdbTier(store / "lmdb" / f"node-a.r{rank}")
    keys = [parse_key(key) for key in tier.list("e2e/")]
    kinds = ("base", "delta", "extra")
    tier.delete([str(key) for key in keys if key.kind in kinds and key.step >= newest])
    tier.sync()
    tier.close()
