"""A record as one run of bytes: a safetensors file whose header is a function of the head."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from . import canonical
from .dtypes import SAFETENSORS_DTYPES
from .errors import (
    DigestMismatchError,
    MalformedError,
    NotOursError,
    RecordNotFoundError,
    TruncatedError,
)
from .head import ArrayInfo, SealedHead, refuse_foreign
from .ids import BLOCK_BYTES, Buffer, block_count, block_digest, iter_blocks

_LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 100_000_000
"""What safetensors readers take at most."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block of an array: its array's name, its index, and its logical bytes."""

    array: str
    index: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class Record:
    """A record in memory: its sealed head and a flat byte view of each array."""

    sealed: SealedHead
    arrays: Mapping[str, memoryview]

    def blocks(self) -> Iterator[Block]:
        """All blocks, array by array in the head's order."""
        for info in self.sealed.head.arrays:
            for index, data in enumerate(iter_blocks(self.arrays[info.name])):
                yield Block(info.name, index, data)

    def buffers(self) -> list[Buffer]:
        """The bytes of the safetensors file, as header and array views, without copying."""
        header = encode_header(self.sealed)
        return [header, *(self.arrays[info.name] for info in self.sealed.head.arrays)]


def encode_header(sealed: SealedHead) -> bytes:
    """Length, JSON and padding of the safetensors header of a record.

    Raises `MalformedError` (rule ``header-size`` or ``openings``) for one no reader would take.
    """
    entries: dict[str, object] = {
        "__metadata__": {"adacheck": sealed.raw.decode(), "id": sealed.id, "info": sealed.info}
    }
    offset = 0
    for info in sealed.head.arrays:
        stored = info.dtype in SAFETENSORS_DTYPES
        entries[info.name] = {
            "dtype": info.dtype if stored else "U8",
            "shape": [info.elements if stored else info.nbytes],
            "data_offsets": [offset, offset + info.nbytes],
        }
        offset += info.nbytes
    spelled = json.dumps(entries, separators=(",", ":"), ensure_ascii=False)
    canonical.check_openings(spelled)
    text = spelled.encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise MalformedError(f"a header of {len(text)} bytes", rule="header-size")
    return _LENGTH.pack(len(text)) + text


def array_offsets(sealed: SealedHead) -> dict[str, int]:
    """Byte offset of each array from the end of the header."""
    offsets, at = {}, 0
    for info in sealed.head.arrays:
        offsets[info.name] = at
        at += info.nbytes
    return offsets


def record_bytes(sealed: SealedHead) -> int:
    """Size of the whole record in bytes."""
    arrays = sum(info.nbytes for info in sealed.head.arrays)
    return len(encode_header(sealed)) + arrays


def header_length(prefix: Buffer) -> int:
    """Bytes of the header (length field included), from a record's first 8 bytes.

    Raises `TruncatedError` or `MalformedError` (rule ``header-size``) before anything is taken.
    """
    start = bytes(memoryview(prefix).cast("B")[: _LENGTH.size])
    if len(start) < _LENGTH.size:
        raise TruncatedError(f"a record of {len(start)} bytes")
    (length,) = _LENGTH.unpack(start)
    if length > MAX_HEADER_BYTES:
        raise MalformedError(f"a header of {length} bytes", rule="header-size")
    return int(length) + _LENGTH.size


def decode_header(data: Buffer) -> SealedHead:
    """Verify and parse a record's header; ``data`` may be longer than it."""
    view = memoryview(data).cast("B")
    end = header_length(view)
    if len(view) < end:
        raise TruncatedError(f"{len(view)} bytes of a header of {end}")
    header = bytes(view[:end])
    sealed = _open_metadata(header[_LENGTH.size :])
    if encode_header(sealed) != header:
        raise MalformedError("the safetensors header does not follow from the head", rule="header")
    return sealed


def _open_metadata(data: bytes) -> SealedHead:
    try:
        text = data.decode("utf-8")
        canonical.check_depth(text)
        entries = json.loads(text, object_pairs_hook=canonical.no_duplicates)
    except ValueError as exc:
        raise NotOursError(f"no safetensors header: {str(exc)[:200]}") from exc
    meta = entries.get("__metadata__") if isinstance(entries, dict) else None
    if not isinstance(meta, dict) or not isinstance(meta.get("adacheck"), str):
        raise NotOursError("a safetensors file, but no record of adacheck-store")
    try:
        raw = meta["adacheck"].encode("utf-8")
    except UnicodeEncodeError as exc:
        raise MalformedError("a lone surrogate in the head", rule="utf-8") from exc
    known = (meta.get("id"), meta.get("info"))
    if len(meta) != 3 or not all(isinstance(item, str) for item in known):
        refuse_foreign(raw)
        raise MalformedError("__metadata__ is not adacheck, id and info", rule="metadata")
    return SealedHead.open(raw, meta["id"], meta["info"])


def decode_record(data: Buffer) -> Record:
    """A record from its bytes: head verified, sizes checked, blocks *not* yet verified.

    Use `verify_block` (or `verify_record`) before trusting an array.
    """
    sealed = decode_header(data)
    view = memoryview(data).cast("B")
    start = header_length(data)
    arrays: dict[str, memoryview] = {}
    for info in sealed.head.arrays:
        arrays[info.name] = view[start : start + info.nbytes]
        start += info.nbytes
    if len(view) < start:
        raise TruncatedError(f"{len(view)} bytes of a record of {start}").at(**sealed.head.place())
    if len(view) > start:
        raise MalformedError(f"{len(view) - start} bytes after the record", rule="trailing").at(
            **sealed.head.place()
        )
    return Record(sealed, arrays)


def block_nbytes(info: ArrayInfo, index: int) -> int:
    """Logical size of a block; raises `RecordNotFoundError` for an index outside the array."""
    if not 0 <= index < block_count(info.nbytes):
        raise RecordNotFoundError(f"no block {index} in array {info.name}")
    return min(BLOCK_BYTES, info.nbytes - index * BLOCK_BYTES)


def verify_block(info: ArrayInfo, index: int, data: Buffer) -> None:
    """Check one block's size and digest; raises `TruncatedError` or `DigestMismatchError`."""
    view, size = memoryview(data).cast("B"), block_nbytes(info, index)
    if len(view) != size:
        raise TruncatedError(f"block {index} of {info.name} has {len(view)} bytes, not {size}")
    if block_digest(view) != info.digests[index]:
        raise DigestMismatchError(f"block {index} of {info.name} differs from its digest")


def verify_record(record: Record) -> None:
    """Check every block of a record."""
    for info in record.sealed.head.arrays:
        data = record.arrays[info.name]
        if len(data) != info.nbytes:
            raise TruncatedError(f"{len(data)} bytes of {info.name}, not {info.nbytes}")
        for index, block in enumerate(iter_blocks(data)):
            verify_block(info, index, block)
