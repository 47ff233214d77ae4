"""Encoding: a closed boundary's buffers as records, on the writer's thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adacheck_store.arrays import torch_dtype
from adacheck_store.boundary import Link
from adacheck_store.format.bodies import (
    DeltaBody,
    Fingerprint,
    Grad,
    Groups,
    SectionState,
    SetPiece,
    Update,
    grad_array,
    set_array,
)
from adacheck_store.format.errors import AdaCheckError
from adacheck_store.format.layout import Layout, Section, align
from adacheck_store.format.record import Record
from adacheck_store.optimizers import arithmetic_digest, folds_alike
from adacheck_store.redundancy.witness import to_tree

from .blocks import BlockWatch, sums_of
from .capture_base import base_record, sealed_record
from .copies import remote
from .extras import extra_record
from .halves import RAW, Form, Scales, encode, usable_scale
from .held import HeldGroups, refuse_arrays, typed_groups, typed_states
from .layouts import Binding
from .outside import SetCopy, Stored
from .pending import sort_out
from .stager import HostBuffer, StateArea
from .updates import CapturedUpdate
from .witness import Sets, Witnessing

ENCODED_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class _Place:
    """A section in an update of a boundary, and the buffer whose memory it may use."""

    update: int
    section: Section
    buffer: HostBuffer

    def key(self, what: str) -> tuple[str, int, str]:
        return (what, self.update, self.section.name)

    def scratch(self, what: str, dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory of the section's length, kept with the buffer from the first use on."""
        found = self.buffer.scratch.get(self.key(what))
        if found is None:
            found = torch.zeros(self.section.elements, dtype=dtype)
            self.buffer.scratch[self.key(what)] = found
        kept: torch.Tensor = found
        return kept


