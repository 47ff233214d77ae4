"""Whole tensors from the pieces that parts have of them, and the fold's sink that tells them apart.

Tensors are named ``model/<name>`` and ``optimizer/<name>/<role>``. What all ranks share is merged
from all parts; of what ranks have for themselves a view is that of one rank.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from adacheck_store.arrays import tensor_of, torch_dtype
from adacheck_store.fold import Fold
from adacheck_store.format.bodies import SectionState
from adacheck_store.format.canonical import Scalar
from adacheck_store.format.dtypes import item_bytes
from adacheck_store.format.errors import UnsupportedError, UsageError
from adacheck_store.format.keys import part_name
from adacheck_store.format.layout import Layout, Section, Slice
from adacheck_store.format.manifest import Manifest
from adacheck_store.redundancy.shares import wanted_of
from adacheck_store.windows import Spare

Box = tuple[tuple[int, int], ...]
Write = Callable[[str, int, torch.Tensor], None]
"""Takes a tensor's label, the place in the flattened tensor, and the elements from there on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A tensor as it is without parts: of ``name``, its ``param`` or ``buffer``, or a state."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def label(self) -> str:
        """Its name among all of the step."""
        of_model = self.role in ("param", "buffer")
        return f"model/{self.name}" if of_model else f"optimizer/{self.name}/{self.role}"

    @property
    def elements(self) -> int:
        """How many it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.elements * item_bytes(self.dtype)


Wanted = Callable[[str, Slice], bool]
"""Whether a view has a slice of a part."""


def view_of(manifest: Manifest, rank: int) -> Wanted:
    """What is shared by all ranks, and what one rank has for itself.

    Raises `UsageError` for a rank that the run has not got.
    """
    if not 0 <= rank < len(manifest.ranks):
        raise UsageError(
            f"there is no rank {rank}", run=manifest.run, term=manifest.term,
            hint=f"the step is of {len(manifest.ranks)} ranks, counted from 0",
        )  # fmt: skip
    own = wanted_of(manifest, rank)

    def wanted(part: str, piece: Slice) -> bool:
        if not piece.scope:
            return True
        if own:
            return (piece.scope, piece.name) in own.get(part, frozenset())
        return part == part_name(rank)

    return wanted


class Tensors:
    """The whole tensors of a step: by label, and for each piece of a part the label it is of.

    Raises `UnsupportedError` where pieces are not of one tensor.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self.all: dict[str, Whole] = {}
        self.label_of: dict[tuple[str, str, str, int], str] = {}
        self.aliases: dict[str, str] = {}
        self._held: dict[str, dict[tuple[tuple[Box, ...], tuple[int, int] | None], int]] = {}

    def add(
        self, part: str, layout: Layout, roles: Mapping[str, Sequence[str]],
        present: Mapping[str, Sequence[bool]],
    ) -> None:  # fmt: skip
        """A part; ``roles`` are those of each section with an array, ``present`` as in a base."""
        for section in layout.sections:
            for index, piece in enumerate(section.slices):
                if not self._wanted(part, piece):
                    continue
                for alias in piece.aliases:
                    self.aliases[f"model/{alias}"] = f"model/{piece.name}"
                kept = roles[section.name] if present[section.name][index] else ()
                for role in dict.fromkeys((section.main_role, *kept)):
                    whole = Whole(
                        name=piece.name, role=role, dtype=section.dtypes[role], shape=piece.shape
                    )
                    self._place((part, section.name, role, index), whole, piece)

    def _place(self, place: tuple[str, str, str, int], whole: Whole, piece: Slice) -> None:
        known = self.all.setdefault(whole.label, whole)
        if known != whole:
            raise UnsupportedError(
                f"parts disagree on tensor {whole.label[:80]!r}: {known.dtype} {known.shape} and "
                f"{whole.dtype} {whole.shape}", hint="restore it into a model instead",
            )  # fmt: skip
        held = self._held.setdefault(whole.label, {})
        mark = (piece.boxes, piece.flat)
        if mark not in held:  # a copy of a piece says nothing new
            held[mark] = piece.elements
            self.label_of[place] = whole.label

    def refuse_holes(self) -> None:
        """Raise `UnsupportedError` for a tensor whose pieces do not make up the whole."""
        for label, held in self._held.items():
            whole, found = self.all[label], sum(held.values())
            if found != whole.elements:
                raise UnsupportedError(
                    f"of tensor {label[:80]!r} the parts have {found} elements of {whole.elements}",
                    hint="restore it into a model instead",
                )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(whole.nbytes for whole in self.all.values())


