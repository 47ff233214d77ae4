"""Layouts: which tensors a part holds, and where each lies in the part's arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from . import strict
from .dtypes import MAX_ARRAY_BYTES, MAX_DIMS, item_bytes
from .errors import MalformedError
from .head import Head, SealedHead, is_array_word

ALIGN = 64
"""Slices start at multiples of this many elements; the padding between them is zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A tensor, or the piece of one, that a part holds.

    ``scope`` is empty where the tensor's identity is global, else the mesh coordinate that
    alone may load it. ``shape`` is the global shape. The piece is ``boxes`` (each a tuple of
    ``(start, stop)`` per dimension, laid one after another in C order) or, if ``flat`` is given,
    elements ``flat[0]..flat[1]`` of the flattened tensor. ``group`` is the index of the
    parameter group (-1 without optimizer). ``offset`` is in elements of the section's arrays.
    ``aliases`` are further names of the same tensor (tied weights).
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, int], ...], ...]
    offset: int
    scope: str = ""
    flat: tuple[int, int] | None = None
    group: int = -1
    aliases: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        """Number of elements of the piece."""
        if self.flat is not None:
            return self.flat[1] - self.flat[0]
        return sum(math.prod(stop - start for start, stop in box) for box in self.boxes)

    @property
    def whole(self) -> bool:
        """True if the piece is the whole tensor."""
        return self.flat is None and self.boxes == (whole_box(self.shape),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Slices that share optimizer, dtypes and state names.

    ``optimizer`` indexes `Layout.optimizers` (-1: none). ``roles`` maps role to dtype; the
    first is ``param`` or ``buffer``, the others are the optimizer's state.
    """

    name: str
    optimizer: int
    roles: tuple[tuple[str, str], ...]
    slices: tuple[Slice, ...]

    @property
    def elements(self) -> int:
        """Length of each of the section's arrays, padding included."""
        if not self.slices:
            return 0
        last = self.slices[-1]
        return align(last.offset + last.elements)

    @property
    def dtypes(self) -> dict[str, str]:
        """Role -> dtype."""
        return dict(self.roles)

    @property
    def main_role(self) -> str:
        """``param`` or ``buffer``."""
        return self.roles[0][0]

    @property
    def state_roles(self) -> tuple[str, ...]:
        """Names of the optimizer's state tensors."""
        return tuple(role for role, _ in self.roles[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The sections of a part and the classes of its optimizers (``module.Class``)."""

    optimizers: tuple[str, ...]
    sections: tuple[Section, ...]

    def section(self, name: str) -> Section:
        """The section of that name; raises `MalformedError` (rule ``layout``)."""
        for section in self.sections:
            if section.name == name:
                return section
        raise MalformedError(f"no section {name!r}", rule="layout")

    def seal(self, run: str) -> SealedHead:
        """The layout's record (it has no arrays)."""
        body = {
            "optimizers": list(self.optimizers),
            "sections": [_section_json(section) for section in self.sections],
        }
        decode_layout(Head(kind="layout", run=run, body=body))
        return SealedHead.seal(Head(kind="layout", run=run, body=body))


def align(elements: int) -> int:
    """Round up to a multiple of `ALIGN`."""
    return -(-elements // ALIGN) * ALIGN


def whole_box(shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The box that covers a whole tensor."""
    return tuple((0, size) for size in shape)


def _section_json(section: Section) -> dict[str, Any]:
    return {
        "name": section.name,
        "optimizer": section.optimizer,
        "roles": [[role, dtype] for role, dtype in section.roles],
        "slices": [_slice_json(piece) for piece in section.slices],
    }


def _slice_json(piece: Slice) -> dict[str, Any]:
    return {
        "scope": piece.scope,
        "name": piece.name,
        "shape": list(piece.shape),
        "boxes": [[list(side) for side in box] for box in piece.boxes],
        "flat": None if piece.flat is None else list(piece.flat),
        "group": piece.group,
        "offset": piece.offset,
        "aliases": list(piece.aliases),
    }


def decode_layout(head: Head) -> Layout:
    """A layout from its head; raises `MalformedError` (rule ``layout``) if a rule is broken."""
    if head.kind != "layout":
        raise MalformedError(f"a {head.kind}, not a layout", rule="kind")
    try:
        layout = _decode(head.body)
        _check_names(layout)
        for section in layout.sections:
            _check_section(section, len(layout.optimizers))
    except (TypeError, ValueError) as exc:
        raise MalformedError(f"not a layout: {exc}"[:300], rule="layout") from exc
    return layout


def _decode(body: Any) -> Layout:
    found = strict.fields(body, "optimizers", "sections")
    return Layout(
        optimizers=tuple(strict.text(name) for name in strict.items(found["optimizers"])),
        sections=tuple(_decode_section(item) for item in strict.items(found["sections"])),
    )


def _decode_section(item: Any) -> Section:
    found = strict.fields(item, "name", "optimizer", "roles", "slices")
    roles = (strict.items(row, 2) for row in strict.items(found["roles"]))
    return Section(
        name=strict.text(found["name"]),
        optimizer=strict.integer(found["optimizer"]),
        roles=tuple((strict.text(role), strict.text(dtype)) for role, dtype in roles),
        slices=tuple(_decode_slice(piece) for piece in strict.items(found["slices"])),
    )


def _decode_slice(item: Any) -> Slice:
    found = strict.fields(
        item, "scope", "name", "shape", "boxes", "flat", "group", "offset", "aliases"
    )
    return Slice(
        scope=strict.text(found["scope"], empty=True),
        name=strict.text(found["name"]),
        shape=tuple(strict.integer(size) for size in strict.items(found["shape"])),
        boxes=tuple(_box(box) for box in strict.items(found["boxes"])),
        flat=None if found["flat"] is None else _range(found["flat"]),
        group=strict.integer(found["group"]),
        offset=strict.integer(found["offset"]),
        aliases=tuple(strict.text(name) for name in strict.items(found["aliases"])),
    )


def _box(value: Any) -> tuple[tuple[int, int], ...]:
    return tuple(_range(side) for side in strict.items(value))


def _range(value: Any) -> tuple[int, int]:
    start, stop = strict.items(value, 2)
    return strict.integer(start), strict.integer(stop)


def _check_names(layout: Layout) -> None:
    sections = [section.name for section in layout.sections]
    if len(set(sections)) != len(sections):
        raise ValueError("two sections of one name")
    seen = set()
    for section in layout.sections:
        for piece in section.slices:
            for name in (piece.name, *piece.aliases):
                mark = (piece.scope, name, piece.flat, piece.boxes)
                if mark in seen:
                    raise ValueError(f"{name[:80]!r} stands twice")
                seen.add(mark)


def _check_section(section: Section, optimizers: int) -> None:
    where = f"section {section.name[:80]!r}"
    if not is_array_word(section.name) or not all(is_array_word(role) for role, _ in section.roles):
        raise ValueError(f"{where}: its name or a role is outside the grammar of arrays")
    if not -1 <= section.optimizer < optimizers:
        raise ValueError(f"{where}: no such optimizer")
    if not section.roles or section.main_role not in ("param", "buffer"):
        raise ValueError(f"{where}: no param or buffer")
    if len(section.dtypes) != len(section.roles):
        raise ValueError(f"{where}: a role stands twice")
    if section.optimizer < 0 and len(section.roles) > 1:
        raise ValueError(f"{where}: optimizer state without optimizer")
    widest = max(item_bytes(dtype) for _, dtype in section.roles)
    end = 0
    for piece in section.slices:
        _check_slice(piece)
        if (piece.group < 0) != (section.optimizer < 0) or piece.group < -1:
            raise ValueError(f"slice {piece.name[:80]!r}: its group")
        if piece.offset != end:
            raise ValueError(f"slice {piece.name[:80]!r}: at {piece.offset}, not at {end}")
        end = align(piece.offset + piece.elements)
        if end > MAX_ARRAY_BYTES // widest:
            raise MalformedError(f"{where} is too large", rule="shape")


def _check_slice(piece: Slice) -> None:
    name = f"slice {piece.name[:80]!r}"
    if len(piece.shape) > MAX_DIMS or any(size < 0 for size in piece.shape):
        raise MalformedError(f"{name}: its dimensions", rule="shape")
    total = math.prod(piece.shape)
    if total > MAX_ARRAY_BYTES:
        raise MalformedError(f"{name}: {total} elements", rule="shape")
    if piece.flat is not None:
        start, stop = piece.flat
        if piece.boxes or not 0 <= start <= stop <= total or piece.flat == (0, total):
            raise MalformedError(f"{name}: its flat range", rule="shape")
    for box in piece.boxes:
        if len(box) != len(piece.shape) or not all(
            0 <= start <= stop <= size for (start, stop), size in zip(box, piece.shape, strict=True)
        ):
            raise MalformedError(f"{name}: a box outside its shape", rule="shape")
    strict.ascending(piece.boxes, f"{name}: boxes")
    if piece.elements > total:
        raise MalformedError(f"{name}: boxes that overlap", rule="shape")
