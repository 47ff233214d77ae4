"""Captured bases: the whole state of a part, copied from live tensors into a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from adacheck_store.arrays import byte_view, dtype_name
from adacheck_store.boundary import Link
from adacheck_store.config import writer_info
from adacheck_store.format.bodies import BaseBody, Groups, SectionState
from adacheck_store.format.head import ArrayInfo, Head, SealedHead
from adacheck_store.format.ids import block_digests
from adacheck_store.format.record import Record

from .copies import copy
from .deepspeed import check_derived
from .held import HeldGroups, held_groups, hold
from .layouts import Binding
from .stager import StateArea


def boundary_groups(binding: Binding) -> tuple[HeldGroups, ...]:
    """The hyper-parameters of every group as they stand now, per optimizer, held."""
    return tuple(held_groups(optimizer.param_groups) for optimizer in binding.optimizers)


def section_states(binding: Binding) -> dict[str, SectionState]:
    """Which slices have optimizer state now, and their counters (held), per trained section."""
    present: dict[str, list[bool]] = {}
    scalars: dict[str, dict[str, list[Any]]] = {}
    for slot in binding.trained:
        name = slot.section.name
        state = binding.state(slot)
        has = binding.present(slot)
        present.setdefault(name, []).append(has)
        for key in binding.spec(slot).scalars:
            values = scalars.setdefault(name, {}).setdefault(key, [])
            values.append(hold(state.get(key)) if has else None)
    return {
        name: SectionState(
            present=tuple(flags),
            scalars={key: tuple(values) for key, values in scalars.get(name, {}).items()},
        )
        for name, flags in present.items()
    }


def existing_arrays(binding: Binding) -> list[str]:
    """Names of the arrays a base has now: a state role exists where any slice has it."""
    stateful = set[str]()
    for slot in binding.trained:
        if slot.section.name not in stateful and binding.present(slot):
            stateful.add(slot.section.name)
    return [
        f"{section.name}/{role}"
        for section in binding.layout.sections
        for role, _ in section.roles
        if role == section.main_role or section.name in stateful
    ]


def fill_area(binding: Binding, area: StateArea) -> None:
    """Copy the whole state into an area (training thread); state that is absent is zeros."""
    check_derived(binding.optimizers)
    targets, sources, zeros = [], [], []
    for slot in binding.slots:
        name, main = slot.section.name, slot.section.main_role
        targets.append(area.views[name, slot.index, main])
        sources.append(slot.item.local.detach())
        if slot.section.optimizer < 0:
            continue
        state = binding.state(slot)
        for role in slot.section.state_roles:
            value = state.get(role)
            if isinstance(value, torch.Tensor):
                targets.append(area.views[name, slot.index, role])
                sources.append(value.detach())
            else:
                zeros.append(area.views[name, slot.index, role])
    if zeros:
        torch._foreach_zero_(zeros)
    copy(targets, sources)
    area.landed()


def base_record(
    link: Link, step: int, arrays: Mapping[str, torch.Tensor], *,
    states: Mapping[str, SectionState], boundary: tuple[Groups, ...],
    gap: Mapping[str, Any] | None, exactness: str = "exact",
) -> Record:  # fmt: skip
    """A captured base of the arrays, hanging where ``link`` says."""
    body = BaseBody(
        origin="captured", exactness=exactness, states=states, boundary=boundary, gap=gap
    )
    return sealed_record("base", link, step, arrays, body.to_json())


def sealed_record(
    kind: str, link: Link, step: int, arrays: Mapping[str, torch.Tensor],
    body: Mapping[str, Any],
) -> Record:  # fmt: skip
    """A base or delta (of the link's part) or an extra (of its rank) over flat CPU tensors."""
    extra = kind == "extra"
    views = {name: byte_view(flat) for name, flat in arrays.items()}
    head = Head(
        kind=kind, run=link.run, term=link.term, part=link.rank if extra else link.part, step=step,
        parent="" if extra else link.parent, manifest=link.manifest,
        layout="" if extra else link.layout, arrays=_infos(arrays, views), body=body,
    )  # fmt: skip
    return Record(SealedHead.seal(head, writer_info()), views)


def _infos(
    arrays: Mapping[str, torch.Tensor], views: Mapping[str, memoryview]
) -> tuple[ArrayInfo, ...]:
    return tuple(
        ArrayInfo(
            name=name, dtype=dtype_name(flat.dtype), elements=flat.numel(),
            digests=block_digests(views[name]),
        )
        for name, flat in arrays.items()
    )  # fmt: skip