def add_fold(tensors: Tensors, part: str, fold: Fold) -> None:
    """A part as its fold will leave it."""
    sections = [section for section in fold.layout.sections if section.slices]
    tensors.add(
        part, fold.layout,
        {section.name: fold.roles(section) for section in sections},
        {section.name: fold.present(section) for section in sections},
    )  # fmt: skip


class PieceSink:
    """A fold's sink for one part: of every window it hands on what belongs to each tensor.

    Its memory is that of the windows under way.
    """

    def __init__(self, part: str, tensors: Tensors, write: Write) -> None:
        self._part, self._tensors, self._write = part, tensors, write
        self._spare = Spare()

    def window(self, section: Section, role: str, start: int, stop: int) -> torch.Tensor:
        """Memory of its own, until it is done."""
        dtype = section.dtypes[role]
        return self._spare.take((stop - start) * item_bytes(dtype)).view(torch_dtype(dtype))

    def done(
        self, section: Section, start: int, stop: int, views: Mapping[str, torch.Tensor]
    ) -> None:
        """Hand on what the window has of every slice."""
        first = bisect_right(section.slices, start, key=lambda piece: piece.offset) - 1
        for index in range(max(0, first), len(section.slices)):
            piece = section.slices[index]
            if piece.offset >= stop:
                break
            low, high = max(piece.offset, start), min(piece.offset + piece.elements, stop)
            for role, view in views.items() if low < high else ():
                label = self._tensors.label_of.get((self._part, section.name, role, index))
                if label is None:
                    continue
                for at, begin, count in runs(piece, low - piece.offset, high - piece.offset):
                    begin += piece.offset - start
                    self._write(label, at, view[begin : begin + count])
        for view in views.values():
            self._spare.give(view)


class Nowhere:
    """A fold's sink that lets every window go when it is done, and tells how many bytes were."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._folded, self._tell = 0, tell

    def window(self, section: Section, role: str, start: int, stop: int) -> torch.Tensor:
        """Fresh memory."""
        return torch.empty(stop - start, dtype=torch_dtype(section.dtypes[role]))

    def done(
        self, section: Section, start: int, stop: int, views: Mapping[str, torch.Tensor]
    ) -> None:
        """Nothing is kept."""
        self._folded += sum(view.nbytes for view in views.values())
        self._tell(self._folded)


def runs(piece: Slice, low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """Where elements low..high of a piece lie in its flattened tensor.

    Yields ``(place in the tensor, place in the piece, count)``, each as long as it can be.
    """
    if piece.flat is not None:
        yield piece.flat[0] + low, low, high - low
        return
    base = 0
    for box in piece.boxes:
        count = math.prod(stop - start for start, stop in box)
        first, last = max(low, base), min(high, base + count)
        if first < last:
            for at, begin, length in _box_runs(piece.shape, box, first - base, last - base):
                yield at, begin + base, length
        base += count


def _box_runs(
    shape: tuple[int, ...], box: Box, low: int, high: int
) -> Iterator[tuple[int, int, int]]:
    sizes = [stop - start for start, stop in box]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    outer, inner = len(shape), 1  # dimensions from ``outer`` on lie in one run of ``inner``
    while outer and (outer == len(shape) or sizes[outer] == shape[outer]):
        outer -= 1
        inner *= sizes[outer]
    origin = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    while low < high:
        row, column = divmod(low, inner)
        at = origin + column
        for dim in reversed(range(outer)):
            row, index = divmod(row, sizes[dim])
            at += index * strides[dim]
        count = min(inner - column, high - low)
        yield at, low, count
        low += count


def counters(
    layout: Layout, states: Mapping[str, SectionState], wanted: Callable[[Slice], bool]
) -> dict[str, torch.Tensor]:
    """``optimizer/<name>/<counter>`` as 0-dim tensors; what is no number is left out."""
    found: dict[str, torch.Tensor] = {}
    for section in layout.sections:
        state = states.get(section.name)
        for name, values in (state.scalars if state else {}).items():
            for piece, value in zip(section.slices, values, strict=True):
                if not wanted(piece):
                    continue
                if isinstance(value, Scalar):
                    found[f"optimizer/{piece.name}/{name}"] = tensor_of(value)
                elif type(value) in (bool, int, float):
                    found[f"optimizer/{piece.name}/{name}"] = torch.tensor(value)
    return found


def joined(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The counters of all parts; raises `UnsupportedError` where two parts count differently."""
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, value in part.items():
            if not torch.equal(found.setdefault(name, value), value):
                raise UnsupportedError(
                    f"parts disagree on {name[:80]!r}", hint="restore it into a model instead"
                )
    return found
