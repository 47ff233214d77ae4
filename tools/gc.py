"""Collect garbage: raise floors by a policy, delete what lies below them, and what nobody finished.

What may go is decided where a trainer decides it (`retention`); this is a second caller, beside a
live one or after its death. Everything is judged by the store's clock. Killed anywhere and run
again it ends the same: a floor stands or does not, and what it covers is deleted heads first.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from adacheck_store.catalog import Catalog
from adacheck_store.format.errors import AdaCheckError
from adacheck_store.format.keys import Key, Term, log_key, parse_key
from adacheck_store.format.manifest import Entry, Floor
from adacheck_store.policy import Retention, from_settings
from adacheck_store.recovery import tolerant_line
from adacheck_store.retention import (
    FloorChoice,
    below,
    detach,
    floor_of,
    plan_floor,
    standing,
    tier_catalog,
)
from adacheck_store.store import Store, writing
from adacheck_store.terms import CLAIM_S, newer_claims, put_floor, read_log
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.lmdb import LmdbTier
from adacheck_store.tiers.zarr import ASIDE, ZarrTier
from adacheck_store.tiers.zarr_meta import DOCUMENT
from adacheck_store.tiers.zarr_packs import expand

from . import agents
from .fsck_objects import owner_of
from .rows import Progress, choose_run, runs_of, silent

Own = tuple[set[str], set[str]]
"""Parts and ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GcRow:
    """What was found in a tier and what became of it.

    ``what``: ``floor`` (of ``step``, below which ``kept`` stay, with the rules that keep them),
    ``below floor`` (records), ``unfinished`` (objects of records without head), ``begun`` (objects
    or uploads that were never named), ``set aside`` (by a repair). ``done``: ``raised``,
    ``stands``, ``deleted`` or ``left``, and then ``why``; ``applied`` is False where nothing was
    changed. ``nbytes`` where it is known.
    """

    run: str
    tier: str
    what: str
    done: str
    applied: bool
    step: int | None = None
    kept: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    count: int = 0
    nbytes: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ages:
    """How old things must be by the store's clock, in seconds.

    ``grace_s``: a floor, before what it covers goes: a reader may have planned before it.
    ``older_s``: what a put has left; it must be longer than any put takes. ``aside``: what a
    repair has set aside goes too, when it is that old.
    """

    grace_s: float = 60.0
    older_s: float = 86_400.0
    aside: bool = False


def gc(
    store: Store, run: str = "", *, last: int | None = None, rules: Retention | None = None,
    apply: bool = False, ages: Ages | None = None, progress: Progress = silent,
) -> Iterator[GcRow]:  # fmt: skip
    """Collect the garbage of a store, or of one run; unless ``apply`` only say what would go.

    What ``rules`` say stays, and tagged steps; without rules what the run's newest writer keeps, as
    its manifest says, or if that has no rules what the last floor kept. ``last`` takes the place of
    the number of bases, however that is known.

    With ``apply`` it waits until a floor is as old as `Ages` says. Raises what a tier says that
    cannot be read or written; an LMDB that a writer holds is left to it.
    """
    ages = ages or Ages()
    for name in [choose_run(store, run)] if run else runs_of(store):
        yield from _RunGc(store, name, last, rules, apply, ages, progress).rows()
    if isinstance(store.far, ZarrTier):
        yield from _leftovers(store.far, run, apply, ages)


def _kept_by_writers(catalog: Catalog) -> tuple[int | None, Retention | None]:
    """What the last trainer of the line keeps: saves and imports after it say nothing of that."""
    for segment in reversed(tolerant_line(catalog)):
        if "saved" not in segment.manifest.settings:
            return from_settings(segment.manifest.settings)
    return None, None


