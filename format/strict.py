"""Strict readers of JSON fields: each gives the value back or raises `ValueError`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

MAX_TEXT = 4096


def text(value: Any, *, empty: bool = False) -> str:
    """A string of at most `MAX_TEXT` characters."""
    if not isinstance(value, str) or len(value) > MAX_TEXT or not (value or empty):
        raise ValueError(f"no name: {str(value)[:80]!r}")
    return value


def octets(value: Any) -> bytes:
    """Bytes of any number, two hexadecimal digits each."""
    if not isinstance(value, str):
        raise ValueError(f"no bytes: {str(value)[:80]!r}")
    return bytes.fromhex(value)


def integer(value: Any) -> int:
    """An integer, and not a boolean."""
    if type(value) is not int:
        raise ValueError(f"no integer: {str(value)[:80]!r}")
    return value


def count(value: Any) -> int:
    """An integer that is not negative."""
    if integer(value) < 0:
        raise ValueError(f"negative: {value}")
    return int(value)


def items(value: Any, length: int | None = None) -> list[Any]:
    """A list, of the given length."""
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise ValueError(f"no list of {length or 'any number of'} items: {str(value)[:80]}")
    return value


def fields(value: Any, *names: str) -> Mapping[str, Any]:
    """An object with at least these fields (a newer writer may have added some)."""
    if not isinstance(value, Mapping):
        raise ValueError(f"no object: {str(value)[:80]}")
    missing = set(names) - value.keys()
    if missing:
        raise ValueError(f"fields missing: {sorted(missing)}")
    return value


def ascending(values: list[Any] | tuple[Any, ...], what: str) -> None:
    """Values in strictly ascending order, hence each of them once."""
    if any(a >= b for a, b in itertools.pairwise(values)):
        raise ValueError(f"{what} must ascend, each once")
