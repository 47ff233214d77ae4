"""Places: where the blocks of a record lie in memory that several processes of a node can read.

A reader has a descriptor of that memory, and copies from it; what it has copied it verifies.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from adacheck_store.format import strict
from adacheck_store.format.errors import MalformedError, TruncatedError, UnsupportedError
from adacheck_store.format.ids import BLOCK_BYTES, block_count

from .base import Tier
from .wire import decode_json

EPOCH = struct.Struct("<Q")
_KNOWN_MAX = 256
_PLACE_MAX = 1 << 62


class Memory:
    """A descriptor of such a file, closed when nobody refers to it any more.

    Page 0 holds the epoch, a number that grows before any place is given up: what was read while
    it stood still was there. Never mapped, so that no peer can make a reader fault.
    """

    def __init__(self, fd: int) -> None:
        """Take a descriptor over. Raises `UnsupportedError` if it is no such file, and closes it.

        Of such files alone it is certain that no read of them waits for anything.
        """
        self.fd = fd
        try:
            fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            found = os.fstat(fd)
        except OSError as error:
            raise UnsupportedError(f"no file in memory: {error}") from error
        self.identity = found.st_dev, found.st_ino

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self.fd)

    def epoch(self) -> int:
        """The epoch; raises `TruncatedError` where there is none."""
        data = os.pread(self.fd, EPOCH.size, 0)
        if len(data) < EPOCH.size:
            raise TruncatedError("a file in memory without an epoch")
        return int(EPOCH.unpack(data)[0])

    def fill(self, at: int, view: memoryview) -> None:
        """Fill a view with the bytes of a place; raises `TruncatedError`."""
        while len(view):
            try:
                got = os.preadv(self.fd, [view], at)
            except (OSError, OverflowError) as error:
                raise TruncatedError(f"a place at {at} cannot be read: {error}") from error
            if not got:
                raise TruncatedError(f"no place at {at} for {len(view)} bytes")
            at, view = at + got, view[got:]


@dataclass(frozen=True, slots=True)
class Places:
    """Where the blocks of a record lie in a memory: by array its bytes, and a place for each block.

    -1 stands for a block that must be read as usual. They are there while the epoch is this one.
    """

    memory: Memory
    epoch: int
    arrays: Mapping[str, tuple[int, Sequence[int]]]

    def fill(self, array: str, first: int, count: int, out: memoryview) -> bool:
        """Fill ``out`` with the blocks from ``first`` on, not verified; False if they are not,
        or no longer, certain to be there."""
        nbytes, places = self.arrays.get(array, (0, ()))
        size = min((first + count) * BLOCK_BYTES, nbytes) - first * BLOCK_BYTES
        places = places[max(0, first) : first + count]
        if first < 0 or size != len(out) or len(places) != block_count(size) or -1 in places:
            return False
        try:
            for index, at in enumerate(places):
                self.memory.fill(at, out[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES])
            return self.memory.epoch() == self.epoch
        except TruncatedError:
            return False


def open_places(epoch: object, payload: bytes, descriptor: int) -> Places:
    """The places that an agent tells of; takes the descriptor over, also where it raises.

    Raises `MalformedError` (rule ``places``) and `UnsupportedError`.
    """
    memory = Memory(descriptor)
    try:
        arrays = {
            name: _array(*strict.items(entry, 2))
            for name, entry in strict.fields(decode_json(payload)).items()
        }
        return Places(memory, strict.count(epoch), arrays)
    except ValueError as exc:
        raise MalformedError(f"places: {exc}"[:200], rule="places") from exc


def _array(nbytes: object, places: object) -> tuple[int, tuple[int, ...]]:
    return strict.count(nbytes), tuple(_place(at) for at in strict.items(places))


def _place(value: object) -> int:
    number = strict.integer(value)
    if not -1 <= number < _PLACE_MAX:
        raise ValueError(f"place {number}")
    return number


class KnownPlaces:
    """What a client knows of one agent's memory: of the records it has read last. Thread-safe.

    One descriptor is kept, however many records there are.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], Places | None] = OrderedDict()
        self._memory: Memory | None = None
        self._closed = False

    def get(self, tier: str, key: str) -> Places | None:
        """The places of a record, None if it has none; raises `KeyError` if nobody has asked."""
        with self._lock:
            self._known.move_to_end((tier, key))
            return self._known[tier, key]

    def learn(self, tier: str, key: str, places: Places | None) -> Places | None:
        """Remember the places of a record; returns them."""
        with self._lock:
            if self._closed:
                return places
            if places is not None:
                if self._memory is None or self._memory.identity != places.memory.identity:
                    self._memory = places.memory
                    self._known.clear()
                places = Places(self._memory, places.epoch, places.arrays)
            self._known[tier, key] = places
            while len(self._known) > _KNOWN_MAX:
                self._known.popitem(last=False)
            return places

    def forget(self, tier: str, key: str) -> None:
        """The places of a record are no longer so."""
        with self._lock:
            self._known.pop((tier, key), None)

    def close(self) -> None:
        """Let the agent's memory go, as soon as nobody is reading."""
        with self._lock:
            self._closed, self._memory = True, None
            self._known.clear()


def places_of(tier: Tier, key: str) -> Places | None:
    """Where a record lies in memory that other processes may read, if its tier can tell."""
    tell = getattr(tier, "places", None)
    found: Places | None = tell(key) if tell is not None else None
    return found
