"""The journal of a check: what it has verified whole, so that one that is cut off goes on.

A file of lines that are only ever added. An entry is a digest of what was verified: the tier, the
key, the id, and where the bytes lie, which is another place or time once they were put anew. Only
what was found right is in it, so damage is found each time. A check that could look at everything
removes its journal, and any that comes to its end leaves what it has read itself, no more: what
rots is found by reading, and never by an entry.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from adacheck_store.format.errors import AdaCheckError, UsageError
from adacheck_store.format.keys import Key, parse_key
from adacheck_store.location import locate
from adacheck_store.store import Store
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.lmdb import LmdbTier
from adacheck_store.tiers.medium import translate
from adacheck_store.tiers.zarr import ZarrTier

log = logging.getLogger(__name__)

MAGIC = '{"adacheck-store": "journal of fsck", '
VERSION = 1
_NAME_BYTES = 16
_STAMPS = 256
_OLD = object()
"""Stands in memory for an entry of the check that is gone on with, until it is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedRow:
    """What a check took from its journal instead of reading it, begun ``age_s`` seconds before."""

    journal: str
    records: int
    nbytes: int
    folds: int
    age_s: float


class Journal:
    """What was verified, by name. In memory at most 150 bytes an entry, in the file 42.

    Opened by `open_journal`; no process but this one writes it meanwhile.
    """

    def __init__(self, path: str, fd: int, began: float, lines: Iterator[str]) -> None:
        self.path, self._fd, self._began = path, fd, began
        self._known = dict[bytes, Any]()
        self._stamps: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._taken = [0, 0, 0]
        self._noting = True
        self._start = os.fstat(fd).st_size
        for line in lines:
            self._known |= _entry(line)

    def holds(self, name: bytes, nbytes: int) -> bool:
        """Whether so many bytes were verified, by this check or the one that it goes on with."""
        if self._known.get(name) is _OLD:
            self._known[name] = None
            self._taken[0] += 1
            self._taken[1] += nbytes
        return name in self._known

    def told(self, name: bytes) -> Any:
        """What was noted with a name; None if there is none."""
        what = self._known.get(name)
        self._taken[2] += what is not None
        return what

    def add(self, name: bytes, what: Any = None) -> None:
        """Note that something was verified, and what else is to be told of it (as JSON)."""
        if name in self._known:
            return
        self._known[name] = what
        text = name.hex() if what is None else f"{name.hex()} {json.dumps(what)}"
        try:
            if self._noting:
                _write(self.path, self._fd, _line(text))
        except AdaCheckError as error:  # the check is worth more than its notes
            self._noting = False
            log.warning("nothing more is noted in the journal: %s", error)

    def forget_places(self) -> None:
        """What is there may have been put anew since it was looked at."""
        self._stamps.clear()

    def name(self, tier: Tier, key: str, identity: str) -> bytes:
        """The name of a record, or pack, as it lies in a tier now."""
        parsed = parse_key(key)
        return name_of(tier.traits.name, str(getattr(tier, "path", "")), key, identity,
                       self._stamp(tier, parsed))  # fmt: skip

    def _stamp(self, tier: Tier, key: Key) -> str:
        """What changes when the bytes below a key are put anew."""
        if isinstance(tier, LmdbTier):
            return tier.stamp(str(key))
        if not isinstance(tier, ZarrTier):
            return ""
        packed = key.kind in ("delta", "extra")
        groups = tier.holding(str(key), fresh=False) if packed else (key,)
        return " ".join(self._group(tier, str(group)) for group in groups)

    def _group(self, tier: ZarrTier, group: str) -> str:
        """Names and times of a group's objects; of a pack they are asked for once, as a rule."""
        place = (tier.path, group)
        if place not in self._stamps:
            found = blake2b(digest_size=_NAME_BYTES)
            for name, at in tier.objects.dated(f"{group}/"):
                found.update(f"{name} {at!r}\n".encode())
            self._stamps[place] = f"{group} {found.hexdigest()}"
            while len(self._stamps) > _STAMPS:
                self._stamps.popitem(last=False)
        return self._stamps[place]

    def row(self) -> ResumedRow:
        """What was taken from the journal so far."""
        records, nbytes, folds = self._taken
        return ResumedRow(journal=self.path, records=records, nbytes=nbytes, folds=folds,
                          age_s=max(0.0, time.time() - self._began))  # fmt: skip

    def end(self, *, whole: bool) -> None:
        """The check has come to its end: if it is ``whole`` the next one is to read everything.

        Else that takes from here what this one has read, and no more: so what cannot be looked at,
        check after check, does not keep what has rotted meanwhile from being read.
        """
        try:
            new = os.pread(self._fd, os.fstat(self._fd).st_size - self._start, self._start)
            if whole or not new:
                with suppress(FileNotFoundError):
                    os.unlink(self.path)
                return
            os.ftruncate(self._fd, len(os.pread(self._fd, 4096, 0).partition(b"\n")[0]) + 1)
            _write(self.path, self._fd, new)
        except OSError as error:
            raise translate(error, "journal", self.path, None) from error


