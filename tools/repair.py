"""Repair a store: rebuild what does not verify from whatever holds it right, set aside the rest.

A record is rebuilt by putting it again: block by block, each from a tier that has it right, so
what is written verifies or is not written. What no tier can rebuild is moved out of the way, never
deleted, and only where every tier could be read. Killed anywhere and run again it ends the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from adacheck_store.catalog import Catalog, RecordRef, may_pass, read_catalog
from adacheck_store.drain import TierSource, in_batches
from adacheck_store.fetch import BlocksLostError, FetchedSource, Fetcher
from adacheck_store.format.errors import AdaCheckError, FormatError, RecordNotFoundError
from adacheck_store.format.head import check_key
from adacheck_store.format.keys import Key, layout_key, manifest_key, parse_key
from adacheck_store.format.record import verify_block
from adacheck_store.store import Store, writing
from adacheck_store.tiers.base import Source, Tier
from adacheck_store.tiers.lmdb import LmdbTier
from adacheck_store.tiers.zarr import ZarrTier
from adacheck_store.tiers.zarr_packs import expand

from . import agents
from .findings import DAMAGE
from .fsck_journal import Journal
from .fsck_objects import check_group, check_medium, check_overlaps, pack_blocks
from .fsck_records import Layouts, RecordCheck
from .holes import missing
from .rows import Progress, all_refs, choose_run, runs_of, silent

REBUILT, SET_ASIDE, LEFT = "rebuilt", "set aside", "left"

_TOGETHER = 64
"""Deltas or extras put together where they are missing."""

_STEPPED = ("delta", "extra")

_GONE = (BlocksLostError, RecordNotFoundError)
"""What a put says where the source has gone since it was looked at: agents go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairRow:
    """What became of a record, or of a pack, in a tier; ``applied`` is False in a dry run.

    ``was`` is ``damaged`` or ``missing``; ``done`` is ``rebuilt``, ``set aside`` or ``left``, and
    ``why`` says why it could not be rebuilt.
    """

    run: str
    tier: str
    key: str
    was: str
    done: str
    applied: bool
    why: str = ""


def repair(
    store: Store, run: str = "", *, dry_run: bool = False, progress: Progress = silent,
    journal: Journal | None = None,
) -> Iterator[RepairRow]:  # fmt: skip
    """Repair every tier of a store, or one run of it; in a dry run only say what would be done.

    An LMDB that a writer holds is left as it is, and so are log entries, forks, and records whose
    bytes are what their writer wrote. What living agents have, those of this node and those that
    they know of, is read like any tier. What the ``journal`` says is verified is not read again to
    find what is wrong. Raises what a medium says that does not take a write.
    """
    for name in [choose_run(store, run)] if run else runs_of(store):
        with agents.meet(store.url, name) as met:
            survey = Survey(store, name, progress, met, journal)
            for tier in store.tiers:
                yield from _TierRepair(survey, tier, dry_run).rows()


