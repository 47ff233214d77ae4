"""The memory tier is the reference: a dictionary of records, gone with the process."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence, Sized

from adacheck_store.format.errors import OrderError, RecordNotFoundError
from adacheck_store.format.head import ArrayInfo, SealedHead
from adacheck_store.format.record import Block, block_nbytes

from .base import Source, Tier, TierTraits
from .blocks import check_length, check_range
from .intake import Intake, Links, ask_before_heads, check_same, check_sources, placed

Stored = Sized
"""A block as it is kept: its bytes, or in a class derived from this one, where they are."""

Blocks = dict[tuple[str, int], Stored]


class MemoryTier(Tier):
    """Records in this process's memory."""

    def __init__(self, name: str = "memory") -> None:
        self.traits = TierTraits(name=name, log=True)
        self._records: dict[str, tuple[SealedHead, Blocks]] = {}
        self._lock = threading.RLock()
        self._links = Links(self)
        self._closed = False

    def put(self, sources: Sequence[Source]) -> None:
        """Store records; see `Tier.put`."""
        with placed(tier=self.traits.name):
            self._check_open()
            check_sources(sources)
            useless: list[Blocks] = []  # all that is taken in, until the put is sure to succeed
            try:
                taken = {source.key: self._take(source, useless) for source in sources}
                self._links.check(sealed for sealed, _ in taken.values())
                ask_before_heads(sources)
                with self._lock:
                    for source in sources:
                        self._held(source)
                    useless = [self._records[key][1] for key in taken if key in self._records]
                    self._records.update(taken)
            finally:
                self._let_go(useless)

    def _held(self, source: Source) -> SealedHead | None:
        with self._lock:
            self._check_open()
            record = self._records.get(source.key)
        if record is None:
            return None
        check_same(source, record[0])
        return record[0]

    def _take(self, source: Source, begun: list[Blocks]) -> tuple[SealedHead, Blocks]:
        """Take a source in; its blocks are among those ``begun`` from the first on."""
        with placed(key=source.key):
            intake = Intake(source, self._held(source))
            blocks: Blocks = {}
            begun.append(blocks)
            for block in intake.blocks():
                blocks[block.array, block.index] = self._keep(block)
            return intake.seal(), blocks

    def _keep(self, block: Block) -> Stored:
        """Keep a block; raises `TierFullError` where there is no memory for it."""
        return bytes(block.data)

    def _let_go(self, records: Iterable[Blocks]) -> None:
        """Blocks of records are of no further use."""

    def head(self, key: str) -> SealedHead:
        """The verified head of a record."""
        return self._record(key)[0]

    def read(self, key: str, array: str, first: int, count: int) -> bytes | memoryview:
        """Bytes of a run of blocks, not verified."""
        sealed, blocks = self._record(key)
        with placed(tier=self.traits.name, key=key):
            info = check_range(sealed, array, first, count)
            found = [self._block(blocks, info, i) for i in range(first, first + count)]
            return b"".join(block for block in found if isinstance(block, bytes))

    def _block(self, blocks: Blocks, info: ArrayInfo, index: int) -> Stored:
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
            gone = [self._records.pop(key)[1] for key in {*keys} if key in self._records]
        self._let_go(gone)
        self._links.forget()

    def sync(self) -> None:
        """Nothing: memory is never durable."""
        self._check_open()

    def close(self) -> None:
        """Drop everything."""
        with self._lock:
            self._closed = True
            gone = [blocks for _, blocks in self._records.values()]
            self._records.clear()
        self._let_go(gone)

    def nbytes(self) -> int:
        """Bytes of all blocks held."""
        with self._lock:
            return sum(
                len(data) for _, blocks in self._records.values() for data in blocks.values()
            )

    def _record(self, key: str) -> tuple[SealedHead, Blocks]:
        with self._lock:
            self._check_open()
            record = self._records.get(key)
        if record is None:
            raise RecordNotFoundError("no such record", tier=self.traits.name, key=key)
        return record

    def _check_open(self) -> None:
        if self._closed:
            raise OrderError("the tier is closed", tier=self.traits.name)
