"""A grid of ranks: an all-to-all in two hops, so that each rank speaks to few others.

What is for a column goes along the row to the rank that is in both, and from there down the column:
about 2 sqrt(N) messages for each of N ranks, not N, and every byte twice.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Mapping, Sequence

from adacheck_store.format.errors import GroupError

GRID_FROM = 16
"""With fewer ranks there is one column."""

Swap = Callable[[Mapping[int, bytes], int], Sequence[bytes]]
"""Sends each of some ranks a message, and gives what each of them has sent here, in that order. It
waits so many times as long as usual."""


class Grid:
    """Where a rank stands among ``size``: the ranks of its ``row``, and those of its ``column``."""

    def __init__(self, rank: int, size: int) -> None:
        width = _width(size)
        self.row = range(rank - rank % width, rank - rank % width + width)
        self.column = range(rank % width, size, width)

    @property
    def peers(self) -> Sequence[int]:
        """The ranks that this one speaks to, itself among them."""
        return sorted({*self.row, *self.column})

    def exchange(self, messages: Sequence[bytes], swap: Swap) -> list[bytes]:
        """What each rank has sent to this one; ``messages`` are for each of them.

        Raises `GroupError` for what was not sent by another grid's `exchange`.
        """
        width = len(self.row)
        heard = swap({peer: _packed(messages[peer % width :: width]) for peer in self.row}, 1)
        of_row = [_unpacked(each, len(self.column)) for each in heard]
        for_column = [_packed(each) for each in zip(*of_row, strict=True)]
        # Longer: who has missed somebody in the row says so meanwhile, and is not missed itself.
        found = swap(dict(zip(self.column, for_column, strict=True)), 1 if width == 1 else 2)
        return [message for each in found for message in _unpacked(each, width)]


def _width(size: int) -> int:
    """Columns for so many ranks, all as long: the divisor nearest to the root."""
    if size < GRID_FROM:
        return 1
    return max(width for width in range(1, math.isqrt(size) + 1) if size % width == 0)


def _packed(messages: Sequence[bytes]) -> bytes:
    return struct.pack(f"<{len(messages)}Q", *map(len, messages)) + b"".join(messages)


def _unpacked(data: bytes, count: int) -> list[bytes]:
    try:
        lengths = struct.unpack_from(f"<{count}Q", data)
    except struct.error as error:
        raise GroupError(f"what another rank says cannot be read: {error}") from error
    ends = list(itertools.accumulate(lengths, initial=8 * count))
    if ends[-1] != len(data):
        raise GroupError(f"what another rank says has {len(data)} bytes, not {ends[-1]}")
    return [data[start:end] for start, end in itertools.pairwise(ends)]
