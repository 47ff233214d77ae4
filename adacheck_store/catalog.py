"""The catalog: what every tier holds of a run, read once, as plain data for the planner."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adacheck_store.format.derived import ORIGIN
from adacheck_store.format.errors import (
    AdaCheckError,
    FormatError,
    RecordNotFoundError,
    TierError,
)
from adacheck_store.format.head import Head, SealedHead, check_key
from adacheck_store.format.keys import Key, parse_key
from adacheck_store.format.manifest import Claim, Floor, Manifest, Tag, decode_log, decode_manifest
from adacheck_store.tiers.base import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRef:
    """A record some tiers hold: enough of its head to plan with.

    ``tiers`` names the holders, nearest first. ``gap`` is a base's (None elsewhere), ``refs``
    an extra's references to earlier steps. ``since`` is of a base the step of the exact base that
    it goes back to: its own step, unless it was folded in class ``bounded``.
    """

    key: str
    kind: str
    term: str
    part: str
    step: int
    id: str
    parent: str
    manifest: str
    layout: str
    tiers: tuple[str, ...]
    nbytes: int
    origin: str = ""
    exactness: str = ""
    gap: Mapping[str, Any] | None = None
    refs: tuple[int, ...] = ()
    since: int = -1


Table = Mapping[tuple[str, str], tuple[RecordRef, ...]]
"""References by term, and part or rank."""


class Gaps:
    """Steps of a part through which nothing may be folded: from a gap's first to its base's.

    ``spans`` are disjoint inclusive ranges in order. No set of steps: a record may name any.
    """

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        merged: list[tuple[int, int]] = []
        for low, high in sorted(spans):
            if merged and low <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        self.spans = tuple(merged)

    def __contains__(self, step: int) -> bool:
        if not self.spans:
            return False
        at = bisect_right(self.spans, (step, 1 << 62)) - 1
        return at >= 0 and step <= self.spans[at][1]


def gaps_of(bases: Iterable[RecordRef], last: int | None) -> Gaps:
    """What bases declare unprovable, as `Catalog.gaps` says it."""
    return Gaps(span for span in _spans(bases) if last is None or span[1] <= last)


def _spans(refs: Iterable[RecordRef]) -> Iterator[tuple[int, int]]:
    for ref in refs:
        first = ref.gap.get("from") if ref.gap is not None else None
        if type(first) is int and first <= ref.step:
            yield first, ref.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Something in a tier that could not be used: a record, or the tier itself (key empty)."""

    tier: str
    key: str
    error: AdaCheckError


