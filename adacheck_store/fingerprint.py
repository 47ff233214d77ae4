"""Fingerprints: sums over blocks that a trainer's device can compute, and a fold can check.

The sum of a block is ``sum(w[i] * (2*i + 1)) mod 2^64`` over its little-endian 32-bit words
taken as signed integers. Unlike a plain sum it sees two changes that cancel; unlike a digest it
can be put together from the pieces of a block in any order, so tensors need not be gathered.
"""

from __future__ import annotations

import numpy as np

from adacheck_store.format.ids import BLOCK_BYTES, Buffer

from . import kernels

WORDS = BLOCK_BYTES // 4
ROTATION = 16
"""A large array has one block in this many fingerprinted by a delta, another one each step."""

_WEIGHTS = 2 * np.arange(WORDS, dtype=np.int64) + 1
_MASK = 2**64 - 1


def block_sum(data: Buffer) -> int:
    """The fingerprint of one block, from its logical bytes."""
    padding = -len(data) % 4
    if padding:
        data = bytes(data) + bytes(padding)
    compiled = kernels.block_sum(data)
    if compiled is not None:
        return compiled
    words = np.frombuffer(data, dtype="<i4").astype(np.int64)
    return int(np.dot(words, _WEIGHTS[: len(words)])) & _MASK


def piece_sum(data: Buffer, first: int) -> int | None:
    """What a piece of a block adds to its sum, whole words of it from number ``first`` on.

    None where there is no compiled loop: to copy the piece costs less than to sum it without.
    """
    return kernels.block_sum(data, first)


def blocks_at(step: int, count: int, base_every: int) -> range:
    """Which of ``count`` blocks a delta fingerprints: all at multiples of ``base_every``."""
    if step % base_every == 0:
        return range(count)
    stride = rotation(count)
    return range(step % stride, count, stride)


def rotation(count: int) -> int:
    """One block in how many a delta fingerprints: about four of a small array, never fewer.

    A power of two up to `ROTATION`, so that ``step % ROTATION`` says which.
    """
    return min(ROTATION, 1 << max(0, (count // 4).bit_length() - 1))
