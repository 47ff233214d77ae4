"""Canonical JSON and typed values: one byte string for one meaning.

Canonical JSON: keys sorted by code point, no spaces, UTF-8, no escapes beyond those JSON
requires, no JSON floats, integers within +-2^53. Python values that plain JSON cannot carry
exactly are *typed values*, objects with one key that begins with ``$``::

    {"$f": "3ff0000000000000"}        float, IEEE-754 binary64, big-endian hex
    {"$i": "18446744073709551616"}    integer beyond +-2^53, decimal, below 2^2048
    {"$t": [ ... ]}                   tuple
    {"$b": "00ff"}                    bytes, hex
    {"$d": [[key, value], ...]}       dict that no object gives back: in its order
    {"$x": [dtype, hex]}              0-dim tensor: dtype name and its bytes, little-endian hex
    {"$a": [array, dtype, [shape]]}   tensor kept as an array of the record

An object gives back a dict whose keys are strings without ``$`` in front, in sorted order.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from . import strict
from .dtypes import MAX_ARRAY_BYTES, MAX_DIMS, item_bytes
from .errors import MalformedError

MAX_DEPTH = 96
"""Nesting of any JSON: the head's object is level 1."""

MAX_VALUE_DEPTH = 80
"""Nesting of a typed value within the head, in JSON levels."""

MAX_OPENINGS = 1 << 21
"""Brackets and braces that open, those within strings counted too: bounds what a parser makes."""

MAX_INT = 1 << 53
MAX_INT_BITS = 2048

_STRING = re.compile(r'"[^"]*"?')
_BRACKETS = re.compile(r"[\[{]+|[\]}]+")
_HEX = re.compile(r"(?:[0-9a-f]{2})*")


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
    text = _spell(value)
    check_openings(text)
    return _encode(text)


def _spell(value: Any) -> str:
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False,
        default=dict,  # other mappings than dict
    )  # fmt: skip


