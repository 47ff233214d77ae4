"""Derived bases: read as the captured ones they stand for, from what the parent's parts give.

See `format.derived`. Each block is held against the digest that it had when the term began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from adacheck_store.format.derived import stood_for
from adacheck_store.format.dtypes import item_bytes
from adacheck_store.format.errors import FormatError, ModelMismatchError
from adacheck_store.format.head import ArrayInfo, SealedHead
from adacheck_store.format.ids import BLOCK_BYTES, block_digests
from adacheck_store.format.layout import Layout, Section, Slice
from adacheck_store.format.record import block_nbytes, verify_block
from adacheck_store.tiers.transfer import copy_into

from .arrays import byte_view, untouched
from .catalog import RecordRef
from .cutting import Elsewhere, Places, cut_out
from .fetch import ArrayReader, BlocksLostError, Fetcher, lost_if_malformed
from .fold import Fold, Only
from .recovery import PartPlan, RestorePlan
from .redundancy.shares import wanted_of
from .regions import Span, merged
from .reshard import names_of, pieces_in

FORKS_MAX = 3
"""Forks that lie between a restore and bytes; then a term begins with a base of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Began:
    """What a rank was given, as its ``layout`` has it: digests of all arrays' blocks, by name."""

    layout: Layout
    digests: Mapping[str, tuple[str, ...]]

    def gives(self, arrays: tuple[ArrayInfo, ...]) -> bool:
        """Whether live arrays are, bit for bit, what was given."""
        return all(self.digests.get(info.name) == info.digests for info in arrays)


def began(layout: Layout, made: Layout, arrays: Mapping[str, torch.Tensor]) -> Began | None:
    """What arrays of the layout ``made`` are as those of ``layout``; an array at a time.

    None where not every piece of the one is a piece of the other.
    """
    pairs = list(_same(layout, made))
    places = {(source.name, given.offset) for _, _, source, given in pairs}
    if any(len(pairs) != count for count in (len(places), _pieces(layout), _pieces(made))):
        return None
    digests = {}
    for section in layout.sections:
        for role, dtype in section.roles:
            whole = untouched(section.elements, dtype)
            for target, piece, source, given in pairs:
                held = arrays.get(f"{source.name}/{role}")
                if target is section and held is not None:
                    piece_of = held[given.offset : given.offset + given.elements]
                    whole[piece.offset : piece.offset + piece.elements].copy_(piece_of)
            digests[f"{section.name}/{role}"] = block_digests(byte_view(whole))
    return Began(layout=layout, digests=digests)


def _same(layout: Layout, made: Layout) -> Iterator[tuple[Section, Slice, Section, Slice]]:
    """Slices of one layout, and those of the other that are the same pieces under any name."""
    found = {
        name: (section, piece)
        for section in made.sections for piece in section.slices for name in names_of(piece)
    }  # fmt: skip
    for section in layout.sections:
        for piece in section.slices:
            other = next((found[name] for name in names_of(piece) if name in found), None)
            if other is not None and piece.elements == other[1].elements > 0:
                yield section, piece, *other


def _pieces(layout: Layout) -> int:
    return sum(piece.elements > 0 for piece in pieces_in(layout))


@dataclass(slots=True)
class _Made:
    """Blocks of a base in memory, read as those of a record are."""

    arrays: dict[str, torch.Tensor] = field(default_factory=dict)

    def read(self, ref: RecordRef, info: ArrayInfo, first: int, count: int) -> memoryview:
        """Verified bytes of ``count`` blocks from ``first``; raises `BlocksLostError`."""
        data = byte_view(self.arrays[info.name])
        for index in range(first, first + count):
            at = index * BLOCK_BYTES
            try:
                verify_block(info, index, data[at : at + block_nbytes(info, index)])
            except FormatError as error:
                raise _lost(ref, f"it is not what the term began with: {error.message}") from error
        return data[first * BLOCK_BYTES : (first + count) * BLOCK_BYTES]

    def read_into(
        self, ref: RecordRef, info: ArrayInfo, first: int, count: int, out: memoryview
    ) -> None:
        """The same into ``out``, as long as the blocks are."""
        copy_into(out, 0, self.read(ref, info, first, count))


