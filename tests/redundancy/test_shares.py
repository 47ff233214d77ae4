"""Shares: each state is written once, and each rank writes about as much; what rank 0 decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_store.format.errors import GroupError
from adacheck_store.format.manifest import Manifest, PartEntry, decode_manifest
from adacheck_store.redundancy.agreement import (
    Known,
    Told,
    agreed,
    decode_told,
    encode_told,
    name_of,
)
from adacheck_store.redundancy.assign import Assignment
from adacheck_store.redundancy.lead import AS_BEFORE, Lead
from adacheck_store.redundancy.shares import (
    Sharing,
    decode_sharing,
    owners_of,
    shares,
    wanted_of,
)
from adacheck_store.redundancy.states import Holding, states
from adacheck_store.redundancy.witness import Witness
from tests.redundancy.kit import WHOLE, ddp, everyone, figure6, held, shard, topology, zero3
from tests.redundancy.loop import carry_all

Run = Mapping[int, Sequence[Holding]]


def of(run: Run, **options: object) -> Assignment:
    """Shares of a run on one node."""
    return shares(states(run), topology(len(run)), **options)  # type: ignore[arg-type]


def manifest_of(found: Assignment) -> Manifest:
    """The manifest that says so."""
    sharing = Sharing.of(found, 2)
    return Manifest(
        run="run", term="t000001-" + "a" * 16, step=2,
        ranks=tuple(f"r{rank:06d}" for rank in found.topology.ranks),
        parts=tuple(
            PartEntry(name=part.name, layout="ab" * 32, sources=ranks, owner=part.owner)
            for part, ranks in zip(found.parts, sharing.sources, strict=True)
        ),
        redundancy=sharing.redundancy,
    )  # fmt: skip


def test_data_parallel_ranks_share_the_work() -> None:
    """Eight equal tensors on four ranks: two each, once."""
    found = of(ddp(4, tensors=8))
    assert [part.owner for part in found.parts] == [0, 1, 2, 3]
    assert [len(part.states) for part in found.parts] == [2, 2, 2, 2]
    assert {part.sources for part in found.parts} == {everyone(4)}


def test_more_ranks_than_tensors() -> None:
    """Some write nothing, and are still there."""
    found = of(ddp(4, tensors=3))
    assert [len(part.states) for part in found.parts] == [1, 1, 1, 0]
    assert found.parts[3].sources == frozenset({3})
    assert decode_manifest(manifest_of(found).seal().head) == manifest_of(found)
    assert wanted_of(manifest_of(found), 3).keys() == {p.name for p in found.parts}


def test_what_one_rank_holds_alone_is_its_own() -> None:
    """Experts; and shared states go to those that have less to write."""
    run = {rank: [*held_by(rank)] for rank in range(3)}
    found = of(run)
    assert [sorted(s.name for s in part.states) for part in found.parts] == [
        ["expert0", "large0"], ["expert1", "shared0"], ["expert2", "shared1"]
    ]  # fmt: skip


def held_by(rank: int) -> list[Holding]:
    """An expert of its own, something large on rank 0, two tensors that all have."""
    own, all_ = (WHOLE, {rank}), (WHOLE, everyone(3))
    large = [held("large0", own, own)] if rank == 0 else []
    return [
        held(f"expert{rank}", own, own),
        *large,
        *(held(f"shared{i}", all_, all_) for i in (0, 1)),
    ]


def test_owners_stay_where_they_are() -> None:
    """One state more moves none of the others; an owner that has no copy any more loses it."""
    before = of(ddp(3, tensors=4))
    after = of(ddp(3, tensors=5), owners=owners_of(before))
    assert owners_of(before).items() <= owners_of(after).items()
    run = {0: list(zero3(2, 1)[0])}
    assert of(run, owners={("", "w0", WHOLE): 7}).parts[0].states


@given(st.data())
def test_every_state_has_one_owner_that_holds_it(data: st.DataObject) -> None:
    """And every rank is told of all that it holds, by the manifest alone."""
    run: dict[int, list[Holding]] = {rank: [] for rank in range(4)}
    for number in range(data.draw(st.integers(0, 6))):
        ranks = data.draw(st.sets(st.integers(0, 3), min_size=1))
        for rank in ranks:
            run[rank].append(held(f"w{number}", (WHOLE, ranks), (WHOLE, ranks)))
    found = of(run)
    count = Counter(s.name for part in found.parts for s in part.states)
    assert all(times == 1 for times in count.values())
    for part in found.parts:
        assert all(part.owner in state.copies for state in part.states)
        assert all(part.sources <= state.copies for state in part.states)
    manifest = decode_manifest(manifest_of(found).seal().head)
    for rank, mine in run.items():
        wanted = wanted_of(manifest, rank)
        assert f"p{rank:06d}" in wanted
        assert {name for places in wanted.values() for _, name in places} == {h.name for h in mine}


def test_copies_of_two_contents_are_read_by_their_own_ranks() -> None:
    """One name means two tensors: each pair of ranks reads its own, under the first's scope."""
    run = {r: [held("w", *[(WHOLE, {r % 2, r % 2 + 2})] * 2)] for r in range(4)}
    found = manifest_of(of(run))
    for rank in range(4):
        own = f"p{rank:06d}"
        places = {
            place for part, each in wanted_of(found, rank).items() if each or part != own
            for place in each
        }  # fmt: skip
        assert places == {(f"r{rank % 2:06d}", "w")}