class _RunGc:
    """The floors of one run and what lies below them: the far tier first, it caps the others."""

    def __init__(
        self, store: Store, run: str, last: int | None, rules: Retention | None, apply: bool,
        ages: Ages, progress: Progress,
    ) -> None:  # fmt: skip
        self._store, self._run = store, run
        self._last, self._rules = last or (rules.last if rules else 0), rules
        self._apply, self._ages, self._progress = apply, ages, progress
        self._planned = -1

    def rows(self) -> Iterator[GcRow]:
        """What is done, tier by tier."""
        far = self._store.far
        catalog = tier_catalog(far, self._run)
        terms, _ = standing(catalog)
        if not terms:
            return
        if self._rules is None:
            last, self._rules = _kept_by_writers(catalog)
            self._last = self._last or last or Retention().last
        live, dead = rivals(far, self._run, terms[-1])
        yield from self._tier(far, live, dead, cap=self._watermark())
        highest = max(self._planned, floor_of(far, self._run, terms[-1]))
        for tier in self._store.uppers:
            if isinstance(tier, LmdbTier):
                yield from self._lmdb(tier, live, dead, highest)

    def _watermark(self) -> int | None:
        """What living agents acknowledge: no floor passes it. None without agents."""
        with agents.meet(self._store.url, self._run) as met:
            marks = [row.watermark for row in met.rows() if isinstance(row, agents.AgentRow)]
        return min(marks, default=None)

    def _lmdb(
        self, tier: LmdbTier, live: set[str], dead: set[str], highest: int
    ) -> Iterator[GcRow]:
        """A near tier that nobody writes; its floor is at most the far one's."""
        catalog = tier_catalog(tier, self._run)
        parts = {part for (_, part), refs in catalog.bases.items() if refs}
        if not parts:
            return
        if not self._apply:
            yield from self._tier(tier, live, dead, highest, (parts, _ranks(parts)))
            return
        try:
            writer = writing(tier)
        except AdaCheckError as error:
            yield self._row(tier, "floor", "left", why=error.message)
            return
        try:
            yield from self._tier(writer, live, dead, highest, (parts, _ranks(parts)))
        finally:
            writer.close()

    def _tier(
        self, tier: Tier, live: set[str], dead: set[str], cap: int | None, own: Own | None = None
    ) -> Iterator[GcRow]:
        rules = self._rules if own is None else None
        choice = plan_floor(tier, self._run, self._last, cap=cap, own=own, retention=rules)
        entries = read_log(tier, self._run)
        floors = [entry for entry in entries if isinstance(entry, Floor)]
        if choice is not None and not self._stands(choice, floors):
            if live:
                why = f"a restore may be under way: {', '.join(sorted(live))} claimed the run"
                yield self._row(tier, "floor", "left", why=why, step=choice.step, kept=choice.kept)
            elif not self._apply or self._raise(tier, choice, dead):
                entries.append(choice.floor(tier.traits.name, self._run))
                self._planned = choice.step if not self._apply else -1
                yield self._row(tier, "floor", "raised", step=choice.step, kept=choice.kept)
            else:
                why = "the log has changed meanwhile (a claim or a tag): run it again"
                yield self._row(tier, "floor", "left", why=why, step=choice.step, kept=choice.kept)
        elif choice is not None:
            yield self._row(tier, "floor", "stands", step=choice.step, kept=choice.kept)
        yield from self._bury(tier, entries)

    def _stands(self, choice: FloorChoice, floors: Iterable[Floor]) -> bool:
        return any(
            floor.step == choice.step and floor.kept == tuple(choice.kept)
            and set(choice.terms) <= set(floor.terms)
            for floor in floors
        )  # fmt: skip

    def _raise(self, tier: Tier, choice: FloorChoice, dead: set[str]) -> bool:
        detach(tier, self._run, choice)
        floor = put_floor(
            tier, self._run, term=choice.terms[-1], terms=choice.terms, step=choice.step,
            kept=tuple(choice.kept), ignore=dead, logged=choice.logged,
        )  # fmt: skip
        return floor is not None

    def _bury(self, tier: Tier, entries: list[Entry]) -> Iterator[GcRow]:
        """Delete what the floors cover; the newest must have stood for the grace period."""
        if self._apply:  # the log alone says what may go, not what was just planned
            entries = read_log(tier, self._run)
            if not self._worth(tier, below(tier.list(f"{self._run}/"), entries), entries)[0]:
                return
            self._wait(tier, entries)
            # A floor that was taken back meanwhile allows nothing, and one that came is young.
            entries = [entry for entry in read_log(tier, self._run) if entry in entries]
        doomed = below(tier.list(f"{self._run}/"), entries)
        count, nbytes = self._worth(tier, doomed, entries)
        if not count:
            return
        if self._apply:
            done = 0
            for _, keys in groupby(sorted(doomed, key=_place), key=_place):
                named = list(keys)
                tier.delete(named)
                done += len(named)
                self._progress(f"deleting from {tier.traits.name}", done, len(doomed))
            tier.sync()
        yield self._row(tier, "below floor", "deleted", count=count, nbytes=nbytes)

    def _worth(self, tier: Tier, doomed: list[str], entries: list[Entry]) -> tuple[int, int]:
        """How many records would go, and their bytes."""
        if not isinstance(tier, ZarrTier):
            return len(doomed), sum(_nbytes(tier, parse_key(text)) for text in doomed)
        # A pack that has the extra of a kept step goes too: that has a pack of its own by then.
        kept = {step for floor in _floors(entries) for step in floor.kept}
        extras = [
            text for text in tier.list(f"{self._run}/")
            if (key := parse_key(text)).kind == "extra" and key.step in kept
        ]  # fmt: skip
        gone = set(doomed)
        units = tier.going([*doomed, *([] if self._apply else extras)])
        count = sum(text in gone for unit in units for text in _records(unit))
        return count, sum(_nbytes(tier, unit) for unit in units) if count else 0

    def _wait(self, tier: Tier, entries: list[Entry]) -> None:
        """Until the floors are old enough by the store's clock; a near tier is ours alone."""
        if not isinstance(tier, ZarrTier):
            return
        keys = {str(log_key(self._run, floor.index)) for floor in _floors(entries)}
        times, now = tier.times(f"{self._run}/log/"), tier.objects.now()
        since = max((times.get(key, now) for key in keys), default=0.0)
        while (left := since + self._ages.grace_s - tier.objects.now()) > 0:
            total = int(self._ages.grace_s)
            self._progress("waiting for readers of what goes", total - int(left), total)
            time.sleep(min(left, 1.0))

    def _row(self, tier: Tier, what: str, done: str, **more: object) -> GcRow:
        applied = self._apply and done in ("raised", "deleted")
        return GcRow(
            run=self._run, tier=tier.traits.name, what=what, done=done, applied=applied,
            **more,  # type: ignore[arg-type]
        )  # fmt: skip


