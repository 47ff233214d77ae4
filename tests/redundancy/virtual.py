"""The exchange among more ranks than can be run: one rank is followed, and all that it speaks to.

What a home does follows from what all ranks send it first, and that from which tokens they have. So
the bytes of one rank are counted exactly by its own rounds and those of its homes alone.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

from adacheck_store.redundancy.exchange import TOKEN_BYTES, Ranks, Rounds, copy_sets, home_of


class Virtual:
    """Ranks of which each has so many tokens, half with all others, half with its group alone."""

    def __init__(self, size: int, group: int, tokens: int) -> None:
        self.size, self._group = size, group
        half = tokens // 2
        self._common = [_token(f"all/{n}") for n in range(half)]
        self._grouped = [
            [_token(f"{first}/{n}") for n in range(tokens - half)]
            for first in range(0, size, group)
        ]
        everyone = range(size)
        self._at: dict[int, list[tuple[bytes, range]]] = defaultdict(list)
        for token in self._common:
            self._at[home_of(token, size)].append((token, everyone))
        for number, each in enumerate(self._grouped):
            ranks = everyone[number * group : (number + 1) * group]
            for token in each:
                self._at[home_of(token, size)].append((token, ranks))

    def tokens_of(self, rank: int) -> list[bytes]:
        """The tokens that a rank offers."""
        return self._common + self._grouped[rank // self._group]

    def copies(self, rank: int) -> dict[bytes, Ranks]:
        """What a rank is to find."""
        first = rank // self._group * self._group
        group = frozenset(range(first, min(first + self._group, self.size)))
        return dict.fromkeys(self._common, frozenset(range(self.size))) | dict.fromkeys(
            self._grouped[rank // self._group], group
        )

    def follow(self, rank: int) -> tuple[int, Mapping[bytes, Ranks]]:
        """Payload of a rank, in bytes that it sends to ask and is told, and what it finds."""
        rounds, asked, _ = self._begun(rank)
        told = self._told(rank, asked)
        wanted = rounds.send(told)
        sets = self._nothing()
        for home in _spoken(wanted):
            other, its_asked, _ = self._begun(home)
            other.send(self._told(home, its_asked))
            heard = self._nothing()
            heard[rank] = wanted[home]
            sets[home] = other.send(heard)[rank]
        rounds.send(self._nothing())  # what others want of it is told to them, and counted there
        try:
            rounds.send(sets)
        except StopIteration as end:
            return sum(len(m) for each in (asked, told, wanted, sets) for m in each), end.value
        raise AssertionError("more rounds than four")

    def _nothing(self) -> list[bytes]:
        return [b""] * self.size

    def _begun(self, rank: int) -> tuple[Rounds[Mapping[bytes, Ranks]], list[bytes], list[bytes]]:
        """A rank's rounds after the first: what it has asked, and what it answers."""
        rounds = copy_sets(rank, self.size, self.tokens_of(rank))
        asked = next(rounds)
        return rounds, asked, rounds.send(self._heard(rank))

    def _heard(self, home: int) -> list[bytes]:
        """What all ranks ask a home, as `copy_sets` spells it."""
        by_rank: dict[int, list[bytes]] = defaultdict(list)
        for token, ranks in sorted(self._at[home], key=lambda pair: pair[0]):
            for rank in ranks:
                by_rank[rank].append(token)
        heard = self._nothing()
        for rank, tokens in by_rank.items():
            heard[rank] = b"".join(tokens)
        return heard

    def _told(self, rank: int, asked: Sequence[bytes]) -> list[bytes]:
        """What a rank's homes answer it."""
        told = self._nothing()
        for home in _spoken(asked):
            told[home] = self._begun(home)[2][rank]
        return told


def _spoken(messages: Sequence[bytes]) -> list[int]:
    return [peer for peer, message in enumerate(messages) if message]


def _token(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=TOKEN_BYTES).digest()
