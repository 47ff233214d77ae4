"""Witnesses: ranks whose digests differ are told apart, and who cannot tell is no proof."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adacheck_store.redundancy.agreement import Told, encode_told
from adacheck_store.redundancy.lead import AS_BEFORE, Lead
from adacheck_store.redundancy.shares import Sharing, decode_sharing, shares
from adacheck_store.redundancy.states import states
from adacheck_store.redundancy.witness import (
    DIGEST_BYTES,
    Witness,
    compare,
    ranks_holding,
    shared_by,
)
from tests.redundancy.kit import WHOLE, ddp, everyone, held, shard, topology


def of(run):
    """What a manifest says of a run, and the names of its parts."""
    found = shares(states(run), topology(len(run)))
    return Sharing.of(found, 2).redundancy, [part.name for part in found.parts]


def alike(found, parts, ranks: int, since: int = 2) -> dict[int, Witness | None]:
    """Equal digests on all ranks, another for each state."""
    return {
        rank: Witness(
            since=since,
            digests=b"".join(
                (part + scope + name).encode().ljust(DIGEST_BYTES)[:DIGEST_BYTES]
                for part, scope, name in shared_by(found, parts, rank)
            ),
        )
        for rank in range(ranks)
    }


def test_states_of_one_rank_are_not_witnessed():
    """A rank tells of what it holds and others too, wherever that is kept."""
    run = ddp(3, tensors=2)
    run[1] = [*run[1], held("own", (WHOLE, {1}), (WHOLE, {1}))]
    run[2] = [*run[2], held("pair", *[(WHOLE, {0, 2})] * 2)]
    run[0] = [*run[0], held("pair", *[(WHOLE, {0, 2})] * 2)]
    found, parts = of(run)
    names = [{name for _, _, name in shared_by(found, parts, rank)} for rank in range(3)]
    assert names == [{"w0", "w1", "pair"}, {"w0", "w1"}, {"w0", "w1", "pair"}]
    verdict = compare(found, parts, alike(found, parts, 3))
    assert (verdict.equal, str(verdict)) == (True, "")


def test_what_has_come_apart_is_named_with_its_sides():
    """Of four ranks two agree; the other tensors are as they were."""
    found, parts = of(ddp(4, tensors=3))
    said = alike(found, parts, 4)
    at = [name for _, _, name in shared_by(found, parts, 0)].index("w1")
    for rank in (1, 3):
        digests = bytearray(said[rank].digests)
        digests[at * DIGEST_BYTES + 15] ^= 1
        said[rank] = replace(said[rank], digests=bytes(digests))
    verdict = compare(found, parts, said)
    assert [each.place[2] for each in verdict.partings] == ["w1"]
    assert verdict.partings[0].sides == (frozenset({0, 2}), frozenset({1, 3}))
    assert str(verdict).endswith("in different ways: w1 (ranks 0, 2 and ranks 1, 3)")
    assert not verdict.equal


@pytest.mark.parametrize("told", [None, "lost", "older", "short"])
def test_who_cannot_tell_is_no_proof(told):
    """No witness, one that has missed a step, one of an earlier look, one of other states."""
    found, parts = of(ddp(2, tensors=2))
    said = alike(found, parts, 2)
    whole = said[1]
    said[1] = {
        None: None, "lost": replace(whole, since=-1), "older": replace(whole, since=1),
        "short": replace(whole, digests=whole.digests[:-1]),
    }[told]  # fmt: skip
    verdict = compare(found, parts, said)
    assert verdict.unknowing == {1}
    assert "rank 1 cannot tell" in str(verdict)
    assert not verdict.equal


def test_that_no_rank_can_tell_is_no_agreement():
    """All have missed the same step."""
    found, parts = of(ddp(2, tensors=2))
    assert compare(found, parts, alike(found, parts, 2, since=-1)).unknowing == {0, 1}


def test_a_rank_that_shares_nothing_need_not_tell():
    """It has no extra of that kind."""
    run = {rank: [held("w", *[(WHOLE, {0, 1})] * 2)] for rank in (0, 1)}
    run[2] = [held("own", *[(WHOLE, {2})] * 2)]
    found, parts = of(run)
    said = alike(found, parts, 2)
    assert compare(found, parts, said | {2: None}).equal


def decided(lead, run, step, said):
    """What rank 0 makes of equal bytes with these witnesses."""
    heard = [
        encode_told(
            Told(node="n", updated=True, held=tuple(mine), witness=said[rank], by=lead._name)
        )
        for rank, mine in run.items()
    ]
    return lead.decide(step, heard)


def other(witness: Witness, found, parts, name: str) -> Witness:
    """The witness of a rank that has changed one state otherwise."""
    at = [place[2] for place in shared_by(found, parts, 1)].index(name) * DIGEST_BYTES
    digests = bytearray(witness.digests)
    digests[at] ^= 1
    return replace(witness, digests=bytes(digests))


def test_what_was_changed_in_different_ways_is_no_copy_though_its_bytes_are_equal():
    """From then on, at every look; and steps before it are in no doubt."""
    run, lead = ddp(3, tensors=2), Lead()
    found = decode_sharing(decided(lead, run, 2, [None] * 3)).redundancy
    parts = [f"p{rank:06d}" for rank in range(3)]
    said = alike(found, parts, 3)
    said[1] = other(said[1], found, parts, "w0")
    sharing = decode_sharing(decided(lead, run, 4, said))
    assert [text.partition(": ")[2] for text in sharing.diverged] == [
        "copies have been updated in different ways: w0 (ranks 0, 2 and rank 1)"
    ]
    assert sharing.redundancy.agreed == 4
    for rank, held_by in ((0, {"w0", "w1"}), (1, {"w1"}), (2, {"w0", "w1"})):
        assert {name for *_, name in shared_by(sharing.redundancy, parts, rank)} == held_by
    said = alike(sharing.redundancy, parts, 3, since=4)
    assert decided(lead, run, 8, said) == AS_BEFORE


def test_a_rank_that_cannot_follow_shares_nothing():
    """Its optimizer's state is edited by the loop; the others still have copies of each other."""
    run, lead = ddp(3, tensors=2), Lead()
    found = decode_sharing(decided(lead, run, 2, [None] * 3)).redundancy
    parts = [f"p{rank:06d}" for rank in range(3)]
    said = alike(found, parts, 3)
    said[2] = replace(said[2], since=-1, trouble="edited")
    sharing = decode_sharing(decided(lead, run, 4, said))
    assert sharing.diverged == ("rank 2: edited",)
    shared = [{name for *_, name in shared_by(sharing.redundancy, parts, r)} for r in range(3)]
    assert shared == [{"w0", "w1"}, {"w0", "w1"}, set()]
    said = alike(sharing.redundancy, parts, 3, since=4)
    said[2] = replace(said[2], trouble="edited")  # and again: it is not asked again and again
    assert decided(lead, run, 8, said) == AS_BEFORE
    said[2] = replace(said[2], trouble="")  # no longer since the last look: as good as others
    sharing = decode_sharing(decided(lead, run, 16, said))
    shared = [{name for *_, name in shared_by(sharing.redundancy, parts, r)} for r in range(3)]
    assert shared == [{"w0", "w1"}] * 3


