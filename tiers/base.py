"""The interface of a tier: a place that keeps records.

A tier is synchronous, write-once and all-or-nothing. Keys are names of `format.keys`. Within a
tier a record's blocks are written first and its head last: a record exists when its head does.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from adacheck_store.format.errors import TruncatedError
from adacheck_store.format.head import SealedHead
from adacheck_store.format.record import Block, Record

from .transfer import copy_into


class Source(Protocol):
    """A record on its way into a tier: a key, a stream of blocks, and then the sealed head.

    ``expected_id`` is the record's id where it is known beforehand, else None. ``blocks`` yields
    the blocks of one array in order of their index; arrays may interleave. A block's data may be
    reused by the producer as soon as the next block is asked for. ``seal`` is called once, after
    the last block. Blocks differing from the digests in the head make the put fail. A source may
    have ``sizes``, the bytes of each array by name, to help a tier that cuts arrays into objects,
    and ``lasting``, True if its blocks' memory is never reused while somebody holds it; beside
    ``sizes`` also ``in_order``, True if its arrays come one after another as in the head, so that
    nobody need hold them. It may have ``before_heads``, which tiers of logs call once all blocks of
    the put are there and synced, and before any of its records is visible; if that raises the put
    fails.
    """

    @property
    def key(self) -> str:
        """The record's key."""
        ...

    @property
    def expected_id(self) -> str | None:
        """The record's id where it is known beforehand."""
        ...

    def blocks(self) -> Iterable[Block]:
        """The blocks."""
        ...

    def seal(self) -> SealedHead:
        """The head; called when `blocks` is exhausted."""
        ...


@dataclass(frozen=True, slots=True)
class RecordSource:
    """A `Source` over a record in memory."""

    key: str
    record: Record
    lasting: ClassVar[bool] = True

    @property
    def expected_id(self) -> str:
        """The record's id."""
        return self.record.sealed.id

    def blocks(self) -> Iterable[Block]:
        """The record's blocks."""
        return self.record.blocks()

    def seal(self) -> SealedHead:
        """The record's head."""
        return self.record.sealed


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTraits:
    """What a tier is like.

    ``durable``: what is synced survives the loss of the process and of power. ``log``: keeps the
    run's log (conditional create). ``packs``: puts of consecutive deltas or extras should come
    together, many at a time. ``parallel``: how many reads at once pay, for each waits.
    """

    name: str
    durable: bool = False
    log: bool = False
    packs: bool = False
    parallel: int = 1


class Tier(abc.ABC):
    """A place that keeps records.

    Thread-safe: any thread may call any method. Every error is an `AdaCheckError` with the tier
    and key in its place.
    """

    traits: TierTraits

    @abc.abstractmethod
    def put(self, sources: Sequence[Source]) -> None:
        """Store records; they become visible together, or none of them does.

        A key that exists with the same id repairs blocks that are missing or do not verify.
        Raises `ForkError` if a key exists with another id (or with any id where the source's is
        not known beforehand), `ChainBrokenError` for a record whose layout or manifest revision
        is neither here nor in this call (bases, deltas, extras), `DigestMismatchError`,
        `TruncatedError`, `TierFullError`, `TierReadOnlyError`.
        """

    @abc.abstractmethod
    def head(self, key: str) -> SealedHead:
        """The verified head of a record; raises `RecordNotFoundError` or a `FormatError`."""

    @abc.abstractmethod
    def read(self, key: str, array: str, first: int, count: int) -> bytes | memoryview:
        """Bytes of ``count`` blocks of an array, from block ``first``: *not* verified.

        The caller checks digests (`format.record.verify_block`). Raises `RecordNotFoundError`
        for a missing record, array or block, `TruncatedError` for fewer bytes than there
        should be.
        """

    def read_into(self, key: str, array: str, first: int, count: int, out: memoryview) -> None:
        """Fill ``out``, as long as the blocks are, with what `read` gives: *not* verified.

        Raises what `read` raises; what ``out`` holds then is undefined.
        """
        data = self.read(key, array, first, count)
        if len(data) != len(out):
            raise TruncatedError(f"{len(data)} bytes of {array}, not {len(out)}").at(key=key)
        copy_into(out, 0, data)

    @abc.abstractmethod
    def list(self, prefix: str) -> Iterator[str]:
        """Keys of existing records that begin with ``prefix``, sorted.

        ``prefix`` is empty or ends in ``/``. Never yields a record without head, nor anything
        that is no key. Records deleted while listing may or may not appear.
        """

    @abc.abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete records, heads first; missing ones are passed over."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Return when everything put before is as durable as the tier's traits say."""

    def requests(self) -> Mapping[str, int]:
        """Requests made so far by kind, and bytes, where a store counts or charges them."""
        return {}

    @abc.abstractmethod
    def close(self) -> None:
        """Release what the tier holds; idempotent."""
