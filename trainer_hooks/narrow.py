"""Narrowing: of all that a rank holds, what it writes; and of what was written, what it loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from adacheck_store.format.layout import Layout, align

from .layouts import Binding, Slot


def narrowed(whole: Binding, scopes: Mapping[str, str]) -> Binding:
    """The binding of the tensors named in ``scopes``, under the scopes given there.

    The other tensors are kept by other ranks. What is asked of optimizers as such stays whole.
    """
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
    return replace(
        whole, layout=Layout(optimizers=whole.layout.optimizers, sections=tuple(sections)),
        slots=tuple(slots), trained=tuple(s for s in slots if s.section.optimizer >= 0),
        outside=tuple(s for s in slots if s.section.optimizer < 0),
    )  # fmt: skip
