"""Packs: containers of deltas or extras of consecutive steps, one zarr group each.

A pack lies at ``<place>/pack/<first>-<last>-<token>`` and holds exactly one record for each step
first..last: their arrays one after another in one uint8 array ``data``, their heads and offsets
in the group's attributes. Packs may overlap; two ids for one step are a fork, found at read.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from adacheck_store.format.errors import (
    ForkError,
    FormatError,
    MalformedError,
    RecordNotFoundError,
)
from adacheck_store.format.head import SealedHead
from adacheck_store.format.keys import Key, is_key, parse_key

from .intake import check_place, placed
from .objects import Objects
from .zarr_meta import DOCUMENT, check_chunk, group_document, head_strings, open_head
from .zarr_meta import read_attributes as read_group

MAX_RECORDS = 1024
"""Records in one pack at most; longer runs of steps become several packs."""

DATA = "data"
_PACK_VERSION = 1
_CACHE_BYTES = 64 << 20
_TAIL = f"/{DOCUMENT}"


def place_of(key: Key) -> str:
    """The part or rank of a term whose packs hold a delta or extra."""
    return f"{key.run}/{key.term}/{key.part}"


def kind_of(part: str) -> str:
    """What the packs of a part (``p...``) or rank (``r...``) hold."""
    return "delta" if part.startswith("p") else "extra"


@dataclass(frozen=True, slots=True)
class Packed:
    """A record in a pack: its three strings, and where its arrays begin."""

    key: str
    strings: Mapping[str, Any]
    offset: int


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack's document, its heads opened when asked for."""

    key: Key
    nbytes: int
    chunk: int
    records: Mapping[int, Packed]
    document_bytes: int = 0
    _heads: dict[int, SealedHead] = field(default_factory=dict)

    @property
    def array(self) -> str:
        """Name of the array of all records' bytes."""
        return f"{self.key}/{DATA}"

    def head(self, step: int) -> SealedHead:
        """The verified head of a record; raises a `FormatError`."""
        if step not in self._heads:
            packed = self.records[step]
            with placed(key=packed.key):
                sealed = open_head(packed.strings)
                check_place(parse_key(packed.key), sealed)
            self._heads[step] = sealed
        return self._heads[step]


def pack_document(nbytes: int, chunk: int, records: list[tuple[str, SealedHead, int]]) -> bytes:
    """A pack's ``zarr.json``; ``records`` are key, head and offset, by step."""
    return group_document(
        {
            "adacheck_pack": _PACK_VERSION,
            "nbytes": nbytes,
            "chunk_bytes": chunk,
            "records": [
                {"key": key, **head_strings(sealed), "offset": offset}
                for key, sealed, offset in records
            ],
        }
    )


def parse_pack(key: Key, text: bytes) -> Pack:
    """A pack from its document; raises `MalformedError` (rule ``pack``)."""
    attributes = read_group(text)
    try:
        nbytes, items = attributes["nbytes"], attributes["records"]
        if attributes["adacheck_pack"] != _PACK_VERSION or type(nbytes) is not int or nbytes < 0:
            raise ValueError("version or size")
        chunk = check_chunk(nbytes, attributes["chunk_bytes"])
        records: dict[int, Packed] = {}
        for item in items:
            own = parse_key(item["key"])
            fits = (own.run, own.term, own.part) == (key.run, key.term, key.part)
            if not fits or own.kind != kind_of(key.part) or own.step in records:
                raise ValueError(f"a record {item['key']!r}")
            if type(item["offset"]) is not int or not 0 <= item["offset"] <= nbytes:
                raise ValueError("an offset")
            records[own.step] = Packed(item["key"], item, item["offset"])
        if len(items) != key.last - key.step + 1 or records.keys() != set(
            range(key.step, key.last + 1)
        ):
            raise ValueError("steps other than its name says")
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise MalformedError(f"not a pack: {exc!r}"[:300], rule="pack") from exc
    return Pack(key, nbytes, chunk, records, len(text))


@dataclass(frozen=True, slots=True)
class Listing:
    """The packs of a place by their first step, and when they were looked up."""

    packs: tuple[Key, ...]
    firsts: tuple[int, ...]
    longest: int
    looked_s: float

    @classmethod
    def of(cls, packs: list[Key], looked_s: float) -> Listing:
        """A listing of some packs."""
        packs = sorted(packs, key=lambda key: (key.step, key.last, key.name))
        longest = max((key.last - key.step for key in packs), default=0)
        return cls(tuple(packs), tuple(key.step for key in packs), longest, looked_s)

    def holding(self, step: int) -> list[Key]:
        """Packs whose range has a step, by their names."""
        found = []
        for i in range(bisect_right(self.firsts, step) - 1, -1, -1):
            if self.firsts[i] < step - self.longest:
                break
            if self.packs[i].last >= step:
                found.append(self.packs[i])
        return found


