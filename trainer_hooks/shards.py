"""Sharded tensors: the piece of a DTensor that this rank holds, and where it lies in the whole.

The one place that knows what a DTensor is. Everything else works on local tensors: plain ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from adacheck_store.format.errors import UnsupportedError
from adacheck_store.format.keys import rank_name
from adacheck_store.format.layout import whole_box
from adacheck_store.group import Group

Box = tuple[tuple[int, int], ...]

PLACEMENTS = ("Shard", "Replicate", "_StridedShard")
"""How a tensor may lie on its mesh. A class of torch's itself: a subclass may mean anything."""

_Cuts = list[tuple[int, int, int]]
"""A dimension of a tensor, into how many chunks it is cut, and which of them lies here."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank holds of a tensor: ``boxes`` of the global ``shape`` (none: nothing).

    ``scope`` is empty where the tensor of that name is the same on all ranks, and its pieces fit
    together; else it names the rank that alone may load it.
    """

    scope: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


def is_sharded(tensor: torch.Tensor) -> bool:
    """True for a DTensor, whatever its placements."""
    return hasattr(tensor, "_local_tensor")


def is_replicated(tensor: torch.Tensor, ranks: int) -> bool:
    """True for a DTensor over all ranks whose placements say that each piece lies on several."""
    if not is_sharded(tensor):
        return False
    dtensor: Any = tensor
    whole = dtensor.device_mesh.size() == ranks
    return whole and any(type(each).__name__ == "Replicate" for each in dtensor.placements)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that this rank holds, sharing its memory; a plain tensor is its own."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def version(tensor: torch.Tensor) -> int:
    """Changes whenever an edit can be seen; those of a DTensor show in either of its tensors."""
    inner = local(tensor)
    return tensor._version if inner is tensor else tensor._version + inner._version


def odd_gradient(param: torch.Tensor, grad: torch.Tensor) -> str:
    """What makes a gradient another kind of tensor than its parameter; empty if nothing does."""
    if grad.layout != torch.strided:
        return "sparse"
    if grad.dtype != param.dtype:
        return f"of {grad.dtype}"
    for name in ("device_mesh", "placements"):  # None for plain tensors
        if getattr(param, name, None) != getattr(grad, name, None):
            return "sharded in another way than the parameter"
    return ""


def refusal(tensor: torch.Tensor) -> str:
    """Why the way a DTensor lies on its mesh is not supported; empty if it is."""
    if not is_sharded(tensor):
        return ""
    dtensor: Any = tensor
    for placement in dtensor.placements:
        if type(placement).__name__ not in PLACEMENTS:
            return f"is a DTensor with placement {type(placement).__name__}"
    if dtensor.device_mesh.get_coordinate() is None:
        return "is a DTensor on a mesh that this rank is not in"
    if _cuts(dtensor.placements, dtensor.device_mesh) is None:
        return f"is a DTensor with placements {dtensor.placements}, in no order of torch's own"
    return ""


def piece_of(tensor: torch.Tensor, group: Group) -> Piece:
    """The piece of a tensor that this rank holds; raises `UnsupportedError` for an odd shard."""
    alone = "" if group.size == 1 else rank_name(group.rank)
    shape = tuple(tensor.shape)
    if not is_sharded(tensor):
        return Piece(alone, shape, (whole_box(shape),))
    dtensor: Any = tensor
    box = _box(shape, dtensor.placements, dtensor.device_mesh)
    held = tuple(stop - start for start, stop in box)
    if held != tuple(local(tensor).shape):
        raise UnsupportedError(
            f"a DTensor of shape {list(shape)} has a shard of {list(local(tensor).shape)} here, "
            f"where {dtensor.placements} gives {list(held)}",
            hint="shard with fully_shard or distribute_tensor",
        )
    scope = "" if dtensor.device_mesh.size() == group.size else alone
    empty = 0 in held and 0 not in shape
    return Piece(scope, shape, () if empty else (box,))


def _box(shape: tuple[int, ...], placements: Any, mesh: Any) -> Box:
    """Start and stop per dimension, as torch.chunk cuts, one mesh dimension after another."""
    box = [(0, size) for size in shape]
    for dim, size, at in _cuts(placements, mesh) or ():
        start, stop = box[dim]
        width = -(-(stop - start) // size)
        low = min(start + at * width, stop)
        box[dim] = (low, min(low + width, stop))
    return tuple(box)


def _cuts(placements: Any, mesh: Any) -> _Cuts | None:
    """In which order a tensor is cut: by mesh dimensions from the left, strided ones at last.

    FSDP2 cuts what tensor parallelism, on mesh dimensions to the right, has cut before: then its
    split factor is the number of their pieces. None if it is another.
    """
    plain: _Cuts = []
    strided: _Cuts = []
    sizes = zip(placements, mesh.shape, mesh.get_coordinate(), strict=True)
    for place, (placement, size, at) in enumerate(sizes):
        kind = type(placement).__name__
        if kind == "_StridedShard":
            right = zip(placements[place + 1 :], mesh.shape[place + 1 :], strict=True)
            pieces = [n for other, n in right if getattr(other, "dim", None) == placement.dim]
            if placement.split_factor != math.prod(pieces):
                return None
        if kind != "Replicate":
            (strided if kind == "_StridedShard" else plain).append((placement.dim, size, at))
    return plain + strided[::-1]
