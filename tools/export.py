"""Layout of a safetensors file that holds a run's state, and the fold's sink that fills it.

Tensors are ``model/<name>`` and ``optimizer/<name>/<role>``. The file is written at offsets known
before the fold, in the memory of one window; only the counters (``step``) and the metadata come
last, so room is left for them in front, which the header fills up with spaces.
"""

from __future__ import annotations

import json
import math
import os
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from adacheck_store.arrays import byte_view, dtype_name, tensor_of, torch_dtype
from adacheck_store.format.bodies import SectionState
from adacheck_store.format.canonical import Scalar
from adacheck_store.format.dtypes import SAFETENSORS_DTYPES, item_bytes
from adacheck_store.format.errors import MalformedError, UnsupportedError
from adacheck_store.format.layout import Layout, Section, Slice

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
_COUNTER_BYTES = 320
"""Room in the header for a counter of a slice, besides its name."""


Place = tuple[str, str, int]
"""Section, role and index of a slice."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the file: ``offset`` from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * item_bytes(self.dtype)

    def header(self) -> dict[str, Any]:
        """Its entry in the header; a dtype that safetensors lacks is U8 with one more dimension."""
        kind, shape = self.dtype, list(self.shape)
        if kind not in SAFETENSORS_DTYPES:
            kind, shape = "U8", [*shape, item_bytes(self.dtype)]
        span = [self.offset, self.offset + self.nbytes]
        return {"dtype": kind, "shape": shape, "data_offsets": span}


def plain_scalar(value: Any) -> Any:
    """A typed scalar as a Python number."""
    if not isinstance(value, Scalar):
        return value
    return tensor_of(value).item()


def tensor_names(section: Section, piece: Slice, roles: Sequence[str]) -> dict[str, str]:
    """Role of a slice -> its tensor's name in the file."""
    names = {section.main_role: f"model/{piece.name}"}
    names |= {role: f"optimizer/{piece.name}/{role}" for role in roles if role != section.main_role}
    return names


@dataclass(frozen=True, slots=True)
class PartNeeds:
    """What of a part goes into the file.

    ``roles`` maps a section to the roles that have an array, ``present`` to which slices have
    optimizer state.
    """

    layout: Layout
    roles: Mapping[str, Sequence[str]]
    present: Mapping[str, Sequence[bool]]

    def tensors(self) -> Iterator[tuple[Place, str, str, Slice]]:
        """Each piece's place, the name of its tensor in the file, its dtype, and the piece."""
        for section in self.layout.sections:
            for index, piece in enumerate(section.slices):
                kept = self.roles[section.name] if self.present[section.name][index] else ()
                for role, name in tensor_names(section, piece, kept).items():
                    yield (section.name, role, index), name, section.dtypes[role], piece


