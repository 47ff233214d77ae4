"""The zarr v3 documents of the zarr tier, and how arrays are cut into chunks.

Documents are written as plain JSON by the zarr v3 specification; tests read them with zarr.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adacheck_store.format.dtypes import item_bytes
from adacheck_store.format.errors import MalformedError
from adacheck_store.format.head import MAX_HEAD_BYTES, SealedHead
from adacheck_store.format.ids import BLOCK_BYTES, block_count
from adacheck_store.format.keys import is_key

CHUNK_BYTES_MAX = 8 << 20
STREAM_CHUNK_BYTES = 4 << 20
DOCUMENT = "zarr.json"

_UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}
_MAX_BLOCKS = CHUNK_BYTES_MAX // BLOCK_BYTES
_PADDINGS = 32
"""Padding of at most one of so many parts of an array is little, whatever other chunks need."""


def chunk_bytes(nbytes: int) -> int:
    """Length of the chunks of an array of known size: whole blocks, with little padding.

    An array that fits one chunk is one chunk of exactly its size. A long one has the longest: their
    ends are those of the runs that are read.
    """
    if nbytes <= CHUNK_BYTES_MAX:
        return nbytes
    blocks = block_count(nbytes)
    if -blocks % _MAX_BLOCKS * _PADDINGS <= blocks:
        return CHUNK_BYTES_MAX
    sizes = range(_MAX_BLOCKS // 2, _MAX_BLOCKS + 1)
    return min(sizes, key=lambda size: (-blocks % size, -size)) * BLOCK_BYTES


def chunk_count(nbytes: int, chunk: int) -> int:
    """Number of chunks of an array."""
    return -(-nbytes // chunk) if nbytes else 0


def check_chunk(nbytes: int, chunk: object) -> int:
    """A chunk length read from a document, if an array of that size may have it."""
    whole = type(chunk) is int and chunk > 0 and (chunk % BLOCK_BYTES == 0 or chunk == nbytes)
    if type(chunk) is not int or not (whole or chunk == nbytes == 0) or chunk > CHUNK_BYTES_MAX:
        raise MalformedError(f"chunks of {chunk!r} bytes", rule="chunk")
    return chunk


def group_document(attributes: Mapping[str, Any]) -> bytes:
    """A group's ``zarr.json``."""
    document = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
    return _dump(document)


def array_document(dtype: str, nbytes: int, chunk: int) -> bytes:
    """An array's ``zarr.json``: raw unsigned integers, the true dtype among the attributes.

    16-byte items become pairs of uint64.
    """
    size = item_bytes(dtype)
    unit = min(size, 8)
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [nbytes // unit],
        "data_type": _UNSIGNED[unit],
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [max(1, chunk // unit)]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [_bytes_codec(unit)],
        "attributes": {"dtype": dtype, "elements": nbytes // size},
    }
    return _dump(document)


def _bytes_codec(unit: int) -> dict[str, Any]:
    if unit == 1:
        return {"name": "bytes"}
    return {"name": "bytes", "configuration": {"endian": "little"}}


def _dump(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def head_strings(sealed: SealedHead) -> dict[str, str]:
    """The three strings that say what a record is."""
    return {"adacheck": sealed.raw.decode(), "id": sealed.id, "info": sealed.info}


def open_head(strings: Mapping[str, Any]) -> SealedHead:
    """Verify and parse the three strings."""
    raw, name, info = (strings.get(key) for key in ("adacheck", "id", "info"))
    if not (isinstance(raw, str) and isinstance(name, str) and isinstance(info, str)):
        raise MalformedError("adacheck, id and info are not three strings", rule="metadata")
    try:
        return SealedHead.open(raw.encode(), name, info)
    except UnicodeEncodeError as exc:
        raise MalformedError("a lone surrogate in a head", rule="utf-8") from exc


def read_attributes(text: bytes) -> dict[str, Any]:
    """The attributes of a group's document; raises `MalformedError` (rule ``zarr``)."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise MalformedError(f"zarr.json is damaged: {exc}"[:200], rule="zarr") from exc
    attributes = document.get("attributes") if isinstance(document, dict) else None
    if not isinstance(attributes, dict) or document.get("node_type") != "group":
        raise MalformedError("zarr.json is no group's", rule="zarr")
    return attributes


@dataclass(frozen=True, slots=True)
class GroupHead:
    """What a record's own group says: its head, and the chunk length of each array."""

    sealed: SealedHead
    chunks: Mapping[str, int]

    def document(self) -> bytes:
        """The group's ``zarr.json``."""
        extra = {"chunk_bytes": dict(self.chunks)} if self.chunks else {}
        return group_document({**head_strings(self.sealed), **extra})

    @classmethod
    def parse(cls, text: bytes) -> GroupHead:
        """Verify and parse a group's ``zarr.json``."""
        if len(text) > 2 * MAX_HEAD_BYTES:
            raise MalformedError(f"a zarr.json of {len(text)} bytes", rule="head-size")
        attributes = read_attributes(text)
        sealed = open_head(attributes)
        given = attributes.get("chunk_bytes", {})
        if not isinstance(given, dict):
            raise MalformedError("chunk_bytes is no object", rule="chunk")
        chunks = {
            info.name: check_chunk(info.nbytes, given.get(info.name)) for info in sealed.head.arrays
        }
        return cls(sealed, chunks)


def owner(name: str) -> str:
    """Key of the record or pack an object belongs to by its name; empty for no key."""
    parts = name.split("/")
    for depth in (3, 4, 5):
        if len(parts) > depth and is_key(key := "/".join(parts[:depth])):
            return key
    return ""
