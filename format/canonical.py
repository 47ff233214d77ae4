"""Canonical JSON and typed values: one byte string for one meaning.

Canonical JSON: keys sorted by code point, no spaces, UTF-8, no escapes beyond those JSON
requires, no JSON floats, integers within +-2^53. Python values that plain JSON cannot carry
exactly are *typed values*, objects with one key that begins with ``$``::

    {"$f": "3ff0000000000000"}        float, IEEE-754 binary64, big-endian hex
    {"$i": "18446744073709551616"}    integer beyond +-2^53, decimal
    {"$t": [ ... ]}                   tuple
    {"$b": "00ff"}                    bytes, hex
    {"$d": [[key, value], ...]}       dict with keys other than plain strings (insertion order)
    {"$x": [dtype, hex]}              0-dim tensor: dtype name and its bytes, little-endian hex
    {"$a": [array, dtype, [shape]]}   tensor kept as an array of the record
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import MalformedError

MAX_DEPTH = 64
MAX_INT = 1 << 53


@dataclass(frozen=True, slots=True)
class Scalar:
    """A 0-dim tensor: ``dtype`` as in FORMAT.md, ``data`` its little-endian bytes."""

    dtype: str
    data: bytes


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """A tensor kept in the record's array ``array``, with its dtype and shape."""

    array: str
    dtype: str
    shape: tuple[int, ...]


def dumps(value: Any) -> bytes:
    """Canonical JSON bytes of a JSON value; raises `MalformedError` for anything else."""
    _check(value, 0)
    try:
        return json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        ).encode("utf-8")
    except UnicodeEncodeError as exc:
        raise MalformedError("a lone surrogate in canonical JSON", rule="utf-8") from exc


def loads(data: bytes) -> Any:
    """Parse canonical JSON; refuses any other spelling of the same value.

    Raises `MalformedError` with rule ``utf-8``, ``json``, ``depth``, ``duplicate-key``,
    ``integer-range``, ``float`` or ``canonical``.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise MalformedError("not UTF-8", rule="utf-8") from exc
    try:
        value = json.loads(
            text, object_pairs_hook=_no_duplicates, parse_float=_no_float, parse_constant=_no_float,
            parse_int=_bounded_int,
        )  # fmt: skip
    except RecursionError as exc:
        raise MalformedError(f"nested deeper than {MAX_DEPTH}", rule="depth") from exc
    except json.JSONDecodeError as exc:
        raise MalformedError(f"not JSON: {exc}", rule="json") from exc
    if dumps(value) != data:
        raise MalformedError("JSON, but not in canonical form", rule="canonical")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise MalformedError("a key stands twice in one object", rule="duplicate-key")
    return found


def _no_float(text: str) -> Any:
    raise MalformedError(f"a JSON float ({text[:40]})", rule="float")


def _bounded_int(text: str) -> int:
    if len(text) > 17 or abs(int(text)) > MAX_INT:
        raise MalformedError(f"an integer beyond 2^53 ({text[:40]})", rule="integer-range")
    return int(text)


def _check(value: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise MalformedError(f"nested deeper than {MAX_DEPTH}", rule="depth")
    if value is None or isinstance(value, bool | str):
        return
    if isinstance(value, int):
        if abs(value) > MAX_INT:
            raise MalformedError("an integer beyond 2^53", rule="integer-range")
    elif isinstance(value, list | tuple):
        for item in value:
            _check(item, depth + 1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise MalformedError(f"a key that is no string: {key!r}", rule="json")
            _check(item, depth + 1)
    else:
        raise MalformedError(f"no JSON value: {type(value).__name__}", rule="json")


def float_hex(value: float) -> str:
    """IEEE-754 binary64 of ``value``, 16 hex digits, big-endian."""
    return struct.pack(">d", value).hex()


def float_from_hex(text: object) -> float:
    """Inverse of `float_hex`."""
    if not isinstance(text, str) or len(text) != 16:
        raise MalformedError(f"not a binary64 in hex: {text!r}", rule="float")
    return float(struct.unpack(">d", _unhex(text))[0])


def _unhex(text: object) -> bytes:
    if not isinstance(text, str) or text != text.lower():
        raise MalformedError(f"not lowercase hex: {text!r}", rule="hex")
    try:
        return bytes.fromhex(text)
    except ValueError as exc:
        raise MalformedError(f"not hex: {text[:40]!r}", rule="hex") from exc


def to_json(value: Any, depth: int = 0) -> Any:
    """Typed value -> JSON value. Raises `TypeError` naming a type that has no spelling."""
    if depth > MAX_DEPTH // 2:
        raise TypeError(f"nested deeper than {MAX_DEPTH // 2}")
    match value:
        case None | bool() | str():
            return value
        case int():
            return value if abs(value) <= MAX_INT else {"$i": str(value)}
        case float():
            return {"$f": float_hex(value)}
        case Scalar():
            return {"$x": [value.dtype, value.data.hex()]}
        case ArrayRef():
            return {"$a": [value.array, value.dtype, list(value.shape)]}
        case bytes() | bytearray():
            return {"$b": bytes(value).hex()}
        case tuple():
            return {"$t": [to_json(item, depth + 1) for item in value]}
        case list():
            return [to_json(item, depth + 1) for item in value]
        case Mapping():
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: to_json(item, depth + 1) for key, item in value.items()}
            pairs = value.items()
            return {"$d": [[to_json(k, depth + 1), to_json(v, depth + 1)] for k, v in pairs]}
        case _:
            raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


def from_json(value: Any) -> Any:
    """JSON value -> typed value, the inverse of `to_json`; raises `MalformedError`."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: from_json(item) for key, item in value.items()}
    if len(value) != 1:
        raise MalformedError(f"a typed value has one key, not {sorted(value)}", rule="typed-value")
    try:
        return _FROM_TAG[tag](value[tag])
    except (KeyError, TypeError, ValueError) as exc:
        raise MalformedError(f"not a typed value: {tag}", rule="typed-value") from exc


def _tagged_int(text: str) -> int:
    value = int(text)
    if str(value) != text or abs(value) <= MAX_INT:
        raise ValueError(text)
    return value


def _tagged_dict(pairs: list[Any]) -> dict[Any, Any]:
    found = {from_json(key): from_json(item) for key, item in pairs}
    if len(found) != len(pairs):
        raise ValueError("duplicate keys")
    return found


def _tagged_array(parts: list[Any]) -> ArrayRef:
    array, dtype, shape = parts
    if not isinstance(array, str) or not isinstance(dtype, str):
        raise ValueError(parts)
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(shape)
    return ArrayRef(array, dtype, tuple(shape))


_FROM_TAG: dict[str, Any] = {
    "$f": float_from_hex,
    "$i": _tagged_int,
    "$b": _unhex,
    "$t": lambda items: tuple(from_json(item) for item in items),
    "$d": _tagged_dict,
    "$x": lambda parts: Scalar(str(parts[0]), _unhex(parts[1])),
    "$a": _tagged_array,
}
