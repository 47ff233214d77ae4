"""Opening a term: layouts, first records and the one manifest, in an order that a kill may cut.

1. Every rank puts its layout into the far tier.
2. Every rank puts layout, manifest and, where its chain starts anew, a captured base and an extra
   into its near tier.
3. Rank 0 puts the manifest into the far tier: from here on the term has begun.

Each is synced, and done by all before the next begins. A term without parent that was cut before
3 has trained nothing, and is passed over (`without_unbegun`); one with a parent can be restored
from its parent's records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from adacheck_store.format.derived import stood_for
from adacheck_store.format.errors import AdaCheckError
from adacheck_store.format.keys import (
    Term,
    base_key,
    extra_key,
    layout_key,
    manifest_key,
    parse_key,
    part_name,
    rank_name,
)
from adacheck_store.format.layout import Layout
from adacheck_store.format.manifest import Manifest, PartEntry
from adacheck_store.format.record import Record
from adacheck_store.tiers.base import RecordSource, Tier

from .beginning import Beginning, Place, stood_in
from .boundary import Link
from .catalog import Catalog, RecordRef, make_ref, read_catalog
from .config import Settings, writer_info
from .drain import Span, missing_below
from .fetch import Fetcher
from .group import Group, lead, same, share, together
from .policy import to_settings
from .recovery import Prover, RestorePlan, tolerant_line
from .restore import Restored
from .retention import below
from .store import Store
from .tail import Tail
from .terms import read_log

MakeRecord = Callable[[Link], Record]


@dataclass(frozen=True, slots=True)
class Opened:
    """A term that has begun: its manifest, and what writer and upkeep of this rank start from."""

    manifest: Manifest
    link: Link
    tail: Tail
    backlog: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Opens a term for a part and a rank; ``restored`` is what it goes on from, if anything.

    ``base`` and ``extra`` make records of the live state, where it is needed. ``announce`` is told
    of the manifest before anything is put under it. ``drains`` is false where agents drain.
    """

    store: Store
    run: str
    term: Term
    group: Group
    settings: Settings
    restored: Restored | None
    base: MakeRecord
    extra: MakeRecord
    announce: Callable[[Manifest, Layout], None] = lambda manifest, layout: None
    drains: bool = True

    @property
    def part(self) -> str:
        """This rank's part."""
        return part_name(self.group.rank)

    @property
    def rank(self) -> str:
        """This rank's name."""
        return rank_name(self.group.rank)

    def open(self, layout: Layout, start_step: int) -> Opened:
        """Open the term, begun at what was restored or at ``start_step``."""
        sealed = layout.seal(self.run)
        shape = RecordSource(str(layout_key(self.run, sealed.id)), Record(sealed, {}))
        layouts = share(self.group, "layouts", lambda: self._publish(shape))
        manifest = self._manifest(layouts, start_step)
        head = manifest.seal(writer_info())
        step = manifest.step
        link = Link(
            run=self.run, term=str(self.term), part=self.part, rank=self.rank, parent=head.id,
            manifest=head.id, layout=sealed.id,
        )  # fmt: skip
        document = RecordSource(str(manifest_key(self.run, link.term, step)), Record(head, {}))
        tail = self._inherited(sealed.id)
        together(self.group, "announce", lambda: self.announce(manifest, layout))
        first = together(
            self.group, "first records",
            lambda: self._keep([shape, document], link, step, anew=tail is None),
        )  # fmt: skip
        same(self.group, "manifest", {"the manifest": head.id})
        stands, line, stand_ins = lead(self.group, "begin", lambda: self._begin(document))
        if not stands:
            first = together(
                self.group, "fork state",
                lambda: first or self._keep([], link, step, anew=True),
            )  # fmt: skip
        if first:
            tail = self._tail(first)
        assert tail is not None
        backlog = [source.key for source in first]
        if self.store.near is not self.store.far:
            inherited = self._inherited_backlog(
                {term: (low, high) for term, low, high in line}, set(map(tuple, stand_ins))
            )
            backlog += inherited
            if stands and self.drains and self.restored is not None:
                backlog = Beginning(
                    store=self.store, group=self.group, restored=self.restored, link=link,
                    layout=layout, first=first, inherited=inherited,
                ).backlog()  # fmt: skip
        return Opened(manifest, link, tail, backlog)

    def _publish(self, shape: RecordSource) -> str:
        """Put the layout where the manifest that names it will be; its id."""
        far = self.store.far
        far.put([shape])
        far.sync()
        return shape.record.sealed.id

    def _manifest(self, layouts: list[str], start_step: int) -> Manifest:
        """The term's first manifest, alike on all ranks."""
        parts = tuple(
            PartEntry(name=part_name(number), layout=layout, sources=(number,), owner=number)
            for number, layout in enumerate(layouts)
        )
        manifest = Manifest(
            run=self.run, term=str(self.term), step=start_step, parts=parts,
            ranks=tuple(rank_name(number) for number in range(self.group.size)),
            settings={
                "base_every": self.settings.base_every, "policy": self.settings.policy,
                **to_settings(self.settings.keep_bases, self.settings.retention),
            },
        )  # fmt: skip
        restored = self.restored
        if restored is None:
            return manifest
        return dataclasses.replace(
            manifest, step=restored.step, parent_term=restored.plan.term,
            fork_step=restored.step,
            tips={part.part: part.link for part in restored.plan.parts},
        )  # fmt: skip

    def _inherited(self, layout_id: str) -> Tail | None:
        """What the next fold starts from, where the chain goes on with the parent's records.

        What was folded by another arithmetic than the trainer's is no part of the new chain: a
        third machine would have it otherwise. It begins with what was loaded.
        """
        restored = self.restored
        if restored is None or restored.certificate.exactness == "bounded":
            return None
        plan = next((part for part in restored.plan.parts if part.part == self.part), None)
        if plan is None or plan.layout != layout_id:
            return None
        base = plan.base if plan.origin is None else self._own_base(plan.base)
        return None if base is None else Tail(base=base, deltas=list(plan.deltas))

    def _own_base(self, derived: RecordRef) -> RecordRef | None:
        """The base with bytes for which a derived one stands, if it lies in this rank's near tier:
        rank 0, which plans, may not see that."""
        near, key = self.store.near, parse_key(derived.key)
        with suppress(AdaCheckError):  # what cannot be read is captured anew
            captured, _ = stood_for(Fetcher(self.store.tiers).head(derived).head)
            for text in near.list(f"{self.run}/{key.term}/{key.part}/base/"):
                sealed = near.head(text)
                if sealed.head == captured:
                    return make_ref(parse_key(text), sealed, (near.traits.name,))
        return None

    def _keep(
        self, documents: list[RecordSource], link: Link, step: int, *, anew: bool
    ) -> list[RecordSource]:
        """Put documents, and if ``anew`` a captured base and its extra, into the near tier."""
        first = [] if not anew else [
            RecordSource(str(base_key(self.run, link.term, link.part, step)), self.base(link)),
            RecordSource(str(extra_key(self.run, link.term, link.rank, step)), self.extra(link)),
        ]  # fmt: skip
        self.store.near.put([*documents, *first])
        self.store.near.sync()
        return first

    def _begin(self, document: RecordSource) -> list[Any]:
        """Make the term known to all (rank 0); whether the state it begins with is still there.

        A writer of the parent that took our claim for dead may have raised its floors meanwhile.
        Gives the line as well, each term with its first and last step, and where derived bases
        stand in for others in the far tier.
        """
        if self.store.near is not self.store.far:
            self.store.far.put([document])
            self.store.far.sync()
        if self.restored is None:
            return [True, [], []]
        catalog = read_catalog(self.store.tiers, self.run)
        before = tolerant_line(catalog, self.restored.plan.term)
        plan = Prover(catalog, before).prove(self.restored.step)
        line = tolerant_line(catalog)
        stand_ins = set[Place]()
        if catalog.derived:
            stand_ins = stood_in(read_catalog([self.store.far], self.run), line)
        spans = [[item.term, item.first, item.last] for item in line]
        return [isinstance(plan, RestorePlan), spans, [list(place) for place in sorted(stand_ins)]]

    def _tail(self, first: list[RecordSource]) -> Tail:
        tail = Tail()
        for source in first:
            sealed = source.record.sealed
            if sealed.head.kind == "base":
                tail.add(make_ref(parse_key(source.key), sealed, (self.store.near.traits.name,)))
        return tail

    def _inherited_backlog(self, line: Mapping[str, Span], stand_ins: set[Place]) -> list[str]:
        """Records on the line up to the fork that the far tier has not received, and would not
        delete again: those of this rank's number, and of numbers that are nobody's now, to each
        rank as many."""
        if not line:
            return []
        far, shared = self.store.far, ("layout", "manifest")
        missing = [
            text for text in missing_below(self.store.uppers, far, self.run, line, stand_ins)
            for key in [parse_key(text)]
            if key.kind in shared or int(key.part[1:]) % self.group.size == self.group.rank
        ]  # fmt: skip
        gone = set(below(missing, read_log(far, self.run))) if missing else set[str]()
        return [text for text in missing if text not in gone]


def without_unbegun(catalog: Catalog, far: Tier) -> Catalog:
    """The catalog less the terms that were claimed and never begun, as far as that can be told.

    Such a term has no parent, no manifest in the far tier, which has its claim, and no record
    but those it was to begin with.
    """
    claimed = {claim.term for claim in catalog.claims}
    gone = set()
    for manifest in catalog.manifests.values():
        if manifest.parent_term or manifest.term not in claimed:
            continue
        tables = (catalog.bases, catalog.deltas, catalog.extras)
        later = any(
            term == manifest.term and any(ref.step > manifest.step for ref in refs)
            for table in tables for (term, _), refs in table.items()
        )  # fmt: skip
        try:
            begun = later or any(far.list(f"{catalog.run}/{manifest.term}/manifest/"))
        except AdaCheckError:
            begun = True
        if not begun:
            gone.add(manifest.term)
    kept = {key: item for key, item in catalog.manifests.items() if item.term not in gone}
    return dataclasses.replace(catalog, manifests=kept)
