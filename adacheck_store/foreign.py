"""Foreign states: a model and its optimizer as other programs keep them, laid out as a part.

Tensors are told by name, role and where they lie in the whole; nothing is read here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from adacheck_store.format.bodies import Groups, SectionState
from adacheck_store.format.errors import ModelMismatchError, UnsupportedError, UsageError
from adacheck_store.format.layout import Layout, Section, Slice, align, whole_box

from .arrays import dtype_name, to_typed
from .optimizers import OptimizerSpec, group_values, make_optimizer, spec_named
from .regions import Box

LEFTOVERS = ("max_exp_avg_sq", "momentum_buffer")
"""State that amsgrad or momentum leaves behind when it is switched off."""

_NORM = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A tensor of the model, or of its optimizer's state, or a piece of one.

    ``boxes`` of the global ``shape``; ``read`` gives the elements, box after box, each in C order.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Its size."""
        sides = ((stop - start for start, stop in box) for box in self.boxes)
        return sum(map(math.prod, sides)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A state by names: ``model`` has tensors, ``states`` those of the optimizer by parameter and
    role, ``counters`` what it counts, by parameter and name.

    ``groups`` are its parameter groups, each with the names of its ``params``; none without an
    optimizer. ``optimizer`` is its class (``torch.optim.AdamW``), empty: found out by what the
    groups have. ``aliases`` maps further names of tied tensors to those in ``model``.
    """

    model: Mapping[str, Found]
    states: Mapping[str, Mapping[str, Found]] = field(default_factory=dict)
    counters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] = ()
    optimizer: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """A state as a part: its layout, and what a base has besides arrays.

    ``sources`` has what is to be read for each slice: by section, index and role.
    """

    layout: Layout
    states: Mapping[str, SectionState]
    boundary: tuple[Groups, ...]
    sources: Mapping[tuple[str, int, str], Found]


def spec_for(foreign: Foreign) -> OptimizerSpec | None:
    """What is known of the optimizer; None without one.

    Files do not say its class. Where none is named it is the one whose options the groups have, and
    whose state is there. Raises `UnsupportedError` if that is none, or could be several.
    """
    if not foreign.groups:
        return None
    if foreign.optimizer:
        name = foreign.optimizer
        return spec_named(name if "." in name else f"torch.optim.{name}")
    kept = {role for roles in foreign.states.values() for role in roles}
    kept |= {name for names in foreign.counters.values() for name in names}
    options = set.intersection(*(set(group) for group in foreign.groups))
    fitting: dict[int, list[OptimizerSpec]] = {}
    for spec in _known():
        defaults = make_optimizer(spec).defaults
        decoupled = {group.get("decoupled_weight_decay", "") for group in foreign.groups}
        roles = {role for group in foreign.groups if set(defaults) <= options
                 for role in (*spec.roles(group), *LEFTOVERS)}  # fmt: skip
        if (
            set(defaults) <= options and kept <= roles | set(spec.scalars)
            and decoupled == {defaults.get("decoupled_weight_decay", "")}
        ):  # fmt: skip
            fitting.setdefault(len(defaults), []).append(spec)
    found = fitting[max(fitting)] if fitting else []
    if len(found) != 1:
        raise UnsupportedError(
            f"which optimizer has options {sorted(options - {'params'})} and state {sorted(kept)} "
            f"is not certain: {', '.join(spec.name for spec in found) or 'none that is known'}",
            hint="name its class: optimizer_class=, or --optimizer torch.optim.AdamW",
        )  # fmt: skip
    return found[0]


def _known() -> Iterator[OptimizerSpec]:
    """Those of torch.optim that can be folded."""
    for name in dir(torch.optim):
        with suppress(UnsupportedError):
            yield spec_named(f"torch.optim.{name}")


def lay_out(foreign: Foreign) -> LaidOut:
    """The layout of a state, and what a base of it says.

    Raises `UnsupportedError` for state that the optimizer's class does not keep, and
    `ModelMismatchError` where the optimizer's tensors are not cut as their parameters are.
    """
    spec = spec_for(foreign)
    group_of = {
        name: number for number, group in enumerate(foreign.groups) for name in group["params"]
    }
    sections: dict[tuple[Any, ...], list[str]] = {}
    for name, found in foreign.model.items():
        number = group_of.get(name, -1)
        key: tuple[Any, ...] = (-1, ((_kind(name, foreign), dtype_name(found.dtype)),))
        if spec is not None and number >= 0:
            key = (0, _roles(foreign, name, spec, foreign.groups[number]))
        sections.setdefault(key, []).append(name)
    made, states = [], {}
    sources: dict[tuple[str, int, str], Found] = {}
    used: dict[str, int] = {}
    for (optimizer, roles), names in sections.items():
        role, dtype = roles[0]
        stem = f"{'trained' if optimizer >= 0 else role}.{dtype.lower()}"
        used[stem] = used.get(stem, 0) + 1
        label = stem if used[stem] == 1 else f"{stem}.{used[stem]}"
        section = _section(label, optimizer, roles, names, foreign, group_of)
        made.append(section)
        for index, name in enumerate(names):
            sources[label, index, role] = foreign.model[name]
            for state, each in foreign.states.get(name, {}).items() if optimizer >= 0 else ():
                sources[label, index, state] = each
        if spec is not None and optimizer >= 0:
            states[label] = _state(foreign, names, spec)
    return LaidOut(
        layout=Layout(optimizers=(spec.name,) if spec else (), sections=tuple(made)),
        states=states, sources=sources,
        boundary=(tuple(group_values(group) for group in foreign.groups),) if spec else (),
    )  # fmt: skip


def _kind(name: str, foreign: Foreign) -> str:
    """Of what no optimizer has: files do not tell frozen parameters from buffers for certain."""
    stem, _, last = name.rpartition(".")
    norm = all(f"{stem}.{each}".removeprefix(".") in foreign.model for each in _NORM)
    number = foreign.model[name].dtype.is_floating_point or foreign.model[name].dtype.is_complex
    return "buffer" if (last in _NORM and norm) or not number else "param"


def _roles(
    foreign: Foreign, name: str, spec: OptimizerSpec, group: Mapping[str, Any]
) -> tuple[tuple[str, str], ...]:
    """The roles of a trained tensor: those that its group's flags ask for, and leftovers."""
    held = foreign.states.get(name, {})
    param = foreign.model[name]
    roles = spec.roles(group)
    roles = (*roles, *(role for role in LEFTOVERS if role not in roles and role in held))
    unknown = sorted((held.keys() - set(roles)) | (
        foreign.counters.get(name, {}).keys() - set(spec.scalars)
    ))  # fmt: skip
    if unknown:
        raise UnsupportedError(
            f"the optimizer keeps state {unknown} of {name!r}",
            hint=f"{spec.name} with these options keeps {[*spec.scalars, *roles]}",
        )
    if held and held.keys() != set(roles):
        raise ModelMismatchError(
            f"of {name!r} the optimizer's {sorted(set(roles) - held.keys())} is missing",
            hint=f"{spec.name} with these options keeps {[*roles]}",
        )
    for role, each in held.items():
        if (each.shape, each.boxes) != (param.shape, param.boxes):
            raise ModelMismatchError(
                f"{role} of {name!r} is {each.boxes} of {list(each.shape)}, the parameter "
                f"{param.boxes} of {list(param.shape)}",
                hint="the optimizer's tensors have to lie as their parameters do",
            )
    dtypes = [(role, dtype_name(held[role].dtype if held else param.dtype)) for role in roles]
    return (("param", dtype_name(param.dtype)), *dtypes)


def _section(
    label: str, optimizer: int, roles: tuple[tuple[str, str], ...], names: Sequence[str],
    foreign: Foreign, group_of: Mapping[str, int],
) -> Section:  # fmt: skip
    slices, offset = [], 0
    for name in names:
        found = foreign.model[name]
        aliases = tuple(alias for alias, target in foreign.aliases.items() if target == name)
        piece = Slice(
            name=name, shape=found.shape, boxes=found.boxes, offset=offset, aliases=aliases,
            group=group_of.get(name, -1) if optimizer >= 0 else -1,
        )  # fmt: skip
        slices.append(piece)
        offset = align(offset + piece.elements)
    return Section(name=label, optimizer=optimizer, roles=roles, slices=tuple(slices))


def _state(foreign: Foreign, names: Sequence[str], spec: OptimizerSpec) -> SectionState:
    present = tuple(bool(foreign.states.get(name)) for name in names)
    scalars = {
        key: tuple(
            to_typed(foreign.counters.get(name, {}).get(key)) if here else None
            for name, here in zip(names, present, strict=True)
        )
        for key in spec.scalars
    }
    return SectionState(present=present, scalars=scalars)


def tied(model: Mapping[str, torch.Tensor], first: Sequence[str] = ()) -> dict[str, str]:
    """Names of tensors that are one and the same, each mapped to the name that stays.

    That is one of those that stand ``first`` (an optimizer's), else the one that comes first.
    """
    seen: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    order = [*(name for name in first if name in model), *model]
    for name in dict.fromkeys(order):
        tensor = model[name]
        if not tensor.numel():
            continue
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place in seen:
            aliases[name] = seen[place]
        else:
            seen[place] = name
    return aliases


def whole(tensor: torch.Tensor) -> Found:
    """A whole tensor in memory, or mapped from a file."""
    shape = tuple(tensor.shape)
    return Found(shape=shape, boxes=(whole_box(shape),), dtype=tensor.dtype, read=tensor.detach)


def only(foreign: Foreign, names: Sequence[str]) -> Foreign:
    """What a state has of some tensors of the model; the groups are those of all."""
    return replace(foreign, model={name: foreign.model[name] for name in names})


def names_of(foreign: Foreign) -> dict[str, list[str]]:
    """Names of the model's tensors, of those in parameter groups, and of those that have state."""
    return {
        "model": list(foreign.model),
        "trained": [str(name) for group in foreign.groups for name in group["params"]],
        "stateful": [*map(str, foreign.states), *map(str, foreign.counters)],
    }


def refuse_strays(told: Sequence[Mapping[str, Sequence[str]]], hint: str, **place: Any) -> None:
    """Nothing of the optimizer's may be left out: the model is to have all that it trains.

    ``told`` is what `names_of` gives, of all ranks. Raises `UsageError`.
    """
    model, trained, stateful = (
        {name for names in told for name in names[kind]}
        for kind in ("model", "trained", "stateful")
    )
    what = ""
    if strays := sorted((trained | stateful) - model):
        what = f"the optimizer trains {strays[0]!r}, and the model has no such tensor"
    elif loose := sorted(stateful - trained):
        what = f"the optimizer has state of {loose[0]!r}, which is in none of its groups"
    elif not model:
        what = "it has no tensor of a model"
    if what:
        raise UsageError(what, hint=hint, **place)
