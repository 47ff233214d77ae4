"""Frames: what two processes say to each other, as bytes. No sockets here; see WIRE.md.

A frame is a fixed header, a head (a JSON object of bounded size) and a payload of bounded size.
Both sizes are checked before any memory is taken for them.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from adacheck_store.format import canonical, errors
from adacheck_store.format.errors import (
    AdaCheckError,
    MalformedError,
    NotOursError,
    TierError,
    TooNewError,
)

MAGIC = b"AdaW"
VERSION = 1
"""The version of the frames written, and the newest that is read."""

HEADER = struct.Struct("<4sBBHIIQ")
"""Magic, version, kind, zero, sequence number, bytes of the head, bytes of the payload."""

MAX_HEAD_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 8 << 20
MAX_SMALL_BYTES = 16 << 10
"""What a frame may take of which nothing is known yet: a hello, a ping."""

_MAX_TEXT = 4096
_PLACES = ("run", "term", "part", "step", "tier", "key", "path")


class Kind(enum.IntEnum):
    """What a frame is: a call; a part of a stream and its end; an answer or the error instead."""

    CALL = 1
    PART = 2
    END = 3
    ANSWER = 4
    ERROR = 5


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed part of a frame; sizes in bytes."""

    kind: Kind
    sequence: int
    head_bytes: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame whose payload is still to be received, or lies in ``payload``."""

    kind: Kind
    head: Mapping[str, Any]
    payload_bytes: int = 0
    payload: bytes = b""


def encode(kind: Kind, sequence: int, head: Mapping[str, Any], payload_bytes: int = 0) -> bytes:
    """Header and head of a frame; the payload follows. Raises `MalformedError` (rule ``frame``)."""
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=str)
    data = text.encode("utf-8", errors="replace")
    if len(data) > MAX_HEAD_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise MalformedError(
            f"a frame of {len(data)} + {payload_bytes} bytes, at most "
            f"{MAX_HEAD_BYTES} + {MAX_PAYLOAD_BYTES}",
            rule="frame",
        )
    sequence &= 0xFFFFFFFF
    return HEADER.pack(MAGIC, VERSION, kind, 0, sequence, len(data), payload_bytes) + data


def decode_header(data: bytes) -> Header:
    """The header of a frame, from its first `HEADER.size` bytes.

    Raises `NotOursError`, `TooNewError` or `MalformedError` (rule ``frame``).
    """
    magic, version, kind, zero, sequence, head_bytes, payload_bytes = HEADER.unpack(data)
    if magic != MAGIC:
        raise NotOursError(f"no frame of adacheck-store: it begins {bytes(data[:8]).hex()}")
    if version > VERSION:
        raise TooNewError(
            f"a frame of version {version}, this program reads up to {VERSION}",
            hint="upgrade adacheck-store on this side",
        )
    if version < 1 or zero or kind not in Kind.__members__.values():
        raise MalformedError(f"frame version {version}, kind {kind}, zero {zero}", rule="frame")
    if head_bytes > MAX_HEAD_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise MalformedError(
            f"a frame announces {head_bytes} + {payload_bytes} bytes", rule="frame"
        )
    return Header(Kind(kind), sequence, head_bytes, payload_bytes)


def decode_json(data: bytes | bytearray | memoryview) -> Any:
    """JSON of a peer, in bounded time; raises `MalformedError` (rule ``json``, ``depth``...)."""
    try:
        text = str(data, "utf-8")
        canonical.check_depth(text)
        return json.loads(text, object_pairs_hook=canonical.no_duplicates)
    except ValueError as exc:
        raise MalformedError(f"no JSON: {str(exc)[:200]}", rule="json") from exc


def decode_head(data: bytes) -> dict[str, Any]:
    """The head of a frame; raises `MalformedError`."""
    head = decode_json(data)
    if not isinstance(head, dict):
        raise MalformedError("the head of a frame is no object", rule="json")
    return head


class Inbox:
    """Small frames cut out of bytes as they come, never more than `MAX_SMALL_BYTES` kept."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, Frame]]:
        """Take bytes; yields the frames they complete, each with its sequence number.

        Raises what `decode_header` and `decode_head` raise, and `MalformedError` (rule ``small``)
        as soon as a header announces too much.
        """
        self._data += data
        while len(self._data) >= HEADER.size:
            header = decode_header(bytes(self._data[: HEADER.size]))
            end = HEADER.size + header.head_bytes + header.payload_bytes
            if end > MAX_SMALL_BYTES:
                raise MalformedError(f"a first frame of {end} bytes", rule="small")
            if len(self._data) < end:
                return
            start = HEADER.size + header.head_bytes
            head = decode_head(bytes(self._data[HEADER.size : start]))
            payload = bytes(self._data[start:end])
            del self._data[:end]
            yield header.sequence, Frame(header.kind, head, len(payload), payload)

    def __len__(self) -> int:
        return len(self._data)


def error_head(exc: Exception) -> dict[str, Any]:
    """The head of an ERROR frame: an error's classes, message, hint and place."""
    if not isinstance(exc, AdaCheckError):
        exc = TierError(
            f"the agent failed: {type(exc).__name__}: {exc}", hint="see the agent's log"
        )
    names = [cls.__name__ for cls in type(exc).__mro__ if issubclass(cls, AdaCheckError)]
    place = {
        name: value if isinstance(value, int) else str(value)[:_MAX_TEXT]
        for name, value in exc.place.items()
    }
    head: dict[str, Any] = {"error": names, "place": place}
    head |= {"message": exc.message[:_MAX_TEXT], "hint": exc.hint[:_MAX_TEXT]}
    if isinstance(exc, MalformedError):
        head["rule"] = exc.rule
    if isinstance(exc, errors.ReplayMismatchError):
        head["last_match"] = exc.last_match
    return head


def open_error(head: Mapping[str, Any]) -> AdaCheckError:
    """The error of an ERROR frame, of the nearest class known here; never raises."""
    names = head.get("error")
    found: type[AdaCheckError] = TierError
    for name in names if isinstance(names, list) else []:
        known = getattr(errors, name, None) if isinstance(name, str) else None
        if isinstance(known, type) and issubclass(known, AdaCheckError):
            found = known
            break
    error = found(str(head.get("message"))[:_MAX_TEXT], hint=str(head.get("hint", ""))[:_MAX_TEXT])
    place = head.get("place")
    for name, value in place.items() if isinstance(place, dict) else ():
        if name in _PLACES and isinstance(value, str | int):
            error.at(**{name: value})
    if isinstance(error, MalformedError):
        error.rule = str(head.get("rule", ""))[:100]
    last = head.get("last_match")
    if isinstance(error, errors.ReplayMismatchError) and isinstance(last, int):
        error.last_match = last
    return error
