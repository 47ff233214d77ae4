"""Check a whole store, read-only: a stream of typed findings, and which steps are provable.

Each run is read twice: heads for the catalog, then every byte, tier by tier, one block at a time.
What is kept is a reference a record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from adacheck_store.catalog import Catalog, read_catalog
from adacheck_store.format.errors import AdaCheckError, NotOursError
from adacheck_store.store import Store
from adacheck_store.tiers.base import Tier

from .findings import Finding, Provable, finding, of_tier
from .fsck_again import read_again, settled
from .fsck_chain import (
    check_drift,
    check_floors,
    check_holes,
    check_links,
    check_steps,
    check_tags,
    check_terms,
    provable_alone,
)
from .fsck_deep import FoldedRow, check_folds
from .fsck_journal import Journal, ResumedRow
from .fsck_objects import check_medium, check_overlaps
from .fsck_records import Layouts, RecordCheck
from .rows import Progress, all_refs, choose_run, held_alone, runs_of, silent

Row = Finding | Provable | FoldedRow | ResumedRow


def fsck(
    store: Store, run: str = "", progress: Progress = silent, *, deep: int = 0,
    journal: Journal | None = None,
) -> Iterator[Row]:  # fmt: skip
    """Every finding of a store, or of one run. The store must be open for reading.

    ``deep`` steps of every run are folded besides, and held against the trainer's fingerprints.
    What the ``journal`` says is verified is not read; a check that could look at
    everything removes it, see `Journal.end`.

    `findings.exit_code` says what they amount to.
    """
    names = [choose_run(store, run)] if run else runs_of(store)
    whole = True
    for row in _rows(store, names, run, progress, deep, journal):
        whole = whole and not (isinstance(row, Finding) and row.unchecked)
        yield row
    if journal is not None:
        yield journal.row()
        journal.end(whole=whole)


def _rows(
    store: Store, names: list[str], run: str, progress: Progress, deep: int,
    journal: Journal | None,
) -> Iterator[Row]:  # fmt: skip
    yield from _tiers(store)
    for tier in store.tiers:
        yield from check_medium(tier, run)
    for name in names:
        yield from check_run(store, name, progress, deep, journal)


def _tiers(store: Store) -> Iterator[Finding]:
    """Tiers that could not be opened, markers, folders set aside."""
    for trouble in store.troubles:
        error = trouble.error
        open_anyway = any(tier.traits.name == trouble.tier for tier in store.tiers)
        if trouble.tier == "zarr" and (open_anyway or isinstance(error, NotOursError)):
            path = str(error.place.get("path", ""))
            kind = "marker" if open_anyway else "tier-damaged"
            yield finding(kind, error.message, tier=trouble.tier, path=path)
        else:
            yield of_tier(error, trouble.tier)
    folders = {Path(str(getattr(tier, "path", ""))).parent for tier in store.tiers
               if tier.traits.name.startswith("lmdb")}  # fmt: skip
    for folder in sorted(folders):
        for aside in sorted(folder.glob("*-damaged-*")):
            yield finding("quarantined", "a tier that was set aside", tier="lmdb", path=str(aside))


@dataclass(slots=True)
class _Bytes:
    """What reading every byte of a run has found: keys by tier, as in `RecordCheck`."""

    lost: set[tuple[str, str]] = field(default_factory=set)
    bad: dict[str, set[str]] = field(default_factory=dict)
    wrong: dict[tuple[str, str], set[tuple[str, int]]] = field(default_factory=dict)
    silent: set[str] | None = None
    """Tiers whose keys could not be listed when the chains were judged first."""

    def sound(self, catalog: Catalog) -> Catalog:
        """What can be read of a catalog's records, from all tiers together."""
        return catalog.without(self.lost - _completed(catalog, self.lost, self.wrong))


def check_run(
    store: Store, run: str, progress: Progress = silent, deep: int = 0,
    journal: Journal | None = None,
) -> Iterator[Row]:  # fmt: skip
    """Every finding of one run."""
    catalog = read_catalog(store.tiers, run)
    layouts, found = Layouts(store.tiers, run), _Bytes()
    for tier in store.tiers:
        name = tier.traits.name
        total = sum(ref.nbytes for ref in all_refs(catalog) if name in ref.tiers)
        check = RecordCheck(tier, run, layouts, progress, total, journal)
        yield from check.findings()
        yield from check_overlaps(tier, run, journal)
        found.lost |= {(name, key) for key in check.lost}
        found.bad[name] = check.bad
        found.wrong |= {(name, key): blocks for key, blocks in check.wrong.items()}

    def again() -> Catalog:
        return read_again(store.tiers, catalog)

    def chains_again() -> Iterator[Row]:
        return _check_chains(store, again(), found)

    yield from settled(_check_chains(store, catalog, found), chains_again)
    if deep:
        yield from check_folds(
            store.tiers, found.sound(catalog), deep, progress, lambda: found.sound(again()),
            journal,
        )  # fmt: skip


def _check_chains(store: Store, catalog: Catalog, found: _Bytes) -> Iterator[Row]:
    """What is wrong with a catalog as a whole, given what is wrong with its records' bytes.

    Of what has come since these were read heads alone are known.
    """
    alone = dict(_alone(store, catalog.without(found.lost), catalog.run, found.silent))
    if found.silent is None:
        found.silent = {tier.traits.name for tier in store.tiers} - alone.keys()
    sound = found.sound(catalog)
    yield from check_links(sound)
    yield from check_terms(sound, log_read=_log_read(store, found.bad))
    for name, held in alone.items():
        floors = held.floors.get(name, ())
        yield from check_floors(name, held, floors, partial=name != store.far.traits.name)
        yield from check_holes(name, held, found.bad.get(name, set()))
    yield from check_drift(sound)
    yield from check_steps(sound, store.tiers)
    yield from check_tags(store.far.traits.name, sound)
    if len(alone) > 1:
        yield from provable_alone(catalog.run, alone, store.tiers)


def _completed(
    catalog: Catalog, lost: set[tuple[str, str]],
    wrong: Mapping[tuple[str, str], set[tuple[str, int]]],
) -> set[tuple[str, str]]:  # fmt: skip
    """Damaged copies of records that have each block right in one of them."""
    found: set[tuple[str, str]] = set()
    for ref in all_refs(catalog):
        copies = {(tier, ref.key) for tier in ref.tiers}
        if copies <= lost and copies <= wrong.keys():
            everywhere = set.intersection(*(wrong[copy] for copy in copies))
            found |= set() if everywhere else copies
    return found


def _alone(
    store: Store, catalog: Catalog, run: str, silent: set[str] | None
) -> Iterator[tuple[str, Catalog]]:  # fmt: skip
    """What each tier has; raises where one does not tell that has told before."""
    for tier in store.tiers:
        name = tier.traits.name
        try:
            yield name, held_alone(catalog, tier, run)
        except AdaCheckError:
            if silent is not None and name not in silent:
                raise
            continue  # named when its records were read


def _log_read(store: Store, bad: dict[str, set[str]]) -> bool:
    """Whether the whole log could be read: only then may a claim be called missing."""
    kept: list[Tier] = [tier for tier in store.tiers if tier.traits.log]
    damaged = any("/log/" in key for tier in kept for key in bad.get(tier.traits.name, ()))
    return bool(kept) and not damaged
