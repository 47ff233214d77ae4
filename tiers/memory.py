"""The memory tier is the reference: a dictionary of records, gone with the process."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

from adacheck_store.format.errors import OrderError, RecordNotFoundError
from adacheck_store.format.head import ArrayInfo, SealedHead
from adacheck_store.format.record import block_nbytes

from .base import Source, Tier, TierTraits
from .blocks import check_length, check_range
from .intake import Intake, Links, check_same, check_sources, placed

_Blocks = dict[tuple[str, int], bytes]


class MemoryTier(Tier):
    """Records in this process's memory."""

    def __init__(self, name: str = "memory") -> None:
        self.traits = TierTraits(name=name, log=True)
        self._records: dict[str, tuple[SealedHead, _Blocks]] = {}
        self._lock = threading.RLock()
        self._links = Links(self)
        self._closed = False

    def put(self, sources: Sequence[Source]) -> None:
        """Store records; see `Tier.put`."""
        with placed(tier=self.traits.name):
            self._check_open()
            check_sources(sources)
            taken = {source.key: self._take(source) for source in sources}
            self._links.check(sealed for sealed, _ in taken.values())
            with self._lock:
                for source in sources:
                    self._held(source)
                self._records.update(taken)

    def _held(self, source: Source) -> SealedHead | None:
        with self._lock:
            self._check_open()
            record = self._records.get(source.key)
        if record is None:
            return None
        check_same(source, record[0])
        return record[0]

    def _take(self, source: Source) -> tuple[SealedHead, _Blocks]:
        with placed(key=source.key):
            intake = Intake(source, self._held(source))
            blocks = {(block.array, block.index): bytes(block.data) for block in intake.blocks()}
            return intake.seal(), blocks

    def head(self, key: str) -> SealedHead:
        """The verified head of a record."""
        return self._record(key)[0]

    def read(self, key: str, array: str, first: int, count: int) -> bytes:
        """Bytes of a run of blocks, not verified."""
        sealed, blocks = self._record(key)
        with placed(tier=self.traits.name, key=key):
            info = check_range(sealed, array, first, count)
            return b"".join(self._block(blocks, info, i) for i in range(first, first + count))

    def _block(self, blocks: _Blocks, info: ArrayInfo, index: int) -> bytes:
        data = blocks.get((info.name, index))
        if data is None:
            raise RecordNotFoundError(f"block {index} of {info.name} is missing")
        check_length(info.name, index, len(data), block_nbytes(info, index))
        return data

    def list(self, prefix: str) -> Iterator[str]:
        """Keys that begin with a prefix, sorted."""
        with self._lock:
            self._check_open()
            found = sorted(key for key in self._records if key.startswith(prefix))
        yield from found

    def delete(self, keys: Iterable[str]) -> None:
        """Delete records; missing ones are passed over."""
        with self._lock:
            self._check_open()
            for key in keys:
                self._records.pop(key, None)
        self._links.forget()

    def sync(self) -> None:
        """Nothing: memory is never durable."""
        self._check_open()

    def close(self) -> None:
        """Drop everything."""
        with self._lock:
            self._closed = True
            self._records.clear()

    def nbytes(self) -> int:
        """Bytes of all blocks held."""
        with self._lock:
            return sum(
                len(data) for _, blocks in self._records.values() for data in blocks.values()
            )

    def _record(self, key: str) -> tuple[SealedHead, _Blocks]:
        with self._lock:
            self._check_open()
            record = self._records.get(key)
        if record is None:
            raise RecordNotFoundError("no such record", tier=self.traits.name, key=key)
        return record

    def _check_open(self) -> None:
        if self._closed:
            raise OrderError("the tier is closed", tier=self.traits.name)
