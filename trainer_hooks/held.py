"""Hyper-parameters and counters as they stand at a moment, typed later on the writer's thread.

A learning rate or a step counter may be a tensor on a device: the training thread copies it, and
does not wait for the copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from adacheck_store.arrays import to_typed
from adacheck_store.format.bodies import Groups, SectionState
from adacheck_store.format.errors import UnsupportedError
from adacheck_store.optimizers import OptimizerSpec, group_values, numbers_of

from .copies import host_copy

HeldGroups = tuple[dict[str, Any], ...]


def hold(value: Any) -> Any:
    """A copy that later changes cannot reach: 0-dim tensors on the host, through containers."""
    if isinstance(value, torch.Tensor):
        return host_copy(value) if value.dim() == 0 else value
    if isinstance(value, tuple | list):
        return type(value)(hold(item) for item in value)
    if isinstance(value, dict):
        return {key: hold(item) for key, item in value.items()}
    return value


def held_groups(groups: Sequence[Mapping[str, Any]]) -> HeldGroups:
    """The groups of an optimizer as they stand, without their parameters."""
    return tuple(
        {key: hold(value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in groups
    )


def typed_groups(held: HeldGroups) -> Groups:
    """Held groups in the format's types; their copies have landed."""
    return tuple(group_values(group) for group in held)


def refuse_arrays(spec: OptimizerSpec, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise `UnsupportedError` if a number that an optimizer updates by is an array; reads none."""
    keys = numbers_of(spec.name) if spec.foldable else ()
    for number, group in enumerate(groups):
        arrays = [key for key in keys if _has_array(group.get(key))]
        if arrays:
            raise UnsupportedError(
                f"{arrays} of group {number} of {spec.name} is a tensor with dimensions",
                hint="make it a number, or a tensor without dimensions: torch.tensor(1e-3)",
            )


def _has_array(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    return isinstance(value, list | tuple) and any(map(_has_array, value))


def typed_keys(group: Mapping[str, Any]) -> list[str]:
    """The keys of a group that have a typed value; what the values are is not looked at."""
    (held,) = held_groups([group])
    return list(group_values(held))


def typed_states(held: Mapping[str, SectionState]) -> dict[str, SectionState]:
    """States whose counters were held, in the format's types."""
    return {
        name: SectionState(
            present=state.present,
            scalars={key: tuple(map(to_typed, values)) for key, values in state.scalars.items()},
        )
        for name, state in held.items()
    }
