"""The LMDB tier keeps records on a local disk of this node, in one LMDB environment.

Layout of the entries: `lmdb_entries`. Pages are written first, all heads of a put in one last
transaction, so records exist together or not at all. LMDB flushes the data of a transaction
before it writes the meta page that makes it count, so after a loss of power some last transactions
may be gone, but never one from the middle; `sync` flushes the last meta page too.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import lmdb
import numpy as np

from adacheck_store.format.errors import (
    AdaCheckError,
    FormatError,
    OrderError,
    RecordNotFoundError,
    TierReadOnlyError,
)
from adacheck_store.format.head import SealedHead
from adacheck_store.format.ids import Buffer
from adacheck_store.format.keys import is_key, parse_key
from adacheck_store.format.record import encode_header

from . import lmdb_open
from .base import Source, Tier, TierTraits
from .blocks import check_length, check_range, span
from .intake import Intake, Links, check_place, check_same, check_sources, placed
from .lmdb_entries import (
    PAGE_BYTES,
    PREFIX_BYTES,
    Entry,
    HeadCache,
    Ledger,
    cost,
    delete_pages,
    entries_from,
    head_key,
    page_key,
    put_entry,
)
from .lmdb_env import LmdbEnv
from .lmdb_pages import PageWriter, Spare
from .transfer import copy_into

DEFAULT_CAPACITY_BYTES = 64 << 30
_LIST_KEYS = 1000
_SPARE_BUFFERS = 4


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A record whose pages are written or waiting, and whose head is to follow."""

    source: Source
    sealed: SealedHead
    prefix: bytes
    header: bytes
    fresh: bool

    @property
    def value(self) -> bytes:
        return self.prefix + self.header