def _encode(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise MalformedError("a lone surrogate in canonical JSON", rule="utf-8") from exc


def loads(data: bytes) -> Any:
    """Parse canonical JSON; refuses any other spelling of the same value.

    Raises `MalformedError` with rule ``utf-8``, ``json``, ``depth``, ``openings``,
    ``duplicate-key``, ``integer-range``, ``float`` or ``canonical``.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise MalformedError("not UTF-8", rule="utf-8") from exc
    check_depth(text)
    try:
        value = json.loads(
            text, object_pairs_hook=no_duplicates, parse_float=_no_float, parse_constant=_no_float,
            parse_int=_bounded_int,
        )  # fmt: skip
    except ValueError as exc:
        raise MalformedError(f"not JSON: {exc}", rule="json") from exc
    if _encode(_spell(value)) != data:
        raise MalformedError("JSON, but not in canonical form", rule="canonical")
    return value


def check_depth(text: str) -> None:
    """Refuse JSON that would cost a parser too much, before it is parsed.

    Raises `MalformedError` with rule ``depth`` beyond `MAX_DEPTH`, with rule ``openings`` beyond
    `MAX_OPENINGS`.
    """
    check_openings(text)
    outside = _STRING.sub("", text.replace("\\\\", "").replace('\\"', ""))
    depth = 0
    for match in _BRACKETS.finditer(outside):
        run = match[0]
        depth += len(run) if run[0] in "[{" else -len(run)
        if depth > MAX_DEPTH:
            raise MalformedError(f"nested deeper than {MAX_DEPTH}", rule="depth")


def check_openings(text: str) -> None:
    """Refuse JSON of which a parser would make too many objects (rule ``openings``)."""
    if text.count("[") + text.count("{") > MAX_OPENINGS:
        raise MalformedError(f"more than {MAX_OPENINGS} brackets and braces", rule="openings")


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON parser; refuses a key that stands twice (rule ``duplicate-key``)."""
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


def _check(value: Any, around: int) -> None:
    """Check a value with ``around`` arrays and objects around it."""
    if value is None or isinstance(value, bool | str):
        return
    if isinstance(value, int):
        if abs(value) > MAX_INT:
            raise MalformedError("an integer beyond 2^53", rule="integer-range")
        return
    if not isinstance(value, list | tuple | Mapping):
        raise MalformedError(f"no JSON value: {type(value).__name__}", rule="json")
    if around == MAX_DEPTH:
        raise MalformedError(f"nested deeper than {MAX_DEPTH}", rule="depth")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise MalformedError("a key that is no string", rule="json")
        value = value.values()
    for item in value:
        _check(item, around + 1)


def float_hex(value: float) -> str:
    """IEEE-754 binary64 of ``value``, 16 hex digits, big-endian."""
    return struct.pack(">d", value).hex()


def float_from_hex(text: object) -> float:
    """Inverse of `float_hex`."""
    data = _unhex(text)
    if len(data) != 8:
        raise MalformedError(f"not a binary64 in hex: {str(text)[:40]!r}", rule="float")
    return float(struct.unpack(">d", data)[0])


def _unhex(text: object) -> bytes:
    if not isinstance(text, str) or not _HEX.fullmatch(text):
        raise MalformedError(f"not lowercase hex: {str(text)[:40]!r}", rule="hex")
    return bytes.fromhex(text)


def to_json(value: Any, depth: int = 0) -> Any:
    """Typed value -> JSON value. Raises `TypeError` naming what has no spelling.

    ``depth`` is the JSON nesting reached so far.
    """
    if depth > MAX_VALUE_DEPTH:
        raise TypeError(f"nested deeper than {MAX_VALUE_DEPTH}")
    match value:
        case None | bool() | str():
            return value
        case int():
            if value.bit_length() > MAX_INT_BITS:
                raise TypeError(f"an integer of more than {MAX_INT_BITS} bits")
            return int(value) if abs(value) <= MAX_INT else {"$i": str(int(value))}
        case float():
            return {"$f": float_hex(value)}
        case Scalar():
            return {"$x": [value.dtype, value.data.hex()]}
        case ArrayRef():
            return {"$a": [value.array, value.dtype, list(value.shape)]}
        case bytes() | bytearray():
            return {"$b": bytes(value).hex()}
        case tuple():
            return {"$t": [to_json(item, depth + 2) for item in value]}
        case list():
            return [to_json(item, depth + 1) for item in value]
        case Mapping():
            if _plain_keys(value) and _in_order(value):
                return {key: to_json(item, depth + 1) for key, item in value.items()}
            pairs = [[to_json(k, depth + 3), to_json(v, depth + 3)] for k, v in value.items()]
            if not _distinct(pairs):
                raise TypeError("a dict with two keys of one spelling")
            return {"$d": pairs}
        case _:
            raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


def _plain_keys(keys: Iterable[Any]) -> bool:
    return all(isinstance(key, str) and not key.startswith("$") for key in keys)


def _in_order(keys: Iterable[str]) -> bool:
    """An object's keys come back sorted: a dict in another order is kept as pairs."""
    names = list(keys)
    return names == sorted(names)


def _distinct(pairs: list[list[Any]]) -> bool:
    return len({dumps(key) for key, _ in pairs}) == len(pairs)


def from_json(value: Any, depth: int = 0) -> Any:
    """JSON value -> typed value, the inverse of `to_json`.

    Raises `MalformedError` with rule ``typed-value``, ``hex``, ``float``, ``dtype`` or ``depth``.
    """
    if depth > MAX_VALUE_DEPTH:
        raise MalformedError(f"a value nested deeper than {MAX_VALUE_DEPTH}", rule="depth")
    if isinstance(value, list):
        return [from_json(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if _plain_keys(value):
        return {key: from_json(item, depth + 1) for key, item in sorted(value.items())}
    if len(value) != 1:
        raise MalformedError("a typed value has one key", rule="typed-value")
    ((tag, content),) = value.items()
    try:
        return _from_tag(tag, content, depth)
    except (TypeError, ValueError) as exc:
        raise MalformedError(f"not a typed value: {tag[:20]}: {exc}", rule="typed-value") from exc


def array_refs(value: Any) -> Iterator[ArrayRef]:
    """The `ArrayRef` of a typed value, in order."""
    if isinstance(value, ArrayRef):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from array_refs(item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from array_refs(key)
            yield from array_refs(item)


def _from_tag(tag: str, content: Any, depth: int) -> Any:
    match tag:
        case "$f":
            return float_from_hex(content)
        case "$i":
            return _tagged_int(content)
        case "$b":
            return _unhex(content)
        case "$t":
            return tuple(from_json(item, depth + 2) for item in strict.items(content))
        case "$d":
            return _tagged_dict(content, depth + 3)
        case "$x":
            dtype, data = strict.items(content, 2)
            return Scalar(dtype, _sized(dtype, _unhex(data)))
        case "$a":
            return _tagged_array(*strict.items(content, 3))
        case _:
            raise ValueError("unknown tag")


def _tagged_int(text: Any) -> int:
    if not isinstance(text, str) or len(text) > MAX_INT_BITS // 3:
        raise ValueError("no integer")
    value = int(text)
    if str(value) != text or abs(value) <= MAX_INT or value.bit_length() > MAX_INT_BITS:
        raise ValueError(text[:40])
    return value


def _tagged_dict(content: Any, depth: int) -> dict[Any, Any]:
    pairs = [strict.items(pair, 2) for pair in strict.items(content)]
    found = {from_json(key, depth): from_json(item, depth) for key, item in pairs}
    if len(found) != len(pairs) or not _distinct(pairs):
        raise ValueError("a key stands twice")
    if _plain_keys(found) and _in_order(found):
        raise ValueError("a plain object would do")
    return found


def _sized(dtype: Any, data: bytes) -> bytes:
    if len(data) != item_bytes(dtype):
        raise ValueError(f"{len(data)} bytes of {dtype}")
    return data


def _tagged_array(array: Any, dtype: Any, shape: Any) -> ArrayRef:
    sizes = tuple(strict.count(size) for size in strict.items(shape))
    if len(sizes) > MAX_DIMS or math.prod(sizes) * item_bytes(dtype) > MAX_ARRAY_BYTES:
        raise ValueError("shape")
    return ArrayRef(strict.text(array), dtype, sizes)
