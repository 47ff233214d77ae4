"""Which blocks of the state a boundary fingerprints, and the pieces of tensors they consist of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from adacheck_store.arrays import byte_view, torch_dtype
from adacheck_store.fingerprint import ROTATION, block_sum, piece_sum, rotation
from adacheck_store.format.bodies import Fingerprint
from adacheck_store.format.dtypes import item_bytes
from adacheck_store.format.ids import BLOCK_BYTES, block_count, iter_blocks
from adacheck_store.format.layout import Section

from .copies import copy, remote
from .layouts import Binding, Slot
from .stager import HostBuffer


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """Elements start..stop of a slot, at byte ``at`` of the buffer's block area."""

    slot: Slot
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True, eq=False)
class _BlockPlan:
    """One block: its array, index, place and size in the block area, its cuts and its gaps."""

    section: Section
    role: str
    index: int
    at: int
    nbytes: int
    cuts: tuple[_Cut, ...]
    gaps: tuple[tuple[int, int], ...]

    @property
    def array(self) -> str:
        return f"{self.section.name}/{self.role}"


class BlockWatch:
    """The blocks whose turn it is, about a sixteenth: plans, copies and sums.

    `stage` runs on the training thread, `sums` on the writer's. What lies in host memory is summed
    up at once, where there is a compiled loop for it; else it is copied, and summed up later.
    """

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._members: dict[str, list[Slot]] = {}
        for slot in binding.slots:
            self._members.setdefault(slot.section.name, []).append(slot)
        self._plans = [self._plan(turn) for turn in range(ROTATION)]

    @property
    def area_bytes(self) -> int:
        """Bytes a buffer needs for the blocks of any one step."""
        return max(len(plan) for plan in self._plans) * BLOCK_BYTES

    def _plan(self, turn: int) -> list[_BlockPlan]:
        plans: list[_BlockPlan] = []
        for section in self._binding.layout.sections:
            for role, dtype in section.roles:
                nbytes = section.elements * item_bytes(dtype)
                # blocks_at for any step of this turn that is no multiple of base_every.
                count = block_count(nbytes)
                stride = rotation(count)
                for index in range(turn % stride, count, stride):
                    at = len(plans) * BLOCK_BYTES
                    plans.append(self._block(section, role, index, at, nbytes))
        return plans

    def _block(self, section: Section, role: str, index: int, at: int, nbytes: int) -> _BlockPlan:
        size = item_bytes(section.dtypes[role])
        first = index * BLOCK_BYTES // size
        last = min(first + BLOCK_BYTES // size, nbytes // size)
        cuts, gaps, end = [], [], first
        for slot in self._members.get(section.name, ()):
            piece = slot.piece
            low, high = max(piece.offset, first), min(piece.offset + piece.elements, last)
            if low >= high:
                continue
            if low > end:
                gaps.append((at + (end - first) * size, at + (low - first) * size))
            place = at + (low - first) * size
            cuts.append(_Cut(slot, low - piece.offset, high - piece.offset, place))
            end = high
        if last > end:
            gaps.append((at + (end - first) * size, at + (last - first) * size))
        return _BlockPlan(section, role, index, at, (last - first) * size, tuple(cuts), tuple(gaps))

    def stage(self, step: int, buffer: HostBuffer) -> None:
        """Sum up this step's blocks, or copy them into the buffer; no state is zeros."""
        targets, sources, zeros = [], [], []
        buffer.sums.clear()
        for plan in self._plans[step % ROTATION]:
            known = self._sum(plan)
            if known is not None:
                buffer.sums[plan.at] = known
                continue
            dtype = torch_dtype(plan.section.dtypes[plan.role])
            for start, stop in plan.gaps:
                zeros.append(buffer.blocks[start:stop])
            for cut in plan.cuts:
                target = buffer.blocks[cut.at : cut.at + (cut.stop - cut.start) * dtype.itemsize]
                source = self._source(cut.slot, plan.role)
                if source is None:
                    zeros.append(target)
                    continue
                flat = source.detach().reshape(-1)
                whole = flat.numel() == cut.stop - cut.start
                targets.append(target.view(dtype))
                sources.append(flat if whole else flat[cut.start : cut.stop])
        if zeros:
            torch._foreach_zero_(zeros)
        copy(targets, sources)

    def _sum(self, plan: _BlockPlan) -> int | None:
        """The sum of a block where it lies, which is half the work of a copy; None: copy it."""
        dtype, total = torch_dtype(plan.section.dtypes[plan.role]), 0
        if dtype.itemsize % 4:  # a word might be of two pieces
            return None
        for cut in plan.cuts:
            source = self._source(cut.slot, plan.role)
            if source is None:
                continue
            if remote(source) or not source.is_contiguous():
                return None
            piece = byte_view(source.detach().view(-1)[cut.start : cut.stop])
            added = piece_sum(piece, (cut.at - plan.at) // 4)
            if added is None:
                return None
            total += added
        return total % 2**64

    def _source(self, slot: Slot, role: str) -> torch.Tensor | None:
        if role == slot.section.main_role:
            return slot.item.local
        found = self._binding.state(slot).get(role)
        return found if isinstance(found, torch.Tensor) else None

    def sums(self, step: int, buffer: HostBuffer, arrays: set[str]) -> tuple[Fingerprint, ...]:
        """The fingerprints of the staged blocks of the arrays that exist."""
        found: dict[str, list[tuple[int, int]]] = {}
        data = byte_view(buffer.blocks)
        for plan in self._plans[step % ROTATION]:
            if plan.array in arrays:
                value = buffer.sums.get(plan.at)
                if value is None:
                    value = block_sum(data[plan.at : plan.at + plan.nbytes])
                found.setdefault(plan.array, []).append((plan.index, value))
        return tuple(_fingerprint(array, pairs) for array, pairs in found.items())


def _fingerprint(array: str, pairs: list[tuple[int, int]]) -> Fingerprint:
    first = pairs[0][0]
    stride = pairs[1][0] - first if len(pairs) > 1 else 1
    return Fingerprint(array=array, first=first, stride=stride, sums=tuple(s for _, s in pairs))


def sums_of(arrays: Mapping[str, torch.Tensor]) -> tuple[Fingerprint, ...]:
    """The fingerprints of every block of whole arrays."""
    return tuple(
        Fingerprint(
            array=name, first=0, stride=1,
            sums=tuple(block_sum(block) for block in iter_blocks(byte_view(flat))),
        )
        for name, flat in arrays.items()
        if flat.numel()
    )  # fmt: skip
