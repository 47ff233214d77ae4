"""Checks of a delta or base against its part's layout: what a body alone cannot tell."""

from __future__ import annotations

from collections.abc import Iterator

from . import derived
from .bodies import BaseBody, DeltaBody, Groups, Update, grad_array, set_array
from .dtypes import item_bytes
from .errors import MalformedError
from .head import ArrayInfo, Head
from .ids import block_count
from .layout import ALIGN, Layout, Section

GRAD_DTYPES = {"bf16": "BF16", "fp16": "F16"}
"""Encoding -> dtype of its arrays; ``raw`` has the dtype of the section's main role."""


def check_delta(head: Head, body: DeltaBody, layout: Layout) -> None:
    """Check a delta against its layout; raises `MalformedError` (rule ``delta-layout``)."""
    try:
        _check_delta(head, body, layout)
    except ValueError as exc:
        raise MalformedError(str(exc)[:300], rule="delta-layout").at(**head.place()) from exc


def check_base(head: Head, body: BaseBody, layout: Layout) -> None:
    """Check a base against its layout; raises `MalformedError` (rule ``base-layout``)."""
    if body.origin == derived.ORIGIN:
        head, _ = derived.stood_for(head)
    try:
        _check_base(head, body, layout)
    except ValueError as exc:
        raise MalformedError(str(exc)[:300], rule="base-layout").at(**head.place()) from exc


class _Pieces:
    """The arrays of a delta, filled piece by piece: ascending, aligned, within their array."""

    def __init__(self, arrays: tuple[ArrayInfo, ...]) -> None:
        self._arrays = {info.name: info for info in arrays}
        self._ends: dict[str, int] = {}

    def take(self, name: str, dtype: str, offset: int, elements: int) -> None:
        info = self._arrays.get(name)
        if info is None or info.dtype != dtype:
            raise ValueError(f"no array {name!r} of {dtype}")
        if offset % ALIGN or offset < self._ends.get(name, 0):
            raise ValueError(f"a piece at element {offset} of {name!r}")
        if offset + elements > info.elements:
            raise ValueError(f"a piece beyond the end of {name!r}")
        self._ends[name] = offset + elements

    def check_all_used(self) -> None:
        if unused := self._arrays.keys() - self._ends.keys():
            raise ValueError(f"arrays without a piece: {sorted(unused)[:3]}")


def _check_delta(head: Head, body: DeltaBody, layout: Layout) -> None:
    _check_groups(body.boundary, layout)
    if len(body.arithmetic) != len(layout.optimizers):
        raise ValueError("arithmetic is not one per optimizer")
    if not head.step:
        raise ValueError("a delta leads to step 1 at the earliest")
    pieces = _Pieces(head.arrays)
    sections = {section.name: section for section in layout.sections}
    for number, update in enumerate(body.updates):
        if update.optimizer >= len(layout.optimizers):
            raise ValueError(f"update {number}: no such optimizer")
        _check_group_count(update.groups, update.optimizer, layout)
        _check_grads(number, update, layout, sections, pieces)
    _check_sets(body, sections, pieces)
    pieces.check_all_used()
    _check_fingerprints(body, sections)


def _check_sets(body: DeltaBody, sections: dict[str, Section], pieces: _Pieces) -> None:
    previous = (-1, -1, -1)
    order = {name: place for place, name in enumerate(sections)}
    for item in body.sets:
        section = sections.get(item.section)
        if section is None or item.role not in section.dtypes or item.slice >= len(section.slices):
            raise ValueError(f"set {item.section[:80]!r}: no such section, role or slice")
        place = (order[item.section], list(section.dtypes).index(item.role), item.slice)
        if place <= previous:
            raise ValueError("sets follow the layout's order, each once")
        previous = place
        pieces.take(
            set_array(item.section, item.role), section.dtypes[item.role],
            item.offset, section.slices[item.slice].elements,
        )  # fmt: skip


def _check_grads(
    number: int, update: Update, layout: Layout, sections: dict[str, Section], pieces: _Pieces
) -> None:
    """Grads and absent slices follow the layout's order and are together all slices."""
    for grad in update.grads:
        section = sections.get(grad.section)
        if section is None or grad.slice >= len(section.slices):
            raise ValueError(f"update {number}: no such slice")
        dtype = GRAD_DTYPES.get(grad.encoding, section.roles[0][1])
        name = grad_array(number, grad.section, grad.encoding)
        pieces.take(name, dtype, grad.offset, section.slices[grad.slice].elements)
    given = iter([(grad.section, grad.slice) for grad in update.grads])
    absent = iter(update.absent)
    next_given, next_absent = next(given, None), next(absent, None)
    for slot in _slots(update.optimizer, layout):
        if slot == next_given:
            next_given = next(given, None)
        elif slot == next_absent:
            next_absent = next(absent, None)
        else:
            raise ValueError(f"update {number}: slice {slot} is missing or out of order")
    if next_given is not None or next_absent is not None:
        raise ValueError(f"update {number}: a slice too many, twice or of another optimizer")


def _slots(optimizer: int, layout: Layout) -> Iterator[tuple[str, int]]:
    for section in layout.sections:
        if section.optimizer == optimizer:
            yield from ((section.name, index) for index in range(len(section.slices)))


def _check_fingerprints(body: DeltaBody, sections: dict[str, Section]) -> None:
    for item in body.fingerprints:
        name, _, role = item.array.partition("/")
        section = sections.get(name)
        if section is None or role not in section.dtypes:
            raise ValueError(f"a fingerprint of {item.array[:80]!r}")
        blocks = block_count(section.elements * item_bytes(section.dtypes[role]))
        if item.first + (len(item.sums) - 1) * item.stride >= blocks:
            raise ValueError(f"a fingerprint beyond the end of {item.array!r}")


def _check_base(head: Head, body: BaseBody, layout: Layout) -> None:
    _check_groups(body.boundary, layout)
    known = {info.name: info for info in head.arrays}
    for section in layout.sections:
        state = body.states.get(section.name)
        if state is None and section.optimizer >= 0:
            raise ValueError(f"no state of section {section.name!r}")
        if state is not None and len(state.present) != len(section.slices):
            raise ValueError(f"section {section.name!r}: present is not one per slice")
        for role, dtype in section.roles:
            info = known.pop(f"{section.name}/{role}", None)
            if info is None:
                if role == section.main_role or (state is not None and any(state.present)):
                    raise ValueError(f"no array {section.name}/{role}")
            elif (info.dtype, info.elements) != (dtype, section.elements):
                raise ValueError(f"array {info.name!r} is not {section.elements} of {dtype}")
    if known or body.states.keys() - {section.name for section in layout.sections}:
        raise ValueError("an array or a state outside the layout")


def _check_groups(boundary: tuple[Groups, ...], layout: Layout) -> None:
    if len(boundary) != len(layout.optimizers):
        raise ValueError("boundary is not one per optimizer")
    for optimizer, groups in enumerate(boundary):
        _check_group_count(groups, optimizer, layout)


def _check_group_count(groups: Groups, optimizer: int, layout: Layout) -> None:
    used = (piece.group for s in layout.sections if s.optimizer == optimizer for piece in s.slices)
    if max(used, default=-1) >= len(groups):
        raise ValueError(f"optimizer {optimizer}: a slice's group is missing")
