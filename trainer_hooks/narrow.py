"""Narrowing: of all that a rank holds, what it writes; and of what was written, what it loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from adacheck_store.format.layout import Layout, Section, align

from .layouts import Binding, Slot


def narrowed(whole: Binding, scopes: Mapping[str, str], shared: Iterable[str] = ()) -> Binding:
    """The binding of the tensors named in ``scopes``, under the scopes given there.

    The other tensors are kept by other ranks. Those that are ``shared``, with the optimizer's state
    of each, are captured here as well. What is asked of optimizers as such stays whole.
    """
    sections, slots = _laid_out(whole, scopes)
    _, others = _laid_out(whole, dict.fromkeys(set(shared).difference(scopes), ""))
    trained, outside = _sides(slots)
    captured, watched = _sides([*slots, *others])
    return replace(
        whole, layout=Layout(optimizers=whole.layout.optimizers, sections=tuple(sections)),
        slots=tuple(slots), trained=trained, outside=outside, captured=captured, watched=watched,
    )  # fmt: skip


def _sides(slots: Iterable[Slot]) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
    """Those that an optimizer updates, and the others."""
    found = list(slots)
    return (
        tuple(slot for slot in found if slot.section.optimizer >= 0),
        tuple(slot for slot in found if slot.section.optimizer < 0),
    )


def _laid_out(whole: Binding, scopes: Mapping[str, str]) -> tuple[list[Section], list[Slot]]:
    """Sections of the tensors named alone, without the room of others, and their slots."""
    sections, slots = [], []
    for section in whole.layout.sections:
        mine = [s for s in whole.slots if s.section is section and s.item.name in scopes]
        pieces, offset = [], 0
        for slot in mine:
            piece = replace(slot.piece, scope=scopes[slot.item.name], offset=offset)
            pieces.append(piece)
            offset = align(offset + piece.elements)
        if pieces:
            made = replace(section, slices=tuple(pieces))
            sections.append(made)
            slots += [Slot(made, index, slot.item) for index, slot in enumerate(mine)]
    return sections, slots


def capture_alike(one: Binding, other: Binding) -> bool:
    """Whether both are alike, and capture the same of what others keep."""
    names = [[slot.item.name for slot in (*each.captured, *each.watched)] for each in (one, other)]
    return one.alike(other) and names[0] == names[1]
