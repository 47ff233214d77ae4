"""Draining: copying records to a lower tier, checked by digest on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from adacheck_store.format.head import SealedHead
from adacheck_store.format.ids import BLOCK_BYTES
from adacheck_store.format.keys import parse_key
from adacheck_store.format.record import Block
from adacheck_store.tiers.base import Source, Tier

from .recovery import Segment

RUN_BLOCKS = 4
"""Blocks read from the upper tier at once."""


class TierSource:
    """A record of one tier as a `Source` for another; the receiver checks the digests."""

    def __init__(self, tier: Tier, key: str) -> None:
        self.key = key
        self._tier = tier
        self._sealed = tier.head(key)

    @property
    def expected_id(self) -> str:
        """The record's id."""
        return self._sealed.id

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(info.nbytes for info in self._sealed.head.arrays)

    def blocks(self) -> Iterator[Block]:
        """The record's blocks, read a few at a time."""
        for info in self._sealed.head.arrays:
            total = len(info.digests)
            for first in range(0, total, RUN_BLOCKS):
                count = min(RUN_BLOCKS, total - first)
                data = memoryview(self._tier.read(self.key, info.name, first, count))
                for index in range(count):
                    at = index * BLOCK_BYTES
                    yield Block(info.name, first + index, data[at : at + BLOCK_BYTES])

    def seal(self) -> SealedHead:
        """The record's head."""
        return self._sealed


def missing_below(near: Tier, far: Tier, run: str, line: Sequence[Segment]) -> list[str]:
    """Keys of bases, deltas and extras of the line that ``near`` has and ``far`` has not."""
    keys: list[str] = []
    for segment in line:
        prefix = f"{run}/{segment.term}/"
        have = set(far.list(prefix))
        for text in near.list(prefix):
            key = parse_key(text)
            if key.kind in ("base", "delta", "extra") and text not in have:
                if segment.covers(key.step):
                    keys.append(text)
    return keys


def in_batches(keys: Iterable[str], most: int) -> Iterator[list[str]]:
    """Group keys for one put each: a base alone, deltas (or extras) of a part together.

    A batch holds consecutive steps only, at most ``most``.
    """
    parsed = sorted({parse_key(text) for text in keys}, key=lambda key: str(key))
    for kind_of, group in groupby(parsed, key=lambda key: (key.term, key.part, key.kind)):
        batch: list[str] = []
        before = -1
        for key in group:
            alone = kind_of[2] == "base"
            if batch and (alone or key.step != before + 1 or len(batch) >= most):
                yield batch
                batch = []
            batch.append(str(key))
            before = key.step
        if batch:
            yield batch


def copy_records(near: Tier, far: Tier, keys: Sequence[str]) -> int:
    """Copy records to ``far`` in one put; returns the bytes of their arrays."""
    sources = [TierSource(near, key) for key in keys]
    plain: list[Source] = list(sources)
    far.put(plain)
    return sum(source.nbytes for source in sources)
