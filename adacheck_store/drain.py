"""Draining: copying records to a lower tier, checked by digest on the way."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from adacheck_store.format.errors import AdaCheckError, FormatError, RecordNotFoundError
from adacheck_store.format.head import SealedHead
from adacheck_store.format.ids import BLOCK_BYTES
from adacheck_store.format.keys import parse_key
from adacheck_store.format.record import Block
from adacheck_store.tiers.base import Source, Tier

Span = tuple[int, int | None]
"""First and last step of a term's stretch of the line (None: open end)."""

RUN_BLOCKS = 4
"""Blocks read from the upper tier at once."""


class TierSource:
    """A record of one tier as a `Source` for another; the receiver checks the digests."""

    in_order = True

    def __init__(self, tier: Tier, key: str) -> None:
        self.key = key
        self._tier = tier
        self._sealed = tier.head(key)

    @property
    def expected_id(self) -> str:
        """The record's id."""
        return self._sealed.id

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each array."""
        return {info.name: info.nbytes for info in self._sealed.head.arrays}

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(self.sizes.values())

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


def missing_below(
    uppers: Sequence[Tier], far: Tier, run: str, line: Mapping[str, Span],
    stood_in: Container[tuple[str, str, int]] = (),
) -> list[str]:  # fmt: skip
    """Keys of the line that some upper tier has and ``far`` has not.

    Layouts, manifests, bases, deltas and extras, of every term of the line up to its end: ``line``
    maps terms to their first and last steps. A base is not missing at a (term, part, step) that is
    ``stood_in`` for.
    """
    have = set(far.list(f"{run}/"))
    keys: set[str] = set()
    for tier in uppers:
        for text in tier.list(f"{run}/"):
            key = parse_key(text)
            if text in have or key.kind == "log":
                continue
            if key.kind == "base" and (key.term, key.part, key.step) in stood_in:
                continue
            first, last = line.get(key.term, (1, 0))
            on_line = first <= key.step and (last is None or key.step <= last)
            if key.kind == "layout" or on_line:
                keys.add(text)
    return sorted(keys)


def _source(uppers: Sequence[Tier], key: str) -> TierSource:
    for tier in uppers[:-1]:
        try:
            return TierSource(tier, key)
        except AdaCheckError:
            continue
    return TierSource(uppers[-1], key)


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


def copy_records(uppers: Sequence[Tier], far: Tier, keys: Sequence[str]) -> int:
    """Copy records to ``far`` in one put, each from the first tier that has it.

    Returns the bytes of their arrays; raises what the last of the upper tiers says of a record
    that none of them gives. One alone is copied from the first tier that has it right.
    """
    if len(keys) == 1:
        return _copy_one(uppers, far, keys[0])
    sources = [_source(uppers, key) for key in keys]
    plain: list[Source] = list(sources)
    far.put(plain)
    return sum(source.nbytes for source in sources)


def _copy_one(uppers: Sequence[Tier], far: Tier, key: str) -> int:
    """What memory has wrong the disk may have right; raises what is wrong with it, if none has."""
    error: AdaCheckError | None = None
    for tier in uppers[:-1]:
        try:
            source = TierSource(tier, key)
        except AdaCheckError:
            continue
        try:
            far.put([source])
            return source.nbytes
        except (FormatError, RecordNotFoundError) as exc:
            error = error or exc
    try:
        source = TierSource(uppers[-1], key)
        far.put([source])
    except (FormatError, RecordNotFoundError) as exc:
        raise error or exc from None
    return source.nbytes