class Survey:
    """What a run consists of and what is wrong with it, tier by tier, before anything is done.

    ``holders`` are the tiers that may give a record: those of the store and what agents have.
    ``wrong`` has the keys of records and packs by tier; ``unread`` the holders that could not be
    read whole: what they have is unknown, so nothing may be given up for lost.
    """

    def __init__(
        self, store: Store, run: str, progress: Progress, met: agents.Met,
        journal: Journal | None,
    ) -> None:  # fmt: skip
        self.store, self.run = store, run
        self.holders: tuple[Tier, ...] = (*met.memories, *store.tiers, *met.others)
        self.wrong: dict[str, set[str]] = defaultdict(set)
        self.unread = {trouble.tier for trouble in store.troubles}
        self.unread |= {f"agent {name}" for name in met.silent}
        catalog = read_catalog(self.holders, run)
        self.unread |= {trouble.tier for trouble in catalog.troubles
                        if not trouble.key or may_pass(trouble.error)}  # fmt: skip
        layouts = Layouts(self.holders, run)
        lost: set[tuple[str, str]] = set()
        for tier in store.tiers:
            name = tier.traits.name
            total = sum(ref.nbytes for ref in all_refs(catalog) if name in ref.tiers)
            check = RecordCheck(tier, run, layouts, progress, total, journal)
            overlaps = check_overlaps(tier, run, journal)
            for found in chain(check.findings(), check_medium(tier, run), overlaps):
                if found.unchecked:
                    self.unread.add(name)
                elif found.severity == DAMAGE and found.key:
                    self.wrong[name].add(found.key)
            lost |= {(name, key) for key in check.lost}
        self.sound: Catalog = catalog.without(lost)
        self.refs: dict[str, list[RecordRef]] = defaultdict(list)
        self.by_id: dict[str, list[RecordRef]] = defaultdict(list)
        for ref in all_refs(catalog):
            self.refs[ref.key].append(ref)
            self.by_id[ref.id].append(ref)

    def source(self, text: str) -> Source:
        """A record as it can be put again; raises an `AdaCheckError` if no tier can give it."""
        key = parse_key(text)
        if key.kind not in ("base", *_STEPPED):
            return self._document(key)
        refs = self.refs[text]
        if len({ref.id for ref in refs}) > 1:
            raise _StandsError("several records have this key, and which is right is not guessed")
        if not refs:
            raise RecordNotFoundError("no tier has its head", key=text)
        # A base may stand elsewhere under another token: equal states have equal ids.
        error: AdaCheckError | None = None
        failures: list[AdaCheckError] = []
        for ref in (*refs, *self.by_id[refs[0].id]):
            fetcher = Fetcher(self.holders)
            try:
                source = FetchedSource(fetcher, ref, text)
                for _ in source.blocks():  # read once before anything is put
                    pass
                return source
            except AdaCheckError as exc:
                error = error or exc
                failures += fetcher.failures
        _stop_if_unread(failures)
        assert error is not None
        raise error

    def _document(self, key: Key) -> Source:
        """A layout or manifest from the first holder that has it right."""
        if key.kind == "log":
            raise _StandsError("what a damaged entry of the log said cannot be known")
        failures: list[AdaCheckError] = []
        for tier in self.holders:
            try:
                check_key(key, tier.head(str(key)).head)
                return TierSource(tier, str(key))
            except AdaCheckError as error:
                failures.append(error)
        _stop_if_unread(failures)
        raise RecordNotFoundError("no tier has it right", key=str(key))

    def documents(self, tier: Tier, keys: Iterable[str]) -> list[Source]:
        """Layouts and revisions that records name and a tier has not got right."""
        return [self.source(text) for text in sorted(self.named(keys)) if not _head(tier, text)]

    def named(self, keys: Iterable[str]) -> set[str]:
        """Keys of the layouts and revisions that some records name."""
        found: set[str] = set()
        for ref in (ref for text in keys for ref in self.refs[text]):
            if ref.layout:
                found.add(str(layout_key(self.run, ref.layout)))
            manifest = self.sound.manifests.get(ref.manifest)
            if manifest is not None:
                found.add(str(manifest_key(self.run, manifest.term, manifest.step)))
        return found


class _StandsError(AdaCheckError):
    """Something that is neither rebuilt nor set aside."""


def _stop_if_unread(failures: Iterable[AdaCheckError]) -> None:
    """Who was read when all began may not answer any more: what it has is not given up for lost."""
    for error in filter(may_pass, failures):
        raise _StandsError(f"not all could be read: {error.message}", **error.place)


