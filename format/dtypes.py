"""Dtype names of the format and their sizes.

Names are those of safetensors where it has the dtype; the others are ours and are stored
as ``U8`` in the safetensors header, with the true name in the head.
"""

from __future__ import annotations

from .errors import MalformedError

MAX_ARRAY_BYTES = 1 << 48
"""Most bytes of one array."""

MAX_DIMS = 32
"""Most dimensions of a tensor."""

SAFETENSORS_DTYPES: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Dtype name -> bytes per element, for dtypes every safetensors reader knows."""

EXTENDED_DTYPES: dict[str, int] = {
    "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0FNU": 1, "C32": 4, "C64": 8, "C128": 16,
}  # fmt: skip
"""Dtype name -> bytes per element, for dtypes stored as ``U8``."""

ITEM_BYTES: dict[str, int] = {**SAFETENSORS_DTYPES, **EXTENDED_DTYPES}


def item_bytes(dtype: str) -> int:
    """Bytes per element of a dtype of the format; raises `MalformedError` (rule ``dtype``)."""
    try:
        return ITEM_BYTES[dtype]
    except (KeyError, TypeError) as exc:
        raise MalformedError(f"unknown dtype {str(dtype)[:40]!r}", rule="dtype") from exc
