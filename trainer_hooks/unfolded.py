"""Optimizers that cannot be folded: their whole state is kept, as trees in the rank's extra.

Nothing is known of such an optimizer but what torch asks of all: it keeps its state in
``state``, by parameter, or says otherwise by a ``state_dict`` of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from adacheck_store.format.errors import ModelMismatchError

from .extras import freeze, thaw
from .held import typed_keys
from .layouts import Binding

log = logging.getLogger(__name__)

TREE = "optimizers"
"""Name of the trees in the extra: optimizer number -> tree."""


def described(binding: Binding) -> str:
    """Which optimizers of a binding cannot be folded, and why; empty if all can."""
    found = [f"{spec.name} ({spec.why})" for spec in binding.specs if not spec.foldable]
    return ", ".join(found)


def warn(binding: Binding, full_every: int) -> None:
    """Say what is not kept because of such optimizers."""
    names = described(binding)
    if names:
        log.warning(
            "updates of %s cannot be folded (class unsupported): the whole state is kept every "
            "%d steps, and nothing in between", names, full_every,
        )  # fmt: skip


def state_trees(binding: Binding) -> dict[str, Any]:
    """Copies of the state of every optimizer that cannot be folded, by `TREE`; or nothing."""
    found = {
        str(number): _tree(optimizer, _names(binding, number))
        for number, optimizer in enumerate(binding.optimizers)
        if not binding.specs[number].foldable
    }
    return {TREE: found} if found else {}


def check_trees(trees: Mapping[str, Any], binding: Binding) -> None:
    """Raise `ModelMismatchError` if the chain has not the state of these very optimizers."""
    mine = sorted(str(i) for i, spec in enumerate(binding.specs) if not spec.foldable)
    if sorted(trees) != mine:
        raise ModelMismatchError(
            f"optimizers kept whole: the chain has {sorted(trees)}, this run {mine}",
            hint="register the same optimizers as the run that wrote the chain",
        )
    for number in mine:
        if ("whole" in trees[number]) != _speaks(binding.optimizers[int(number)]):
            raise ModelMismatchError(
                f"optimizer {number} has kept its state in another way",
                hint="use the class that wrote the chain",
            )


def load_trees(trees: Mapping[str, Any], binding: Binding) -> None:
    """Give every optimizer that cannot be folded its state back."""
    for number, tree in trees.items():
        optimizer = binding.optimizers[int(number)]
        if "whole" in tree:
            optimizer.load_state_dict(thaw(tree["whole"]))
        else:
            _load(tree, optimizer, _names(binding, int(number)))


def _names(binding: Binding, number: int) -> dict[torch.Tensor, str]:
    return {
        slot.item.tensor: slot.item.name
        for slot in binding.trained
        if slot.section.optimizer == number
    }


def _speaks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the class has a state dict of its own."""
    cls, parent = type(optimizer), torch.optim.Optimizer
    return (
        cls.state_dict is not parent.state_dict
        or cls.load_state_dict is not parent.load_state_dict
    )  # fmt: skip


def _tree(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> dict[str, Any]:
    if _speaks(optimizer):
        return {"whole": freeze(optimizer.state_dict(), "the optimizer's state_dict()")}
    states: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    away: dict[str, list[str]] = {}
    for key, value in optimizer.state.items():
        if isinstance(key, torch.Tensor):
            if key not in names:
                continue  # no parameter of any group: left over
            name = names[key]
            states[name] = freeze(value, f"the optimizer's state of {name!r}")
            away[name] = [path for path, item in _tensors(value) if item.device.type != "cpu"]
        else:
            shared[key] = freeze(value, f"the optimizer's state {key!r}")
    groups = []
    for group in optimizer.param_groups:
        known = {"params", "param_names", *typed_keys(group)}
        groups.append({
            key: freeze(value, f"{key!r} of a parameter group")
            for key, value in group.items() if key not in known and not callable(value)
        })  # fmt: skip
    return {"states": states, "shared": shared, "away": away, "groups": groups}


def _load(
    tree: Mapping[str, Any], optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
) -> None:  # fmt: skip
    params = {name: param for param, name in names.items()}
    optimizer.state.clear()
    for name, state in tree["states"].items():
        param = params[name]
        away = set(tree["away"].get(name, ()))
        optimizer.state[param] = _placed(thaw(state), param, away)
    for key, value in tree["shared"].items():
        optimizer.state[key] = thaw(value)
    for group, values in zip(optimizer.param_groups, tree["groups"], strict=True):
        group.update(thaw(values))


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a tree with their paths."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{path}.{index}")


def _placed(value: Any, param: torch.Tensor, away: set[str], path: str = "") -> Any:
    """A tree with its tensors where they were: on the device, laid out like the parameter."""
    if isinstance(value, torch.Tensor):
        device = param.device if path in away else value.device
        if value.shape == param.shape:
            like = torch.empty_like(
                param, dtype=value.dtype, device=device, requires_grad=False,
                memory_format=torch.preserve_format,
            )  # fmt: skip
            return like.copy_(value)
        return value.to(device)
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _placed(item, param, away, f"{path}.{key}")
        return value
    if isinstance(value, list | tuple):
        return type(value)(
            _placed(item, param, away, f"{path}.{index}") for index, item in enumerate(value)
        )
    return value
