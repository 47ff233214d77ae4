"""Regions: boxes of a tensor, and where their elements lie in a flat array. Pure geometry."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from adacheck_store.format.layout import Slice

Box = tuple[tuple[int, int], ...]
"""Start and stop of each dimension; that of a scalar has none, and one element."""

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a tensor in an array: its first element at ``base``, the others by ``strides``.

    All in elements; strides are those of C order, so they do not grow from one to the next.
    """

    box: Box
    base: int
    strides: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The box's extent in each dimension."""
        return tuple(stop - start for start, stop in self.box)

    def at(self, box: Box) -> Region:
        """The region of a box that lies within this one."""
        inner = zip(box, self.box, self.strides, strict=True)
        shift = sum((low - start) * stride for (low, _), (start, _), stride in inner)
        return Region(box, self.base + shift, self.strides)

    def touched(self, unit: int) -> Iterator[Span]:
        """Ranges of whole units of the array that have an element of it; each unit at least once.

        Where elements lie no further apart than a unit, none between them is without.
        """
        sizes = self.sizes
        far = [d for d, size in enumerate(sizes) if size > 1 and self.strides[d] > unit]
        near = [d for d in range(len(sizes)) if d not in far]
        reach = 1 + sum((sizes[d] - 1) * self.strides[d] for d in near)
        for steps in product(*(range(sizes[d]) for d in far)):
            start = self.base + sum(i * self.strides[d] for i, d in zip(steps, far, strict=True))
            yield start // unit * unit, -(-(start + reach) // unit) * unit


def c_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides of C order."""
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def boxes_between(shape: Sequence[int], low: int, high: int) -> list[Box]:
    """Boxes that make up elements ``low..high`` of a tensor in C order: two a dimension at most."""
    if low >= high:
        return []
    if not shape:
        return [()]
    rest = shape[1:]
    inner = math.prod(rest)
    (first, start), (last, stop) = divmod(low, inner), divmod(high, inner)

    def within(row: int, begin: int, end: int) -> list[Box]:
        return [((row, row + 1), *box) for box in boxes_between(rest, begin, end)]

    if first == last:
        return within(first, start, stop)
    found = within(first, start, inner) if start else []
    begin = first + bool(start)
    if begin < last:
        found.append(((begin, last), *((0, size) for size in rest)))
    return found + within(last, 0, stop)


def regions_of(piece: Slice, low: int = 0, high: int | None = None) -> list[Region]:
    """Elements ``low..high`` of a slice (all) as regions of its section's arrays."""
    low = max(low, 0)
    high = piece.elements if high is None else min(high, piece.elements)
    found: list[Region] = []
    if piece.flat is not None:
        start = piece.flat[0]
        strides = c_strides(piece.shape)
        for box in boxes_between(piece.shape, start + low, start + high):
            index = sum(first * stride for (first, _), stride in zip(box, strides, strict=True))
            found.append(Region(box, piece.offset + index - start, strides))
        return found
    before = 0
    for whole in piece.boxes:
        sizes = [stop - start for start, stop in whole]
        count = math.prod(sizes)
        outer = Region(whole, piece.offset + before, c_strides(sizes))
        for inner in boxes_between(sizes, max(low - before, 0), min(high - before, count)):
            pairs = zip(inner, whole, strict=True)
            found.append(outer.at(tuple((a + start, b + start) for (a, b), (start, _) in pairs)))
        before += count
    return found


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None if that is nothing."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def less(box: Box, gone: Box) -> list[Box]:
    """What is left of a box without one that lies within it."""
    left: list[Box] = []
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, gone, strict=True)):
        head, tail = gone[:dim], box[dim + 1 :]
        left += [(*head, side, *tail) for side in ((start, low), (high, stop)) if side[0] < side[1]]
    return left


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Ranges in order, those that touch as one."""
    found: list[Span] = []
    for low, high in sorted(spans):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def clash(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes of one tensor that have elements in common; None where all are disjoint."""
    if not boxes or not boxes[0]:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    # Swept along the dimension that is cut most, so few stand beside each other.
    dim = max(range(len(boxes[0])), key=lambda dim: len({box[dim][0] for box in boxes}))
    beside: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[dim]):
        beside = [other for other in beside if other[dim][1] > box[dim][0]]
        for other in beside:
            if overlap(box, other) is not None:
                return other, box
        beside.append(box)
    return None
