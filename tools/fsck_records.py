"""Checks of every record of a run in one tier: head, key, body, layout, manifest, blocks.

Blocks are read ahead, of several records at a time; findings come in the order of keys.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

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

from .findings import Finding, finding, of_error, of_tier
from .fsck_blocks import BlockCheck, Pieces, Run
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


@dataclass(slots=True)
class RecordCheck:
    """Reads all of a run in a tier, once and in order; holds a few runs of blocks at a time.

    After `findings`, ``lost`` has the keys whose blocks or bodies are wrong (their heads may be
    right), ``bad`` those and all others that cannot be used. ``wrong`` has of those of ``lost`` in
    which nothing but blocks is wrong these blocks, by array and index: another tier may have them.
    """

    tier: Tier
    run: str
    layouts: Layouts
    progress: Progress
    total_bytes: int
    lost: set[str] = field(default_factory=set)
    bad: set[str] = field(default_factory=set)
    wrong: dict[str, set[tuple[str, int]]] = field(default_factory=dict)
    done_bytes: int = 0
    _manifests: dict[str, Manifest] = field(default_factory=dict)
    _held_layouts: set[str] = field(default_factory=set)
    _named: set[str] = field(default_factory=set)
    _floors: list[Floor] = field(default_factory=list)
    _below: int = 0
    _unfit: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The tier's name."""
        return self.tier.traits.name

    def findings(self) -> Iterator[Finding]:
        """Every finding, in the order of keys (layouts, the log and manifests come first)."""
        waiting: deque[tuple[str, Finding | Run]] = deque()
        with Ahead(self.tier.traits.parallel) as ahead:
            blocks = BlockCheck(self.tier, ahead)
            for item in self._items(blocks):
                waiting.append(item)
                while len(waiting) > ahead.threads + 1:
                    yield from self._settled(blocks, *waiting.popleft())
            while waiting:
                yield from self._settled(blocks, *waiting.popleft())
        for text in self._unfit:
            self.wrong.pop(text, None)
        if self._below:
            yield finding("below-floor", f"{self._below} records below the tier's floor",
                          tier=self.name, run=self.run)  # fmt: skip
        yield from self._unnamed()

    def _items(self, blocks: BlockCheck) -> Iterator[tuple[str, Finding | Run]]:
        """Findings, and blocks that are on their way, with the key of the record they are of (empty
        for one without a head, which no plan has)."""
        try:
            for text in self.tier.list(f"{self.run}/"):
                yield from self._record(parse_key(text), blocks)
        except AdaCheckError as error:
            yield "", of_tier(error, self.name)

    def _settled(self, blocks: BlockCheck, text: str, item: Finding | Run) -> Iterator[Finding]:
        """What an item amounts to, noted."""
        if isinstance(item, Finding):
            self._note(text, item)
            yield item
            return
        for found in blocks.findings(item):
            self._note(text, found)
            yield found
        if item.content.wrong:
            self.wrong[text] = item.content.wrong
        self.done_bytes += item.nbytes
        self.progress(f"{self.run} in {self.name}", self.done_bytes, self.total_bytes)

    def _note(self, text: str, found: Finding) -> None:
        if text and found.severity == "damage" and found.kind not in ("layout-missing", "padding"):
            self.lost.add(text)
            self.bad.add(text)
            if found.kind != "block":
                self._unfit.add(text)

    def _record(self, key: Key, blocks: BlockCheck) -> Iterator[tuple[str, Finding | Run]]:
        text = str(key)
        try:
            sealed = self.tier.head(text)
            check_key(key, sealed.head, sealed.id)
        except RecordNotFoundError:
            return  # deleted since it was listed
        except AdaCheckError as error:
            self.bad.add(text)
            yield "", of_error(error, self.name, text)
            return
        if key.kind in ("base", "delta", "extra") and self._is_below(key):
            self._below += 1
            return
        for item in self._contents(key, sealed, blocks):
            yield text, item

    def _is_below(self, key: Key) -> bool:
        return any(floor.covers(key.term, key.kind, key.step) for floor in self._floors)

    def _contents(
        self, key: Key, sealed: SealedHead, blocks: BlockCheck
    ) -> Iterator[Finding | Run]:
        head, text = sealed.head, str(key)
        try:
            match head.kind:
                case "manifest":
                    self._manifests[sealed.id] = decode_manifest(head)
                    self._named.update(p.layout for p in self._manifests[sealed.id].parts)
                case "layout":
                    decode_layout(head)
                    self._held_layouts.add(sealed.id)
                case "claim" | "floor" | "tag":
                    entry = decode_log(head)
                    if isinstance(entry, Floor):
                        self._floors.append(entry)
                case "extra":
                    yield from self._extra_refs(key, head)
                    yield from self._documents(head, text)
                    yield from blocks.begin(text, head, None)
                case _:
                    pieces, found = self._fits(head, text)
                    yield from found
                    yield from self._documents(head, text)
                    yield from blocks.begin(text, head, pieces)
        except FormatError as error:
            yield of_error(error, self.name, text, "body")
        except RecordNotFoundError:
            return

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