def name_of(*words: str) -> bytes:
    """A name of what these words tell."""
    return blake2b("\0".join(words).encode(), digest_size=_NAME_BYTES).digest()


@contextmanager
def open_journal(path: str | os.PathLike[str], store: Store) -> Iterator[Journal]:
    """The journal at a path, made if absent.

    Raises `UsageError` for a file that is none, for one of another store, and for one that another
    check has open; what the file system says.
    """
    text = os.fspath(path)
    try:
        fd = os.open(text, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise translate(error, "journal", text, None) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError("another check has this journal open", path=text,
                             hint="wait for it, or name another file") from error  # fmt: skip
        if not os.path.samestat(os.fstat(fd), os.stat(text)):
            raise UsageError("another check has just ended and removed this journal", path=text,
                             hint="begin again")  # fmt: skip
        began = _begun(text, fd, _store_name(store))
        with open(fd, encoding="ascii", errors="replace", closefd=False) as file:
            file.seek(0)
            file.readline()
            journal = Journal(text, fd, began, iter(file))
        yield journal
    finally:
        os.close(fd)


def _begun(path: str, fd: int, store: str) -> float:
    """When the journal was begun; a new one is, and a line that was cut off is ended."""
    size = os.fstat(fd).st_size
    first = os.pread(fd, 4096, 0)
    line, whole, _ = first.partition(b"\n")
    if not whole and (line.startswith(MAGIC.encode()) or MAGIC.encode().startswith(line)):
        os.ftruncate(fd, 0)
        now = time.time()
        text = f'{MAGIC}"version": {VERSION}, "began": {now!r}, "store": {json.dumps(store)}}}'
        _write(path, fd, _line(text))
        return now
    head = _head(line)
    if head is None or head.get("version") != VERSION:
        raise UsageError(
            "the file is no journal of this program's fsck", path=path,
            hint="name a new file, or the one of the check that was cut off",
        )  # fmt: skip
    if head["store"] != store:
        raise UsageError(
            f"the journal is of another store, {head['store']}, and this is {store}", path=path,
            hint="name a new file",
        )  # fmt: skip
    if os.pread(fd, 1, size - 1) != b"\n":
        _write(path, fd, b"\n")
    return float(head["began"])


def _head(line: bytes) -> Mapping[str, Any] | None:
    text = _checked(line.decode("ascii", "replace"))
    return json.loads(text) if text.startswith(MAGIC) else None


def _entry(line: str) -> dict[bytes, Any]:
    """The entry of a line; none if it is damaged, which costs reading again what it told."""
    name, _, what = _checked(line.rstrip("\n")).partition(" ")
    return {bytes.fromhex(name): json.loads(what) if what else _OLD} if name else {}


def _line(text: str) -> bytes:
    return f"{text} {zlib.crc32(text.encode()):08x}\n".encode("ascii")


def _checked(line: str) -> str:
    """A line without its check sum; empty if that is another."""
    text, _, told = line.rpartition(" ")
    return text if told == f"{zlib.crc32(text.encode()):08x}" else ""


def _write(path: str, fd: int, line: bytes) -> None:
    try:
        while line:
            line = line[os.write(fd, line) :]
    except OSError as error:
        raise translate(error, "journal", path, len(line)) from error


def _store_name(store: Store) -> str:
    memory = store.url.startswith("memory://")
    return store.url if memory else locate(store.url).name
