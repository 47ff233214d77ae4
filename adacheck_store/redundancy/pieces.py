"""Pieces of tensors, one within another, or several that make one up."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .sighting import Box, Piece


def covers(outer: Piece, inner: Piece, shape: tuple[int, ...]) -> bool:
    """True if ``inner`` certainly lies within ``outer``, both pieces of a tensor of ``shape``."""
    if outer == inner or outer.elements == math.prod(shape):
        return True
    if outer.flat and inner.flat:
        return outer.flat[0] <= inner.flat[0] and inner.flat[1] <= outer.flat[1]
    if outer.flat or inner.flat or len(outer.boxes) != 1:
        return False
    return all(_within(outer.boxes[0], box) for box in inner.boxes)


def _within(outer: Box, inner: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def tile(whole: Piece, pieces: Iterable[Piece], shape: tuple[int, ...]) -> bool:
    """True if the pieces certainly make ``whole`` up.

    They may be flat ranges, or boxes cut along one dimension. For anything else the answer is
    no, which costs room and loses nothing.
    """
    found = list(pieces)
    if whole in found or not found:
        return whole in found
    if all(piece.flat for piece in found):
        size = math.prod(shape)
        wanted = whole.flat or ((0, size) if whole.elements == size else None)
        return wanted is not None and _joined([piece.flat for piece in found if piece.flat], wanted)
    if len(whole.boxes) != 1 or any(piece.flat for piece in found):
        return False
    boxes = [box for piece in found for box in piece.boxes]
    for dim, side in enumerate(whole.boxes[0]):
        if all(_rest(box, dim) == _rest(whole.boxes[0], dim) for box in boxes):
            return _joined([box[dim] for box in boxes], side)
    return False


def _rest(box: Box, dim: int) -> Box:
    return box[:dim] + box[dim + 1 :]


def _joined(ranges: list[tuple[int, int]], wanted: tuple[int, int]) -> bool:
    """True if the ranges cover all that is wanted, without a gap."""
    reached, end = wanted
    for start, stop in sorted(ranges):
        if start > reached:
            break
        reached = max(reached, stop)
    return reached >= end