class _TierRepair:
    """The repair of one run in one tier: documents first, then what names them."""

    def __init__(self, survey: Survey, tier: Tier, dry_run: bool) -> None:
        self._survey, self._tier, self._dry = survey, tier, dry_run
        self._name = tier.traits.name

    def rows(self) -> Iterator[RepairRow]:
        """What is done, record by record."""
        wrong = sorted(self._survey.wrong[self._name], key=_order)
        absent = missing(self._survey, self._tier)
        if not wrong and not absent:
            return
        writer: LmdbTier | None = None
        if isinstance(self._tier, LmdbTier) and self._tier.readonly and not self._dry:
            try:
                writer = writing(self._tier)
            except AdaCheckError as error:
                for text in wrong:
                    yield self._row(text, "damaged", LEFT, error.message)
                return
            self._tier = writer
        try:
            yield from self._missing(text for text in absent if parse_key(text).kind == "layout")
            yield from self._missing(text for text in absent if parse_key(text).kind == "manifest")
            for unit in dict.fromkeys(unit for text in wrong for unit in self._units(text)):
                yield from self._damaged(unit)
            yield from self._missing(
                text for text in absent if parse_key(text).kind not in ("layout", "manifest")
            )
            if not self._dry:
                self._tier.sync()
        finally:
            if writer is not None:
                writer.close()

    def _units(self, text: str) -> list[str]:
        """What is mended as a whole: the packs that hold a record, or the record."""
        key = parse_key(text)
        if isinstance(self._tier, ZarrTier) and key.kind in _STEPPED:
            return [str(pack) for pack in self._tier.holding(text)]
        return [text]

    def _damaged(self, unit: str) -> Iterator[RepairRow]:
        if self._sound(unit):
            return
        key = parse_key(unit)
        records = list(expand([key])) if key.kind == "pack" else [unit]
        sources: list[Source] = []
        why = ""
        for text in records:
            try:
                sources.append(self._survey.source(text))
            except _StandsError as error:
                yield self._row(unit, "damaged", LEFT, error.message)
                return
            except AdaCheckError as error:
                why = why or error.message
        if why and self._survey.unread:
            unread = ", ".join(sorted(self._survey.unread))
            yield self._row(unit, "damaged", LEFT, f"{why}; not all could be read: {unread}")
            return
        if why and not isinstance(self._tier, ZarrTier):
            yield self._row(unit, "damaged", LEFT, why)
            return
        if not self._dry:
            try:
                self._put(sources)
            except _GONE as error:
                yield self._row(unit, "damaged", LEFT, error.message)
                return
            if not self._sound(unit) and isinstance(self._tier, ZarrTier):
                # All that can be had of it stands in a place of its own by now.
                self._tier.sync()
                self._tier.set_aside(unit)
        yield self._row(unit, "damaged", SET_ASIDE if why else REBUILT, why)

    def _missing(self, keys: Iterable[str]) -> Iterator[RepairRow]:
        for batch in in_batches(keys, _TOGETHER):
            sources: list[Source] = []
            for text in batch:
                try:
                    sources.append(self._survey.source(text))
                except AdaCheckError as error:
                    yield self._row(text, "missing", LEFT, error.message)
            yield from self._bring(sources)

    def _bring(self, sources: list[Source]) -> Iterator[RepairRow]:
        """Put what is missing; what is left is what has gone from where it was read."""
        try:
            if not self._dry:
                self._put(sources)
        except _GONE as error:
            if len(sources) == 1:
                yield self._row(sources[0].key, "missing", LEFT, error.message)
                return
            for source in sources:
                yield from self._bring([source])
        else:
            for source in sources:
                yield self._row(source.key, "missing", REBUILT)

    def _put(self, sources: list[Source]) -> None:
        if sources:
            keys = [source.key for source in sources]
            self._tier.put([*self._survey.documents(self._tier, keys), *sources])

    def _sound(self, unit: str) -> bool:
        """Whether all bytes below a key are what they should be; what is gone is."""
        tier, key = self._tier, parse_key(unit)
        try:
            if isinstance(tier, ZarrTier):
                names = list(tier.objects.list(f"{unit}/"))
                if any(f.severity == DAMAGE for f in check_group(self._name, tier.objects, key,
                                                                 names)):  # fmt: skip
                    return False
                if key.kind == "pack":
                    return not any(pack_blocks(self._name, tier.objects, tier.load(unit)))
            head = tier.head(unit).head
            check_key(key, head)
            for info in head.arrays:
                for index in range(len(info.digests)):
                    verify_block(info, index, memoryview(tier.read(unit, info.name, index, 1)))
        except RecordNotFoundError:
            return not _stands(tier, unit)
        except FormatError:
            return False
        return True

    def _row(self, key: str, was: str, done: str, why: str = "") -> RepairRow:
        applied = not self._dry and done != LEFT
        return RepairRow(run=self._survey.run, tier=self._name, key=key, was=was, done=done,
                         applied=applied, why=why)  # fmt: skip


def _order(text: str) -> tuple[int, str]:
    kinds = ("layout", "manifest")
    kind = parse_key(text).kind
    return (kinds.index(kind) if kind in kinds else len(kinds), text)


def _head(tier: Tier, text: str) -> bool:
    try:
        tier.head(text)
    except (FormatError, RecordNotFoundError):
        return False
    return True


def _stands(tier: Tier, text: str) -> bool:
    """Whether a head lies at a key, readable or not."""
    try:
        tier.head(text)
    except RecordNotFoundError:
        return False
    except FormatError:
        return True
    return True
