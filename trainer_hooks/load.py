"""Loading: a part's state copied into a live model and optimizer, in place and by name.

Everything is checked before the first tensor is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from adacheck_store.arrays import byte_tensor, dtype_name, from_typed
from adacheck_store.format.bodies import SectionState
from adacheck_store.format.canonical import Scalar
from adacheck_store.format.errors import ChainBrokenError
from adacheck_store.format.layout import Layout
from adacheck_store.optimizers import IMPLEMENTATION_FLAGS, OptimizerSpec
from adacheck_store.state import PartState

from .deepspeed import check_partitions
from .inner import settle
from .layouts import MISMATCHES_SHOWN, Binding, Match, compare
from .shards import local
from .stager import shaped
from .unfolded import TREE, check_trees, load_trees


def fitting(
    state: PartState, tree: Mapping[str, Any], binding: Binding, **place: Any
) -> list[Match]:
    """What of a state goes where in a binding; changes nothing.

    Raises `ModelMismatchError` if the model is not the chain's.
    """
    check_trees(tree.get(TREE, {}), binding)
    check_partitions(tree, binding.optimizers)
    matches = compare(binding, state.layout, _group_counts(state, binding), **place)
    _check_arrays(state, matches, place)
    return matches


def load(
    state: PartState, tree: Mapping[str, Any], binding: Binding, matches: Sequence[Match]
) -> None:
    """Put a state into the tensors of a binding and into its optimizer, as `fitting` says.

    What the extra's ``tree`` has of optimizers and gradients goes with it.

    Optimizer state gets tensors of the recorded dtype, the state's own where that can be, so a
    state is loaded once; parameters, buffers and a learning rate that is a tensor keep their
    objects. Implementation flags stay as the user set them.
    """
    with torch.no_grad():
        for match in matches:
            source = _values(state, match, match.section.main_role)
            write(match.slot.item.local, source)
        for optimizer, groups in zip(binding.optimizers, state.boundary, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                _load_group(group, values)
            settle(optimizer)
        for match in matches:
            if match.section.optimizer >= 0:
                _load_state(state, match, binding)
    load_trees(tree.get(TREE, {}), binding)
    _revive_grads(binding, tree.get("held", ()), tree.get("grads") or {})


def _revive_grads(
    binding: Binding, held: bool | Sequence[str], grads: Mapping[str, torch.Tensor]
) -> None:
    """Give parameters the gradients that the next update builds on.

    Those of ``grads`` were accumulated and not used yet; zeros go to ``held``, where the run
    zeroes gradients instead of dropping them.
    """
    names = None if held is True else set(held or ())
    for slot in binding.given:
        param = slot.item.tensor
        param.grad = None
        if slot.item.name in grads:
            param.grad = torch.empty_like(param)
            local(param.grad).copy_(grads[slot.item.name])
        elif names is None or slot.item.name in names:
            param.grad = torch.zeros_like(param)


def write(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values into a tensor in place, also where it is expanded from fewer elements."""
    target, source = target.detach(), source.detach()
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)


def _values(state: PartState, match: Match, role: str) -> torch.Tensor:
    piece = match.section.slices[match.index]
    array = state.arrays[f"{match.section.name}/{role}"]
    return shaped(array, piece.offset, match.slot.shape)


def _group_counts(state: PartState, binding: Binding) -> list[str]:
    """Optimizers whose number of parameter groups is not the chain's, and what the groups hold."""
    wrong = []
    pairs = zip(state.boundary, binding.optimizers, strict=False)
    for number, (saved, optimizer) in enumerate(pairs):
        theirs, mine = len(saved), len(optimizer.param_groups)
        if theirs == mine:
            continue
        of = f" of optimizer {number}" if len(binding.optimizers) > 1 else ""
        layout = state.layout if theirs > mine else binding.layout
        members = [
            f"group {group}: {', '.join(_members(layout, number, group))}"
            for group in range(min(theirs, mine), max(theirs, mine))
        ]
        wrong.append(
            f"parameter groups{of}: the chain has {theirs}, this run {mine} "
            f"(only {'the chain' if theirs > mine else 'this run'} has {'; '.join(members)})"
        )
    return wrong


def _members(layout: Layout, optimizer: int, group: int) -> list[str]:
    names = [
        piece.name
        for section in layout.sections if section.optimizer == optimizer
        for piece in section.slices if piece.group == group
    ]  # fmt: skip
    return names[:MISMATCHES_SHOWN]


def _check_arrays(state: PartState, matches: Sequence[Match], place: Mapping[str, Any]) -> None:
    for match in matches:
        section = match.section
        present = _present(state.states.get(section.name), match.index)
        roles = [section.main_role, *(section.state_roles if present else ())]
        for role in roles:
            name = f"{section.name}/{role}"
            array = state.arrays.get(name)
            if section.elements and (
                array is None
                or array.numel() != section.elements
                or dtype_name(array.dtype) != section.dtypes[role]
            ):
                raise ChainBrokenError(f"the restored state has no whole array {name}", **place)


def _present(state: SectionState | None, index: int) -> bool:
    return state is not None and state.present[index]


def _load_group(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if key in IMPLEMENTATION_FLAGS:
            continue
        live = group.get(key)
        if isinstance(live, torch.Tensor) and isinstance(value, Scalar | float | int):
            live.fill_(float(from_typed(value)))
        else:
            group[key] = from_typed(value)


def _load_state(state: PartState, match: Match, binding: Binding) -> None:
    param = match.slot.item.tensor
    section = match.section
    states = state.states.get(section.name)
    if states is None or not (states.present[match.index] and section.state_roles):
        binding.keepers[match.slot.section.optimizer].state.pop(param, None)
        return
    fresh: dict[str, Any] = {}
    spec = binding.spec(match.slot)
    for key in spec.scalars:
        values = states.scalars.get(key)
        if values is not None and values[match.index] is not None:
            fresh[key] = _counter(values[match.index], spec, binding.group(match.slot), param)
    for role in section.state_roles:
        fresh[role] = _state_tensor(param, _values(state, match, role))
    binding.keepers[match.slot.section.optimizer].state[param] = fresh


def _state_tensor(param: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Optimizer state like its parameter: the values themselves where they lie as it does.

    Nobody else uses them, and to copy them into fresh memory would cost more than all the rest.
    Each tensor has a storage of its own, with its values alone in it.
    """
    plain = type(param) in (torch.Tensor, torch.nn.Parameter) and values.numel()
    if plain and param.device == values.device and param.is_contiguous():
        alone = torch.from_numpy(byte_tensor(values).numpy())
        return alone.view(values.dtype).view(param.shape)
    tensor = torch.empty_like(
        param, dtype=values.dtype, requires_grad=False, memory_format=torch.preserve_format
    )
    local(tensor).copy_(values)
    return tensor


def _counter(value: Any, spec: OptimizerSpec, group: Mapping[str, Any], param: torch.Tensor) -> Any:
    """A counter as it was; a class of torch's gets it where and how its group's flags want it."""
    found = from_typed(value)
    if not spec.name.startswith("torch.optim."):
        return found
    counter = found if isinstance(found, torch.Tensor) else torch.tensor(float(found))
    if not counter.is_floating_point():
        counter = counter.to(torch.float32)
    if group.get("fused") or group.get("capturable"):
        return counter.to(device=param.device, dtype=torch.float32)
    return counter.to(param.device) if spec.on_device else counter.clone()
