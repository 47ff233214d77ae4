"""A window of a fold: the elements of a section that are folded while they lie in the cache.

Windows side by side are read together, a leg of the way: a read of a window alone is so small
that an object store takes longer to answer it than to send it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from adacheck_store.format.bodies import Grad, SectionState, grad_array
from adacheck_store.format.layout import Section, Slice
from adacheck_store.tiers.transfer import HUGE_BYTES, populate

from .arrays import byte_view, from_typed
from .engines import Piece
from .fetch import Want

_HALVES = (torch.bfloat16, torch.float32)
_SIZES = 4


@dataclass(slots=True)
class Run:
    """Gradients of neighbouring pieces: elements from ``at`` on of a read that is on its way."""

    grad: Grad
    pieces: Sequence[Piece]
    read: Future[torch.Tensor]
    at: int


class Spare:
    """Memory for gradients and windows, used again: fresh pages cost more than filling them.

    Never more than was in use at once of each of the last `_SIZES` sizes: full windows are alike,
    those at a section's end are not. Any thread may call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: OrderedDict[int, list[torch.Tensor]] = OrderedDict()

    def take(self, nbytes: int) -> torch.Tensor:
        """So many bytes, flat, with anything in them."""
        with self._lock:
            free = self._of(nbytes)
            if free:
                return free.pop()
        memory = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes >= HUGE_BYTES:
            populate(byte_view(memory))
        return memory

    def give(self, memory: torch.Tensor) -> None:
        """Take back what nobody reads any more, as it was taken or as a view of all of it."""
        flat = memory.view(torch.uint8)
        with self._lock:
            self._of(flat.numel()).append(flat)

    def _of(self, nbytes: int) -> list[torch.Tensor]:
        free = self._free.setdefault(nbytes, [])
        self._free.move_to_end(nbytes)
        while len(self._free) > _SIZES:
            self._free.popitem(last=False)
        return free


Updates = list[tuple[int, Sequence[Piece], list[Run]]]
"""A delta's updates of a section: their number, the pieces that step, and their gradients."""


@dataclass(frozen=True, slots=True)
class Window:
    """Elements start..stop of a section: memory by role, and pieces of slices."""

    section: Section
    start: int
    stop: int
    views: Mapping[str, torch.Tensor]
    pieces: Sequence[Piece]


@dataclass(slots=True)
class Leg:
    """Windows side by side, and some deltas that are folded into each of them.

    ``loads`` are reads of the base, at the ``first`` leg of these windows, ``reads`` those of
    gradients; ``updates`` are those of each delta, for each window.
    """

    windows: Sequence[Window]
    deltas: Sequence[Any]
    first: bool
    last: bool
    loads: list[Future[None]] = field(default_factory=list)
    reads: list[Future[torch.Tensor]] = field(default_factory=list)
    updates: list[list[Updates]] = field(default_factory=list)


