"""Layouts: which tensors a part holds, and where each lies in the part's arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .dtypes import item_bytes
from .errors import MalformedError
from .head import MAX_ARRAY_BYTES, Head, SealedHead

ALIGN = 64
"""Slices start at multiples of this many elements; the padding between them is zero."""

MAX_DIMS = 32


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

    def trained_elements(self) -> int:
        """Parameters that an optimizer updates."""
        return sum(
            piece.elements for s in self.sections if s.optimizer >= 0 for piece in s.slices
        )

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
    except (KeyError, TypeError, ValueError, IndexError) as exc:
        raise MalformedError(f"not a layout: {exc!r}"[:300], rule="layout") from exc
    names = [section.name for section in layout.sections]
    if len(set(names)) != len(names):
        raise MalformedError("two sections of one name", rule="layout")
    for section in layout.sections:
        _check_section(section, len(layout.optimizers))
    return layout


def _decode(body: Mapping[str, Any]) -> Layout:
    optimizers = tuple(body["optimizers"])
    if not all(isinstance(name, str) for name in optimizers):
        raise ValueError("optimizers")
    sections = tuple(
        Section(
            name=item["name"],
            optimizer=_int(item["optimizer"]),
            roles=tuple((role, dtype) for role, dtype in item["roles"]),
            slices=tuple(_decode_slice(piece) for piece in item["slices"]),
        )
        for item in body["sections"]
    )
    return Layout(optimizers=optimizers, sections=sections)


def _int(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"no integer: {value!r}")
    return value


def _decode_slice(item: Mapping[str, Any]) -> Slice:
    flat = item["flat"]
    return Slice(
        scope=_text(item["scope"]),
        name=_text(item["name"]),
        shape=tuple(_int(size) for size in item["shape"]),
        boxes=tuple(tuple((_int(a), _int(b)) for a, b in box) for box in item["boxes"]),
        flat=None if flat is None else (_int(flat[0]), _int(flat[1])),
        group=_int(item["group"]),
        offset=_int(item["offset"]),
        aliases=tuple(_text(name) for name in item["aliases"]),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"no string: {value!r}")
    return value


def _check_section(section: Section, optimizers: int) -> None:
    if not isinstance(section.name, str) or not section.roles:
        raise MalformedError("a section without name or roles", rule="layout")
    if not -1 <= section.optimizer < optimizers:
        raise MalformedError(f"section {section.name}: no such optimizer", rule="layout")
    if section.roles[0][0] not in ("param", "buffer"):
        raise MalformedError(f"section {section.name}: no param or buffer", rule="layout")
    if len(section.dtypes) != len(section.roles):
        raise MalformedError(f"section {section.name}: a role stands twice", rule="layout")
    widest = max(item_bytes(dtype) for _, dtype in section.roles)
    end = 0
    for piece in section.slices:
        _check_slice(piece)
        if piece.offset % ALIGN or piece.offset < end:
            raise MalformedError(f"slice {piece.name[:80]!r}: its offset", rule="layout")
        end = piece.offset + piece.elements
        if end > MAX_ARRAY_BYTES // widest:
            raise MalformedError(f"section {section.name} is too large", rule="layout")


def _check_slice(piece: Slice) -> None:
    name = piece.name[:80]
    if not piece.name or len(piece.shape) > MAX_DIMS:
        raise MalformedError(f"slice {name!r}: name or dimensions", rule="layout")
    if any(size < 0 for size in piece.shape):
        raise MalformedError(f"slice {name!r}: a negative size", rule="shape")
    total = math.prod(piece.shape)
    if total > MAX_ARRAY_BYTES:
        raise MalformedError(f"slice {name!r}: {total} elements", rule="shape")
    if piece.flat is not None:
        if piece.boxes or not 0 <= piece.flat[0] <= piece.flat[1] <= total:
            raise MalformedError(f"slice {name!r}: its flat range", rule="shape")
    for box in piece.boxes:
        if len(box) != len(piece.shape) or not all(
            0 <= start <= stop <= size for (start, stop), size in zip(box, piece.shape, strict=True)
        ):
            raise MalformedError(f"slice {name!r}: a box outside its shape", rule="shape")
