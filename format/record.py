"""A record as one run of bytes: a safetensors file whose header is a function of the head."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .dtypes import SAFETENSORS_DTYPES
from .errors import (
    DigestMismatchError,
    MalformedError,
    NotOursError,
    RecordNotFoundError,
    TruncatedError,
)
from .head import MAX_HEAD_BYTES, ArrayInfo, SealedHead
from .ids import BLOCK_BYTES, Buffer, block_count, block_digest, iter_blocks

_LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = MAX_HEAD_BYTES + (36 << 20)
_DUPLICATE = "a key stands twice in the safetensors header"


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
    """Length, JSON and padding of the safetensors header of a record."""
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
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
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
    if len(prefix) < _LENGTH.size:
        raise TruncatedError(f"a record of {len(prefix)} bytes")
    (length,) = _LENGTH.unpack(bytes(prefix[: _LENGTH.size]))
    if length > MAX_HEADER_BYTES:
        raise MalformedError(f"a header of {length} bytes", rule="header-size")
    return int(length) + _LENGTH.size


def decode_header(data: Buffer) -> SealedHead:
    """Verify and parse a record's header; ``data`` may be longer than it."""
    end = header_length(data)
    if len(data) < end:
        raise TruncatedError(f"{len(data)} bytes of a header of {end}")
    header = bytes(data[:end])
    sealed = _open_metadata(header[_LENGTH.size :])
    if encode_header(sealed) != header:
        raise MalformedError("the safetensors header does not follow from the head", rule="header")
    return sealed


def _open_metadata(text: bytes) -> SealedHead:
    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except RecursionError as exc:
        raise MalformedError("the safetensors header is nested too deep", rule="depth") from exc
    except UnicodeDecodeError as exc:
        raise NotOursError("no safetensors header") from exc
    except ValueError as exc:
        raise NotOursError(f"no safetensors header: {exc}") from exc
    meta = entries.get("__metadata__") if isinstance(entries, dict) else None
    if not isinstance(meta, dict) or "adacheck" not in meta:
        raise NotOursError("a safetensors file, but no record of adacheck-store")
    strings = [meta.get(name) for name in ("adacheck", "id", "info")]
    if len(meta) != 3 or not all(isinstance(text, str) for text in strings):
        raise MalformedError("__metadata__ is not adacheck, id and info", rule="metadata")
    try:
        raw = strings[0].encode("utf-8")
        strings[2].encode("utf-8")
    except UnicodeEncodeError as exc:
        raise MalformedError("a lone surrogate in __metadata__", rule="utf-8") from exc
    return SealedHead.open(raw, strings[1], strings[2])


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise MalformedError(_DUPLICATE, rule="duplicate-key")
    return found


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
        raise TruncatedError(f"{len(view)} bytes of a record of {start}").at(
            **sealed.head.place()
        )
    if len(view) > start:
        raise MalformedError(f"{len(view) - start} bytes after the record", rule="trailing")
    return Record(sealed, arrays)


def block_nbytes(info: ArrayInfo, index: int) -> int:
    """Logical size of a block; raises `RecordNotFoundError` for an index outside the array."""
    if not 0 <= index < block_count(info.nbytes):
        raise RecordNotFoundError(f"no block {index} in array {info.name}")
    return min(BLOCK_BYTES, info.nbytes - index * BLOCK_BYTES)


def verify_block(info: ArrayInfo, index: int, data: Buffer) -> None:
    """Check one block's size and digest; raises `TruncatedError` or `DigestMismatchError`."""
    if len(data) != block_nbytes(info, index):
        raise TruncatedError(
            f"block {index} of {info.name} has {len(data)} bytes, not {block_nbytes(info, index)}"
        )
    if block_digest(data) != info.digests[index]:
        raise DigestMismatchError(f"block {index} of {info.name} differs from its digest")


def verify_record(record: Record) -> None:
    """Check every block of a record."""
    for block in record.blocks():
        verify_block(record.sealed.head.array(block.array), block.index, block.data)
