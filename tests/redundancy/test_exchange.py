"""The exchange agrees with brute force and with the paper's ring, and moves what it should."""

from __future__ import annotations

import hashlib
import random
import struct
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_store.format.errors import GroupError
from adacheck_store.format.rank_sets import ranks_of, runs_of
from adacheck_store.redundancy import exchange
from adacheck_store.redundancy.costs import exchange_bytes, ring_bytes
from adacheck_store.redundancy.exchange import carry, copy_sets
from tests.redundancy.loop import Traffic, carry_all
from tests.redundancy.ring import brute, reduced, ring
from tests.redundancy.virtual import Virtual


def token(text: str) -> bytes:
    """A token of that name."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def find(tokens: Sequence[Sequence[bytes]]) -> tuple[list[dict[bytes, frozenset[int]]], Traffic]:
    """What the ranks find together."""
    size = len(tokens)
    return carry_all([copy_sets(rank, size, own) for rank, own in enumerate(tokens)])


def grouped(size: int, group: int, count: int) -> list[list[bytes]]:
    """Ranks in groups of ``group`` with ``count`` tokens each: half shared by all of a group."""
    return [
        [token(f"g{rank // group}/{i}") for i in range(count // 2)]
        + [token(f"r{rank}/{i}") for i in range(count - count // 2)]
        for rank in range(size)
    ]


def test_thousands_of_random_assignments() -> None:
    """Any ranks may hold any tokens: the sets are those of brute force, and those of the ring."""
    source = random.Random(5)
    shared = 0
    for case in range(3000):
        size = source.randint(1, 9)
        names = [token(f"{case}/{i}") for i in range(source.randint(0, 12))]
        tokens = [[t for t in names if source.random() < 0.6] for _ in range(size)]
        for own in tokens:
            source.shuffle(own)
        found, _ = find(tokens)
        assert found == brute(tokens)
        everyone = [frozenset(range(size)), frozenset((0,))]
        assert found == ring(tokens, everyone)[0]
        shared += sum(1 for each in found for ranks in each.values() if 1 < len(ranks) < size)
    assert shared > 10_000


def test_the_ring_finds_only_what_lies_in_one_group() -> None:
    """Where groups are those of the copies, the two agree; else the ring misses copies."""
    groups = [frozenset((0, 1, 2, 3)), frozenset((4, 5, 6, 7)), frozenset((4, 5))]
    tokens = grouped(8, 4, 10)
    assert reduced(groups) == groups[:2]
    assert find(tokens)[0] == ring(tokens, groups)[0] == brute(tokens)
    across = [[*own, token("all")] for own in tokens]
    assert find(across)[0] == brute(across) != ring(across, groups)[0]


def test_payload_does_not_grow_with_the_ranks() -> None:
    """Tokens, answers and sets of a rank are as many for 8 as for 128, and as predicted."""
    per_rank = {}
    for size in (8, 16, 32, 64, 128):
        found, traffic = find(grouped(size, 4, 200))
        assert traffic.rounds == 4
        assert all(len(ranks) in (1, 4) for each in found for ranks in each.values())
        per_rank[size] = traffic.payload / size
        assert per_rank[size] == exchange_bytes(tokens=200, sets=1, runs=1).payload
    assert len(set(per_rank.values())) == 1
    _, ring_total = ring(grouped(32, 32, 200), [frozenset(range(32))])
    assert ring_total / 32 == ring_bytes(tokens=200, group=32)
    assert per_rank[128] < ring_bytes(tokens=200, group=128) / 20


def test_a_rank_that_is_followed_is_counted_as_if_all_were_run() -> None:
    """Each rank's bytes add up to what goes through an all-to-all of all of them."""
    world = Virtual(22, 4, 60)
    found, traffic = find([world.tokens_of(rank) for rank in range(22)])
    followed = [world.follow(rank) for rank in range(22)]
    assert [each for _, each in followed] == found == [world.copies(rank) for rank in range(22)]
    assert sum(payload for payload, _ in followed) == traffic.payload


