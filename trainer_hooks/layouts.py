"""The layout of a live model and optimizer, bound to their tensors, and its comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adacheck_store.arrays import dtype_name
from adacheck_store.format.errors import ModelMismatchError, UnsupportedError
from adacheck_store.format.layout import Layout, Section, Slice, align, whole_box
from adacheck_store.optimizers import OptimizerSpec, spec_of

from .names import Model, NamedTensor, named_tensors

MISMATCHES_SHOWN = 20

_Key = tuple[int, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A slice bound to its tensor: where it lies in the layout and what it is here."""

    section: Section
    index: int
    item: NamedTensor

    @property
    def piece(self) -> Slice:
        """The slice."""
        return self.section.slices[self.index]


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """A layout whose slices are tensors of a live model and optimizer.

    ``slots`` are in the layout's order; ``trained`` those an optimizer updates, ``outside`` the
    others. ``spec`` is the optimizer's.
    """

    layout: Layout
    optimizer: torch.optim.Optimizer
    spec: OptimizerSpec
    slots: tuple[Slot, ...]
    trained: tuple[Slot, ...]
    outside: tuple[Slot, ...]

    def state(self, slot: Slot) -> Mapping[str, Any]:
        """The optimizer's state of a slot's parameter, possibly empty."""
        found: Mapping[str, Any] = self.optimizer.state.get(slot.item.tensor, {})
        return found

    def present(self, slot: Slot) -> bool:
        """True if the optimizer keeps state tensors of the slot."""
        state = self.state(slot)
        return any(state.get(role) is not None for role in slot.section.state_roles)