class ExportPlan:
    """Where every tensor of all parts goes, before anything is written.

    Wide dtypes come first, so that every tensor lies aligned. A tensor's pieces may lie in
    several parts; together they must be the whole of it, each element once, or each whole.
    """

    def __init__(self, parts: Sequence[PartNeeds]) -> None:
        self.parts = parts
        kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        cuts: dict[str, dict[object, int]] = {}
        for part in parts:
            for _, name, dtype, piece in part.tensors():
                refuse_scope(piece)
                if kinds.setdefault(name, (dtype, piece.shape)) != (dtype, piece.shape):
                    raise MalformedError(f"two tensors of one name: {name[:80]}", rule="layout")
                cuts.setdefault(name, {})[piece.boxes, piece.flat] = piece.elements
        for name, found in cuts.items():
            if sum(found.values()) != math.prod(kinds[name][1]):
                raise UnsupportedError(
                    f"tensor {name[:80]!r} is not whole: {len(found)} pieces of it are kept",
                    hint="restore it into a model instead",
                )
        self.entries: dict[str, Entry] = {}
        at = 0
        for name in sorted(kinds, key=lambda name: (-item_bytes(kinds[name][0]), name)):
            dtype, shape = kinds[name]
            self.entries[name] = Entry(name, dtype, shape, at)
            at += self.entries[name].nbytes
        self.nbytes = at
        header = json.dumps({name: e.header() for name, e in self.entries.items()}).encode()
        named = {piece.name for part in parts for _, _, _, piece in part.tensors()}
        counted = sum(len(json.dumps(name)) + _COUNTER_BYTES for name in named)
        self._header_bytes = len(header) + counted

    def room(self, metadata_bytes: int) -> int:
        """Bytes to leave for the header, its length field included; a multiple of 64."""
        return -(-(self._header_bytes + metadata_bytes) // 64) * 64 + 64


def refuse_scope(piece: Slice) -> None:
    """Raise `UnsupportedError` for a tensor that each rank has of its own."""
    if piece.scope:
        raise UnsupportedError(
            f"tensor {piece.name[:80]!r} is kept for each rank apart, which one file cannot hold",
            hint="restore it into a model instead",
        )


def runs_of(piece: Slice) -> list[tuple[int, int, int]]:
    """A piece as runs of elements: where each begins in the piece and in the tensor, its length."""
    if piece.flat is not None:
        return [(0, piece.flat[0], piece.elements)]
    runs, at = [], 0
    for box in piece.boxes:
        inner = len(box)  # dimensions from here on are whole: they lie in the run of the one before
        while inner > 0 and box[inner - 1] == (0, piece.shape[inner - 1]):
            inner -= 1
        outer = max(0, inner - 1)
        steps = [math.prod(piece.shape[depth + 1 :]) for depth in range(len(box))]
        size = math.prod(stop - start for start, stop in box[outer:])
        if not size:
            continue
        starts = [start for start, _ in box[outer:]]
        lead = sum(start * step for start, step in zip(starts, steps[outer:], strict=True))
        for index in product(*(range(start, stop) for start, stop in box[:outer])):
            begin = sum(i * step for i, step in zip(index, steps, strict=False)) + lead
            runs.append((at, begin, size))
            at += size
    return runs


class FileSink:
    """A fold's sink that writes every window of a part to its places in a file.

    Owner of the descriptor is the caller. ``start`` is where the tensors' bytes begin.
    """

    def __init__(self, file: int, start: int, plan: ExportPlan, part: int = 0) -> None:
        self._file = file
        self._start = start
        needs = plan.parts[part]
        self._entries = {place: plan.entries[name] for place, name, _, _ in needs.tensors()}
        self._runs = {
            (section.name, index): runs_of(piece)
            for section in needs.layout.sections for index, piece in enumerate(section.slices)
        }  # fmt: skip
        self._scratch: dict[str, torch.Tensor] = {}
        self.written = 0

    def window(self, section: Section, role: str, start: int, stop: int) -> torch.Tensor:
        """Scratch memory, the same for every window of a role."""
        kept = self._scratch.get(role)
        dtype = torch_dtype(section.dtypes[role])
        if kept is None or kept.dtype != dtype or kept.numel() < stop - start:
            kept = torch.empty(stop - start, dtype=dtype)
            self._scratch[role] = kept
        return kept[: stop - start]

    def done(
        self, section: Section, start: int, stop: int, views: Mapping[str, torch.Tensor]
    ) -> None:
        """Write what the window has of every slice."""
        first = bisect_right(section.slices, start, key=lambda piece: piece.offset) - 1
        for index in range(max(0, first), len(section.slices)):
            piece = section.slices[index]
            if piece.offset >= stop:
                break
            low, high = max(piece.offset, start), min(piece.offset + piece.elements, stop)
            if low >= high:
                continue
            for role, view in views.items():
                entry = self._entries.get((section.name, role, index))
                if entry is not None:
                    runs = self._runs[section.name, index]
                    self._write(entry, runs, low - piece.offset, view[low - start : high - start])

    def _write(
        self, entry: Entry, runs: Sequence[tuple[int, int, int]], at: int, view: torch.Tensor
    ) -> None:
        """Write elements of a piece, from element ``at`` of it on."""
        size, stop = item_bytes(entry.dtype), at + view.numel()
        for index in range(bisect_right(runs, at, key=lambda run: run[0]) - 1, len(runs)):
            begin, target, length = runs[index]
            low, high = max(begin, at), min(begin + length, stop)
            if low >= high:
                break
            data = byte_view(view[low - at : high - at])
            place = self._start + entry.offset + (target + low - begin) * size
            _write_at(self._file, data, place)
            self.written += len(data)


def _write_at(file: int, data: memoryview, at: int) -> None:
    while data.nbytes:
        count = os.pwrite(file, data, at)
        data, at = data[count:], at + count


def counters(
    parts: Sequence[tuple[Layout, Mapping[str, SectionState]]],
) -> dict[str, torch.Tensor]:
    """``optimizer/<name>/<counter>`` as 0-dim tensors; what is no number is left out.

    Pieces of one tensor in several parts have counters alike, or it is `UnsupportedError`.
    """
    found: dict[str, torch.Tensor] = {}
    for layout, states in parts:
        for name, value in _counters(layout, states):
            if not torch.equal(found.setdefault(name, value), value):
                raise UnsupportedError(
                    f"pieces of a tensor have counters of their own: {name[:80]}",
                    hint="restore it into a model instead",
                )
    return found


def _counters(
    layout: Layout, states: Mapping[str, SectionState]
) -> Iterator[tuple[str, torch.Tensor]]:
    for section in layout.sections:
        state = states.get(section.name)
        for name, values in (state.scalars if state else {}).items():
            for piece, value in zip(section.slices, values, strict=True):
                if isinstance(value, Scalar):
                    yield f"optimizer/{piece.name}/{name}", tensor_of(value)
                elif type(value) in (bool, int, float):
                    yield f"optimizer/{piece.name}/{name}", torch.tensor(value)


def finish(
    file: int, room: int, plan: ExportPlan, scalars: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
) -> None:  # fmt: skip
    """Write the counters right before the tensors, and the header before them."""
    entries: list[Entry] = []
    data = bytearray()
    for name, value in sorted(scalars.items(), key=lambda item: (-item[1].itemsize, item[0])):
        entries.append(Entry(name, dtype_name(value.dtype), (), len(data)))
        data += byte_view(value)
    entries += [replace(entry, offset=entry.offset + len(data)) for entry in plan.entries.values()]
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    header |= {entry.name: entry.header() for entry in entries}
    if len(header) != len(entries) + 1:
        raise MalformedError("two tensors of one name", rule="layout")
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    space = room - len(data) - _LENGTH.size
    if len(text) > space or space > _MAX_HEADER_BYTES:
        raise UnsupportedError(
            f"a header of {len(text)} bytes is more than a safetensors file takes",
            hint="restore it into a model instead",
        )
    head = _LENGTH.pack(space) + text + b" " * (space - len(text)) + data
    _write_at(file, memoryview(head), 0)
