"""Sightings: what a rank sees of one tensor at a boundary, its bytes as a digest of 128 bits.

The fingerprints of blocks (`adacheck_store.fingerprint`) are sums: made to be put together from
pieces, and easily made equal. Whoever leaves a tensor unsaved because it is equal elsewhere needs
a digest instead.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import torch
import xxhash

from adacheck_store.arrays import byte_view, dtype_name
from adacheck_store.format import canonical
from adacheck_store.format.dtypes import item_bytes
from adacheck_store.format.errors import MalformedError, UnsupportedError

DIGEST_BYTES = 16
VERSION = 1
"""Of the digest: what another version has digested is equal to nothing."""

MAIN_ROLES = ("param", "buffer")
"""Roles of a model's own tensors; every other role is a state of the optimizer."""

Box = tuple[tuple[int, int], ...]


class Piece(NamedTuple):
    """The piece of a tensor: ``boxes`` of its global shape, or elements ``flat`` of it flattened.

    As in a `Slice` of a layout: no boxes and no flat range is a piece of nothing.
    """

    boxes: tuple[Box, ...] = ()
    flat: tuple[int, int] | None = None

    @property
    def elements(self) -> int:
        """Number of elements of the piece."""
        if self.flat is not None:
            return self.flat[1] - self.flat[0]
        return sum(math.prod(stop - start for start, stop in box) for box in self.boxes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which tensor it is: only tensors of one identity can be copies of each other.

    ``scope`` is empty where all ranks mean the same tensor by that name, or may mean it: then the
    content tells. ``role`` is ``param``, ``buffer``, or a state of the optimizer. ``dtype`` is
    the format's name, ``shape`` the global one.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    piece: Piece
    scope: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return self.piece.elements * item_bytes(self.dtype)


class Standing(Enum):
    """Whether a tensor that never changes may be a copy: only if something else says why not."""

    TRAINED = "trained"
    FROZEN = "frozen"
    """It requires no gradient and no optimizer has it."""
    DECLARED = "declared"
    """The placements of a DTensor say that it is replicated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A tensor as it is at a boundary: its digest, or (empty) the ``trouble`` with making one."""

    identity: Identity
    digest: bytes
    standing: Standing = Standing.TRAINED
    trouble: str = ""


def sight(
    tensor: torch.Tensor, *, name: str, role: str, shape: tuple[int, ...], piece: Piece,
    scope: str = "", standing: Standing = Standing.TRAINED,
) -> Sighting:  # fmt: skip
    """See a local tensor, of any device and strides; it holds ``piece`` of ``shape``.

    A tensor that cannot be digested is no error: its sighting says why, and it will be saved.
    """
    bare = Identity(name=name, role=role, dtype="U8", shape=shape, piece=piece, scope=scope)
    try:
        identity = replace(bare, dtype=dtype_name(tensor.dtype))
        if tensor.numel() != piece.elements:
            raise UnsupportedError(f"{tensor.numel()} elements where {piece.elements} are due")
        digest = fingerprint(identity, tensor)
    except (UnsupportedError, MalformedError, RuntimeError, NotImplementedError) as error:
        trouble = f"cannot be digested: {error}"[:200]
        return Sighting(identity=bare, digest=b"", standing=standing, trouble=trouble)
    return Sighting(identity=identity, digest=digest, standing=standing)


def fingerprint(identity: Identity, tensor: torch.Tensor) -> bytes:
    """Digest over identity and logical bytes, `DIGEST_BYTES` long.

    The bytes go through xxh3-128, as fast as memory; blake2b ties them to the identity. Raises
    what torch raises for a tensor whose bytes it does not give.
    """
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise UnsupportedError(f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}")
    plain = tensor.detach().resolve_conj().resolve_neg()
    content = xxhash.xxh3_128(byte_view(plain.contiguous().cpu())).digest()
    return hashlib.blake2b(_spelled(identity) + content, digest_size=DIGEST_BYTES).digest()


def _spelled(identity: Identity) -> bytes:
    """An identity as bytes, one spelling for one identity."""
    piece = identity.piece
    return canonical.dumps(
        [VERSION, identity.scope, identity.name, identity.role, identity.dtype,
         identity.shape, piece.boxes, piece.flat]
    )  # fmt: skip
