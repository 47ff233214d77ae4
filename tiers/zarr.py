"""The zarr tier keeps records as zarr v3 groups over an object store.

A base, layout, manifest or log entry is a group at the record's key; deltas and extras lie in
packs (`zarr_packs`). A group's ``zarr.json`` holds the three strings of the record and is written
last. Plain zarr opens any base: arrays are raw unsigned integers, the true dtype among the
attributes.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import groupby
from typing import TypeVar

from adacheck_store.format.errors import (
    AdaCheckError,
    ForkError,
    FormatError,
    OrderError,
    RecordNotFoundError,
    TruncatedError,
)
from adacheck_store.format.head import SealedHead
from adacheck_store.format.keys import MARKER, Key, is_key, parse_key
from adacheck_store.format.record import array_offsets

from .base import Source, Tier, TierTraits
from .blocks import check_range, span
from .flight import Batch, Runway
from .intake import Links, ask_before_heads, check_place, check_sources, placed
from .objects import Objects, open_marked
from .zarr_chunks import Filling, fill_span, read_span
from .zarr_meta import DOCUMENT, GroupHead, owner
from .zarr_packs import Pack, PackShelf, expand, place_of
from .zarr_writer import Arrival, plan, take_group, take_pack

__all__ = ["ZarrTier", "open_marked"]

ASIDE = "_aside/"
"""Where objects of records lie that are set aside: no key, and no run's name, begins so."""

_TAIL = f"/{DOCUMENT}"
_CACHE_GROUPS = 32

T = TypeVar("T")
_Take = Callable[[str, int, int, int], T]
"""Takes bytes of a zarr array: its name, its chunk's bytes, the first one and the end."""