def bind(
    model: Model,
    optimizer: torch.optim.Optimizer,
    names: Mapping[str, torch.Tensor] | None = None,
) -> Binding:
    """The layout of a model and optimizer as they stand; refuses what is not supported."""
    spec = checked_spec(optimizer)
    items = named_tensors(model, optimizer, names)
    groups = {
        id(param): (number, group)
        for number, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    by_key: dict[_Key, list[tuple[NamedTensor, int]]] = {}
    for item in items:
        number, group = groups.get(id(item.tensor), (-1, None))
        by_key.setdefault(_key(item, group, optimizer, spec), []).append((item, number))
    sections, slots = [], []
    used: dict[str, int] = {}
    for key, members in by_key.items():
        section = _section(key, [(item, number) for item, number in members], used)
        sections.append(section)
        slots += [Slot(section, i, item) for i, (item, _) in enumerate(members)]
    return Binding(
        layout=Layout(optimizers=(spec.name,), sections=tuple(sections)),
        optimizer=optimizer,
        spec=spec,
        slots=tuple(slots),
        trained=tuple(slot for slot in slots if slot.section.optimizer >= 0),
        outside=tuple(slot for slot in slots if slot.section.optimizer < 0),
    )


def checked_spec(optimizer: Any) -> OptimizerSpec:
    """The spec of the one optimizer; refuses several, wrappers and unknown classes by name."""
    if isinstance(optimizer, Sequence):
        if len(optimizer) != 1:
            raise UnsupportedError(
                f"{len(optimizer)} optimizers", hint="one optimizer is supported so far"
            )
        return checked_spec(optimizer[0])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(
            f"an optimizer of type {type(optimizer).__module__}.{type(optimizer).__qualname__}",
            hint="give the torch.optim optimizer itself",
        )
    inner = getattr(optimizer, "optim", None) or getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        raise UnsupportedError(
            f"optimizer wrapper {type(optimizer).__module__}.{type(optimizer).__qualname__} "
            "is not supported",
            hint=f"attach to the {type(inner).__qualname__} inside it, if it holds everything",
        )
    spec = spec_of(optimizer)
    step = getattr(optimizer, "step", None)
    if hasattr(step, "_torchdynamo_orig_callable"):
        raise UnsupportedError(
            "a compiled optimizer step cannot be folded", hint="call optimizer.step() eagerly"
        )
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise UnsupportedError(
                f"group {number} has differentiable=True", hint="use differentiable=False"
            )
    return spec


def _key(
    item: NamedTensor, group: Mapping[str, Any] | None, optimizer: torch.optim.Optimizer,
    spec: OptimizerSpec,
) -> _Key:  # fmt: skip
    dtype = dtype_name(item.tensor.dtype)
    if group is None:
        return (-1, (("param" if item.parameter else "buffer", dtype),))
    roles = spec.roles(group)
    state = optimizer.state.get(item.tensor, {})
    unknown = sorted(
        str(key) for key, value in state.items()
        if key not in roles and key not in spec.scalars and value is not None
    )  # fmt: skip
    if unknown:
        raise UnsupportedError(
            f"the optimizer keeps state {unknown} of {item.name!r}",
            hint=f"{spec.name} with these flags keeps {[*spec.scalars, *roles]}",
        )
    typed = []
    for role in roles:
        value = state.get(role)
        if isinstance(value, torch.Tensor) and value.shape != item.tensor.shape:
            raise UnsupportedError(
                f"state {role} of {item.name!r} has shape {tuple(value.shape)}",
                hint=f"the parameter has {tuple(item.tensor.shape)}",
            )
        typed.append((role, dtype_name(value.dtype) if value is not None else dtype))
    return (0, (("param", dtype), *typed))


def _section(
    key: _Key, members: Sequence[tuple[NamedTensor, int]], used: dict[str, int]
) -> Section:
    optimizer, roles = key
    role, dtype = roles[0]
    stem = f"{'trained' if optimizer >= 0 else role}.{dtype.lower()}"
    used[stem] = used.get(stem, 0) + 1
    name = stem if used[stem] == 1 else f"{stem}.{used[stem]}"
    slices, offset = [], 0
    for item, group in members:
        shape = tuple(item.tensor.shape)
        piece = Slice(
            name=item.name, shape=shape, boxes=(whole_box(shape),), offset=offset, group=group,
            aliases=item.aliases,
        )  # fmt: skip
        slices.append(piece)
        offset = align(offset + piece.elements)
    return Section(name=name, optimizer=optimizer, roles=roles, slices=tuple(slices))


@dataclass(frozen=True, slots=True)
class Match:
    """A live slot and the slice of a chain that holds its state."""

    slot: Slot
    section: Section
    index: int


def compare(binding: Binding, chain: Layout, **place: Any) -> list[Match]:
    """Match a live model with a chain's layout by name.

    Raises `ModelMismatchError` naming both sides of every difference: missing and unexpected
    tensors, shapes, dtypes, groups, ties, the optimizer's class.
    """
    wrong = []
    if chain.optimizers != binding.layout.optimizers:
        wrong.append(
            f"optimizer: the chain has {', '.join(chain.optimizers)}, "
            f"this run {', '.join(binding.layout.optimizers)}"
        )
    theirs: dict[str, tuple[Section, int]] = {}
    for section in chain.sections:
        for index, piece in enumerate(section.slices):
            for name in (piece.name, *piece.aliases):
                theirs[name] = (section, index)
    matches, seen = [], set[str]()
    for slot in binding.slots:
        found = next((theirs[name] for name in slot.item.names if name in theirs), None)
        if found is None:
            wrong.append(f"{_described(slot.section, slot.piece)} is not in the chain")
            continue
        section, index = found
        piece = section.slices[index]
        seen.update((piece.name, *piece.aliases))
        wrong += _differences(slot, section, piece)
        matches.append(Match(slot, section, index))
    for name, (section, index) in theirs.items():
        if name not in seen and name == section.slices[index].name:
            piece = section.slices[index]
            wrong.append(f"{_described(section, piece)} of the chain is not in this model")
    if wrong:
        shown = wrong[:MISMATCHES_SHOWN]
        more = f"; and {len(wrong) - len(shown)} more" if len(wrong) > len(shown) else ""
        raise ModelMismatchError(
            "this model is not the chain's: " + "; ".join(shown) + more,
            hint="build the model as it was, or start another run; nothing was changed", **place,
        )  # fmt: skip
    return matches


def _described(section: Section, piece: Slice) -> str:
    return f"{section.main_role} {piece.name!r} {section.roles[0][1]} {list(piece.shape)}"


def _differences(slot: Slot, section: Section, piece: Slice) -> list[str]:
    mine, name = slot.piece, slot.item.name
    pairs: list[tuple[str, Any, Any]] = [
        ("shape", list(piece.shape), list(mine.shape)),
        ("dtype", section.roles[0][1], slot.section.roles[0][1]),
        ("kind", section.main_role, slot.section.main_role),
        ("trained", section.optimizer >= 0, slot.section.optimizer >= 0),
        ("group", piece.group, mine.group),
        (
            "tied names",
            sorted((piece.name, *piece.aliases)),
            sorted((mine.name, *mine.aliases)),
        ),
    ]
    wrong = [
        f"{what} of {name!r}: the chain has {theirs}, this run {ours}"
        for what, theirs, ours in pairs
        if theirs != ours
    ]
    if not piece.whole:
        wrong.append(f"{name!r}: the chain holds only a piece of it")
    return wrong
