"""Reading verified blocks of records, from whichever tier has them right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from adacheck_store.format.dtypes import item_bytes
from adacheck_store.format.errors import (
    AdaCheckError,
    ChainError,
    DigestMismatchError,
    FormatError,
    MalformedError,
    RecordNotFoundError,
)
from adacheck_store.format.head import ArrayInfo, Head, SealedHead
from adacheck_store.format.ids import BLOCK_BYTES
from adacheck_store.format.record import Block, block_nbytes, verify_block
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.transfer import copy_into

from .arrays import byte_tensor, torch_dtype
from .catalog import RecordRef, may_pass


class BlocksLostError(ChainError):
    """No tier has a record's block right; ``lost`` names the (tier, key) pairs that failed."""

    def __init__(self, ref: RecordRef, lost: Sequence[tuple[str, str]], cause: str) -> None:
        self.lost = tuple(lost)
        super().__init__(
            f"no tier has this {ref.kind} whole: {cause}", term=ref.term, part=ref.part,
            step=ref.step, key=ref.key, hint="an older step is restored; fsck names the damage",
        )  # fmt: skip


class Fetcher:
    """Reads heads and blocks by reference, verified, nearest tier first.

    Of a damaged record the blocks that verify are taken, the others from the next tier; a tier
    that does not answer for a record is not asked for it again. Counts blocks verified and
    which tiers gave bytes. Any thread may call any method.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers: Mapping[str, Tier] = {tier.traits.name: tier for tier in tiers}
        self.failed: set[tuple[str, str]] = set()
        self.failures: list[AdaCheckError] = []
        self.blocks_verified = 0
        self.bytes_read = 0
        self.used: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def tiers(self) -> Sequence[Tier]:
        """The tiers that are read, nearest first."""
        return tuple(self._tiers.values())

    @property
    def parallel(self) -> int:
        """How many reads at once pay, with the tier that waits longest."""
        return max((tier.traits.parallel for tier in self._tiers.values()), default=1)

    def _candidates(self, ref: RecordRef) -> list[str]:
        held = [name for name in self._tiers if name in ref.tiers]  # a plan is made elsewhere
        return [name for name in held if (name, ref.key) not in self.failed]

    def _fail(self, ref: RecordRef, tier: str, error: AdaCheckError) -> None:
        self.failed.add((tier, ref.key))
        self.failures.append(error.at(tier=tier, key=ref.key))

    def _lost(self, ref: RecordRef) -> BlocksLostError:
        pairs = [(name, ref.key) for name in ref.tiers]
        messages = dict.fromkeys(str(e) for e in self.failures if e.place.get("key") == ref.key)
        return BlocksLostError(ref, pairs, "; ".join(messages) or "it is held nowhere")

    def raise_unread(self, key: str = "") -> None:
        """Raise what kept a record (that of ``key`` alone, if given) from being read, if anything
        did: unread is not damaged."""
        for failure in self.failures:
            if may_pass(failure) and key in ("", failure.place.get("key")):
                raise failure from None

    def head(self, ref: RecordRef) -> SealedHead:
        """The verified head; raises `BlocksLostError`."""
        for name in self._candidates(ref):
            try:
                sealed = self._tiers[name].head(ref.key)
                if sealed.id != ref.id:
                    raise DigestMismatchError("another record lies under this key")
            except AdaCheckError as error:
                self._fail(ref, name, error)
            else:
                return sealed
        raise self._lost(ref)

    def read(self, ref: RecordRef, info: ArrayInfo, first: int, count: int) -> memoryview:
        """Verified bytes of ``count`` blocks from ``first``; raises `BlocksLostError`."""

        def get(tier: Tier, index: int, number: int) -> memoryview:
            return memoryview(tier.read(ref.key, info.name, index, number))

        return self._verified(ref, info, first, count, get)

    def read_into(
        self, ref: RecordRef, info: ArrayInfo, first: int, count: int, out: memoryview
    ) -> None:
        """The same into ``out``, as long as the blocks are."""

        def get(tier: Tier, index: int, number: int) -> memoryview:
            at = (index - first) * BLOCK_BYTES
            view = out[at : at + number * BLOCK_BYTES]
            tier.read_into(ref.key, info.name, index, number, view)
            return view

        self._verified(ref, info, first, count, get)

    def _verified(
        self, ref: RecordRef, info: ArrayInfo, first: int, count: int,
        get: Callable[[Tier, int, int], memoryview],
    ) -> memoryview:  # fmt: skip
        """What ``get`` gives of a run of blocks, from the first tier that has it right."""
        damaged = False
        for name in self._candidates(ref):
            try:
                data = get(self._tiers[name], first, count)
                at = 0
                for index in range(first, first + count):
                    size = block_nbytes(info, index)
                    verify_block(info, index, data[at : at + size])
                    at += size
            except (FormatError, RecordNotFoundError) as error:
                self.failures.append(error.at(tier=name, key=ref.key))
                damaged = True
                continue
            except AdaCheckError as error:
                self._fail(ref, name, error)
                continue
            with self._lock:
                self.blocks_verified += count
                self.bytes_read += len(data)
                self.used[name] = self.used.get(name, 0) + len(data)
            return data
        if damaged and count > 1:  # no tier has them all right: each from whichever has it
            indexes = range(first, first + count)
            singly = [self._verified(ref, info, index, 1, get) for index in indexes]
            return memoryview(b"".join(singly))
        raise self._lost(ref)


class _Block:
    """A block of which several reads want a part: the first one fetches it for all."""

    def __init__(self, read: Callable[[], memoryview]) -> None:
        self._read, self._lock = read, threading.Lock()
        self._data: memoryview | None = None

    def data(self) -> memoryview:
        """Its bytes; raises `BlocksLostError`."""
        with self._lock:
            if self._data is None:
                self._data = self._read()
            return self._data


def _fresh(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


class Blocks(Protocol):
    """Gives verified blocks: a `Fetcher`, or what has them in memory."""

    def read(self, ref: RecordRef, info: ArrayInfo, first: int, count: int) -> memoryview:
        """See `Fetcher.read`."""
        ...

    def read_into(
        self, ref: RecordRef, info: ArrayInfo, first: int, count: int, out: memoryview
    ) -> None:
        """See `Fetcher.read_into`."""
        ...


@dataclass(frozen=True, slots=True)
class Want:
    """Bytes ``begin..end`` of a record's array that are to be read, by any thread.

    ``edges`` are the blocks of which only a part is wanted, by their indexes.
    """

    fetcher: Blocks
    ref: RecordRef
    info: ArrayInfo
    begin: int
    end: int
    edges: Mapping[int, _Block]

    def elements(self, memory: Callable[[int], torch.Tensor] = _fresh) -> torch.Tensor:
        """The elements, flat, in the array's dtype; to be read, not written.

        ``memory`` gives so many bytes, as a flat tensor of bytes.
        """
        out = memory(self.end - self.begin)
        self.into(out)
        return out.view(torch_dtype(self.info.dtype))

    def into(self, out: torch.Tensor) -> None:
        """Fill ``out`` (contiguous, as many bytes); raises `BlocksLostError`."""
        target = byte_tensor(out).numpy()
        begin, end = self.begin, self.end
        index = begin // BLOCK_BYTES
        while begin < end and (at := index * BLOCK_BYTES) < end:
            edge = self.edges.get(index)
            if edge is not None:
                block = edge.data()
                low, high = max(begin, at), min(end, at + len(block))
                copy_into(target.data, low - begin, block[low - at : high - at])
                index += 1
                continue
            count = 1  # straight to where they are wanted
            while index + count not in self.edges and (index + count) * BLOCK_BYTES < end:
                count += 1
            out_at = target[at - begin : min(end, at + count * BLOCK_BYTES) - begin]
            self.fetcher.read_into(self.ref, self.info, index, count, out_at.data)
            index += count


class FetchedSource:
    """A record as a source for a put, whose every block comes from a tier that has it right."""

    in_order = True

    def __init__(self, fetcher: Fetcher, ref: RecordRef, key: str = "") -> None:
        """Reads the head; raises `BlocksLostError`. It is put under ``key``, if that is given."""
        self.key, self.expected_id = key or ref.key, ref.id
        self._ref, self._fetcher = ref, fetcher
        self._sealed = fetcher.head(ref)
        self.sizes = {info.name: info.nbytes for info in self._sealed.head.arrays}

    def blocks(self) -> Iterator[Block]:
        """The record's blocks, one at a time; raises `BlocksLostError`."""
        for info in self._sealed.head.arrays:
            for index in range(len(info.digests)):
                yield Block(info.name, index, self._fetcher.read(self._ref, info, index, 1))

    def seal(self) -> SealedHead:
        """The record's head."""
        return self._sealed


