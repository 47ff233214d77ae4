"""Derived bases: a base without its bytes, which follow from what all parts had before.

Where a term goes on from another topology's exact state, what its parts begin with is known: it is
what the parts of the parent give at the fork step, cut otherwise. So a derived base keeps the head
of the captured base it stands for, block digests included, and no arrays. The manifest revision it
hangs on names parent, fork step and tips.
"""

from __future__ import annotations

from dataclasses import replace

from . import strict
from .errors import MalformedError
from .head import ArrayInfo, Head, check_head

FEATURE = "derived"
"""What a head ``requires`` of its reader."""

ORIGIN = "derived"
"""The ``origin`` in the body."""


def derived_head(head: Head, ranks: int) -> Head:
    """The derived base that stands for a captured one, in a term of so many ranks."""
    arrays = [
        {"name": info.name, "dtype": info.dtype, "elements": info.elements,
         "digests": list(info.digests)}
        for info in sorted(head.arrays, key=lambda info: info.order)
    ]  # fmt: skip
    body = {**head.body, "origin": ORIGIN, "arrays": arrays, "ranks": ranks}
    return replace(head, arrays=(), requires=(FEATURE,), body=body)


def stood_for(head: Head) -> tuple[Head, int]:
    """The head of the captured base that a derived one stands for, and its term's ranks.

    Raises `MalformedError` (rule ``base``) where it is no derived base.
    """
    try:
        found = strict.fields(head.body, "origin", "arrays", "ranks")
        if found["origin"] != ORIGIN or head.requires != (FEATURE,) or head.arrays:
            raise ValueError(f"a base of origin {ORIGIN} requires {FEATURE!r} and has no arrays")
        if head.parent != head.manifest or head.body.get("class") != "exact":
            raise ValueError("a derived base is exact, and hangs on its manifest revision")
        if head.body.get("gap") is not None:
            raise ValueError("a derived base closes no gap")
        body = {key: value for key, value in head.body.items() if key not in ("arrays", "ranks")}
        whole = replace(
            head, requires=(), arrays=tuple(map(_array, strict.items(found["arrays"]))),
            body={**body, "origin": "captured"},
        )  # fmt: skip
        check_head(whole)
        ranks = strict.count(found["ranks"])
        if not whole.arrays or not ranks:
            raise ValueError("a derived base without arrays or ranks")
        return whole, ranks
    except (TypeError, ValueError) as exc:
        raise MalformedError(f"not a base: {exc}"[:300], rule="base").at(**head.place()) from exc


def _array(item: object) -> ArrayInfo:
    found = strict.fields(item, "name", "dtype", "elements", "digests")
    return ArrayInfo(
        name=strict.text(found["name"]), dtype=strict.text(found["dtype"]),
        elements=strict.count(found["elements"]),
        digests=tuple(strict.text(digest) for digest in strict.items(found["digests"])),
    )  # fmt: skip