def of_four(moments):
    """A parameter on four ranks, and pieces of its moments on pairs of them, or none."""
    run = {}
    for piece, copies in moments:
        for rank in copies:
            mine = (piece, copies) if piece else None
            run[rank] = [held("w", (WHOLE, everyone(4)), mine)]
    return run


@pytest.mark.parametrize(
    "moments",
    [[(shard(0, 2), {0, 1}), (shard(1, 2), {2, 3})], [(WHOLE, {0, 1}), (None, {2, 3})]],
    ids=["halves", "some have the parameter alone"],
)
def test_moments_that_part_take_their_parameter_along(moments):
    """As under ZeRO-1 with copies: the parameter is on ranks that have other moments, or none."""
    run, lead = of_four(moments), Lead()
    parts = [f"p{rank:06d}" for rank in range(4)]
    found = decode_sharing(decided(lead, run, 2, [None] * 4)).redundancy
    said = alike(found, parts, 4)
    said[1] = other(said[1], found, parts, "w")
    now = decode_sharing(decided(lead, run, 4, said)).redundancy
    kept = sorted(sorted(ranks_holding(now, each)) for each in now.grounds)
    assert kept == [[0], [1], [2, 3]]
    assert decided(lead, run, 8, alike(now, parts, 4, since=4)) == AS_BEFORE


def test_a_rank_that_has_missed_a_step_takes_nothing_apart():
    """It does not know; the look does."""
    run, lead = ddp(2, tensors=2), Lead()
    found = decode_sharing(decided(lead, run, 2, [None] * 2)).redundancy
    said = alike(found, ["p000000", "p000001"], 2)
    said[1] = replace(said[1], since=-1)
    assert decided(lead, run, 4, said) == AS_BEFORE