def gathered_on_all(size: int, tensors: int = 4) -> dict[int, list[Holding]]:
    """Each parameter is stepped on one rank, and sent to all others."""
    run: dict[int, list[Holding]] = {rank: [] for rank in range(size)}
    for number in range(tensors):
        for rank in range(size):
            mine = (WHOLE, {number % size}) if rank == number % size else None
            run[rank].append(held(f"w{number}", (WHOLE, everyone(size)), mine))
    return run


def test_of_what_others_step_the_parameter_alone_is_read() -> None:
    """ZeRO-1 by whole parameters: the owner writes it and reads all of it."""
    found = of(gathered_on_all(2))
    assert [sorted(s.name for s in p.states) for p in found.parts] == [["w0", "w2"], ["w1", "w3"]]
    for rank in range(2):
        wanted = wanted_of(decode_manifest(manifest_of(found).seal().head), rank)
        whole = {name: whole for each in wanted.values() for (_, name), whole in each.items()}
        assert whole == {f"w{number}": number % 2 == rank for number in range(4)}
    told = str(Sharing.of(found, 2))
    assert "0 of 4 states have copies" in told
    assert "4 more have of their parameter or optimizer alone" in told


def test_moments_of_ones_own_come_before_a_parameter_alone() -> None:
    """Equal parameters with moments that differ: each rank reads its own, a third any of them."""
    run = {r: [held("w", (WHOLE, everyone(3)), (WHOLE, {r}) if r < 2 else None)] for r in range(3)}
    manifest = manifest_of(of(run))
    for rank in range(2):
        wanted = wanted_of(manifest, rank)
        assert wanted == {f"p{rank:06d}": {(f"r{rank:06d}", "w"): True}}
    assert wanted_of(manifest, 2) == {"p000000": {("r000000", "w"): False}, "p000002": {}}


def test_a_parameter_alone_that_comes_apart_is_named() -> None:
    """What was sent to rank 2 is not what it has."""
    lead, run = Lead(), gathered_on_all(3, tensors=2)
    decided(lead, run, 2)
    rest, alone = frozenset({0, 1}), frozenset({2})
    for rank in run:
        mine = (WHOLE, {1}) if rank == 1 else None
        run[rank][1] = held("w1", (WHOLE, alone if rank == 2 else rest), mine)
    sharing = decode_sharing(decided(lead, run, 8)[0])  # type: ignore[arg-type]
    assert sharing.redundancy.agreed == 2
    assert sharing.diverged == (
        "step 8: w1 (param, block 0): ranks 2 differ from most copies; equal at step 2",
    )


def test_a_sharing_comes_back() -> None:
    """As JSON; and what is none is refused by name."""
    sharing = Sharing.of(of(figure6(3)), 5, ("one has come apart",))
    assert decode_sharing(sharing.encode()) == sharing
    assert sharing.written_by(1).keys() >= {"expert1"}
    for bad in (b"", b"{}", sharing.encode()[:-3]):
        with pytest.raises(GroupError, match="rank 0 sent no assignment"):
            decode_sharing(bad)


def test_holdings_come_back() -> None:
    """Boxes, flat ranges, empty sides, reasons."""
    mine = [held("a", (WHOLE, {0}), None, "never"), held("b", None, (shard(1, 4), {0, 3}))]
    witness = Witness(since=3, digests=bytes(range(256)) * 40)  # of 640 states
    said = Told(node="n0", updated=True, held=tuple(mine), witness=witness)
    told = encode_told(said)
    assert decode_told(told, 0, Known()) == said
    for bad in (told[:-2], told[:50], b"", b"\xff" * 8 + told[8:]):
        with pytest.raises(GroupError, match="rank 4"):
            decode_told(bad, 4, Known())


def decided(
    leads: Lead, run: Run, step: int, idle: Sequence[int] = (), by: Sequence[str] = ()
) -> list[object]:
    """What all ranks are told, who write ``by`` assignments of these names (those of the lead)."""
    rounds = [
        agreed(
            rank, len(run),
            encode_told(
                Told(
                    node="n", updated=rank not in idle, held=tuple(mine),
                    by=by[rank] if by else leads._name,
                )
            ),
            lambda heard: leads.decide(step, heard),
        )
        for rank, mine in run.items()
    ]  # fmt: skip
    return carry_all(rounds)[0]


