"""Live state: what a trainer that has outlived others holds is handed to those in their places.

No tier is asked for it. It goes over torch.distributed (gloo, on the CPU), within `restore`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from adacheck_store.arrays import byte_tensor, byte_view, torch_dtype
from adacheck_store.boundary import Link
from adacheck_store.format.bodies import decode_base
from adacheck_store.format.errors import AdaCheckError, GroupError
from adacheck_store.format.head import SealedHead
from adacheck_store.format.keys import part_name, rank_name
from adacheck_store.format.layout import decode_layout
from adacheck_store.format.record import Record, decode_header, encode_header, verify_record
from adacheck_store.group import Group, share
from adacheck_store.recovery import RestorePlan
from adacheck_store.redundancy.handover import givers
from adacheck_store.state import PartState

from .assemble import Assembly
from .capture_base import base_record, existing_arrays, fill_area, section_states
from .encode import ClosedBoundary
from .held import typed_groups, typed_states
from .layouts import Binding
from .seam import Session
from .stager import StateArea

log = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20
"""Bytes of one message."""

TIMEOUT_S = 300.0
"""Longest wait for a message of another rank."""


@dataclass(slots=True, kw_only=True)
class Live:
    """A copy, in host memory, of all that a rank held at the last boundary of a term.

    ``rank`` of ``size`` is the number it had then. ``state`` is None once it has been used: what is
    loaded from it is trained on in place.
    """

    run: str
    term: str
    rank: int
    size: int
    step: int
    state: PartState | None

    @classmethod
    def of(
        cls, session: Session, group: Group, assembly: Assembly | None,
        last: ClosedBoundary | None,
    ) -> Live | None:  # fmt: skip
        """Of the whole that a rank holds; None if it is not as at its ``last`` boundary.

        Nor where that boundary was captured otherwise: it has no copies of what is here now.
        """
        if assembly is None or last is None or last.encoder is not assembly.encoder:
            return None
        if assembly.watch.changed() or assembly.watch.changed_apart():
            return None
        return cls(
            run=session.run, term=session.term, rank=group.rank, size=group.size, step=last.step,
            state=copied(assembly.whole, last),
        )  # fmt: skip

    def unlike(self, plan: RestorePlan, group: Group) -> str:
        """Why it is not what this rank held at a planned step; empty if it is."""
        if self.state is None:
            return "it has been used already"
        if (self.rank, self.size) != (group.rank, group.size):
            now = f"rank {group.rank} of {group.size}"
            return f"it was rank {self.rank}'s of {self.size}, and this is {now}"
        if (self.run, self.term, self.step) != (plan.run, plan.term, plan.step):
            return f"it is of step {self.step} of run {self.run}, term {self.term}"
        return ""


def copied(binding: Binding, last: ClosedBoundary) -> PartState:
    """The state at a boundary of all that a rank holds, on which no update was made since.

    Of what a forward may have changed meanwhile the boundary has copies.
    """
    area = StateArea(binding, False)
    fill_area(binding, area)
    area.settle()
    slots = {slot.item.name: slot for slot in binding.slots}
    for item in (*last.copies, *last.apart):
        slot = slots[item.slot.item.name]
        area.views[slot.section.name, slot.index, item.role].copy_(item.data)
    sections = tuple(
        replace(section, slices=tuple(replace(piece, scope="") for piece in section.slices))
        for section in binding.layout.sections
    )
    return PartState(
        part="", step=last.step, layout=replace(binding.layout, sections=sections), layout_id="",
        arrays={name: area.arrays[name] for name in existing_arrays(binding)},
        states=typed_states(section_states(binding)),
        boundary=tuple(typed_groups(held) for held in last.groups),
    )  # fmt: skip


class Handover:
    """What ranks still hold of a planned step, for those that hold nothing: a `restore.Living`."""

    def __init__(self, live: Live | None, group: Group) -> None:
        self._live, self._group = live, group

    def __call__(self, plan: RestorePlan) -> tuple[PartState, str] | None:
        """This rank's state and whose it was, or None on all ranks. All call it.

        Raises `GroupError` where a rank is lost meanwhile, or what is handed over is not whole.
        """
        group, live = self._group, self._live
        why = "" if live is None else live.unlike(plan, group)
        if why:
            log.warning("step %d: the live state given is not taken: %s", plan.step, why)
        mine = live.state if live is not None and not why else None
        here = mine is not None
        told = share(group, "live state", lambda: [live is not None, here, _same_ranks(group)])
        if not any(given for given, *_ in told):
            return None
        living = [rank for rank, (_, has_it, _) in enumerate(told) if has_it]
        found = self._givers(plan, living, all(same for *_, same in told))
        if isinstance(found, str):
            log.warning("step %d is read from the tiers: %s", plan.step, found)
            return None
        state = self._moved(plan, found, mine)
        if live is not None and here:
            live.state = None
        whose = found.get(group.rank, group.rank)
        own = " still held it" if whose == group.rank else " handed it over"
        part = part_name(group.rank)
        return replace(state, part=part, step=plan.step), f"rank {whose}{own}, live"

    def _givers(self, plan: RestorePlan, living: list[int], same: bool) -> Mapping[int, int] | str:
        if not living:
            return "no rank still holds this step"
        if len(plan.manifest.ranks) != self._group.size:
            return "there were other ranks"
        if not same:
            return "these are not the ranks of torch.distributed"
        return givers(plan.manifest, living)

    def _moved(
        self, plan: RestorePlan, found: Mapping[int, int], mine: PartState | None
    ) -> PartState:
        """This rank's state, its own or what it was given, once all have got what they are."""
        if not found:
            assert mine is not None
            return mine
        try:
            wire: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
            try:
                return self._exchanged(plan, found, mine, wire)
            finally:
                dist.destroy_process_group(wire)
        except (RuntimeError, AdaCheckError) as error:
            raise GroupError(
                f"the live state of step {plan.step} was not handed over: {error}"[:600],
                run=plan.run, step=plan.step,
                hint="start all ranks again; without live= all is read from the tiers",
            ) from error  # fmt: skip

    def _exchanged(
        self, plan: RestorePlan, found: Mapping[int, int], state: PartState | None, wire: Any
    ) -> PartState:
        for receiver, giver in sorted(found.items()):
            if giver == self._group.rank:
                assert state is not None
                _send(packed(plan, state, giver), receiver, wire)
            elif receiver == self._group.rank:
                state = _received(giver, wire)
        assert state is not None
        return state