def _lost(ref: RecordRef, cause: str) -> BlocksLostError:
    return BlocksLostError(ref, [(tier, ref.key) for tier in ref.tiers], cause)


class DerivedReader(ArrayReader):
    """Reads a derived base, between `prepare` and `forget`; what it needs is in memory meanwhile.

    ``open_folds`` opens the folds of the origin's parts. Raises `BlocksLostError`.
    """

    def __init__(
        self, fetcher: Fetcher, part: PartPlan, layout: Layout,
        open_folds: Callable[[RestorePlan], Mapping[str, Fold]],
    ) -> None:  # fmt: skip
        assert part.origin is not None
        told = fetcher.head(part.base)
        with lost_if_malformed(part.base):
            head, self._ranks = stood_for(told.head)
        self._tiers, self._origin, self._layout = fetcher, part.origin, layout
        self._open_folds = open_folds
        self._made = _Made()
        super().__init__(self._made, part.base, SealedHead.seal(head))

    def prepare(self, only: Only | None) -> None:
        """Put together what is needed of it, from all that the parent had at the fork step."""
        self._made.arrays = {info.name: untouched(info.elements, info.dtype)
                             for info in self.head.arrays}  # fmt: skip
        spans = None if only is None else _widened(self._layout, only)
        need = self._layout if spans is None else _needed(self._layout, spans)
        if not need.sections:
            return
        origin, rank = self._origin, int(self.ref.part[1:])
        folds = self._open_folds(origin)
        at = rank % len(folds)
        order = [*list(folds)[at:], *list(folds)[:at]]
        bare = {
            piece.name for section in need.sections if section.optimizer < 0
            for piece in section.slices
        }  # fmt: skip
        try:
            cut = cut_out(
                self._tiers, {name: folds[name] for name in order}, need, rank=rank, bare=bare,
                own=wanted_of(origin.manifest, rank),
                as_many=len(origin.manifest.ranks) == self._ranks,
                to=Elsewhere(arrays=self._made.arrays, places=self._places, spans=spans),
            )  # fmt: skip
        except ModelMismatchError as error:
            raise _lost(self.ref, error.message) from error
        if any(report.exactness != "exact" for report in cut.given):
            raise _lost(
                self.ref, f"step {origin.step} of term {origin.term}, of which it is made, cannot "
                "be folded here as it was where it was trained",
            )  # fmt: skip

    def _places(self, made: Layout) -> Places:
        return {
            (source.name, given.offset): (section, piece)
            for section, piece, source, given in _same(self._layout, made)
        }

    def forget(self) -> None:
        """Give the memory back."""
        self._made.arrays = {}


def _widened(layout: Layout, only: Only) -> dict[str, tuple[Span, ...]]:
    """Elements of whole blocks of every role, where ``only`` has whole ones of the widest."""
    found = {}
    for section in layout.sections:
        unit = BLOCK_BYTES // min(item_bytes(dtype) for _, dtype in section.roles)
        found[section.name] = merged(
            (low // unit * unit, -(-high // unit) * unit)
            for low, high in only.get(section.name, ()) if low < high
        )  # fmt: skip
    return found


def _needed(layout: Layout, spans: Mapping[str, tuple[Span, ...]]) -> Layout:
    """The slices that have something in spans of their sections."""
    sections = []
    for section in layout.sections:
        slices = tuple(
            piece for piece in section.slices
            if any(low < piece.offset + piece.elements and piece.offset < high
                   for low, high in spans[section.name])
        )  # fmt: skip
        if slices:
            sections.append(replace(section, slices=slices))
    return replace(layout, sections=tuple(sections))
