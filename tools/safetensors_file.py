"""A safetensors file that is written at offsets known before its tensors are.

Only what is known last, counters and metadata, is written last: room is left for it in front, which
the header fills up with spaces.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from adacheck_store.arrays import byte_view, dtype_name, torch_dtype
from adacheck_store.format.dtypes import SAFETENSORS_DTYPES, item_bytes
from adacheck_store.format.errors import MalformedError, UnsupportedError

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
_COUNTER_BYTES = 320
"""Room in the header for the counters of a tensor, besides their names."""


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


class FilePlan:
    """Where every tensor goes, before anything is written.

    ``tensors`` maps names to dtype and shape. Wide dtypes come first, so that every tensor lies
    aligned.
    """

    def __init__(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self.entries: dict[str, Entry] = {}
        at = 0
        for name in sorted(tensors, key=lambda name: (-item_bytes(tensors[name][0]), name)):
            entry = Entry(name, *tensors[name], at)
            self.entries[name] = entry
            at += entry.nbytes
        self.nbytes = at
        self._names = sum(len(json.dumps(name)) + _COUNTER_BYTES for name in tensors)
        header = json.dumps({e.name: e.header() for e in self.entries.values()}).encode()
        self._plain_bytes = len(header)

    def room(self, metadata_bytes: int) -> int:
        """Bytes to leave for the header, its length field included; a multiple of 64."""
        return -(-(self._plain_bytes + self._names + metadata_bytes) // 64) * 64 + 64


def mapped(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """The metadata of a file and its tensors, mapped, not read; each has a storage of its own.

    Dtypes that safetensors lacks are given back where the metadata names them. Raises
    `MalformedError` (rule ``safetensors``).
    """
    size = path.stat().st_size
    if size < _LENGTH.size:
        raise MalformedError(f"a file of {size} bytes", rule="safetensors")
    whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    storage = whole.untyped_storage()
    length = int.from_bytes(bytes(whole[: _LENGTH.size].tolist()), "little")
    try:
        if length > min(size - _LENGTH.size, _MAX_HEADER_BYTES):
            raise ValueError(f"a header of {length} bytes")
        start = _LENGTH.size + length
        header = json.loads(whole[_LENGTH.size : start].numpy().tobytes())
        said = dict(header.pop("__metadata__", {}))
        dtypes = json.loads(said.get("dtypes", "{}"))
        found = {}
        for name, entry in header.items():
            kind, shape = entry["dtype"], entry["shape"]
            if name in dtypes:
                kind, shape = dtypes[name], shape[:-1]
            low, high = (start + at for at in entry["data_offsets"])
            if not start <= low <= high <= size or high - low != math.prod(shape) * item_bytes(
                kind
            ):
                raise ValueError(f"{name[:80]!r} lies at {low}..{high}")
            tensor = torch.empty(0, dtype=torch_dtype(kind))
            if high > low:  # a storage of its own: torch.save writes storages, not views
                tensor.set_(storage[low:high])
            found[name] = tensor.reshape(shape)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MalformedError(f"no safetensors file: {error}"[:300], rule="safetensors") from error
    return said, found


class FileWriter:
    """Writes elements to their places in a file whose tensors begin at ``start``.

    Owner of the descriptor is the caller. Names that the plan has not got are passed over.
    """

    def __init__(self, file: int, start: int, plan: FilePlan) -> None:
        self._file, self._start, self._plan = file, start, plan
        self.written = 0

    def write(self, name: str, at: int, elements: torch.Tensor) -> None:
        """Elements of a tensor, from element ``at`` of it on."""
        entry = self._plan.entries.get(name)
        if entry is not None:
            data = byte_view(elements)
            write_at(self._file, data, self._start + entry.offset + at * item_bytes(entry.dtype))
            self.written += len(data)


def write_at(file: int, data: memoryview, at: int) -> None:
    """Write all of some bytes to their place in a file."""
    while data.nbytes:
        count = os.pwrite(file, data, at)
        data, at = data[count:], at + count


def finish(
    file: int, room: int, plan: FilePlan, scalars: Mapping[str, torch.Tensor],
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
    write_at(file, memoryview(head), 0)
