"""Watching: a copy that comes apart is named, taken out, and what was safe before stays so."""

from __future__ import annotations

import random

import pytest

from adacheck_store.redundancy.assign import assign
from adacheck_store.redundancy.states import NOBODY, Keep, State, states
from adacheck_store.redundancy.watch import Spot, Watch, split
from tests.redundancy.kit import WHOLE, ddp, everyone, topology, zero1, zero3

W0 = Spot("", "w0", WHOLE, "param")


def report(
    size: int, spot: Spot = W0, wrong: dict[int, bytes] | None = None
) -> dict[int, dict[Spot, bytes]]:
    """Equal fingerprints of a spot on all ranks, but those ``wrong``."""
    return {rank: {spot: (wrong or {}).get(rank, b"same")} for rank in range(size)}


@pytest.mark.parametrize(
    ("size", "wrong", "ranks", "certain"),
    [
        (4, {2: b"x"}, {2}, True),
        (5, {2: b"x", 3: b"y"}, {2, 3}, True),
        (5, {2: b"x", 3: b"x"}, {2, 3}, True),
        (2, {1: b"x"}, {0, 1}, False),
        (4, {2: b"x", 3: b"x"}, {0, 1, 2, 3}, False),
        (4, {1: b"x", 2: b"y", 3: b"z"}, {0, 1, 2, 3}, False),
    ],
)
def test_who_diverged(size: int, wrong: dict[int, bytes], ranks: set[int], certain: bool) -> None:
    """The minority, where there is a majority; else all."""
    watch = Watch(states(ddp(size)), agreed=3)
    assert watch.compare(10, report(size)) == ()
    assert watch.agreed == 10
    (found,) = watch.compare(11, report(size, wrong=wrong))
    assert (found.ranks, found.certain, found.step, found.agreed) == (ranks, certain, 11, 10)
    assert watch.agreed == 10
    assert "w0 (param, block 0)" in str(found)
    assert "equal at step 10" in str(found)


def test_the_step_until_which_all_agreed() -> None:
    """Blocks take turns, and each counts from when it was compared; a silent rank says nothing."""
    spots = [W0._replace(block=block) for block in range(4)]
    watch = Watch(states(ddp(3)), agreed=2, spots=spots)
    for step in range(3, 11):
        assert watch.agreed == max(2, step - 4)
        assert watch.compare(step, report(3, spots[step % 4])) == ()
    silent = report(3, spots[11 % 4])
    del silent[1]
    assert watch.compare(11, silent) == ()
    assert watch.agreed == 7
    (found,) = watch.compare(12, report(3, spots[0], {1: b"x"}))
    assert found.agreed == 8
    assert watch.agreed == 7


def test_only_copies_are_compared() -> None:
    """Shards and unknown places may differ; of ZeRO-1 parameters are copies, moments are not."""
    watch = Watch(states(zero3(4)), agreed=0)
    shards = {rank: {Spot("", "w0", s.piece, "param"): b"%d" % rank}
              for rank, s in enumerate(states(zero3(4)))}  # fmt: skip
    assert watch.compare(1, shards) == ()
    assert watch.compare(1, {0: {W0: b"a"}, 1: {W0: b"b"}}) == ()
    found = states(zero1(4))
    watch = Watch(found, agreed=0)
    spot = Spot("", "w0", found[0].piece, "param")
    assert [d.ranks for d in watch.compare(1, report(4, spot, {3: b"x"}))] == [{3}]
    moment = spot._replace(role="exp_avg")
    assert watch.compare(1, report(4, moment, {3: b"x"})) == ()


def test_a_diverged_copy_leaves_the_set() -> None:
    """The others go on as copies; the one that differs is kept as its own, and may be unsafe."""
    before = states(ddp(4))
    watch = Watch(before, agreed=0)
    after = split(before, watch.compare(5, report(4, wrong={2: b"x"})))
    assert [(s.scope, s.copies, s.param, s.optimizer, s.why) for s in after] == [
        ("", {0, 1, 3}, {0, 1, 3}, everyone(4), ""),
        ("r000002", {2}, {2}, {2}, "differed from its copies at step 5"),
    ]
    parts = assign(after, topology(1, 1, 1, 1)).parts
    assert [sum(not h.local for h in part.holders) for part in parts] == [0, 1]
    assert [part.kept for part in parts] == [(Keep.GRADIENT,)] * 2


def test_without_majority_nobody_is_a_copy() -> None:
    """Each is kept, under a scope of its own: no restore may take one for the other."""
    before = states(ddp(2))
    after = split(before, Watch(before, agreed=0).compare(5, report(2, wrong={1: b"x"})))
    assert [(s.scope, s.copies) for s in after] == [("r000000", {0}), ("r000001", {1})]
    assert sum(s.nbytes for s in after) == 2 * before[0].nbytes


def test_a_parameter_diverges_away_from_its_optimizer() -> None:
    """ZeRO-1: rank 3 has another parameter. The state stays rank 0's, and what 3 has is kept."""
    before = states(zero1(4))
    spot = Spot("", "w0", before[0].piece, "param")
    after = split(before, Watch(before, agreed=0).compare(5, report(4, spot, {3: b"x"})))
    assert after[0]._replace(param=before[0].param) == before[0]
    assert after[0].param == {0, 1, 2}
    own = after[1]
    assert (own.scope, own.copies, own.param, own.optimizer) == ("r000003", {3}, {3}, NOBODY)
    assert own.nbytes == before[0].param_bytes
    assert after[2:] == before[1:]


def test_moments_diverge_where_there_is_no_parameter() -> None:
    """What such a rank has, and is kept of it, is its moments alone."""
    one = State(
        scope="", name="w0", piece=WHOLE, copies=frozenset({0}), param=frozenset({0}),
        optimizer=everyone(3), param_bytes=192, optimizer_bytes=1152,
    )  # fmt: skip
    spot = W0._replace(role="exp_avg")
    found = Watch([one], agreed=0).compare(5, report(3, spot, {2: b"x"}))
    rest, own = split([one], found)
    assert (rest.copies, rest.optimizer) == ({0}, {0, 1})
    assert (own.copies, own.param, own.optimizer, own.param_bytes) == ({2}, NOBODY, {2}, 0)


def test_no_state_is_lost_by_any_divergence() -> None:
    """Whoever diverges, each rank that held a state holds one with its name and piece after."""
    source = random.Random(3)
    for make in (ddp, zero1, zero3):
        for _ in range(200):
            before = states(make(5))
            state = source.choice(before)
            role = source.choice(["param", "exp_avg"])
            spot = Spot(state.scope, state.name, state.piece, role)
            wrong = {r: source.choice([b"x", b"y"]) for r in range(5) if source.random() < 0.4}
            found = Watch(before, agreed=0).compare(1, report(5, spot, wrong))
            after = split(before, found)
            assert _held(before) <= _held(after)
            for each in found:
                for rank in each.ranks:
                    assert not any(
                        rank in s.copies and len(s.copies) > 1
                        for s in after if (s.name, s.piece) == (spot.name, spot.piece)
                    )  # fmt: skip


def _held(found: tuple[State, ...]) -> set[tuple[int, str, object]]:
    return {(rank, s.name, s.piece) for s in found for rank in s.copies}
