"""Sets of ranks as runs ``start, stride, count``: short for what parallel training is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .keys import MAX_NUMBER


def runs_of(ranks: Iterable[int]) -> list[int]:
    """The runs of a set, one after another in one list: the same set always gives the same list.

    Taken from the least rank on, each as long as it goes. A single rank has stride 1.
    """
    order = sorted(set(ranks))
    found: list[int] = []
    at = 0
    while at < len(order):
        stride = order[at + 1] - order[at] if at + 1 < len(order) else 1
        end = at + 1
        while end < len(order) and order[end] - order[end - 1] == stride:
            end += 1
        found += [order[at], stride if end > at + 1 else 1, end - at]
        at = end
    return found


def ranks_of(runs: Sequence[int]) -> tuple[int, ...]:
    """The ranks of a set, ascending; raises `ValueError` for any list `runs_of` does not give."""
    if len(runs) % 3 or any(type(number) is not int for number in runs):
        raise ValueError("a set of ranks is runs of three integers")
    found: list[int] = []
    for start, stride, count in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
        if start < 0 or stride < 1 or count < 1 or start + stride * (count - 1) > MAX_NUMBER:
            raise ValueError("a run of ranks out of range")
        found += range(start, start + stride * count, stride)
        if len(found) > MAX_NUMBER + 1:
            raise ValueError("a rank stands twice")
    if runs_of(found) != list(runs):
        raise ValueError("a set of ranks that is not spelled canonically")
    return tuple(found)
