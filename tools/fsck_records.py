"""Checks of every record of a run in one tier: head, key, body, layout, manifest, blocks.

Blocks are read ahead, of several records at a time; findings come in the order of keys.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter

from adacheck_store.ahead import Ahead
from adacheck_store.format.bodies import (
    DeltaBody,
    decode_base,
    decode_delta,
    decode_extra,
    grad_array,
    set_array,
)
from adacheck_store.format.check import check_base, check_delta
from adacheck_store.format.errors import (
    AdaCheckError,
    FormatError,
    RecordNotFoundError,
    UnsupportedError,
)
from adacheck_store.format.head import Head, SealedHead, check_key
from adacheck_store.format.keys import Key, layout_key, parse_key
from adacheck_store.format.layout import ALIGN, Layout, decode_layout
from adacheck_store.format.manifest import Floor, Manifest, decode_log, decode_manifest
from adacheck_store.optimizers import check_groups
from adacheck_store.tiers.base import Tier

from .findings import DAMAGE, Finding, finding, of_error, of_tier
from .fsck_again import settled
from .fsck_blocks import BlockCheck, Content, Pieces, Run
from .fsck_journal import Journal
from .rows import Progress


class Layouts:
    """Layouts by id, from whichever tier has them; a few are kept."""

    def __init__(self, tiers: tuple[Tier, ...], run: str) -> None:
        self._tiers, self._run = tiers, run
        self._known: dict[str, Layout | None] = {}

    def get(self, layout_id: str) -> Layout | None:
        """A layout; None if no tier has it right."""
        if layout_id not in self._known:
            if len(self._known) >= 16:
                self._known.clear()
            self._known[layout_id] = self._load(layout_id)
        return self._known[layout_id]

    def _load(self, layout_id: str) -> Layout | None:
        for tier in self._tiers:
            try:
                sealed = tier.head(str(layout_key(self._run, layout_id)))
                if sealed.id == layout_id:
                    return decode_layout(sealed.head)
            except AdaCheckError:
                continue
        return None


_OF_BYTES = ("block", "head", "body", "padding")
"""Kinds of damage that another step, floor or term has no part in."""


@dataclass(slots=True)
class RecordCheck:
    """Reads all of a run in a tier, once and in order; holds a few runs of blocks at a time.

    After `findings`, ``lost`` has the keys whose heads, blocks or bodies are wrong, ``bad`` those
    and all others that cannot be used. ``wrong`` has of those of ``lost`` in
    which nothing but blocks is wrong these blocks, by array and index: another tier may have them.
    """

    tier: Tier
    run: str
    layouts: Layouts
    progress: Progress
    total_bytes: int
    journal: Journal | None = None
    lost: set[str] = field(default_factory=set)
    bad: set[str] = field(default_factory=set)
    wrong: dict[str, set[tuple[str, int]]] = field(default_factory=dict)
    done_bytes: int = 0
    _manifests: dict[str, Manifest] = field(default_factory=dict)
    _held_layouts: set[str] = field(default_factory=set)
    _named: set[str] = field(default_factory=set)
    _floors: list[Floor] = field(default_factory=list)
    _known: set[str] = field(default_factory=set)
    _below: int = 0
    _found: dict[str, Content] = field(default_factory=dict)
    _headless: set[str] = field(default_factory=set)
    _names: dict[str, bytes] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The tier's name."""
        return self.tier.traits.name

    def findings(self) -> Iterator[Finding]:
        """Every finding, in the order of keys (layouts, the log and manifests come first)."""
        with Ahead(self.tier.traits.parallel) as ahead:
            blocks = BlockCheck(self.tier, ahead)
            for text, told in groupby(self._told(blocks, ahead.threads + 1), key=itemgetter(0)):
                first = [found for _, several in told for found in several]
                rows = settled(first, partial(self._again, text, blocks)) if text else first
                rows += self._flickering(text, first, rows)
                self._note(text, rows)
                yield from rows
        if self._below:
            yield finding("below-floor", f"{self._below} records below the tier's floor",
                          tier=self.name, run=self.run)  # fmt: skip
        yield from self._unnamed()

    def _told(self, blocks: BlockCheck, ahead: int) -> Iterator[tuple[str, list[Finding]]]:
        """The findings of each item, with the key of its record; so many items are on their way."""
        waiting: deque[tuple[str, Finding | Run]] = deque()
        for item in self._items(blocks):
            waiting.append(item)
            while len(waiting) > ahead:
                yield self._read(*waiting.popleft(), blocks)
        while waiting:
            yield self._read(*waiting.popleft(), blocks)

    def _items(self, blocks: BlockCheck) -> Iterator[tuple[str, Finding | Run]]:
        """Findings, and blocks that are on their way, with the key of the record they are of (empty
        for what is of none)."""
        try:
            for text in self.tier.list(f"{self.run}/"):
                for item in self._record(parse_key(text), blocks):
                    yield text, item
        except AdaCheckError as error:
            yield "", of_tier(error, self.name)

    def _read(
        self, text: str, item: Finding | Run, blocks: BlockCheck
    ) -> tuple[str, list[Finding]]:  # fmt: skip
        """What an item amounts to."""
        found = self._amounts_to(text, item, blocks)
        if isinstance(item, Run):
            self.done_bytes += item.nbytes
            self.progress(f"{self.run} in {self.name}", self.done_bytes, self.total_bytes)
        return text, found

    def _amounts_to(self, text: str, item: Finding | Run, blocks: BlockCheck) -> list[Finding]:
        if isinstance(item, Finding):
            return [item]
        found = list(blocks.findings(item))
        if item.content.runs:
            self._found[text] = item.content
        if item.last and (name := self._names.pop(text, None)) and self.journal is not None:
            if not item.content.runs and not item.content.gone:
                self.journal.add(name)
        return found

    def _flickering(
        self, text: str, first: Sequence[Finding], rows: Sequence[Finding]
    ) -> list[Finding]:  # fmt: skip
        """What is said of a record that was read wrong, is there still, and was then read right:
        no run that goes on explains that."""
        wrong = [row for row in first if row.severity == DAMAGE and row.kind in _OF_BYTES]
        if not wrong or rows or not text:
            return []
        try:
            sealed = self.tier.head(text)
        except AdaCheckError:
            return []
        if sealed.head.kind in ("base", "delta", "extra") and self._is_below(parse_key(text)):
            return []
        what = f"{wrong[0].kind}: {wrong[0].what}; read again, it was right"
        return [finding("unsettled", what, tier=self.name, key=text)]

    def _again(self, text: str, blocks: BlockCheck) -> list[Finding]:
        """Another reading of a record: of all but the blocks that were right."""
        key, content = parse_key(text), self._found.pop(text, None)
        self._learn(key.term)
        seen = None if text in self._headless else ()  # without a head no block was looked at
        items = self._record(key, blocks, seen if content is None else content.runs)
        return [found for item in items for found in self._amounts_to(text, item, blocks)]

    def _learn(self, term: str) -> None:
        """Take in the layouts, entries of the log and manifests that have come since."""
        places = ("layout/", "log/", *([f"{term}/manifest/"] if term else []))
        for text in [text for place in places for text in self.tier.list(f"{self.run}/{place}")]:
            if text not in self._known:
                with suppress(FormatError, RecordNotFoundError):
                    self._take(text, self.tier.head(text))

    def _note(self, text: str, rows: Sequence[Finding]) -> None:
        """Keep what rows say of a record."""
        content = self._found.pop(text, None)
        kinds = {row.kind for row in rows if row.severity == DAMAGE}
        kinds -= {"layout-missing", "padding"}
        if text and (kinds or any(row.unchecked for row in rows)):
            self.bad.add(text)
        if text and kinds:
            self.lost.add(text)
        if kinds == {"block"} and content is not None:
            self.wrong[text] = content.wrong

    def _record(
        self, key: Key, blocks: BlockCheck, only: Collection[tuple[str, int]] | None = None
    ) -> Iterator[Finding | Run]:
        text = str(key)
        try:
            sealed = self.tier.head(text)
            check_key(key, sealed.head, sealed.id)
        except RecordNotFoundError:
            return  # deleted since it was listed
        except AdaCheckError as error:
            self._headless.add(text)
            yield of_error(error, self.name, text)
            return
        self._headless.discard(text)
        if key.kind in ("base", "delta", "extra") and self._is_below(key):
            self._below += 1
            return
        yield from self._contents(key, sealed, blocks, only)

    def _is_below(self, key: Key) -> bool:
        return any(floor.covers(key.term, key.kind, key.step) for floor in self._floors)

    def _contents(
        self, key: Key, sealed: SealedHead, blocks: BlockCheck,
        only: Collection[tuple[str, int]] | None,
    ) -> Iterator[Finding | Run]:  # fmt: skip
        head, text = sealed.head, str(key)
        try:
            match head.kind:
                case "extra":
                    yield from self._extra_refs(key, head)
                    yield from self._documents(head, text)
                    yield from self._blocks(text, sealed, None, blocks, only)
                case "base" | "delta":
                    pieces, found = self._fits(head, text)
                    yield from found
                    yield from self._documents(head, text)
                    yield from self._blocks(text, sealed, pieces, blocks, only)
                case _:
                    self._take(text, sealed)
        except FormatError as error:
            yield of_error(error, self.name, text, "body")
        except RecordNotFoundError:
            return

    def _blocks(
        self, text: str, sealed: SealedHead, pieces: Pieces | None, blocks: BlockCheck,
        only: Collection[tuple[str, int]] | None,
    ) -> Iterator[Run]:  # fmt: skip
        """The blocks of a record on their way, unless the journal has it."""
        head, journal = sealed.head, self.journal
        judged = pieces is not None or head.kind == "extra"
        if journal is not None and only is None and head.arrays and judged:
            with suppress(AdaCheckError):  # whose place cannot be told is not noted
                self._names[text] = journal.name(self.tier, text, sealed.id)
                if journal.holds(self._names[text], sum(info.nbytes for info in head.arrays)):
                    del self._names[text]
                    return
        yield from blocks.begin(text, head, pieces, only)

    def _take(self, text: str, sealed: SealedHead) -> None:
        """Keep a layout, a manifest or an entry of the log; raises what is wrong with its body."""
        head = sealed.head
        if head.kind == "manifest":
            self._manifests[sealed.id] = decode_manifest(head)
            self._named.update(p.layout for p in self._manifests[sealed.id].parts)
        elif head.kind == "layout":
            decode_layout(head)
            self._held_layouts.add(sealed.id)
        elif isinstance(entry := decode_log(head), Floor) and text not in self._known:
            self._floors.append(entry)
        self._known.add(text)

    def _fits(self, head: Head, key: str) -> tuple[Pieces | None, list[Finding]]:
        """The ranges in use of a base's or delta's arrays, and whether it fits its layout."""
        layout = self.layouts.get(head.layout)
        body = decode_base(head) if head.kind == "base" else decode_delta(head)
        if layout is None:
            return None, []
        try:
            if isinstance(body, DeltaBody):
                check_delta(head, body, layout)
                for update in body.updates:
                    with suppress(UnsupportedError):  # a class of the user's own
                        check_groups(layout.optimizers[update.optimizer], update.groups)
                pieces = _delta_pieces(body, layout)
                loose = _loose(pieces)
                found = [finding("loose-pieces", loose, tier=self.name, key=key)] if loose else []
                return pieces, found
            check_base(head, body, layout)
        except FormatError as error:
            return None, [of_error(error, self.name, key, "layout-mismatch")]
        pieces = {}
        for section in layout.sections:
            state = body.states.get(section.name)
            for role, _ in section.roles:
                pieces[f"{section.name}/{role}"] = [
                    (piece.offset, piece.offset + piece.elements)
                    for index, piece in enumerate(section.slices)
                    if role == section.main_role or (state and state.present[index])
                ]
        return pieces, []

    def _documents(self, head: Head, key: str) -> Iterator[Finding]:
        """The layout and the manifest revision a record names, in this very tier."""
        if head.layout and head.layout not in self._held_layouts:
            yield finding("layout-missing", f"its layout {head.layout[:16]} is not in this tier",
                          tier=self.name, key=key)  # fmt: skip
        manifest = self._manifests.get(head.manifest)
        self._named.add(head.manifest)
        if manifest is None:
            yield finding(
                "manifest-missing", f"its manifest {head.manifest[:16]} is not in this tier",
                tier=self.name, key=key,
            )  # fmt: skip
            return
        right = manifest.term == head.term and manifest.step <= (head.step or 0)
        if head.kind == "extra":
            right = right and head.part in manifest.ranks
        else:
            right = right and (head.part, head.layout) in {
                (part.name, part.layout) for part in manifest.parts
            }
        if not right:
            yield finding(
                "manifest-mismatch", "its manifest is of another term or later step, or does not "
                "name its part with its layout, or its rank", tier=self.name, key=key,
            )  # fmt: skip

    def _extra_refs(self, key: Key, head: Head) -> Iterator[Finding]:
        body = decode_extra(head)
        for name, step in body.refs.items():
            earlier = Key(run=key.run, kind="extra", term=key.term, part=key.part, step=step)
            what = ""
            try:
                if name not in decode_extra(self.tier.head(str(earlier)).head).tree:
                    what = f"the extra of step {step} does not hold {name[:80]!r}"
            except RecordNotFoundError:
                what = f"refers to the extra of step {step}, which is not in this tier"
            except AdaCheckError as error:
                what = f"refers to the extra of step {step}, which cannot be read: {error.message}"
            if what:
                yield finding("extra-ref", what, tier=self.name, key=str(key))

    def _unnamed(self) -> Iterator[Finding]:
        for identity, manifest in self._manifests.items():
            if identity not in self._named:
                yield finding(
                    "unnamed", "a manifest of which no record is here", tier=self.name,
                    key=f"{self.run}/{manifest.term}/manifest/{manifest.step:012d}",
                )  # fmt: skip
        for layout_id in sorted(self._held_layouts - self._named):
            key = str(layout_key(self.run, layout_id))
            yield finding("unnamed", "a layout no manifest here names", tier=self.name, key=key)


def _delta_pieces(body: DeltaBody, layout: Layout) -> Pieces:
    sections = {section.name: section for section in layout.sections}
    pieces: dict[str, list[tuple[int, int]]] = {}
    for number, update in enumerate(body.updates):
        for grad in update.grads:
            size = sections[grad.section].slices[grad.slice].elements
            name = grad_array(number, grad.section, grad.encoding)
            pieces.setdefault(name, []).append((grad.offset, grad.offset + size))
    for item in body.sets:
        size = sections[item.section].slices[item.slice].elements
        name = set_array(item.section, item.role)
        pieces.setdefault(name, []).append((item.offset, item.offset + size))
    return pieces


def _loose(pieces: Pieces) -> str:
    """Names an array with more unused elements between its pieces than padding needs."""
    for name, ranges in pieces.items():
        end = 0
        for start, stop in ranges:
            if start - end >= ALIGN:
                return f"{start - end} unused elements before element {start} of {name}"
            end = stop
    return ""