@pytest.mark.parametrize("size", [128, 2048, pytest.param(16_384, marks=pytest.mark.slow)])
def test_what_a_rank_sends_among_thousands(size: int) -> None:
    """The same for any number, as counted by `costs`; what it finds is right."""
    world = Virtual(size, 8, 200)
    payload, found = world.follow(size // 3)
    assert found == world.copies(size // 3)
    assert payload == exchange_bytes(tokens=200, sets=1, runs=1).payload


def test_a_rank_with_nothing_and_tokens_given_twice() -> None:
    """Empty ranks take part; a token twice is once."""
    found, _ = find([[token("a"), token("a")], [], [token("a")]])
    assert found == [{token("a"): frozenset((0, 2))}, {}, {token("a"): frozenset((0, 2))}]


def test_carry_over_an_all_to_all() -> None:
    """A single rank is its own all-to-all."""
    assert carry(copy_sets(0, 1, [token("a")]), lambda messages: messages) == {
        token("a"): frozenset((0,))
    }


HOMES = [token("x"), token("y"), token("z")]


@pytest.mark.parametrize("turn", [0, 1, 2, 3])
@pytest.mark.parametrize("spoil", [b"", b"x", b"y" * 16, b"\xff" * 64], ids=range(4))
def test_what_makes_no_sense_names_the_rank(turn: int, spoil: bytes) -> None:
    """Another version, or memory gone bad: a typed error in bounded time, or no difference."""
    everyone = [HOMES[:2], HOMES[1:], HOMES]
    rounds = [copy_sets(rank, 3, own) for rank, own in enumerate(everyone)]
    outgoing = [next(each) for each in rounds]
    named = ""
    for now in range(4):
        if len(outgoing) < 3:
            break
        incoming = [[outgoing[peer][rank] for peer in range(3)] for rank in range(3)]
        if now == turn:
            incoming[0][1] = spoil
        outgoing = []
        for rank, each in enumerate(rounds):
            try:
                outgoing.append(each.send(incoming[rank]))
            except StopIteration as end:
                assert now == 3
                for known, ranks in end.value.items():
                    assert ranks <= brute(everyone)[rank][known]
            except GroupError as error:
                named = str(error)
    assert not outgoing or "what rank" in named


def packed(*runs: int) -> bytes:
    """A set of ranks as it is sent."""
    return struct.pack(f"<I{len(runs)}I", 4 * len(runs), *runs)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (exchange.name_of(frozenset((0, 2))), packed(0, 1, 2)),  # another set than was named
        (exchange.name_of(frozenset((1, 2))), packed(1, 1, 2)),  # who asks is not in it
        (exchange.name_of(frozenset((0, 2))), packed(0, 2, 2) + b"more"),
        (exchange.name_of(frozenset((0, 2))), b""),
    ],
    ids=["another", "not its own", "too long", "too short"],
)
def test_a_set_is_taken_only_if_it_is_the_one_asked_for(name: bytes, content: bytes) -> None:
    """A set too large is the one error that loses data: it is checked by name and member."""
    own = next(t for t in map(token, "abcdefgh") if exchange.home_of(t, 3) == 1)
    rounds = copy_sets(0, 3, [own])
    assert next(rounds) == [b"", own, b""]
    rounds.send([b""] * 3)
    assert rounds.send([b"", name, b""]) == [b"", name, b""]
    rounds.send([b""] * 3)
    with pytest.raises(GroupError, match="rank 1"):
        rounds.send([b"", content, b""])


@given(st.sets(st.integers(0, 200)))
def test_runs_give_the_set_back(ranks: set[int]) -> None:
    """Each set has one spelling, and it is short for what strides are."""
    runs = runs_of(ranks)
    assert ranks_of(runs) == tuple(sorted(ranks))
    assert len(runs) <= 3 * len(ranks)
    assert len(runs_of(range(3, 9000, 8))) == 3


@pytest.mark.parametrize(
    "runs",
    [[0], [0, 1], [0, 1, 0], [-1, 1, 1], [0, 0, 2], [0, 1, 10**7], [1, 1, 1, 0, 1, 1],
     [0, 1, 2, 1, 1, 1], [0, 2, 1], [0, 1, 1, 1, 1, 1], [0, 1, True], [0, 1, "1"]],
)  # fmt: skip
def test_other_spellings_are_refused(runs: list[int]) -> None:
    """Only what `runs_of` gives."""
    with pytest.raises(ValueError, match=r"rank"):
        ranks_of(runs)


def test_128_ranks_in_bounded_time() -> None:
    """1 000 tensors each: processor time of all ranks together, on one thread."""
    tokens = grouped(128, 8, 1000)
    begun = time.process_time()
    found, _ = find(tokens)
    took = time.process_time() - begun
    print(f"\n128 ranks x 1000 tokens: {took:.2f} s of processor time")
    assert sum(len(ranks) == 8 for ranks in found[77].values()) == 500
    assert took < 30


def test_a_home_that_is_not_asked_for_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that place tokens differently do not agree quietly."""
    rounds = copy_sets(0, 2, [token("a")])
    next(rounds)
    foreign = next(t for t in map(token, "abcdefgh") if exchange.home_of(t, 2) == 1)
    with pytest.raises(GroupError, match="rank 1"):
        rounds.send([b"", foreign])