def test_all_are_told_the_same_and_only_what_is_new() -> None:
    """Nothing, where all is as before, or where a rank has made no update."""
    lead = Lead()
    assert decided(lead, ddp(3), 1, idle=[2]) == [b""] * 3
    first = decided(lead, ddp(3), 2)
    assert len(set(map(bytes, first))) == 1
    assert first[0]
    assert decided(lead, ddp(3), 4) == [AS_BEFORE] * 3


def test_where_a_rank_did_not_follow_all_are_told_anew() -> None:
    """Once, and until all have."""
    lead, run = Lead(), ddp(3)
    first = bytes(decided(lead, run, 2)[0])  # type: ignore[call-overload]
    name = name_of(first)
    again = decided(lead, run, 4, by=[name, name, ""])
    assert len(set(map(bytes, again))) == 1  # type: ignore[call-overload, arg-type]
    sharing = decode_sharing(again[1])  # type: ignore[arg-type]
    assert sharing.alike(decode_sharing(first))
    assert sharing.redundancy.agreed == 4
    late = decided(lead, run, 8, by=[name, name_of(again[0]), name_of(again[0])])  # type: ignore[arg-type]
    assert late[0] != AS_BEFORE
    assert decided(lead, run, 16) == [AS_BEFORE] * 3


def test_copies_that_come_apart_are_named_with_the_step_they_were_equal() -> None:
    """Rank 1's parameter differs; the moments do not."""
    lead, run = Lead(), ddp(3, tensors=2)
    decided(lead, run, 2)
    decided(lead, run, 4)
    rest, alone = frozenset({0, 2}), frozenset({1})
    for rank in run:
        mine = alone if rank == 1 else rest
        run[rank][1] = held("w1", (WHOLE, mine), (WHOLE, everyone(3)))
    sharing = decode_sharing(decided(lead, run, 8)[2])  # type: ignore[arg-type]
    assert sharing.redundancy.agreed == 4
    assert sharing.diverged == (
        "step 8: w1 (param, block 0): ranks 1 differ from most copies; equal at step 4",
    )
    scopes = {
        sharing.redundancy.grounds[ground].why
        for part in sharing.redundancy.parts for _, ground in part.pairs()
    }  # fmt: skip
    assert scopes == {"", "differed from its copies at step 8"}
    again = decode_sharing(decided(lead, run, 12, by=["", "", ""])[0])  # type: ignore[arg-type]
    assert again.redundancy.agreed == 4  # nobody has followed: no step since is in less doubt
    assert decided(lead, run, 16) == [AS_BEFORE] * 3


def test_what_a_rank_tells_is_as_long_whatever_the_number_of_ranks() -> None:
    """Sets of ranks are told as runs; ranks that hold the same are read once."""
    told = [
        encode_told(Told(node="n", updated=True, held=tuple(ddp(size, 50)[0]), by="x"))
        for size in (2, 2000)
    ]
    assert len(told[1]) - len(told[0]) < 10
    known = Known()
    first, second = (decode_told(told[1], rank, known) for rank in (0, 1))
    assert first.held is second.held
    assert len(known.held) == len(known.sets) == 1
    found = Sharing.of(shares(states(ddp(300, 2)), topology(300)), 2, ("rank 1, " * 1000,) * 99)
    assert decode_sharing(found.encode()) == found
    assert len(found.encode()) < 300 * 250 + 20 * 4200


def test_sets_that_ranks_name_alike_are_one_object() -> None:
    """Also where no two ranks hold the same: each a shard of its own, of what all have."""
    size, known = 48, Known()
    all_told = [
        Told(
            node="n", updated=True,
            held=(held("a", (WHOLE, everyone(size)), (shard(rank, size), {rank})),),
        )
        for rank in range(size)
    ]  # fmt: skip
    found = [decode_told(encode_told(told), rank, known) for rank, told in enumerate(all_told)]
    assert found == all_told
    assert len(known.held) == size
    assert len({id(told.held[0].param.copies) for told in found if told.held[0].param}) == 1
    assert len(known.sets) == 1 + size
    with pytest.raises(ValueError, match="no integer"):  # equal to runs that are known, and no runs
        known.ranks([False, True, size])


def test_ranks_that_disagree_are_refused_everywhere() -> None:
    """Rank 0 says that all have it, and nobody else does."""
    run = ddp(3)
    run[1] = run[2] = []
    rounds = [
        agreed(
            rank,
            3,
            encode_told(Told(node="n", updated=True, held=tuple(mine))),
            lambda heard: Lead().decide(2, heard),
        )
        for rank, mine in run.items()
    ]
    with pytest.raises(GroupError, match="1 ranks say that it is on 3"):
        carry_all(rounds)
    other = agreed(1, 3, b"", lambda heard: b"")
    next(other)
    other.send([b"", b"", b""])
    with pytest.raises(GroupError, match="rank 0: no such thing"):
        other.send([b"-no such thing", b"", b""])
