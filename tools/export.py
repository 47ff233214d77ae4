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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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


class ExportPlan:
    """Where every tensor of a layout goes, before anything is written.

    ``roles`` maps a section to the roles that have an array, ``present`` to which slices have
    optimizer state. Wide dtypes come first, so that every tensor lies aligned.
    """

    def __init__(
        self, layout: Layout, roles: Mapping[str, Sequence[str]],
        present: Mapping[str, Sequence[bool]],
    ) -> None:  # fmt: skip
        self.layout = layout
        wanted: list[tuple[tuple[str, str, int], str, str, tuple[int, ...]]] = []
        self._names = 0
        for section in layout.sections:
            for index, piece in enumerate(section.slices):
                refuse_pieces(piece)
                self._names += len(json.dumps(piece.name)) + _COUNTER_BYTES
                kept = roles[section.name] if present[section.name][index] else ()
                for role, name in tensor_names(section, piece, kept).items():
                    place = (section.name, role, index)
                    wanted.append((place, name, section.dtypes[role], piece.shape))
        wanted.sort(key=lambda item: (-item_bytes(item[2]), item[1]))
        self.entries: dict[tuple[str, str, int], Entry] = {}
        at = 0
        for place, name, dtype, shape in wanted:
            entry = Entry(name, dtype, shape, at)
            self.entries[place] = entry
            at += entry.nbytes
        self.nbytes = at
        header = json.dumps({e.name: e.header() for e in self.entries.values()}).encode()
        self._plain_bytes = len(header)

    def room(self, metadata_bytes: int) -> int:
        """Bytes to leave for the header, its length field included; a multiple of 64."""
        return -(-(self._plain_bytes + self._names + metadata_bytes) // 64) * 64 + 64


def refuse_pieces(piece: Slice) -> None:
    """Raise `UnsupportedError` for a tensor that is not whole in its part."""
    if not piece.whole or piece.scope:
        raise UnsupportedError(
            f"tensor {piece.name[:80]!r} is kept in pieces, which one file cannot hold yet",
            hint="restore it into a model instead",
        )


class FileSink:
    """A fold's sink that writes every window to its place in a file.

    Owner of the descriptor is the caller. ``start`` is where the tensors' bytes begin.
    """

    def __init__(self, file: int, start: int, plan: ExportPlan) -> None:
        self._file = file
        self._start = start
        self._plan = plan
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
                entry = self._plan.entries.get((section.name, role, index))
                if entry is not None:
                    size = item_bytes(entry.dtype)
                    at = self._start + entry.offset + (low - piece.offset) * size
                    data = byte_view(view[low - start : high - start])
                    _write_at(self._file, data, at)
                    self.written += len(data)


def _write_at(file: int, data: memoryview, at: int) -> None:
    while data.nbytes:
        count = os.pwrite(file, data, at)
        data, at = data[count:], at + count


def counters(layout: Layout, states: Mapping[str, SectionState]) -> dict[str, torch.Tensor]:
    """``optimizer/<name>/<counter>`` as 0-dim tensors; what is no number is left out."""
    found: dict[str, torch.Tensor] = {}
    for section in layout.sections:
        state = states.get(section.name)
        for name, values in (state.scalars if state else {}).items():
            for piece, value in zip(section.slices, values, strict=True):
                if isinstance(value, Scalar):
                    found[f"optimizer/{piece.name}/{name}"] = tensor_of(value)
                elif type(value) in (bool, int, float):
                    found[f"optimizer/{piece.name}/{name}"] = torch.tensor(value)
    return found


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