class ZarrTier(Tier):
    """Records as zarr groups in an object store; any number of processes may use it at once.

    An object store has no transactions: the documents of one put appear one after another, in
    the order layouts, manifests, bases, packs, log entries, of which every beginning is sound.
    A put that fails before its first document leaves nothing. The records of one pack appear
    together. A pack is deleted when every one of its steps is named in one `delete`, and else
    left whole.
    """

    def __init__(self, objects: Objects, name: str = "zarr", *, listing_s: float = 1.0) -> None:
        self.traits = TierTraits(
            name=name, durable=True, log=True, packs=True, parallel=objects.parallel
        )
        self.path = objects.path
        self.objects = objects
        self._runway = Runway(objects)
        self._shelf = PackShelf(objects, listing_s)
        self._links = Links(self)
        self._lock = threading.Lock()
        self._groups: OrderedDict[str, GroupHead] = OrderedDict()
        self._closed = False

    # -- writing --

    def put(self, sources: Sequence[Source]) -> None:
        """Store records; see `Tier.put` and the class."""
        with self._placed():
            own, runs = plan(sources, check_sources(sources))
            begun: list[Key] = []
            arrivals: list[Arrival] = []
            try:
                with Batch(self._runway) as batch:
                    for source in own:
                        with placed(key=source.key):
                            arrivals.append(take_group(batch, source, begun))
                    for run in runs:
                        arrivals.append(take_pack(batch, self._shelf, run, begun))
                self._links.check(head for arrival in arrivals for head in arrival.heads)
                if any(arrival.has_chunks for arrival in arrivals):
                    self.objects.sync()
                ask_before_heads(sources)
            except BaseException:
                self._withdraw(begun)
                raise
            arrivals.sort(key=lambda arrival: (arrival.rank, str(arrival.key)))
            self._publish(arrivals, begun)

    def _publish(self, arrivals: list[Arrival], begun: list[Key]) -> None:
        try:
            for arrival in arrivals:
                with placed(key=str(arrival.key)):
                    self._write_document(arrival)
                if arrival.key in begun:
                    begun.remove(arrival.key)
        except BaseException:
            self._withdraw(begun)
            raise
        finally:
            for arrival in arrivals:
                if arrival.key.kind == "pack":
                    self._shelf.forget(place_of(arrival.key))
                self._forget_group(str(arrival.key))

    def _write_document(self, arrival: Arrival) -> None:
        if arrival.stands:
            return
        name = f"{arrival.key}{_TAIL}"
        if self.objects.put(name, [arrival.document], if_absent=not arrival.replaces):
            return
        # Another writer was faster: with the same record, or this is a fork.
        held = GroupHead.parse(self.objects.get(name)).sealed
        if held.id != arrival.heads[0].id:
            raise ForkError(
                f"another record is there, {held.id[:16]}..., not {arrival.heads[0].id[:16]}",
                hint="read it, and use the next key",
            ).at(**held.head.place())

    def _withdraw(self, begun: list[Key]) -> None:
        """Delete groups without document; what cannot be is left as orphans.

        One that has a document by now is another writer's, who has put the same record.
        """
        for key in begun:
            if key.kind in ("base", "pack"):
                with suppress(AdaCheckError):
                    names = tuple(self.objects.list(f"{key}/"))
                    if f"{key}{_TAIL}" not in names:
                        self.objects.delete(names)

    def _remove(self, key: Key) -> None:
        """Delete a group whose document is gone. A log's entry is a document alone, and its place
        may be another's by now."""
        if key.kind != "log":
            self.objects.delete(tuple(self.objects.list(f"{key}/")))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete records, heads first; a pack only when none of its steps is lost by it."""
        with self._placed():
            whole = self.going(keys)
            self.objects.delete(f"{key}{_TAIL}" for key in whole)
            for key in whole:
                self._remove(key)
                self._shelf.drop(key)
                self._forget_group(str(key))
                if key.kind == "pack":
                    self._shelf.forget(place_of(key))
            self._links.forget()

    def going(self, keys: Iterable[str]) -> list[Key]:
        """Keys of the records and packs that `delete` deletes.

        Of a pack each step must be named, or lie in a pack of its own that stays.
        """
        with self._placed():
            parsed = [parse_key(key) for key in keys if is_key(key)]
            stepped = [key for key in parsed if key.kind in ("delta", "extra")]
            whole = [key for key in parsed if key.kind not in ("delta", "extra", "pack")]
            for place, named in groupby(sorted(stepped, key=place_of), key=place_of):
                steps = {key.step for key in named}
                packs = self._shelf.listing(place, fresh=True).packs
                alone = {pack.step for pack in packs if pack.step == pack.last} - steps
                whole += [
                    pack for pack in packs if pack.step < pack.last or pack.step in steps
                    if (steps | alone).issuperset(range(pack.step, pack.last + 1))
                ]  # fmt: skip
            return whole

    def set_aside(self, key: str) -> None:
        """Move what lies at a record's or pack's key below `ASIDE`, where nothing reads it.

        The document goes last: a move that is cut short leaves a damaged record, not loose
        objects, and is done again.
        """
        with self._placed(key):
            parsed, names = parse_key(key), list(self.objects.list(f"{key}/"))
            for name in names:
                self.objects.put(f"{ASIDE}{name}", [self.objects.get(name)])
            self.objects.sync()
            self.objects.delete(name for name in names if name != f"{key}{_TAIL}")
            self.objects.delete([f"{key}{_TAIL}"])
            self._remove(parsed)
            self._shelf.drop(parsed)
            self._forget_group(key)
            if parsed.kind == "pack":
                self._shelf.forget(place_of(parsed))
            self._links.forget()

    def renew(self, key: str) -> None:
        """Write a record's document again as it is: `times` tells another time."""
        with self._placed(key):
            name = f"{_record_key(key)}{_TAIL}"
            self.objects.put(name, [self.objects.get(name)])

    def sync(self) -> None:
        """Return when all that was put is durable."""
        with self._placed():
            self.objects.sync()

    # -- reading --

    def head(self, key: str) -> SealedHead:
        """The verified head of a record; `ForkError` if packs hold the step under two ids."""
        with self._placed(key):
            parsed = _record_key(key)
            if parsed.kind in ("delta", "extra"):
                return self._shelf.find(parsed)[0].head(parsed.step)
            return self._group(parsed, cached=False).sealed

    def read(self, key: str, array: str, first: int, count: int) -> bytes:
        """Bytes of a run of blocks, not verified."""

        def get(name: str, chunk: int, start: int, stop: int) -> bytes:
            return read_span(self.objects, name, chunk, start, stop, self._runway)

        return self._read(key, array, first, count, get)

    def read_into(self, key: str, array: str, first: int, count: int, out: memoryview) -> None:
        """The same to where it is wanted."""
        objects = self.objects
        if not isinstance(objects, Filling):
            super().read_into(key, array, first, count, out)
            return

        def fill(name: str, chunk: int, start: int, stop: int) -> None:
            if stop - start != len(out):
                raise TruncatedError(f"{stop - start} bytes of {array}, not {len(out)}")
            fill_span(objects, name, chunk, start, out, self._runway)

        self._read(key, array, first, count, fill)

    def _read(self, key: str, array: str, first: int, count: int, take: _Take[T]) -> T:
        """What ``take`` gives of blocks: it is told a zarr array, its chunk's bytes, and which."""
        with self._placed(key):
            parsed = _record_key(key)
            if parsed.kind in ("delta", "extra"):
                return self._read_packed(parsed, array, first, count, take)
            group = self._group(parsed, cached=True)
            start, stop = span(check_range(group.sealed, array, first, count), first, count)
            return take(f"{key}/{array}", group.chunks[array], start, stop)

    def _read_packed(self, key: Key, array: str, first: int, count: int, take: _Take[T]) -> T:
        try:
            return self._read_from_packs(key, array, first, count, take)
        except (RecordNotFoundError, TruncatedError):
            # A pack known here may be gone, and another have come in its place.
            self._shelf.forget(place_of(key))
            return self._read_from_packs(key, array, first, count, take)

    def _read_from_packs(self, key: Key, array: str, first: int, count: int, take: _Take[T]) -> T:
        trouble: RecordNotFoundError | TruncatedError | None = None
        for pack in self._shelf.find(key, known=True):
            sealed = pack.head(key.step)
            start, stop = span(check_range(sealed, array, first, count), first, count)
            at = pack.records[key.step].offset + array_offsets(sealed)[array]
            try:
                return take(pack.array, pack.chunk, at + start, at + stop)
            except (RecordNotFoundError, TruncatedError) as exc:
                trouble = trouble or exc
                self._shelf.drop(pack.key)
        raise trouble or RecordNotFoundError("no such record")

    def _group(self, key: Key, *, cached: bool) -> GroupHead:
        name = str(key)
        with self._lock:
            group = self._groups.get(name) if cached else None
        if group is None:
            group = GroupHead.parse(self.objects.get(f"{name}{_TAIL}"))
            check_place(key, group.sealed)
            with self._lock:
                self._groups[name] = group
                while len(self._groups) > _CACHE_GROUPS:
                    self._groups.popitem(last=False)
        return group

    def _forget_group(self, key: str) -> None:
        with self._lock:
            self._groups.pop(key, None)

    def list(self, prefix: str) -> Iterator[str]:
        """Keys that begin with a prefix, sorted; those in packs by the packs' names alone."""
        with self._placed():
            below, looked_s = _below(prefix), time.monotonic()
            groups = (
                parse_key(name[: -len(_TAIL)])
                for name in self.objects.list(below)
                if name.endswith(_TAIL) and is_key(name[: -len(_TAIL)])
            )
            for place, keys in groupby(groups, key=_pack_place):
                found = list(keys)
                if place and f"{place}/pack/".startswith(below):
                    self._shelf.learn(place, found, looked_s)  # heads are read next, as a rule
                names = expand(found) if place else map(str, found)
                yield from (name for name in names if name.startswith(prefix))

    def forks(self, prefix: str) -> Iterator[tuple[str, frozenset[str]]]:
        """Records that packs hold under several ids, with these; for fsck."""
        with self._placed():
            keys = map(parse_key, self.list(prefix))
            for place in sorted({place_of(k) for k in keys if k.kind in ("delta", "extra")}):
                yield from self._forks_of(place)

    def _forks_of(self, place: str) -> Iterator[tuple[str, frozenset[str]]]:
        packs = self._shelf.listing(place, fresh=True).packs
        for name, several in groupby(heapq.merge(*(expand([pack]) for pack in packs))):
            if sum(1 for _ in several) > 1:
                ids = self._shelf.ids(parse_key(name))
                if len(ids) > 1:
                    yield name, frozenset(ids)

    def orphans(self, prefix: str) -> Iterator[str]:
        """Objects that no record owns: of puts that did not end, or of somebody else; for fsck.

        A put that is still going on shows here too.
        """
        with self._placed():
            for key, names in groupby(self.objects.list(prefix), key=owner):
                found = tuple(names)
                if f"{key}{_TAIL}" not in found and found != (MARKER,):
                    yield from found

    def times(self, prefix: str) -> dict[str, float]:
        """When each record or pack below a prefix was made, in seconds of the store's clock."""
        with self._placed():
            tail = len(_TAIL)
            dated = self.objects.dated(prefix)
            return {name[:-tail]: at for name, at in dated
                    if name.endswith(_TAIL) and is_key(name[:-tail])}  # fmt: skip

    def holding(self, key: str, *, fresh: bool = True) -> tuple[Key, ...]:
        """Keys of the packs whose range has a delta's or extra's step, readable or not."""
        with self._placed(key):
            parsed = parse_key(key)
            return tuple(self._shelf.listing(place_of(parsed), fresh=fresh).holding(parsed.step))

    def load(self, key: str) -> Pack:
        """A pack by its key; raises `RecordNotFoundError` or `MalformedError`."""
        with self._placed(key):
            self._shelf.drop(parse_key(key))
            return self._shelf.load(parse_key(key))

    def packs(self, prefix: str) -> Iterator[Pack]:
        """Documents of the packs below a prefix that verify; for fsck and statistics."""
        with self._placed():
            for name in self.objects.list(prefix):
                key = name[: -len(_TAIL)]
                if name.endswith(_TAIL) and is_key(key) and parse_key(key).kind == "pack":
                    try:
                        yield self._shelf.load(parse_key(key))
                    except (FormatError, RecordNotFoundError):
                        continue

    def requests(self) -> Mapping[str, int]:
        """What the object store has counted."""
        return self.objects.requests()

    def close(self) -> None:
        """Forget everything; idempotent."""
        self._closed = True
        self._groups.clear()

    def _placed(self, key: str = "") -> AbstractContextManager[None]:
        if self._closed:
            raise OrderError("the tier is closed", tier=self.traits.name)
        return placed(tier=self.traits.name, key=key, path=self.path)


def _record_key(text: str) -> Key:
    """Parse a record's key; what is none names no record."""
    if not is_key(text) or (key := parse_key(text)).kind == "pack":
        raise RecordNotFoundError("no such record")
    return key


def _pack_place(key: Key) -> str:
    """The place of a pack; empty for any other key."""
    return place_of(key) if key.kind == "pack" else ""


def _below(prefix: str) -> str:
    """The prefix of objects under which the records of a prefix of keys lie."""
    for kind in ("delta/", "extra/"):
        if prefix.endswith("/" + kind):
            return f"{prefix[: -len(kind)]}pack/"
    return prefix
