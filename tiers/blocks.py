"""Runs of blocks: which may be asked for, and how long they must be."""

from __future__ import annotations

from adacheck_store.format.errors import MalformedError, RecordNotFoundError, TruncatedError
from adacheck_store.format.head import ArrayInfo, SealedHead
from adacheck_store.format.ids import BLOCK_BYTES, block_count


def check_range(sealed: SealedHead, array: str, first: int, count: int) -> ArrayInfo:
    """The array, if it has blocks first .. first + count - 1; raises `RecordNotFoundError`."""
    try:
        info = sealed.head.array(array)
    except MalformedError as exc:
        raise RecordNotFoundError(f"no array {array!r} in the record") from exc
    if first < 0 or count < 0 or first + count > block_count(info.nbytes):
        raise RecordNotFoundError(
            f"no blocks {first}..{first + count - 1} in array {array} "
            f"of {block_count(info.nbytes)} blocks"
        )
    return info


def span(info: ArrayInfo, first: int, count: int) -> tuple[int, int]:
    """Bytes (start, stop) of a run of blocks within its array."""
    start = min(first * BLOCK_BYTES, info.nbytes)
    return start, min((first + count) * BLOCK_BYTES, info.nbytes)


def check_length(array: str, index: int, got: int, expected: int) -> None:
    """Raise `TruncatedError` if a stored piece is shorter or longer than it must be."""
    if got != expected:
        raise TruncatedError(f"{got} bytes stored for piece {index} of {array}, not {expected}")
