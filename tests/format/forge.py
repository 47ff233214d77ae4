"""Forged records: bytes made without the encoder, so that they may break any rule."""

import copy
import hashlib
import json
import struct
from collections.abc import Callable
from typing import Any

from adacheck_store.format.bodies import decode_base, decode_delta, decode_extra
from adacheck_store.format.head import Head, SealedHead
from adacheck_store.format.layout import decode_layout
from adacheck_store.format.manifest import decode_log, decode_manifest
from adacheck_store.format.record import Record, decode_record, verify_record
from tests.golden.make_v1 import FOLDER

Json = Any
LONE = "\ud800"
Change = Callable[[dict[str, Json]], object]
NAMES = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
DECODERS: dict[str, Callable[[Head], Any]] = {
    "manifest": decode_manifest, "layout": decode_layout, "base": decode_base,
    "delta": decode_delta, "extra": decode_extra, "claim": decode_log, "floor": decode_log,
    "tag": decode_log,
}  # fmt: skip


def golden_bytes(name: str) -> bytes:
    """A golden record's bytes."""
    return (FOLDER / f"{name}.safetensors").read_bytes()


def golden_head(name: str) -> dict[str, Json]:
    """A golden record's head as plain JSON."""
    data = golden_bytes(name)
    (length,) = struct.unpack_from("<Q", data)
    head: dict[str, Json] = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["adacheck"])
    return head


def golden_arrays(name: str) -> bytes:
    """The bytes after a golden record's header."""
    data = golden_bytes(name)
    (length,) = struct.unpack_from("<Q", data)
    return data[8 + length :]


def spell(value: Json) -> str:
    """Canonical JSON, for values that have it, and the nearest thing for others."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def frame(header: bytes, arrays: bytes = b"") -> bytes:
    """A safetensors file around a header's JSON."""
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + arrays


def forge_text(name: str, raw: str, info: str = "{}") -> bytes:
    """A golden record with another text for its head, under the right id for that text."""
    data = golden_bytes(name)
    (length,) = struct.unpack_from("<Q", data)
    entries = json.loads(data[8 : 8 + length])
    identity = hashlib.blake2b(raw.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()
    entries["__metadata__"] = {"adacheck": raw, "id": identity, "info": info}
    try:
        header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        header = json.dumps(entries, separators=(",", ":")).encode()
    return frame(header, data[8 + length :])


def forge(name: str, change: Callable[[dict[str, Json]], object]) -> bytes:
    """A golden record whose head was changed, under the right id for the changed head."""
    head = copy.deepcopy(golden_head(name))
    change(head)
    return forge_text(name, spell(head))


def read(data: bytes) -> tuple[Record, Any]:
    """Decode a record, verify its blocks and decode its body: all that a reader does."""
    record = decode_record(data)
    verify_record(record)
    head = record.sealed.head
    return record, DECODERS[head.kind](head)


def sealed_of(name: str) -> SealedHead:
    """A golden record's sealed head."""
    return decode_record(golden_bytes(name)).sealed


def put(value: Json, *path: Json) -> Change:
    """A change that puts a value at a path of the head."""

    def change(head: dict[str, Json]) -> None:
        at: Json = head
        for name in path[:-1]:
            at = at[name]
        if isinstance(at, list) and path[-1] == len(at):
            at.append(value)
        else:
            at[path[-1]] = value

    return change


def drop(*path: Json) -> Change:
    """A change that removes what lies at a path of the head."""

    def change(head: dict[str, Json]) -> None:
        at: Json = head
        for name in path[:-1]:
            at = at[name]
        del at[path[-1]]

    return change


def nested(depth: int) -> Json:
    """A list in a list in a list."""
    value: Json = []
    for _ in range(depth - 1):
        value = [value]
    return value