class ArrayReader:
    """Reads element ranges of a record's arrays. A block that a range shares with the one asked
    for before it, of the same array, is read once.
    """

    def __init__(
        self, fetcher: Fetcher | Blocks, ref: RecordRef, sealed: SealedHead | None = None
    ) -> None:  # fmt: skip
        """Only a `Fetcher` can do without the head."""
        self.ref = ref
        if sealed is None:
            assert isinstance(fetcher, Fetcher)
            sealed = fetcher.head(ref)
        self.sealed = sealed
        self._fetcher: Blocks = fetcher
        self._arrays = {info.name: info for info in self.sealed.head.arrays}
        self._last: dict[str, tuple[int, _Block]] = {}

    @property
    def head(self) -> Head:
        """The record's head."""
        return self.sealed.head

    def prepare(self, only: Any) -> None:
        """A fold of ``only`` that (`fold.Only`; None: of all) begins to read here."""

    def forget(self) -> None:
        """It is done."""

    def info(self, array: str) -> ArrayInfo | None:
        """What the head says of an array; None if there is none of that name."""
        return self._arrays.get(array)

    def elements(self, array: str, start: int, stop: int) -> torch.Tensor:
        """Elements start..stop of an array, flat, in its dtype; to be read, not written."""
        return self.want(array, start, stop).elements()

    def read_into(self, array: str, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` (contiguous, its dtype's bytes) with elements from ``start``."""
        self.want(array, start, start + out.numel()).into(out)

    def want(self, array: str, start: int, stop: int) -> Want:
        """Elements start..stop of an array, to be read by any thread; ask for them in order."""
        info = self.head.array(array)
        begin, end = (item_bytes(info.dtype) * at for at in (start, stop))
        if end > begin and not 0 <= begin < end <= info.nbytes:
            raise DigestMismatchError(
                f"array {array} has no bytes {begin}..{end}", key=self.ref.key,
                **self.head.place(),
            )  # fmt: skip
        edges: dict[int, _Block] = {}
        if end > begin:
            if begin % BLOCK_BYTES:
                self._share(info, begin // BLOCK_BYTES, edges)
            if end % BLOCK_BYTES and end != info.nbytes:
                self._share(info, end // BLOCK_BYTES, edges)
        return Want(self._fetcher, self.ref, info, begin, end, edges)

    def _share(self, info: ArrayInfo, index: int, edges: dict[int, _Block]) -> None:
        kept = self._last.get(info.name)
        if kept is None or kept[0] != index:
            block = _Block(partial(self._fetcher.read, self.ref, info, index, 1))
            kept = self._last[info.name] = index, block
        edges[index] = kept[1]


@contextmanager
def lost_if_malformed(ref: RecordRef) -> Iterator[None]:
    """A record whose body cannot be used is as good as lost: without it another plan is made."""
    try:
        yield
    except FormatError as error:
        raise BlocksLostError(ref, [(t, ref.key) for t in ref.tiers], error.message) from error


@contextmanager
def refused(reader: ArrayReader) -> Iterator[None]:
    """What torch says of nonsense in a delta is an error of ours that names the delta."""
    try:
        yield
    except (AdaCheckError, MemoryError):
        raise
    except Exception as error:
        raise MalformedError(
            f"the optimizer refuses this update: {type(error).__name__}: {error}"[:400],
            rule="delta", hint="restore an earlier step by naming it",
        ).at(key=reader.ref.key, **reader.head.place()) from error  # fmt: skip