def may_pass(error: AdaCheckError) -> bool:
    """Whether a record was not read, rather than found wrong or gone."""
    return isinstance(error, TierError) and not isinstance(error, RecordNotFoundError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """What the tiers hold of ``run``.

    ``bases``, ``deltas`` and ``extras`` map (term, part or rank) to references, and so does
    ``derived``: bases without bytes (`format.derived`), which stand for nothing by themselves and
    are in no other table. ``manifests`` maps ids, ``layouts`` ids to the tiers that hold them.
    Records that a tier's floor covers are left out. ``tags`` are names of steps. ``troubles`` lists
    what could not be read. ``gap_spans`` are gaps told by bases that are no longer among ``bases``:
    their heads verified, and stay true when their blocks do not.
    """

    run: str
    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    layouts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bases: Mapping[tuple[str, str], tuple[RecordRef, ...]] = field(default_factory=dict)
    deltas: Mapping[tuple[str, str], tuple[RecordRef, ...]] = field(default_factory=dict)
    extras: Mapping[tuple[str, str], tuple[RecordRef, ...]] = field(default_factory=dict)
    derived: Mapping[tuple[str, str], tuple[RecordRef, ...]] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    floors: Mapping[str, tuple[Floor, ...]] = field(default_factory=dict)
    tags: tuple[Tag, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    gap_spans: Mapping[tuple[str, str], tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def gaps(self, place: tuple[str, str], last: int | None = None) -> Gaps:
        """Steps that the bases of a (term, part) declare unprovable, those up to step ``last``.

        What a writer declares after the step at which a newer term left it is off the line.
        """
        return Gaps(span for span in self._told(place) if last is None or span[1] <= last)

    def _told(self, place: tuple[str, str]) -> tuple[tuple[int, int], ...]:
        told = {*self.gap_spans.get(place, ()), *_spans(self.bases.get(place, ()))}
        return tuple(sorted(told))

    @property
    def empty(self) -> bool:
        """True if no term of the run has a manifest."""
        return not self.manifests

    def raise_unread(self) -> None:
        """Raise the trouble of a tier, or of a record that could not be read now: what hangs on
        what is not there is not decided without them."""
        for trouble in self.troubles:
            if not trouble.key or may_pass(trouble.error):
                raise trouble.error

    def only(self, parts: Collection[str], ranks: Collection[str]) -> Catalog:
        """The catalog of a run that consists of these parts and the extras of these ranks."""
        manifests = {
            identity: dataclasses.replace(
                manifest, parts=tuple(entry for entry in manifest.parts if entry.name in parts),
                ranks=tuple(name for name in manifest.ranks if name in ranks),
            )
            for identity, manifest in self.manifests.items()
        }  # fmt: skip
        return dataclasses.replace(self, manifests=manifests)

    def held_by(self, tiers: Collection[str], part: str) -> Catalog:
        """The catalog of a part's records that one of these tiers has, and nothing else.

        Without derived bases: these need other parts.
        """

        def keep(table: Table) -> Table:
            return {
                place: tuple(ref for ref in refs if not set(tiers).isdisjoint(ref.tiers))
                for place, refs in table.items() if place[1] == part
            }  # fmt: skip

        told = {place: self._told(place) for place in self.bases if place[1] == part}
        return dataclasses.replace(
            self, bases=keep(self.bases), deltas=keep(self.deltas), extras={}, derived={},
            gap_spans=told,
        )  # fmt: skip

    def without(self, lost: Iterable[tuple[str, str]]) -> Catalog:
        """The catalog less some (tier, key) pairs whose blocks did not verify."""
        gone = set(lost)

        def keep(table: Table) -> Table:
            result = {}
            for place, refs in table.items():
                kept = []
                for ref in refs:
                    tiers = tuple(t for t in ref.tiers if (t, ref.key) not in gone)
                    if tiers:
                        kept.append(dataclasses.replace(ref, tiers=tiers))
                result[place] = tuple(kept)
            return result

        return dataclasses.replace(
            self, bases=keep(self.bases), deltas=keep(self.deltas), extras=keep(self.extras),
            derived=keep(self.derived),
            gap_spans={place: self._told(place) for place in {*self.bases, *self.gap_spans}},
        )  # fmt: skip


def make_ref(key: Key, sealed: SealedHead, tiers: Sequence[str]) -> RecordRef:
    """A reference from a record's head."""
    head = sealed.head
    body = head.body
    gap = body.get("gap") if head.kind == "base" else None
    refs = body.get("refs", {}) if head.kind == "extra" else {}
    since = body.get("since")
    return RecordRef(
        key=str(key), kind=head.kind, term=head.term, part=head.part, step=head.step or 0,
        id=sealed.id, parent=head.parent, manifest=head.manifest, layout=head.layout,
        tiers=tuple(tiers), nbytes=sum(info.nbytes for info in head.arrays) + len(sealed.raw),
        origin=str(body.get("origin", "")), exactness=str(body.get("class", "")),
        gap=gap if isinstance(gap, Mapping) else None,
        refs=tuple(sorted({s for s in refs.values() if type(s) is int}))
        if isinstance(refs, Mapping) else (),
        since=since if type(since) is int else head.step or 0,
    )  # fmt: skip


class _Builder:
    """Gathers one run's records from tier after tier."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.refs: dict[tuple[str, str], RecordRef] = {}
        self.manifests: dict[str, Manifest] = {}
        self.layouts: dict[str, list[str]] = defaultdict(list)
        self.claims: dict[int, Claim] = {}
        self.floors: dict[str, list[Floor]] = defaultdict(list)
        self.tags: dict[int, Tag] = {}
        self.troubles: list[Trouble] = []

    def add_tier(self, tier: Tier) -> None:
        """Read all heads of the run in a tier; a tier that fails is a trouble, not an error."""
        name = tier.traits.name
        found: list[tuple[Key, SealedHead]] = []
        try:
            for text in tier.list(f"{self.run}/"):
                key = parse_key(text)
                sealed = self._head(tier, key)
                if sealed is not None:
                    found.append((key, sealed))
        except AdaCheckError as error:
            self.troubles.append(Trouble(tier=name, key="", error=error.at(tier=name)))
        for key, sealed in found:
            if key.kind == "log":
                self._add_log(name, str(key), sealed.head)
        for key, sealed in found:
            self._add(name, key, sealed)

    def _head(self, tier: Tier, key: Key) -> SealedHead | None:
        try:
            sealed = tier.head(str(key))
            check_key(key, sealed.head)
        except RecordNotFoundError:
            return None
        except AdaCheckError as error:
            if not isinstance(error, FormatError) and key.kind not in ("base", "delta", "extra"):
                raise
            error.at(tier=tier.traits.name, key=str(key))
            self.troubles.append(Trouble(tier=tier.traits.name, key=str(key), error=error))
            return None
        return sealed

    def _add_log(self, tier: str, key: str, head: Head) -> None:
        try:
            entry = decode_log(head)
        except FormatError as error:
            self.troubles.append(Trouble(tier=tier, key=key, error=error.at(tier=tier, key=key)))
            return
        if isinstance(entry, Claim):
            self.claims[entry.index] = entry
        elif isinstance(entry, Tag):
            self.tags[entry.index] = entry
        else:
            self.floors[tier].append(entry)

    def _add(self, tier: str, key: Key, sealed: SealedHead) -> None:
        head = sealed.head
        if head.kind == "manifest":
            try:
                self.manifests[sealed.id] = decode_manifest(head)
            except FormatError as error:
                self.troubles.append(Trouble(tier=tier, key=str(key), error=error))
        elif head.kind == "layout":
            if key.name == sealed.id:
                self.layouts[sealed.id].append(tier)
        elif head.kind in ("base", "delta", "extra") and not self._below_floor(tier, head):
            place = (str(key), sealed.id)
            known = self.refs.get(place)
            tiers = (*known.tiers, tier) if known else (tier,)
            self.refs[place] = make_ref(key, sealed, tiers)

    def _below_floor(self, tier: str, head: Head) -> bool:
        step, tags = head.step or 0, self.tags.values()
        return any(floor.covers(head.term, head.kind, step, tags) for floor in self.floors[tier])

    def build(self) -> Catalog:
        """The catalog."""
        tables: dict[str, dict[tuple[str, str], list[RecordRef]]] = {
            kind: defaultdict(list) for kind in ("base", "delta", "extra", ORIGIN)
        }
        for ref in self.refs.values():
            kind = ORIGIN if ref.origin == ORIGIN else ref.kind
            tables[kind][ref.term, ref.part].append(ref)

        def sort(kind: str) -> dict[tuple[str, str], tuple[RecordRef, ...]]:
            return {
                place: tuple(sorted(refs, key=lambda ref: (ref.step, ref.key, ref.id)))
                for place, refs in tables[kind].items()
            }

        return Catalog(
            run=self.run,
            manifests=self.manifests,
            layouts={name: tuple(tiers) for name, tiers in self.layouts.items()},
            bases=sort("base"),
            deltas=sort("delta"),
            extras=sort("extra"),
            derived=sort(ORIGIN),
            claims=tuple(self.claims[index] for index in sorted(self.claims)),
            floors={tier: tuple(floors) for tier, floors in self.floors.items()},
            tags=tuple(self.tags[index] for index in sorted(self.tags)),
            troubles=tuple(self.troubles),
        )


def read_catalog(tiers: Sequence[Tier], run: str) -> Catalog:
    """The catalog of a run over tiers given nearest first. Reads heads only."""
    builder = _Builder(run)
    for tier in tiers:
        builder.add_tier(tier)
    return builder.build()


def list_runs(tiers: Sequence[Tier]) -> list[str]:
    """Names of all runs in the tiers, sorted."""
    return sorted({key.split("/", 1)[0] for tier in tiers for key in tier.list("")})
