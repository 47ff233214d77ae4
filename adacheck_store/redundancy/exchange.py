"""The exchange: which ranks offer the same token, found without comparing ranks with each other.

Each token belongs to one rank, its home, by its value. There everybody who offers it is known.
What a rank sends and is told depends on how many tokens it has, not on how many ranks there are.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TypeVar

from adacheck_store.format.errors import GroupError
from adacheck_store.format.rank_sets import ranks_of, runs_of

T = TypeVar("T")
Ranks = frozenset[int]

Rounds = Generator[list[bytes], Sequence[bytes], T]
"""Yields what goes to each rank, is sent what came from each, and returns its result.

Every rank's rounds are as many, so each is one all-to-all of all ranks.
"""

TOKEN_BYTES = 16
NAME_BYTES = 16


def carry(rounds: Rounds[T], exchange: Callable[[list[bytes]], Sequence[bytes]]) -> T:
    """Carry rounds out over an all-to-all: ``exchange`` takes and gives bytes by rank."""
    try:
        messages = next(rounds)
        while True:
            messages = rounds.send(exchange(messages))
    except StopIteration as end:
        found: T = end.value
        return found


def copy_sets(rank: int, size: int, tokens: Sequence[bytes]) -> Rounds[Mapping[bytes, Ranks]]:
    """For each token of `TOKEN_BYTES` bytes, the ranks that offer it; this one among them.

    Four rounds: tokens go to their homes, homes answer with the name of a set each, a rank asks
    one home for each set whose name it does not know, and is told. Raises `GroupError` that
    names the rank whose message makes no sense.
    """
    mine: list[list[bytes]] = [[] for _ in range(size)]
    for token in sorted(set(tokens)):
        mine[home_of(token, size)].append(token)
    asked = yield [b"".join(each) for each in mine]
    sets = _directory(rank, asked)
    names = {ranks: name_of(ranks) for ranks in set(sets.values())}
    answers = yield [
        b"".join(names[sets[token]] for token in _cut(message, TOKEN_BYTES, peer))
        for peer, message in enumerate(asked)
    ]
    named = dict(_named(mine, answers))
    known = {name_of(ranks): ranks for ranks in (frozenset((rank,)), frozenset(range(size)))}
    wanted: list[list[bytes]] = [[] for _ in range(size)]
    for token, name in named.items():
        if name not in known:
            known[name] = frozenset()
            wanted[home_of(token, size)].append(name)
    queries = yield [b"".join(each) for each in wanted]
    by_name = {name: ranks for ranks, name in names.items()}
    told = yield [_contents(message, by_name, peer) for peer, message in enumerate(queries)]
    for peer, message in enumerate(told):
        known.update(zip(wanted[peer], _read(message, wanted[peer], rank, peer), strict=True))
    return {token: known[name] for token, name in named.items()}


def home_of(token: bytes, size: int) -> int:
    """The rank that a token belongs to."""
    return int.from_bytes(token[:8], "little") % size


def name_of(ranks: Ranks) -> bytes:
    """The name of a set of ranks, `NAME_BYTES` long, the same at every home."""
    return hashlib.blake2b(_packed(ranks), digest_size=NAME_BYTES).digest()


def _packed(ranks: Ranks) -> bytes:
    runs = runs_of(ranks)
    return struct.pack(f"<{len(runs)}I", *runs)


def _directory(rank: int, asked: Sequence[bytes]) -> dict[bytes, Ranks]:
    """The set of each token that belongs to this rank, one object for equal sets."""
    offered: dict[bytes, list[int]] = {}
    for peer, message in enumerate(asked):
        for token in _cut(message, TOKEN_BYTES, peer):
            if home_of(token, len(asked)) != rank:
                raise _nonsense(peer)
            offered.setdefault(token, []).append(peer)
    shared: dict[tuple[int, ...], Ranks] = {}
    found = {}
    for token, peers in offered.items():
        key = tuple(peers)
        found[token] = shared.get(key) or shared.setdefault(key, frozenset(key))
    return found


def _named(mine: list[list[bytes]], answers: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Each own token with the name of its set."""
    for peer, (tokens, message) in enumerate(zip(mine, answers, strict=True)):
        names = _cut(message, NAME_BYTES, peer)
        if len(names) != len(tokens):
            raise _nonsense(peer)
        yield from zip(tokens, names, strict=True)


def _contents(queries: bytes, by_name: Mapping[bytes, Ranks], peer: int) -> bytes:
    """The sets a rank asks for, each with its length before it."""
    found = []
    for name in _cut(queries, NAME_BYTES, peer):
        if name not in by_name:
            raise _nonsense(peer)
        packed = _packed(by_name[name])
        found.append(struct.pack("<I", len(packed)) + packed)
    return b"".join(found)


def _read(message: bytes, names: list[bytes], rank: int, peer: int) -> Iterator[Ranks]:
    """The sets that a home tells, in the order of the names asked for; checked by name."""
    at = 0
    for name in names:
        try:
            (length,) = struct.unpack_from("<I", message, at)
            packed = message[at + 4 : at + 4 + length]
            ranks = frozenset(ranks_of(struct.unpack(f"<{length // 4}I", packed)))
        except (struct.error, ValueError) as error:
            raise _nonsense(peer) from error
        if hashlib.blake2b(packed, digest_size=NAME_BYTES).digest() != name or rank not in ranks:
            raise _nonsense(peer)
        at += 4 + length
        yield ranks
    if at != len(message):
        raise _nonsense(peer)


def _cut(message: bytes, width: int, peer: int) -> list[bytes]:
    if len(message) % width:
        raise _nonsense(peer)
    return [bytes(message[at : at + width]) for at in range(0, len(message), width)]


def _nonsense(peer: int) -> GroupError:
    return GroupError(
        f"what rank {peer} says about its tensors cannot be read",
        hint="run the same version of adacheck-store on all ranks",
    )