def rivals(far: Tier, run: str, term: str) -> tuple[set[str], set[str]]:
    """Claims newer than a term, the newest that has begun: those that may be restoring, and those
    that have stood so long, by the store's clock, that they are taken for dead."""
    newer = newer_claims(far, run, Term.parse(term))
    if not newer or not isinstance(far, ZarrTier):
        return set(newer), set()
    now = far.objects.now()
    dead = {
        claim for claim, at in newer.items()
        if now - at > CLAIM_S
        and not any(far.list(f"{run}/{claim}/manifest/"))  # one that cannot be read has begun
    }  # fmt: skip
    return newer.keys() - dead, dead


def _leftovers(tier: ZarrTier, run: str, apply: bool, ages: Ages) -> Iterator[GcRow]:
    """What puts have left that did not end, and with ``aside`` what repairs have set aside."""
    objects, now, below_run = tier.objects, tier.objects.now(), f"{run}/" if run else ""
    loose: dict[str, list[str]] = {"unfinished": [], "set aside": []}
    for owner, found in groupby(objects.dated(below_run), lambda item: owner_of(item[0])):
        names = list(found)
        old = all(now - at >= ages.older_s for _, at in names)
        if owner and old and all(name != f"{owner}/{DOCUMENT}" for name, _ in names):
            gone = _delete_loose(tier, owner, ages) if apply else [name for name, _ in names]
            loose["unfinished"] += gone
    if ages.aside:
        aside = objects.dated(f"{ASIDE}{below_run}")
        loose["set aside"] += [name for name, at in aside if now - at >= ages.older_s]
    for what, names_of in loose.items():
        if apply and what != "unfinished":
            objects.delete(names_of)
        if names_of:
            yield GcRow(run=run, tier=tier.traits.name, what=what, done="deleted", applied=apply,
                        count=len(names_of))  # fmt: skip
    if apply:
        objects.sync()
    count = objects.sweep(ages.older_s) if apply else objects.unfinished(ages.older_s)
    if count:
        yield GcRow(run="", tier=tier.traits.name, what="begun", done="deleted", applied=apply,
                    count=count)  # fmt: skip


def _delete_loose(tier: ZarrTier, owner: str, ages: Ages) -> list[str]:
    """Delete a record's objects if they are loose still, looked up anew: another put of the same
    record may have begun since they were listed, or ended."""
    objects = tier.objects
    now, found = objects.now(), list(objects.dated(f"{owner}/"))
    names = [name for name, _ in found]
    young = any(now - at < ages.older_s for _, at in found)
    if young or f"{owner}/{DOCUMENT}" in names:
        return []
    objects.delete(names)
    return names


def _floors(entries: Iterable[Entry]) -> list[Floor]:
    return [entry for entry in entries if isinstance(entry, Floor)]


def _place(text: str) -> tuple[str, str, str]:
    key = parse_key(text)
    return key.term, key.part, key.kind


def _records(unit: Key) -> Iterator[str]:
    return expand([unit]) if unit.kind == "pack" else iter((str(unit),))


def _nbytes(tier: Tier, unit: Key) -> int:
    try:
        if unit.kind == "pack" and isinstance(tier, ZarrTier):
            return tier.load(str(unit)).nbytes
        return sum(info.nbytes for info in tier.head(str(unit)).head.arrays)
    except AdaCheckError:
        return 0  # damaged, or gone meanwhile


def _ranks(parts: Iterable[str]) -> set[str]:
    return {f"r{part[1:]}" for part in parts}
