"""Several ranks: what they tell each other, and what they restore together."""

import dataclasses
import time
from types import SimpleNamespace

import pytest

from adacheck_store.arrays import byte_view
from adacheck_store.boundary import Link
from adacheck_store.catalog import Trouble, make_ref
from adacheck_store.config import local_size
from adacheck_store.format.canonical import dumps, loads
from adacheck_store.format.errors import (
    GroupError,
    ModelMismatchError,
    NotProvableError,
    OrderError,
    RestoreError,
    TierError,
    TierFullError,
    UnsupportedError,
)
from adacheck_store.format.keys import parse_key
from adacheck_store.format.manifest import Manifest, PartEntry
from adacheck_store.group import SOLO, lead, same, share, together
from adacheck_store.plan_json import decode_plan, encode_plan
from adacheck_store.retention import floor_of, tier_catalog
from adacheck_store.revisions import Revisions
from adacheck_store.store import _disk_share
from tests.core.kit import QUICK, BrokenTier, Journal, KeptTier, make_toy
from tests.core.ranks import BlindTier, CutTier, Fleet, NotingTier, on_ranks

LATE = dataclasses.replace(QUICK, object_lag=1000, object_lag_s=1000.0)
"""Nothing but bases is drained."""


# What is said --------------------------------------------------------------------------------


def test_rank_0_leads():
    """Its value, or its error with class, place and hint, is everyone's."""
    assert on_ranks(3, lambda group: lead(group, "x", lambda: group.rank + 7)) == [7, 7, 7]

    def fail():
        raise TierFullError("full", hint="make room", tier="lmdb", step=3)

    found = on_ranks(3, lambda group: lead(group, "x", fail))
    assert [type(error) for error in found] == [TierFullError] * 3
    assert str(found[0]) == "full [step=3 tier=lmdb] -> make room"
    assert str(found[2]) == "rank 0: full [step=3 tier=lmdb] -> make room"