def cuts(section: Section, width: int, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Windows of ``width`` elements over ranges of a section."""
    return [
        (start, min(start + width, high, section.elements))
        for low, high in ranges for start in range(low, high, width)
    ]  # fmt: skip


def pieces_of(
    section: Section, start: int, stop: int, views: Mapping[str, torch.Tensor],
    scratch: torch.Tensor, state: SectionState | None,
) -> list[Piece]:  # fmt: skip
    """The slices' cuts in a window, with the counters that ``state`` gives; ``scratch`` takes
    their gradients."""
    pieces = []
    for index, item in enumerate(section.slices):
        low, high = max(item.offset, start), min(item.offset + item.elements, stop)
        if low >= high and not _empty_here(section, item, start, stop):
            continue
        high = max(low, high)
        cut = slice(low - start, high - start)
        pieces.append(
            Piece(
                slice=index, group=item.group, start=low - item.offset,
                stop=high - item.offset, param=_shaped(item, views[section.main_role][cut]),
                grad=_shaped(item, scratch[cut]),
                roles={
                    role: _shaped(item, view[cut])
                    for role, view in views.items() if role != section.main_role
                },
                present=bool(state and state.present[index]), scalars=_scalars(state, index),
            )
        )  # fmt: skip
    return pieces


def idle_pieces(
    section: Section, indexes: Iterable[int], views: Mapping[str, torch.Tensor],
    scratch: torch.Tensor, state: SectionState | None,
) -> list[Piece]:  # fmt: skip
    """Cuts without elements of slices that no window has: their counters go on all the same."""
    roles = {role: view[:0] for role, view in views.items() if role != section.main_role}
    return [
        Piece(
            slice=index, group=section.slices[index].group, start=0, stop=0,
            param=views[section.main_role][:0], grad=scratch[:0], roles=roles,
            present=bool(state and state.present[index]), scalars=_scalars(state, index),
        )
        for index in indexes
    ]  # fmt: skip


def _scalars(state: SectionState | None, index: int) -> dict[str, Any]:
    """A slice's counters, fresh, where it has state."""
    if state is None or not state.present[index]:
        return {}
    return {
        name: from_typed(values[index])
        for name, values in state.scalars.items() if values[index] is not None
    }  # fmt: skip


def load(want: Want | None, view: torch.Tensor, fresh: bool) -> None:
    """Fill a window's memory from the base, or with zeros where that has nothing."""
    if fresh and view.numel():
        populate(byte_view(view))
    if want is None:
        view.zero_()
    else:
        want.into(view)


def updates_of(
    windows: Sequence[Window], number: int, grads: Mapping[tuple[str, int], Grad],
    start: Callable[[str, int, int], Future[torch.Tensor]],
) -> list[tuple[int, Sequence[Piece], list[Run]]]:  # fmt: skip
    """What a delta's update of this number does to each window.

    ``start`` begins to read elements of one of its arrays; neighbours are read together.
    """
    found: list[tuple[int, Sequence[Piece], list[Run]]] = []
    lots: list[tuple[str, int, int, list[tuple[list[Run], Grad, Sequence[Piece], int]]]] = []
    for window in windows:
        stepping = [p for p in window.pieces if (window.section.name, p.slice) in grads]
        runs: list[Run] = []
        found.append((number, stepping, runs))
        for grad, pieces, name, begin, end in _runs(window.section, number, grads, stepping):
            if lots and lots[-1][0] == name and lots[-1][2] == begin:
                _, first, _, lot = lots.pop()
            else:
                first, lot = begin, []
            lot.append((runs, grad, pieces, begin - first))
            lots.append((name, first, end, lot))
    for name, first, end, lot in lots:
        read = start(name, first, end)
        for runs, grad, pieces, at in lot:
            runs.append(Run(grad, pieces, read, at))
    return found


def _runs(
    section: Section, number: int, grads: Mapping[tuple[str, int], Grad], pieces: Sequence[Piece]
) -> Iterator[tuple[Grad, Sequence[Piece], str, int, int]]:
    """The pieces' gradients, neighbours in one run: first gradient, pieces, and the array's name
    with the first and last element."""
    at = 0
    while at < len(pieces):
        first = grads[section.name, pieces[at].slice]
        shift = _shift(section, pieces[at], first)
        end = at + 1
        while end < len(pieces):
            grad = grads[section.name, pieces[end].slice]
            if (grad.encoding, grad.scale) != (first.encoding, first.scale):
                break
            if _shift(section, pieces[end], grad) != shift:
                break
            end += 1
        begin = first.offset + pieces[at].start
        name = grad_array(number, first.section, first.encoding)
        yield first, pieces[at:end], name, begin, begin + _target(pieces[at:end]).numel()
        at = end


def decode(run: Run, halves: bool) -> None:
    """Fill the pieces' gradients; with ``halves`` bfloat16 is left to the engine as it is."""
    target = _target(run.pieces)
    kept = run.read.result()[run.at : run.at + target.numel()]
    if halves and run.grad.scale is None and (kept.dtype, target.dtype) == _HALVES:
        for piece in run.pieces:
            at = piece.grad.storage_offset() - target.storage_offset()
            piece.kept = kept[at : at + piece.grad.numel()]
        return
    if run.grad.scale is not None:
        kept = kept.to(torch.float32).mul_(_scale(run.grad.scale))
    target.copy_(kept)


def _target(pieces: Sequence[Piece]) -> torch.Tensor:
    """The scratch memory from the first piece's gradient to the end of the last one's."""
    target = pieces[0].grad.reshape(-1)
    if len(pieces) > 1:
        last = pieces[-1].grad
        span = last.storage_offset() + last.numel() - target.storage_offset()
        target = target.as_strided((span,), (1,))
    return target


def _empty_here(section: Section, item: Slice, start: int, stop: int) -> bool:
    """An empty slice has counters to step: it belongs to the window its offset falls into."""
    at = max(0, min(item.offset, section.elements - 1))
    return item.elements == 0 and start <= at < max(stop, 1)


def _shaped(item: Slice, flat: torch.Tensor) -> torch.Tensor:
    """A cut as the engine takes it: flat, but a scalar stays one, for it promotes differently."""
    return flat.reshape(()) if item.shape == () and flat.numel() else flat


def _shift(section: Section, piece: Piece, grad: Grad) -> int:
    return grad.offset - section.slices[piece.slice].offset


def _scale(bits: int) -> torch.Tensor:
    return torch.tensor(bits - 2**32 if bits >= 2**31 else bits, dtype=torch.int32).view(
        torch.float32
    )