class Encoder:
    """What all boundaries of a run share: the binding, and what was stored last.

    ``bounded`` once some update's arithmetic was not that of folds on this machine.
    """

    def __init__(
        self, binding: Binding, blocks: BlockWatch, new_area: Callable[[], StateArea]
    ) -> None:
        self.binding = binding
        self.blocks = blocks
        self.new_area = new_area
        self.stored = Stored()
        self.witness = Witnessing(binding)
        self.bounded = False
        self._judged: set[str] = set()
        self._members: dict[str, list[int]] = {}
        self._places = {
            (section.name, role): (i, j)
            for i, section in enumerate(binding.layout.sections)
            for j, (role, _) in enumerate(section.roles)
        }
        for number, slot in enumerate(binding.trained):
            self._members.setdefault(slot.section.name, []).append(number)

    def place(self, item: SetPiece) -> tuple[int, int, int]:
        """Where a set stands in the layout's order."""
        section, role = self._places[item.section, item.role]
        return section, role, item.slice

    def arithmetic(self, used: Sequence[Groups]) -> tuple[str, ...]:
        """The digest of each optimizer's arithmetic under these groups, on its device."""
        found = []
        for number, (spec, groups) in enumerate(zip(self.binding.specs, used, strict=True)):
            slots = [s for s in self.binding.captured if s.section.optimizer == number]
            folded = [s for s in self.binding.trained if s.section.optimizer == number]
            dtypes = sorted({slot.section.roles[0][1] for slot in folded})  # as the part's layout
            device = next((s.item.tensor.device for s in slots if remote(s.item.tensor)), "cpu")
            if not spec.foldable:
                found.append("")
                continue
            digest = arithmetic_digest(spec.name, groups, dtypes, str(device))
            found.append(digest)
            if digest not in self._judged:
                self._judged.add(digest)
                self.bounded |= not folds_alike(spec.name, groups, dtypes, digest)
        return tuple(found)

    def update(
        self, number: int, update: CapturedUpdate, buffer: HostBuffer
    ) -> tuple[Update, dict[str, torch.Tensor]]:
        """The body of the boundary's update ``number``, and its gradient arrays."""
        scales = [usable_scale(float(scale)) for scale in update.scales]
        known = Scales([scale for scale in scales if scale is not None])
        grads: list[Grad] = []
        absent: list[tuple[str, int]] = []
        arrays: dict[str, torch.Tensor] = {}
        for section in self.binding.layout.sections:
            if section.optimizer != update.optimizer:
                continue
            members = self._members.get(section.name, [])
            given = [index for index in members if index in update.given]
            absent += [
                (section.name, self.binding.trained[index].index)
                for index in members
                if index not in update.given
            ]
            place = _Place(number, section, buffer)
            found, kept = self._section(place, members, given, update, known)
            grads += found
            arrays |= kept
        body = Update(
            optimizer=update.optimizer, groups=typed_groups(update.groups),
            grads=tuple(grads), absent=tuple(absent),
        )  # fmt: skip
        return body, arrays

    def _section(
        self, place: _Place, members: Sequence[int], given: Sequence[int],
        update: CapturedUpdate, scales: Scales,
    ) -> tuple[list[Grad], dict[str, torch.Tensor]]:  # fmt: skip
        if not given:
            return [], {}
        section = place.section
        staged = update.area.grads[section.name]
        dtype = torch_dtype(section.roles[0][1])
        own = "bf16" if staged.dtype != dtype else "raw"
        chosen: list[tuple[int, Form, torch.Tensor]] = []
        if own == "raw" and dtype == torch.float32:
            halves = place.scratch("halves", torch.int16)
            for number in given:
                flat = self._flat(number, staged)
                out = self._flat(number, halves)
                form = encode(flat, scales, out)
                kept = flat if form == RAW else out.view(ENCODED_DTYPES[form.encoding])
                chosen.append((number, form, kept))
        else:
            for number in given:
                late = update.late.get(number)
                if late is not None:
                    chosen.append((number, RAW, late.reshape(-1)))
                else:
                    chosen.append((number, Form(own), self._flat(number, staged)))
        return self._packed(place, members, chosen, staged)

    def _flat(self, number: int, flat: torch.Tensor) -> torch.Tensor:
        piece = self.binding.trained[number].piece
        return flat[piece.offset : piece.offset + piece.elements]

    def _packed(
        self, place: _Place, members: Sequence[int],
        chosen: Sequence[tuple[int, Form, torch.Tensor]], staged: torch.Tensor,
    ) -> tuple[list[Grad], dict[str, torch.Tensor]]:  # fmt: skip
        """Arrays of the chosen forms; where all slices are kept alike, without another copy."""
        section = place.section
        arrays: dict[str, torch.Tensor] = {}
        grads: list[Grad] = []
        encodings = sorted({form.encoding for _, form, _ in chosen})
        whole = len(encodings) == 1 and len(chosen) == len(members)
        for encoding in encodings:
            mine = [item for item in chosen if item[1].encoding == encoding]
            length = sum(align(kept.numel()) for _, _, kept in mine)
            if whole:
                array = self._in_place(place, encoding, mine, staged)
            else:
                array = place.scratch(encoding, mine[0][2].dtype)[:length]
            at = 0
            for number, form, kept in mine:
                slot = self.binding.trained[number]
                offset = slot.piece.offset if whole else at
                if not whole:
                    array[at : at + kept.numel()].copy_(kept)
                    at = align(at + kept.numel())
                    array[offset + kept.numel() : at].zero_()
                grads.append(
                    Grad(
                        section=section.name, slice=slot.index, encoding=encoding,
                        offset=offset, scale=form.bits,
                    )
                )  # fmt: skip
            arrays[grad_array(place.update, section.name, encoding)] = array
        grads.sort(key=lambda grad: grad.slice)
        return grads, arrays

    def _in_place(
        self, place: _Place, encoding: str, mine: Sequence[tuple[int, Form, torch.Tensor]],
        staged: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """The array in which all slices already lie at their offsets."""
        kept = mine[0][2]
        if kept.untyped_storage().data_ptr() == staged.untyped_storage().data_ptr():
            return staged
        halves = place.buffer.scratch.get(place.key("halves"))
        if isinstance(halves, torch.Tensor) and (
            kept.untyped_storage().data_ptr() == halves.untyped_storage().data_ptr()
        ):
            return halves.view(ENCODED_DTYPES[encoding])
        array = place.scratch(encoding, kept.dtype)
        array.zero_()
        for number, _, late in mine:
            self._flat(number, array).copy_(late)
        return array


def encode_sets(copies: Sequence[SetCopy]) -> tuple[list[SetPiece], dict[str, torch.Tensor]]:
    """Arrays of the copies, one per section and role, and where each lies in them."""
    by_array: dict[str, list[SetCopy]] = {}
    for item in copies:
        name = set_array(item.slot.section.name, item.role)
        by_array.setdefault(name, []).append(item)
    pieces, arrays = [], {}
    for name, items in by_array.items():
        items.sort(key=lambda item: item.slot.index)
        length = sum(align(item.data.numel()) for item in items)
        array = torch.zeros(length, dtype=items[0].data.dtype)
        at = 0
        for item in items:
            array[at : at + item.data.numel()].copy_(item.data.reshape(-1))
            pieces.append(
                SetPiece(
                    section=item.slot.section.name, role=item.role, slice=item.slot.index,
                    offset=at,
                )
            )  # fmt: skip
            at = align(at + item.data.numel())
        arrays[name] = array
    return pieces, arrays


@dataclass(slots=True, kw_only=True, eq=False)
class ClosedBoundary:
    """A boundary with its buffers (see `boundary.Boundary`); the writer owns it until `release`.

    ``gap`` is that of the base it comes with instead of a delta, ``based`` says that one comes
    besides; ``failure`` why there is no delta to be had. ``flushes`` says whether the training
    thread took denormals for zero: then so does the writer's. ``area`` holds the whole state
    where one was wanted, ``arrays`` names the arrays of the state that exist. ``apart`` are copies
    of slots kept elsewhere; ``agreed`` are the states whose copies all ranks have found equal at
    this step, None if they were not compared; ``edited`` says whether optimizers' state was changed
    by others before it. What was copied may be read only once it has landed.
    """

    step: int
    encoder: Encoder
    buffer: HostBuffer | None
    area: StateArea | None
    updates: Sequence[CapturedUpdate]
    copies: list[SetCopy]
    groups: tuple[HeldGroups, ...]
    arrays: list[str]
    states: Mapping[str, SectionState]
    extras: Mapping[str, Any]
    on_release: Callable[[HostBuffer | None, StateArea | None], None]
    start: bool = False
    failure: AdaCheckError | None = None
    gap: Mapping[str, Any] | None = None
    based: bool = False
    flushes: bool = False
    apart: Sequence[SetCopy] = ()
    agreed: Sets | None = None
    edited: bool = False
    _content: tuple[DeltaBody, dict[str, torch.Tensor]] | None = None

    @property
    def layout(self) -> Layout:
        """The layout of its records."""
        return self.encoder.binding.layout

    def delta(self, link: Link) -> Record | None:
        """The delta that leads to this step."""
        if self.start or self.gap is not None:
            return None
        if self.failure is not None:
            raise self.failure
        if self._content is None:
            self._content = self._encode()
        body, arrays = self._content
        return sealed_record("delta", link, self.step, arrays, body.to_json())

    def _encode(self) -> tuple[DeltaBody, dict[str, torch.Tensor]]:
        assert self.buffer is not None, "released"
        self._settle()
        torch.set_flush_denormal(self.flushes)
        arrays: dict[str, torch.Tensor] = {}
        updates: list[Update] = []
        boundary = self._boundary()
        used = list(boundary)
        for captured in self.updates:
            if not captured.applied():
                continue
            update, grads = self.encoder.update(len(updates), captured, self.buffer)
            updates.append(update)
            arrays |= grads
            used[captured.optimizer] = update.groups
        fingerprints = self._fingerprints(self.buffer)
        arithmetic = self.encoder.arithmetic(used)
        sets, kept = encode_sets(self.encoder.stored.changed(self.copies))
        sets.sort(key=self.encoder.place)
        body = DeltaBody(
            updates=tuple(updates), sets=tuple(sets), boundary=boundary,
            arithmetic=arithmetic, fingerprints=fingerprints,
        )  # fmt: skip
        return body, arrays | kept

    def _settle(self) -> None:
        for memory in (self.buffer, self.area):
            if memory is not None:
                memory.settle()

    def _boundary(self) -> tuple[Groups, ...]:
        for spec, held in zip(self.encoder.binding.specs, self.groups, strict=True):
            refuse_arrays(spec, held)
        return tuple(typed_groups(held) for held in self.groups)

    def _fingerprints(self, buffer: HostBuffer) -> tuple[Fingerprint, ...]:
        if self.area is not None:
            return sums_of({name: self.area.arrays[name] for name in self.arrays})
        return self.encoder.blocks.sums(self.step, buffer, set(self.arrays))

    def base(self, link: Link) -> Record | None:
        """A captured base of this step, where one was wanted."""
        if self.area is None or not (self.start or self.based or self.gap is not None):
            return None
        self._settle()
        self.encoder.stored.rebase(self.copies)
        arrays = {name: self.area.arrays[name] for name in self.arrays}
        return base_record(
            link, self.step, arrays, states=typed_states(self.states),
            boundary=self._boundary(), gap=self.gap,
            exactness="exact" if self.encoder.binding.foldable else "unsupported",
        )  # fmt: skip

    def extra(self, link: Link) -> Record:
        """The rank's extra of this step."""
        self._settle()
        self.encoder.witness.take_in(self.step)
        told = self.encoder.witness.of(self.step)
        witness = {} if told is None else {"witness": to_tree(told)}
        return extra_record(link, self.step, {**sort_out(self.extras), **witness})

    def witness(self) -> None:
        """Tell, when it is its turn, what has changed states that other ranks hold too."""
        witness = self.encoder.witness
        if self.agreed is not None:
            witness.begin(self.step, self.agreed)
        elif self.failure is None and witness.begun:
            self._settle()
            updates = [update for update in self.updates if update.applied()]
            copies = (*self.copies, *self.apart)
            witness.advance(self.step, updates, copies, self.edited)

    def release(self) -> None:
        """Give the buffers back; a second call does nothing."""
        self.encoder.witness.take_in(self.step)  # stored or not: other ranks have copies of it
        buffer, area = self.buffer, self.area
        self.buffer = self.area = self._content = None
        if buffer is not None or area is not None:
            self.on_release(buffer, area)
