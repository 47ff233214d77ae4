"""Reading verified blocks of records, from whichever tier has them right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

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
from adacheck_store.tiers.transfer import copy_into

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


class ArrayReader:
    """Reads element ranges of a record's arrays through a small cache of blocks.

    Any thread may call any method.
    """

    def __init__(self, fetcher: Fetcher, ref: RecordRef, sealed: SealedHead | None = None) -> None:
        self.ref = ref
        self.sealed = sealed or fetcher.head(ref)
        self._fetcher = fetcher
        self._arrays = {info.name: info for info in self.sealed.head.arrays}
        self._cache: dict[str, tuple[int, memoryview]] = {}

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
        whole = info.nbytes if end == info.nbytes else end - end % BLOCK_BYTES
        index = begin // BLOCK_BYTES
        while (at := index * BLOCK_BYTES) < end:
            count = 1
            if at >= begin and at < whole:  # straight to where it is wanted
                count = block_count(whole - at)
                out_at = target[at - begin : min(whole, at + count * BLOCK_BYTES) - begin]
                self._fetcher.read_into(self.ref, info, index, count, out_at.data)
            else:
                block = self._edge(info, index)
                low, high = max(begin, at), min(end, at + len(block))
                copy_into(target.data, low - begin, block[low - at : high - at])
            index += count

    def _edge(self, info: ArrayInfo, index: int) -> memoryview:
        """A block of which a window wants a part; the next window begins inside the last one."""
        kept = self._cache.get(info.name)
        if kept is None or kept[0] != index:
            kept = self._cache[info.name] = index, self._fetcher.read(self.ref, info, index, 1)
        return kept[1]


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