def _same_ranks(group: Group) -> bool:
    """Whether the group's ranks are those of torch.distributed."""
    own = group.rank, group.size
    return dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == own


def packed(plan: RestorePlan, state: PartState, giver: int) -> tuple[SealedHead, Record]:
    """A state as a layout and a base, with the digests of its blocks; nothing of it is stored."""
    layout = state.layout.seal(plan.run)
    link = Link(
        run=plan.run, term=plan.term, part=part_name(giver), rank=rank_name(giver),
        parent=plan.manifest_id, manifest=plan.manifest_id, layout=layout.id,
    )  # fmt: skip
    record = base_record(
        link, state.step, state.arrays, states=state.states, boundary=state.boundary, gap=None
    )
    return layout, record


def unpacked(layout: SealedHead, record: Record, arrays: Mapping[str, torch.Tensor]) -> PartState:
    """The state again; raises a `FormatError` where blocks are not what was sent."""
    verify_record(record)
    head = record.sealed.head
    body = decode_base(head)
    assert head.step is not None
    return PartState(
        part=head.part, step=head.step, layout=decode_layout(layout.head), layout_id="",
        arrays=arrays, states=body.states, boundary=body.boundary,
    )  # fmt: skip


def _send(packed: tuple[SealedHead, Record], to: int, wire: Any) -> None:
    layout, record = packed
    headers = [encode_header(layout), encode_header(record.sealed)]
    dist.send(torch.tensor([len(header) for header in headers]), to, wire)
    arrays = [record.arrays[info.name] for info in record.sealed.head.arrays]
    for data in (*headers, *arrays):
        for at in range(0, len(data), CHUNK_BYTES):
            piece = bytearray(data[at : at + CHUNK_BYTES])
            dist.send(torch.frombuffer(piece, dtype=torch.uint8), to, wire)


def _received(giver: int, wire: Any) -> PartState:
    lengths = torch.zeros(2, dtype=torch.int64)
    dist.recv(lengths, giver, wire)
    headers = [torch.empty(length, dtype=torch.uint8) for length in lengths.tolist()]
    for header in headers:
        _receive(header, giver, wire)
    layout, sealed = (decode_header(byte_view(header)) for header in headers)
    arrays = {
        info.name: torch.empty(info.elements, dtype=torch_dtype(info.dtype))
        for info in sealed.head.arrays
    }
    for array in arrays.values():
        _receive(byte_tensor(array), giver, wire)
    views = {name: byte_view(array) for name, array in arrays.items()}
    return unpacked(layout, Record(sealed, views), arrays)


def _receive(into: torch.Tensor, giver: int, wire: Any) -> None:
    for at in range(0, into.numel(), CHUNK_BYTES):
        dist.recv(into[at : at + CHUNK_BYTES], giver, wire)