def test_an_error_of_any_rank_is_everyones():
    """The rank's own as it is, the others' of its class; one that is none of ours by its text."""

    def work(group):
        if group.rank == 1:
            raise ZeroDivisionError("by nothing")
        return group.rank

    found = on_ranks(3, lambda group: together(group, "x", lambda: work(group)))
    assert isinstance(found[1], ZeroDivisionError)
    assert str(found[0]) == str(found[2]) == "rank 1: ZeroDivisionError: by nothing"
    assert type(found[0]) is GroupError
    assert on_ranks(2, lambda group: share(group, "x", lambda: group.rank)) == [[0, 1], [0, 1]]
    with pytest.raises(ZeroDivisionError):
        together(SOLO, "x", lambda: 1 // 0)


def test_ranks_at_different_calls_are_told():
    """One restores, the other begins: said, not mixed up."""
    found = on_ranks(2, lambda group: share(group, f"step {group.rank}", lambda: 1))
    assert "rank 1 is at 'step 1', this rank at 'step 0'" in str(found[0])


def test_differences_are_named_with_their_ranks():
    """Every side of every difference."""
    found = on_ranks(3, lambda group: same(group, "x", {"a": 1, "b": group.rank // 2}))
    assert "b is 0 on ranks 0, 1, 1 on rank 2" in str(found[0])
    assert on_ranks(2, lambda group: same(group, "x", {"a": 1})) == [None, None]


# The plan ------------------------------------------------------------------------------------


def test_a_plan_is_the_same_after_its_journey():
    """And anything else is no plan."""
    fleet = Fleet(2)
    fleet.life(13)
    plan = fleet.life(0)[0].plan
    sent = loads(dumps(encode_plan(plan)))
    assert decode_plan(sent) == plan
    broken = [{**sent, name: 7.5 if name == "step" else None} for name in sent]
    broken += [{name: value for name, value in sent.items() if name != left} for left in sent]
    ref = {**sent["parts"][0]["base"], "tiers": "near0"}
    broken.append({**sent, "parts": [{**sent["parts"][0], "base": ref}]})
    for value in [*broken, None, [], "plan"]:
        with pytest.raises(GroupError):
            decode_plan(value)


# Restoring together --------------------------------------------------------------------------


def test_each_rank_gets_its_own_part_back_term_after_term():
    """Three lives; states differ by rank, and are checked against each rank's journal."""
    fleet = Fleet(3)
    assert fleet.life(5) == [None] * 3
    for steps, expected in ((11, 5), (4, 16), (0, 20)):
        restored = fleet.life(steps)
        for rank, found in enumerate(restored):
            assert found.step == expected, found
            assert list(found.parts) == [f"p{rank:06d}"]
            assert list(found.extras) == [f"r{rank:06d}"]
            _assert_same(fleet.journals[rank], found)
    assert fleet.journals[0].at[20][0] != fleet.journals[1].at[20][0]


def _assert_same(journal: Journal, restored) -> None:
    (state,) = restored.parts.values()
    arrays, states, _ = journal.at[restored.step]
    assert {name: bytes(byte_view(t)) for name, t in state.arrays.items()} == arrays
    assert dict(state.states) == states


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("trained", [0, 3])
def test_a_start_that_is_cut_anywhere_is_made_up_for(trained):
    """A fresh one begins anew; one that goes on loses nothing. Every put and sync is a cut."""
    cuts = 0
    while True:
        fleet = Fleet(2)
        if trained:
            fleet.life(trained)
        left = [cuts]
        cut = fleet.life(0, lambda tier, left=left: CutTier(tier, left))
        done = not any(isinstance(result, BaseException) for result in cut)
        assert done or left[0] < 0, cut  # where a thread of ours was cut the rank ends otherwise
        again = fleet.life(2)
        for rank, restored in enumerate(again):
            assert not isinstance(restored, BaseException), (cuts, restored)
            if restored is not None:
                assert restored.step == trained
                _assert_same(fleet.journals[rank], restored)
            elif trained or done:
                raise AssertionError(f"cut {cuts}: history is gone")
        assert [found.step for found in fleet.life(0)] == [trained + 2] * 2
        if done:
            break
        cuts += 1
    assert cuts >= 10


def test_a_block_that_one_rank_has_lost_takes_all_ranks_back():
    """Rank 1 finds it, rank 0 plans again, and all restore the older step, with the reason."""
    fleet = Fleet(2, LATE)
    fleet.life(13)
    restored = fleet.life(0, lambda tier: BlindTier(tier, "p000001/delta/000000000012"))
    assert [found.step for found in restored] == [11, 11]
    assert [found.lost for found in restored] == [2, 2]
    for rank, found in enumerate(restored):
        assert any("p000001" in reason and "rotten" in reason for reason in found.reasons)
        _assert_same(fleet.journals[rank], found)


def test_a_rank_that_lags_is_waited_for():
    """The newest step that all can prove; what one has beyond it is lost, and counted."""
    fleet = Fleet(4, LATE)
    fleet.life(7)
    for tier in (fleet.nears[2], fleet.far):
        keys = [key for key in tier.list("run/") if "000002/" in key]
        tier.delete([key for key in keys if parse_key(key).step in (6, 7)])
    restored = fleet.life(3)
    assert [(found.step, found.lost) for found in restored] == [(5, 2)] * 4
    assert [found.step for found in fleet.life(0)] == [8] * 4


def test_where_a_part_has_nothing_left_nothing_is_restored():
    """No step is provable by all; no rank begins anew by itself."""
    fleet = Fleet(2, LATE)
    fleet.life(5)
    fleet.nears[1].delete([key for key in fleet.nears[1].list("run/") if "p000001" in key])
    fleet.far.delete([key for key in fleet.far.list("run/") if "p000001" in key])
    found = fleet.life(0)
    assert [type(error) for error in found] == [NotProvableError] * 2
    assert all("part p000001" in str(error) for error in found)


def test_what_another_number_of_ranks_has_left_is_not_taken():
    """Refused where it is the line; passed over where a later term is (F2)."""
    fleet = Fleet(3)
    fleet.life(9)
    refused = fleet.life(0, size=2)
    assert [type(error) for error in refused] == [ModelMismatchError] * 2
    assert all("written by 3 ranks, this run has 2" in str(error) for error in refused)
    anew = Fleet(2)
    anew.nears, anew.far = fleet.nears, fleet.far
    assert anew.life(4, how={"resume": "never"}) == [None, None]
    assert [found.step for found in anew.life(0)] == [4, 4]


def test_who_does_not_restore_a_run_with_history_is_refused_on_all_ranks():
    """As a single process is."""
    fleet = Fleet(2)
    fleet.life(3)

    def start(group):
        session, toy = fleet.session(group), make_toy()
        try:
            session.start(toy.layout, start_step=0, base=toy.base, extra=toy.extra)
        finally:
            session.close()

    assert [type(error) for error in on_ranks(2, start)] == [OrderError] * 2


def test_other_steps_asked_for_are_refused():
    """All ranks restore one step."""
    fleet = Fleet(2)
    fleet.life(5)

    def restore(group):
        session = fleet.session(group)
        try:
            session.restore(step=3 + group.rank)
        finally:
            session.close()

    assert all("step is 3 on rank 0, 4 on rank 1" in str(error) for error in on_ranks(2, restore))


def test_a_tier_that_one_rank_alone_cannot_read_is_everyones_trouble():
    """It may hold the run's history: no rank begins anew beside it."""
    fleet = Fleet(2)

    def restore(group):
        session = fleet.session(group)
        if group.rank == 1:
            trouble = Trouble(tier="lmdb:b", key="", error=TierError("rotten", tier="lmdb:b"))
            session.store = dataclasses.replace(session.store, troubles=(trouble,))
        try:
            session.restore()
        finally:
            session.close()

    found = on_ranks(2, restore)
    assert [type(error) for error in found] == [RestoreError] * 2
    assert all("rotten [tier=lmdb:b]" in str(error) for error in found)


# Floors --------------------------------------------------------------------------------------


def test_near_tiers_of_one_part_are_pruned_behind_the_far_one():
    """Every floor rises, none above the far tier's, and the newest common step stays provable."""
    fleet = Fleet(2)

    def live(group):
        session = fleet.session(group)
        toy, _ = fleet.begin(group, session)
        for _ in range(60):
            fleet.train(group, session, toy, 2)
            session.flush(120)
            together(group, "two steps", lambda: None)
            floors = [floor_of(t, "run", session.status().term) for t in (*fleet.nears, fleet.far)]
            if all(min(found) > 8 for found in share(group, "enough", lambda f=floors: f)):
                break
        session.close()
        return floors

    found = on_ranks(2, live)
    for near0, near1, far in found:
        assert 8 < near0 <= far
        assert 8 < near1 <= far
    steps = [min(ref.step for refs in tier_catalog(tier, "run").deltas.values() for ref in refs)
             for tier in fleet.nears]  # fmt: skip
    assert all(step > 8 for step in steps)
    restored = fleet.life(0)
    assert restored[0].step == restored[1].step == max(fleet.journals[0].at)


def test_a_near_tier_keeps_what_a_rank_that_is_behind_may_need():
    """Rank 1 stops saving at step 10; then the far tier is lost: all go back to step 10."""
    fleet = Fleet(2)

    def live(group):
        session = fleet.session(group)
        toy, _ = fleet.begin(group, session)
        fleet.train(group, session, toy, 10)
        session.flush(120)
        broken = BrokenTier(session.store.near)
        if group.rank == 1:
            broken.fault = lambda keys: TierFullError("full")
            session._writer._near = broken
        for _ in range(16):
            fleet.train(group, session, toy, 2)
            if group.rank == 0:
                session.flush(120)
        session.close()

    assert on_ranks(2, live) == [None, None]
    fleet.far = KeptTier("far")
    restored = fleet.life(0)
    assert [found.step for found in restored] == [10, 10]
    assert [found.lost for found in restored] == [32, 32]


def test_each_rank_writes_what_is_its_own():
    """Its part and extra; what concerns all is written by rank 0 alone."""
    fleet = Fleet(2, dataclasses.replace(QUICK, object_lag=1000, object_lag_s=1000.0))
    fleet.life(13)
    noted = [[], []]

    def live(group):
        session = fleet.session(group)
        far = NotingTier(fleet.far, noted[group.rank])
        session.store = dataclasses.replace(session.store, far=far)
        toy, _ = fleet.begin(group, session)
        for _ in range(20):
            fleet.train(group, session, toy, 2)
            session.flush(120)
        session.close()

    assert on_ranks(2, live) == [None, None]
    for rank, keys in enumerate(noted):
        found = {parse_key(key) for key in keys}
        parts = {key.part for key in found if key.kind in ("base", "delta", "extra")}
        assert parts == {f"p{rank:06d}", f"r{rank:06d}"}
        assert any(key.kind == "claim" or key.kind == "log" for key in found) == (rank == 0)
    assert sum("/log/" in key for key in noted[0]) >= 2


# Layouts that change -------------------------------------------------------------------------


def _revisions(group, settings=QUICK):
    """A term of two parts, and a layout that is another than its first."""
    old, new = make_toy().layout, make_toy([(3,)]).layout
    part = PartEntry(name="p000000", layout=old.seal("run").id)
    manifest = Manifest(
        run="run", term="t000001-" + "a" * 16, step=0, ranks=("r000000", "r000001"),
        parts=(part, dataclasses.replace(part, name="p000001")),
    )  # fmt: skip
    layouts = {part.layout: old}
    link = Link(
        run="run", term=manifest.term, part=f"p{group.rank:06d}", rank=f"r{group.rank:06d}",
        parent="", manifest=manifest.seal().id, layout=part.layout,
    )  # fmt: skip
    return Revisions("run", group, manifest, layouts, 0.2, lambda *_: None), link, new


def test_all_ranks_write_one_and_the_same_revision():
    """And keep its documents until they are stored."""

    def work(group):
        revisions, link, new = _revisions(group)
        revisions.follow(new, 7)
        again, documents = revisions.revise(link, new, 8), revisions.documents()
        assert again.parent == again.manifest != link.manifest
        assert len(documents) == 2 == len(revisions.documents())
        refs = [make_ref(parse_key(item.key), item.record.sealed, ()) for item in documents]
        revisions.stored(refs)
        assert revisions.documents() == []
        return [(item.key, item.record.sealed.id) for item in documents], again.manifest

    one, other = on_ranks(2, work)
    assert one == other
    assert "manifest/000000000007" in one[0][1][0]


def test_a_layout_that_changes_on_one_rank_alone_is_not_saved():
    """The others do not come; what nobody agreed on is never written."""

    def work(group):
        revisions, link, new = _revisions(group)
        if group.rank == 1:
            time.sleep(0.5)
            return
        with pytest.raises(GroupError, match="rank 1 did not come"):
            revisions.follow(new, 7)
        with pytest.raises(UnsupportedError, match="did not agree"):
            revisions.revise(link, new, 7)
        return

    assert on_ranks(2, work) == [None, None]


# The disk ------------------------------------------------------------------------------------


def test_ranks_of_a_host_share_its_disk(tmp_path, monkeypatch):
    """Nine tenths of what is free, divided; of what a rank has already, all."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=8000))
    assert _disk_share(tmp_path / "a.r0", 1) == 7200
    assert _disk_share(tmp_path / "a.r0", 4) == 1800
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert [local_size(1), local_size(8)] == [1, 8]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert [local_size(1), local_size(8)] == [1, 4]
