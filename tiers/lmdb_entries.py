"""What the entries of the LMDB tier mean.

::

    m                                            marker: {"format", "version"}
    h <record key>                               8 bytes prefix, then the safetensors header
    p <prefix:8> <digest of array name:8> <n:4>  page n of an array: 4 blocks, the last ones fewer

Integers are big-endian. The prefix, a number no other record ever had, keeps page keys short and
lets pages be written before their head; pages whose prefix no head names are orphans of a put
that did not end, and are swept when a writer opens the tier.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache

import lmdb

from adacheck_store.format.errors import TierFullError
from adacheck_store.format.head import SealedHead
from adacheck_store.format.ids import BLOCK_BYTES, Buffer
from adacheck_store.format.record import decode_header

from .lmdb_env import MARKER_KEY, LmdbEnv

PAGE_BLOCKS = 4
PAGE_BYTES = PAGE_BLOCKS * BLOCK_BYTES
PREFIX_BYTES = 8
_DELETE_ENTRIES = 4096
_CACHE_HEADS = 4096
_CACHE_BYTES = 64 << 20

_ENGINE_PAGE_BYTES = 4096
_INLINE_BYTES = 2000


def head_key(key: str) -> bytes:
    """Entry of a record's head."""
    return b"h" + key.encode()


def page_key(prefix: bytes, array: str, page: int) -> bytes:
    """Entry of a page of an array."""
    return b"p" + prefix + _array_digest(array) + struct.pack(">I", page)


@lru_cache(maxsize=4096)
def _array_digest(array: str) -> bytes:
    return hashlib.blake2b(array.encode(), digest_size=8).digest()


def cost(key_bytes: int, value_bytes: int) -> int:
    """Bytes an entry takes in the file, about: large values take whole pages of their own."""
    inline = key_bytes + value_bytes + 10
    if inline <= _INLINE_BYTES:
        return inline
    pages = -(-(16 + value_bytes) // _ENGINE_PAGE_BYTES)
    return pages * _ENGINE_PAGE_BYTES + key_bytes + 18


def entries_from(
    txn: lmdb.Transaction, start: bytes, prefix: bytes, most: int
) -> list[bytes]:  # fmt: skip
    """Up to ``most`` entries' keys that begin with ``prefix``, from ``start`` on."""
    found: list[bytes] = []
    cursor = txn.cursor()
    more = cursor.set_range(start)
    while more and len(found) < most:
        name = bytes(cursor.key())
        if not name.startswith(prefix):
            break
        found.append(name)
        more = cursor.next()
    return found


def put_entry(txn: lmdb.Transaction, key: bytes, value: Buffer) -> int:
    """Put an entry; returns by how many bytes the tier grew."""
    old = txn.get(key)
    before = 0 if old is None else cost(len(key), len(old))
    txn.put(key, value)
    return cost(len(key), len(value)) - before


@dataclass(slots=True)
class Ledger:
    """What a writer knows of its tier: bytes in use, and the next prefix. Owner: the write lock."""

    used_bytes: int = 0
    next_prefix: int = 1

    def new_prefix(self) -> bytes:
        """A prefix no record ever had."""
        prefix = struct.pack(">Q", self.next_prefix)
        self.next_prefix += 1
        return prefix


def take_stock(env: LmdbEnv) -> Ledger:
    """Sum up the entries of a tier, after sweeping orphan pages."""
    ledger = Ledger()
    known: set[bytes] = set()
    orphans: dict[bytes, None] = {}
    with env.reading() as txn:
        for key, value in txn.cursor():
            kind = bytes(key[:1])
            ledger.used_bytes += cost(len(key), len(value))
            prefix = bytes(value[:PREFIX_BYTES]) if kind == b"h" else bytes(key[1:9])
            if kind == b"h":
                known.add(prefix)
            elif kind == b"p" and prefix not in known:
                orphans[prefix] = None
            if kind in b"hp":
                ledger.next_prefix = max(ledger.next_prefix, int.from_bytes(prefix, "big") + 1)
    ledger.used_bytes -= delete_pages(env, orphans, "lmdb.sweep")
    return ledger


def delete_pages(env: LmdbEnv, prefixes: Iterable[bytes], point: str) -> int:
    """Delete all pages of some prefixes, a bounded number a transaction; returns bytes freed."""
    freed, left = 0, sorted(prefixes)
    while left:

        def body(txn: lmdb.Transaction, left: Sequence[bytes] = tuple(left)) -> tuple[int, int]:
            return _delete_some(txn, left)

        some, done = env.write(point, body)
        freed += some
        del left[:done]
    if freed:
        with suppress(TierFullError):
            env.write(point, _touch)
    return freed


def _touch(txn: lmdb.Transaction) -> None:
    """Change nothing: LMDB reuses the pages a transaction freed from the second one on."""
    txn.put(MARKER_KEY, bytes(txn.get(MARKER_KEY) or b""))


def _delete_some(txn: lmdb.Transaction, prefixes: Sequence[bytes]) -> tuple[int, int]:
    """Delete up to a bounded number of entries; returns bytes freed and prefixes done."""
    freed, room = 0, _DELETE_ENTRIES
    cursor = txn.cursor()
    for done, prefix in enumerate(prefixes):
        start = b"p" + prefix
        while cursor.set_range(start) and bytes(cursor.key()[: len(start)]) == start:
            if not room:
                return freed, done
            freed += cost(len(cursor.key()), len(cursor.value()))
            cursor.delete()
            room -= 1
    return freed, len(prefixes)


@dataclass(frozen=True, slots=True)
class Entry:
    """A record's head as it stands: its prefix and its head, verified."""

    prefix: bytes
    sealed: SealedHead


@dataclass(slots=True)
class HeadCache:
    """Parsed heads by the very bytes that were parsed: never stale, whoever writes."""

    _entries: OrderedDict[bytes, Entry] = field(default_factory=OrderedDict)
    _bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def parse(self, value: Buffer) -> Entry:
        """The entry of a head's value; raises a `FormatError` if it does not verify."""
        text = bytes(value)
        entry = self._entries.get(text)
        if entry is None:
            entry = Entry(text[:PREFIX_BYTES], decode_header(memoryview(text)[PREFIX_BYTES:]))
            self._keep(text, entry)
        return entry

    def forget(self, values: Iterable[bytes]) -> None:
        """Keep the heads of these values no longer: their records are deleted."""
        with self._lock:
            for text in values:
                if self._entries.pop(text, None) is not None:
                    self._bytes -= len(text)

    def _keep(self, text: bytes, entry: Entry) -> None:
        with self._lock:
            self._bytes += 0 if text in self._entries else len(text)
            self._entries[text] = entry
            while len(self._entries) > _CACHE_HEADS or self._bytes > _CACHE_BYTES:
                dropped, _ = self._entries.popitem(last=False)
                self._bytes -= len(dropped)