class LmdbTier(Tier):
    """Records in an LMDB folder. One process writes, any number read beside it.

    Tiers on the same folder in one process share one environment. ``put`` makes visible (and
    safe from the death of the process), ``sync`` durable. Never carry a tier across a fork.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, capacity_bytes: int | None = None,
        readonly: bool = False, name: str = "lmdb",
    ) -> None:  # fmt: skip
        self.traits = TierTraits(name=name, durable=True)
        self.path = os.path.realpath(path)
        self.readonly = readonly
        self._lock = threading.Lock()
        self._links = Links(self)
        self._heads = HeadCache()
        self._spare: Spare = deque(maxlen=_SPARE_BUFFERS)
        self._shared: lmdb_open.Shared | None = lmdb_open.acquire(
            self.path, name, capacity_bytes or DEFAULT_CAPACITY_BYTES, readonly=readonly
        )

    # -- writing --

    def put(self, sources: Sequence[Source]) -> None:
        """Store records; see `Tier.put`."""
        with placed(tier=self.traits.name, path=self.path):
            env, ledger = self._writer()
            check_sources(sources)
            pages = PageWriter(env, ledger, self._spare)
            fresh: dict[bytes, bytes] = {}
            try:
                arrivals = [self._take(env, ledger, pages, source, fresh) for source in sources]
                self._links.check(arrival.sealed for arrival in arrivals)
                self._publish(env, pages, arrivals)
            except BaseException:
                self._withdraw(env, fresh)
                raise

    def _take(
        self, env: LmdbEnv, ledger: Ledger, pages: PageWriter, source: Source,
        fresh: dict[bytes, bytes],
    ) -> _Arrival:  # fmt: skip
        with placed(key=source.key):
            held = self._held(env, source)
            if held is None:
                with env.write_lock:
                    prefix = ledger.new_prefix()
                fresh[head_key(source.key)] = prefix
            else:
                prefix = held.prefix
            intake = Intake(source, held.sealed if held else None)
            pages.begin(prefix, repair=held is not None)
            for block in intake.blocks():
                pages.add(block)
            pages.end()
            sealed = intake.seal()
            return _Arrival(source, sealed, prefix, encode_header(sealed), held is None)

    def _held(self, env: LmdbEnv, source: Source) -> Entry | None:
        """The record that stands under the source's key, if it verifies; it must be the same."""
        with env.reading() as txn:
            try:
                entry = self._entry(txn, source.key)
            except (FormatError, RecordNotFoundError):
                return None
        check_same(source, entry.sealed)
        return entry

    def _publish(self, env: LmdbEnv, pages: PageWriter, arrivals: list[_Arrival]) -> None:
        new = [arrival for arrival in arrivals if arrival.fresh]
        stale: list[bytes] = []

        def body(txn: lmdb.Transaction) -> int:
            stale.clear()
            grown = pages.write_waiting(txn)
            for arrival in new:
                key = head_key(arrival.source.key)
                old = txn.get(key)
                if old is not None and self._stands(old, arrival):
                    # Another thread was faster, and a third may be repairing what it put.
                    stale.append(arrival.prefix)
                    continue
                if old is not None:
                    stale.append(bytes(old[:PREFIX_BYTES]))
                grown += put_entry(txn, key, arrival.value)
            return grown

        heads = sum(cost(len(a.source.key) + 1, len(a.header) + PREFIX_BYTES) for a in new)
        pages.reserve(heads)
        if new or pages.waiting_bytes:
            pages.written(env.write("lmdb.head", body, pages.waiting_bytes + heads))
        self._drop(env, stale)

    def _stands(self, old: Buffer, arrival: _Arrival) -> bool:
        """Whether a record that came meanwhile verifies; another one than ours is a fork."""
        try:
            held = self._heads.parse(old).sealed
        except FormatError:
            return False
        if held.id != arrival.sealed.id:
            check_same(arrival.source, held)
        return True

    def _withdraw(self, env: LmdbEnv, fresh: Mapping[bytes, bytes]) -> None:
        """Delete the pages of a put that failed; what cannot be is swept at the next open.

        A commit may report an error and stand: what has a head keeps its pages.
        """
        with suppress(AdaCheckError):
            with env.reading() as txn:
                loose = [
                    prefix for name, prefix in fresh.items()
                    if bytes((txn.get(name) or b"")[:PREFIX_BYTES]) != prefix
                ]  # fmt: skip
            self._drop(env, loose)

    def _drop(self, env: LmdbEnv, prefixes: Iterable[bytes]) -> None:
        freed = delete_pages(env, prefixes, "lmdb.delete")
        if freed:
            with env.write_lock:
                self._ledger().used_bytes -= freed

    def delete(self, keys: Iterable[str]) -> None:
        """Delete records, heads first; missing ones are passed over."""
        with placed(tier=self.traits.name, path=self.path):
            env, ledger = self._writer()
            names = [head_key(key) for key in keys if is_key(key)]

            def body(txn: lmdb.Transaction) -> tuple[int, list[bytes]]:
                freed, values = 0, []
                for name in names:
                    value = txn.get(name)
                    if value is not None:
                        values.append(bytes(value))
                        freed += cost(len(name), len(value))
                        txn.delete(name)
                return freed, values

            freed, values = env.write("lmdb.delete", body)
            with env.write_lock:
                ledger.used_bytes -= freed
            self._drop(env, [value[:PREFIX_BYTES] for value in values])
            self._heads.forget(values)
            self._links.forget()

    def sync(self) -> None:
        """Return when all that was put is on the disk."""
        with placed(tier=self.traits.name, path=self.path):
            if not self.readonly:
                self._env().sync()

    # -- reading --

    def head(self, key: str) -> SealedHead:
        """The verified head of a record."""
        with placed(tier=self.traits.name, key=key, path=self.path):
            with self._env().reading() as txn:
                entry = self._entry(txn, key)
            check_place(parse_key(key), entry.sealed)
            return entry.sealed

    def read(self, key: str, array: str, first: int, count: int) -> memoryview:
        """Bytes of a run of blocks, not verified."""
        place = placed(tier=self.traits.name, key=key, path=self.path)
        with place, self._env().reading() as txn:
            entry = self._entry(txn, key)
            info = check_range(entry.sealed, array, first, count)
            start, stop = span(info, first, count)
            found = np.empty(stop - start, dtype=np.uint8)
            for page in range(start // PAGE_BYTES, -(-stop // PAGE_BYTES)):
                data = txn.get(page_key(entry.prefix, array, page))
                if data is None:
                    raise RecordNotFoundError(f"page {page} of {array} is missing")
                at = page * PAGE_BYTES
                check_length(array, page, len(data), min(PAGE_BYTES, info.nbytes - at))
                piece = data[max(0, start - at) : stop - at]
                copy_into(found.data, max(0, at - start), piece)
            return found.data

    def list(self, prefix: str) -> Iterator[str]:
        """Keys that begin with a prefix, sorted."""
        after = head_key(prefix)
        while True:
            with placed(tier=self.traits.name, path=self.path), self._env().reading() as txn:
                batch = entries_from(txn, after, head_key(prefix), _LIST_KEYS)
            if not batch:
                return
            for name in batch:
                key = name[1:].decode(errors="replace")
                if is_key(key):
                    yield key
            after = batch[-1] + b"\0"

    def stamp(self, key: str) -> str:
        """A text that is another one once a record was put anew, or all of the folder."""
        with placed(tier=self.traits.name, key=key, path=self.path):
            with self._env().reading() as txn:
                prefix = self._entry(txn, key).prefix
            return f"{os.stat(os.path.join(self.path, 'data.mdb')).st_ino} {prefix.hex()}"

    def _entry(self, txn: lmdb.Transaction, key: str) -> Entry:
        name = head_key(key)
        value = txn.get(name) if len(name) <= 511 else None
        if value is None:
            raise RecordNotFoundError("no such record")
        return self._heads.parse(value)

    # -- state --

    def used_bytes(self) -> int:
        """Bytes the records take, about; for a writer only."""
        return self._writer()[1].used_bytes

    def free_bytes(self) -> int:
        """Bytes left of the tier's capacity; for a writer only."""
        env, ledger = self._writer()
        return max(0, env.capacity_bytes - ledger.used_bytes)

    def close(self) -> None:
        """Release the environment; idempotent."""
        with self._lock:
            shared, self._shared = self._shared, None
        if shared is not None:
            lmdb_open.release(shared)

    def _env(self) -> LmdbEnv:
        shared = self._shared
        if shared is None:
            raise OrderError("the tier is closed")
        return shared.env

    def _ledger(self) -> Ledger:
        return self._writer()[1]

    def _writer(self) -> tuple[LmdbEnv, Ledger]:
        shared = self._shared
        if shared is None:
            raise OrderError("the tier is closed")
        if self.readonly or shared.ledger is None:
            raise TierReadOnlyError("opened for reading only", hint="open it without readonly")
        return shared.env, shared.ledger
