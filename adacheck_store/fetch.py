"""Reading verified blocks of records, from whichever tier has them right."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
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
from adacheck_store.format.ids import BLOCK_BYTES, block_count
from adacheck_store.format.record import block_nbytes, verify_block
from adacheck_store.tiers.base import Tier

from .arrays import byte_tensor, torch_dtype
from .catalog import RecordRef


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
    which tiers gave bytes. Not thread-safe.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers: Mapping[str, Tier] = {tier.traits.name: tier for tier in tiers}
        self.failed: set[tuple[str, str]] = set()
        self.failures: list[AdaCheckError] = []
        self.blocks_verified = 0
        self.bytes_read = 0
        self.used: dict[str, int] = {}

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
        damaged = False
        for name in self._candidates(ref):
            try:
                data = memoryview(self._tiers[name].read(ref.key, info.name, first, count))
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
            self.blocks_verified += count
            self.bytes_read += len(data)
            self.used[name] = self.used.get(name, 0) + len(data)
            return data
        if damaged and count > 1:  # no tier has them all right: each from whichever has it
            singly = [self.read(ref, info, index, 1) for index in range(first, first + count)]
            return memoryview(b"".join(singly))
        raise self._lost(ref)


class ArrayReader:
    """Reads element ranges of a record's arrays through a small cache of blocks."""

    def __init__(self, fetcher: Fetcher, ref: RecordRef, sealed: SealedHead | None = None) -> None:
        self.ref = ref
        self.sealed = sealed or fetcher.head(ref)
        self._fetcher = fetcher
        self._arrays = {info.name: info for info in self.sealed.head.arrays}
        self._cache: OrderedDict[tuple[str, int], memoryview] = OrderedDict()

    @property
    def head(self) -> Head:
        """The record's head."""
        return self.sealed.head

    def info(self, array: str) -> ArrayInfo | None:
        """What the head says of an array; None if there is none of that name."""
        return self._arrays.get(array)

    def elements(self, array: str, start: int, stop: int) -> torch.Tensor:
        """Elements start..stop of an array, flat, in its dtype; to be read, not written."""
        info = self.head.array(array)
        out = torch.empty((stop - start) * item_bytes(info.dtype), dtype=torch.uint8)
        self.read_into(array, start, out)
        return out.view(torch_dtype(info.dtype))

    def read_into(self, array: str, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` (contiguous, its dtype's bytes) with elements from ``start``."""
        info = self.head.array(array)
        target = byte_tensor(out).numpy()
        begin = start * item_bytes(info.dtype)
        end = begin + len(target)
        if end == begin:
            return
        if not 0 <= begin < end <= info.nbytes:
            raise DigestMismatchError(
                f"array {array} has no bytes {begin}..{end}", key=self.ref.key,
                **self.head.place(),
            )  # fmt: skip
        first, last = begin // BLOCK_BYTES, block_count(end)
        index = first
        while index < last:
            block = self._cached(array, index)
            count = 1
            if block is None:
                while index + count < last and (array, index + count) not in self._cache:
                    count += 1
                block = self._fetcher.read(self.ref, info, index, count)
                self._remember(array, index + count - 1, block, end)
            at = index * BLOCK_BYTES
            low, high = max(begin, at), min(end, at + len(block))
            target[low - begin : high - begin] = np.frombuffer(
                block, dtype=np.uint8, offset=low - at, count=high - low
            )
            index += count

    def _cached(self, array: str, index: int) -> memoryview | None:
        return self._cache.get((array, index))

    def _remember(self, array: str, index: int, data: memoryview, end: int) -> None:
        """Keep the last block of a run, ``index``, if the next window begins inside it.

        Alone: a fold has a reader for each delta, and a view would keep the run with it.
        """
        for key in [key for key in self._cache if key[0] == array]:
            del self._cache[key]
        if end < min((index + 1) * BLOCK_BYTES, self.head.array(array).nbytes):
            at = (len(data) - 1) // BLOCK_BYTES * BLOCK_BYTES
            self._cache[array, index] = data if not at else memoryview(bytes(data[at:]))


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