class PackShelf:
    """Finds records in packs. Listings are looked up again after ``listing_s``, and on a miss."""

    def __init__(self, objects: Objects, listing_s: float = 1.0) -> None:
        self._objects = objects
        self._listing_s = listing_s
        self._lock = threading.Lock()
        self._listings: dict[str, Listing] = {}
        self._packs: OrderedDict[str, Pack] = OrderedDict()
        self._packs_bytes = 0

    def listing(self, place: str, *, fresh: bool = False) -> Listing:
        """The packs of a place."""
        now = time.monotonic()
        known = self._listings.get(place)
        if known is not None and not fresh and now - known.looked_s < self._listing_s:
            return known
        packs = []
        for name in self._objects.list(f"{place}/pack/"):
            if name.endswith(_TAIL) and is_key(name[: -len(_TAIL)]):
                packs.append(parse_key(name[: -len(_TAIL)]))
        return self.learn(place, packs, now)

    def learn(self, place: str, packs: list[Key], looked_s: float) -> Listing:
        """Keep what all of a place was found to hold, by one who began to look at ``looked_s``."""
        listing = Listing.of(packs, looked_s)
        with self._lock:
            known = self._listings.get(place)
            if known is not None and known.looked_s > looked_s:
                return known
            if len(self._listings) > 1024:
                self._listings.clear()
            self._listings[place] = listing
        return listing

    def forget(self, place: str) -> None:
        """Look a place up anew: packs were put or deleted."""
        with self._lock:
            self._listings.pop(place, None)

    def drop(self, key: Key) -> None:
        """Forget a pack's document."""
        with self._lock:
            pack = self._packs.pop(str(key), None)
            self._packs_bytes -= pack.document_bytes if pack else 0

    def load(self, key: Key) -> Pack:
        """A pack's document; raises `RecordNotFoundError` or `MalformedError`."""
        name = str(key)
        with self._lock:
            pack = self._packs.get(name)
            if pack is not None:
                self._packs.move_to_end(name)
                return pack
        pack = parse_pack(key, self._objects.get(f"{name}{_TAIL}"))
        with self._lock:
            if name not in self._packs:
                self._packs[name] = pack
                self._packs_bytes += pack.document_bytes
            while self._packs_bytes > _CACHE_BYTES and len(self._packs) > 1:
                _, dropped = self._packs.popitem(last=False)
                self._packs_bytes -= dropped.document_bytes
        return pack

    def find(self, key: Key, *, known: bool = False) -> list[Pack]:
        """The packs that hold a record under one id; at least one.

        Of a record that is ``known``, its head having been read, any listing does: a restore
        reads for longer than one lasts. Raises `ForkError` if packs disagree about its id, and
        where no pack's word for it verifies the first error met.
        """
        place, fresh = place_of(key), False
        while True:
            try:
                listing = self._listings.get(place) if known and not fresh else None
                return self._find(key, listing or self.listing(place, fresh=fresh))
            except (FormatError, RecordNotFoundError) as error:
                if fresh or not (known or isinstance(error, RecordNotFoundError)):
                    raise
                fresh = True  # its pack may have been mended, or another come in its place

    def _find(self, key: Key, listing: Listing) -> list[Pack]:
        found: list[Pack] = []
        trouble: FormatError | None = None
        for name in listing.holding(key.step):
            try:
                pack = self.load(name)
                pack.head(key.step)
                found.append(pack)
            except FormatError as exc:
                self.drop(name)  # who asks again is to be told what lies there then
                trouble = trouble or exc
        ids = {pack.head(key.step).id for pack in found}
        if len(ids) > 1:
            raise fork(key, ids)
        if not found:
            raise trouble or RecordNotFoundError("no such record")
        return found

    def ids(self, key: Key) -> set[str]:
        """All ids that packs hold for a record; what does not verify is passed over."""
        found: set[str] = set()
        for name in self.listing(place_of(key)).holding(key.step):
            try:
                found.add(self.load(name).head(key.step).id)
            except (FormatError, RecordNotFoundError):
                continue
        return found


def fork(key: Key, ids: set[str]) -> ForkError:
    """The error of a step that packs hold under several ids."""
    return ForkError(
        f"packs hold {len(ids)} records of this step: {sorted(name[:16] for name in ids)}",
        hint="two writers of one term; fsck lists them, restore an earlier step",
        key=str(key), run=key.run, term=key.term, part=key.part, step=key.step,
    )  # fmt: skip


def expand(packs: list[Key]) -> Iterator[str]:
    """Keys of all records of a place's packs, sorted, each once."""
    step = -1
    for pack in sorted(packs, key=lambda key: (key.step, key.last)):
        for number in range(max(pack.step, step + 1), pack.last + 1):
            yield str(
                Key(
                    run=pack.run, kind=kind_of(pack.part), term=pack.term, part=pack.part,
                    step=number,
                )
            )  # fmt: skip
        step = max(step, pack.last)
