"""Identities: record ids, block digests, nonces."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator

import xxhash

from .errors import MalformedError

BLOCK_BYTES = 1 << 20
"""Size of a block: the unit of verification and repair. The last block of an array is shorter."""

DIGEST_ALGORITHM = "xxh3-128"
ID_ALGORITHM = "blake2b-256"

_ID = re.compile(r"[0-9a-f]{64}")
_NONCE = re.compile(r"[0-9a-f]{16}")

Buffer = bytes | bytearray | memoryview


def record_id(head: bytes) -> str:
    """Id of a record: blake2b-256 of its canonical head, 64 lowercase hex digits."""
    return hashlib.blake2b(head, digest_size=32).hexdigest()


def block_digest(data: Buffer) -> str:
    """Digest of one block: xxh3-128 of its logical bytes, 32 lowercase hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def block_count(nbytes: int) -> int:
    """Number of blocks of an array of ``nbytes`` bytes (0 for an empty array)."""
    return -(-nbytes // BLOCK_BYTES)


def iter_blocks(data: memoryview) -> Iterator[memoryview]:
    """Cut a flat byte view into blocks, without copying."""
    for start in range(0, len(data), BLOCK_BYTES):
        yield data[start : start + BLOCK_BYTES]


def block_digests(data: memoryview) -> tuple[str, ...]:
    """Digests of all blocks of a flat byte view."""
    return tuple(block_digest(block) for block in iter_blocks(data))


def is_id(text: object) -> bool:
    """True for 64 lowercase hex digits."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None


def check_id(text: object, what: str) -> str:
    """Return ``text`` if it is an id, else raise `MalformedError` naming ``what``."""
    if not is_id(text):
        raise MalformedError(f"{what} is not an id: {str(text)[:80]!r}", rule="id")
    return str(text)


def new_nonce() -> str:
    """A fresh nonce or token: 16 random lowercase hex digits."""
    return secrets.token_hex(8)


def is_nonce(text: str) -> bool:
    """True for 16 lowercase hex digits."""
    return _NONCE.fullmatch(text) is not None
