"""How the LMDB tier writes the pages of a put: a page's worth in each transaction."""

from __future__ import annotations

from collections import deque

import lmdb

from adacheck_store.format.ids import BLOCK_BYTES, Buffer
from adacheck_store.format.record import Block

from .lmdb_entries import PAGE_BLOCKS, PAGE_BYTES, Ledger, cost, page_key, put_entry
from .lmdb_env import LmdbEnv
from .medium import full
from .transfer import copy_into

Spare = deque[bytearray]


class PageWriter:
    """Collects blocks into pages, and writes those whenever they come to a page's worth.

    The cost of a transaction in LMDB grows with all it holds, so large records are written in
    many; the pages of small ones wait in `waiting` for the transaction that writes the heads.
    """

    def __init__(self, env: LmdbEnv, ledger: Ledger, spare: Spare) -> None:
        self._env = env
        self._ledger = ledger
        self._spare = spare
        self._waiting: list[tuple[bytes, Buffer]] = []
        self._waiting_bytes = 0
        self._open: dict[str, tuple[int, int, bytearray]] = {}
        self._prefix = b""
        self._repair = False

    def begin(self, prefix: bytes, *, repair: bool) -> None:
        """Begin a record; in a repair only pages that differ are written."""
        self._prefix = prefix
        self._repair = repair

    def add(self, block: Block) -> None:
        """Take one block; its data may be reused afterwards. An array's blocks come in order."""
        page, place = divmod(block.index, PAGE_BLOCKS)
        size = block.data.nbytes
        if place == 0 and size < BLOCK_BYTES:
            self._page(block.array, page, bytes(block.data))
            return
        if place == 0:
            self._open[block.array] = (page, 0, self._buffer())
        page, filled, buffer = self._open[block.array]
        copy_into(buffer, filled, block.data)
        filled += size
        self._open[block.array] = (page, filled, buffer)
        if filled == PAGE_BYTES or size < BLOCK_BYTES:
            self._finish(block.array)

    def end(self) -> None:
        """End the record: what is left of its arrays becomes pages."""
        for array in list(self._open):
            self._finish(array)

    def _finish(self, array: str) -> None:
        page, filled, buffer = self._open.pop(array)
        self._page(array, page, memoryview(buffer)[:filled])

    def _page(self, array: str, page: int, data: Buffer) -> None:
        key = page_key(self._prefix, array, page)
        if self._repair and self._stands(key, data):
            self._give_back(data)
            return
        self._waiting.append((key, data))
        self._waiting_bytes += cost(len(key), len(data))
        if self._waiting_bytes >= PAGE_BYTES:
            self.flush()

    def _stands(self, key: bytes, data: Buffer) -> bool:
        with self._env.reading() as txn:
            return bool(txn.get(key) == data)

    def flush(self) -> None:
        """Write the waiting pages in a transaction of their own."""
        self.reserve(0)
        grown = self._env.write("lmdb.page", self.write_waiting, self._waiting_bytes)
        self.written(grown)

    def reserve(self, head_bytes: int) -> None:
        """Raise `TierFullError` if the waiting pages and heads exceed the tier's capacity."""
        needed = self._waiting_bytes + head_bytes
        free = self._env.capacity_bytes - self._ledger.used_bytes
        if needed > free:
            raise full(self._env.tier, self._env.path, needed, free)

    def write_waiting(self, txn: lmdb.Transaction) -> int:
        """Write the waiting pages; they wait on until `written` says the transaction stands."""
        return sum(put_entry(txn, key, data) for key, data in self._waiting)

    def written(self, grown: int) -> None:
        """Account for a transaction that stands, and forget the pages it wrote."""
        with self._env.write_lock:
            self._ledger.used_bytes += grown
        for _, data in self._waiting:
            self._give_back(data)
        self._waiting.clear()
        self._waiting_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._waiting_bytes

    def _buffer(self) -> bytearray:
        try:
            return self._spare.pop()
        except IndexError:
            return bytearray(PAGE_BYTES)

    def _give_back(self, data: Buffer) -> None:
        if isinstance(data, memoryview) and isinstance(data.obj, bytearray):
            self._spare.append(data.obj)
