"""The layout of a live model and optimizer, bound to their tensors, and its comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adacheck_store.arrays import dtype_name
from adacheck_store.foreign import LEFTOVERS
from adacheck_store.format.errors import ModelMismatchError, UnsupportedError
from adacheck_store.format.layout import Layout, Section, Slice, align
from adacheck_store.group import SOLO, Group
from adacheck_store.optimizers import OptimizerSpec, find_spec

from .held import refuse_arrays
from .inner import keeper, no_optimizer, stepper
from .names import Model, NamedTensor, named_tensors
from .shards import is_sharded, local, piece_of

MISMATCHES_SHOWN = 20

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

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

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the piece as it lies here: of the local tensor."""
        return tuple(self.item.local.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """A layout whose slices are tensors of a live model and its optimizers.

    ``slots`` are in the layout's order; ``trained`` those an optimizer updates, ``outside`` the
    others. ``keepers`` keep the state of the ``optimizers`` (see `inner`), ``specs`` are theirs.
    ``given`` are all slots here that an optimizer was given, also those that another rank updates
    or keeps (see `narrowed`), in the order of the whole. ``captured`` are ``trained`` and, laid out
    for themselves, others that are trained here alike and kept by another rank; so are ``watched``.
    """

    layout: Layout
    optimizers: tuple[torch.optim.Optimizer, ...]
    keepers: tuple[torch.optim.Optimizer, ...]
    specs: tuple[OptimizerSpec, ...]
    slots: tuple[Slot, ...]
    trained: tuple[Slot, ...]
    outside: tuple[Slot, ...]
    given: tuple[Slot, ...]
    captured: tuple[Slot, ...]
    watched: tuple[Slot, ...]

    @property
    def foldable(self) -> bool:
        """True if every optimizer's updates can be folded; else bases alone are kept."""
        return all(spec.foldable for spec in self.specs)

    def alike(self, other: Binding) -> bool:
        """Whether both have the same layout, and keep the same of it."""
        return self.layout == other.layout and self.foldable == other.foldable

    def same(self, other: Binding) -> bool:
        """Whether both are alike, of the very same tensors."""
        pairs = zip(self.slots, other.slots, strict=False)
        return self.alike(other) and all(a.item.tensor is b.item.tensor for a, b in pairs)

    def spec(self, slot: Slot) -> OptimizerSpec:
        """What is known of the optimizer of a trained slot."""
        return self.specs[slot.section.optimizer]

    def group(self, slot: Slot) -> dict[str, Any]:
        """The parameter group of a trained slot."""
        found: dict[str, Any] = self.optimizers[slot.section.optimizer].param_groups[
            slot.piece.group
        ]
        return found

    def state(self, slot: Slot) -> Mapping[str, Any]:
        """The optimizer's state of a slot's parameter, possibly empty; tensors are local ones."""
        optimizer = self.keepers[slot.section.optimizer]
        found: Mapping[str, Any] = optimizer.state.get(slot.item.tensor, {})
        if is_sharded(slot.item.tensor):
            return {
                key: local(value) if isinstance(value, torch.Tensor) else value
                for key, value in found.items()
            }
        return found

    def present(self, slot: Slot) -> bool:
        """True if the optimizer keeps state tensors of the slot."""
        state = self.state(slot)
        return any(state.get(role) is not None for role in slot.section.state_roles)


def bind(
    model: Model, optimizer: Optimizers, names: Mapping[str, torch.Tensor] | None = None,
    group: Group = SOLO,
) -> Binding:  # fmt: skip
    """The layout of a model and its optimizers as they stand; refuses what is not supported.

    Of tensors that are sharded over the ranks of ``group`` it has this rank's pieces.
    """
    optimizers = listed(optimizer)
    keepers = tuple(keeper(item) for item in optimizers)
    specs = tuple(checked_spec(item) for item in optimizers)
    for spec, held in zip(specs, optimizers, strict=True):
        refuse_arrays(spec, held.param_groups)
    dense = all(spec.foldable for spec in specs)
    items = named_tensors(model, optimizers, names, dense=dense)
    if not dense:
        _refuse_shards(items, specs)
    groups = _groups_of(keepers, items)
    given = _groups_of(optimizers, items)
    by_key: dict[_Key, list[tuple[NamedTensor, int]]] = {}
    for item in items:
        number, index = groups.get(id(item.tensor), (-1, -1))
        if number < 0:
            key = _outside_key(item)
            item.elsewhere = group.size > 1 and item.parameter and item.tensor.requires_grad
        else:
            key = _key(item, number, optimizers[number].param_groups[index],
                       keepers[number].state.get(item.tensor, {}), specs[number])  # fmt: skip
        by_key.setdefault(key, []).append((item, index))
    sections, slots = [], []
    used: dict[str, int] = {}
    for key, members in by_key.items():
        section = _section(key, members, used, group)
        sections.append(section)
        slots += [Slot(section, i, item) for i, (item, _) in enumerate(members)]
    trained = tuple(slot for slot in slots if slot.section.optimizer >= 0)
    outside = tuple(slot for slot in slots if slot.section.optimizer < 0)
    return Binding(
        layout=Layout(optimizers=tuple(spec.name for spec in specs), sections=tuple(sections)),
        optimizers=optimizers, keepers=keepers, specs=specs, slots=tuple(slots),
        trained=trained, outside=outside, captured=trained, watched=outside,
        given=tuple(slot for slot in slots if id(slot.item.tensor) in given),
    )  # fmt: skip


def _refuse_shards(items: Sequence[NamedTensor], specs: Sequence[OptimizerSpec]) -> None:
    """What is kept whole is kept as trees, which hold plain tensors."""
    sharded = next((item.name for item in items if item.held is not None), None)
    if sharded is not None:
        names = ", ".join(spec.name for spec in specs if not spec.foldable)
        raise UnsupportedError(
            f"{names} cannot be folded, and parameter {sharded!r} is sharded",
            hint="shard models with an optimizer that can be folded; see docs/exactness.md",
        )


def listed(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """One optimizer or several, as a tuple; refuses what is none, and one given twice."""
    found = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
    if not found:
        raise UnsupportedError("no optimizer", hint="give the optimizer, or a list of them")
    for item in found:
        if not isinstance(item, torch.optim.Optimizer):
            raise no_optimizer(item)
    if len({id(item) for item in found}) < len(found):
        raise UnsupportedError("an optimizer is given twice", hint="give each one once")
    return found


def _groups_of(
    optimizers: Sequence[torch.optim.Optimizer], items: Sequence[NamedTensor]
) -> dict[int, tuple[int, int]]:
    """Parameter id -> its optimizer's number and its group's; each has one optimizer."""
    found: dict[int, tuple[int, int]] = {}
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                other = found.setdefault(id(param), (number, index))[0]
                if other != number:
                    name = next(item.name for item in items if item.tensor is param)
                    raise UnsupportedError(
                        f"parameter {name!r} is trained by optimizers {other} and {number}",
                        hint="give each parameter to one optimizer",
                    )
    return found


def checked_spec(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """The spec of an optimizer; refuses wrappers and compiled steps by name."""
    kept = stepper(optimizer)
    inner = getattr(optimizer, "optim", None) or getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer) and inner is not kept:
        raise UnsupportedError(
            f"optimizer wrapper {type(optimizer).__module__}.{type(optimizer).__qualname__} "
            "is not supported",
            hint=f"attach to the {type(inner).__qualname__} inside it, if it holds everything",
        )
    spec = find_spec(kept)
    if not spec.foldable and kept is not optimizer:
        raise UnsupportedError(
            f"{type(optimizer).__name__} of {spec.name}, which cannot be folded: {spec.why}",
            hint="use one that can be folded; see docs/exactness.md",
        )
    if not spec.foldable:
        return spec
    step = getattr(kept, "step", None)
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


def state_roles(
    spec: OptimizerSpec, group: Mapping[str, Any], state: Mapping[str, Any]
) -> tuple[str, ...]:
    """Names of the state tensors of a parameter: those its group's flags ask for, and leftovers.

    A flag that was switched off leaves tensors behind, which the optimizer keeps untouched.
    """
    if not spec.foldable:
        return ()  # see `unfolded`
    roles = spec.roles(group)
    left = (role for role in LEFTOVERS if role not in roles and state.get(role) is not None)
    return (*roles, *left)


def _outside_key(item: NamedTensor) -> _Key:
    kind = "param" if item.parameter else "buffer"
    return (-1, ((kind, dtype_name(item.tensor.dtype)),))


def _key(
    item: NamedTensor, number: int, group: Mapping[str, Any], state: Mapping[str, Any],
    spec: OptimizerSpec,
) -> _Key:  # fmt: skip
    dtype = dtype_name(item.tensor.dtype)
    roles = state_roles(spec, group, state)
    unknown = sorted(
        str(key) for key, value in state.items()
        if key not in roles and key not in spec.scalars and value is not None and spec.foldable
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
    return (number, (("param", dtype), *typed))


def _section(
    key: _Key, members: Sequence[tuple[NamedTensor, int]], used: dict[str, int], group: Group
) -> Section:
    optimizer, roles = key
    role, dtype = roles[0]
    stem = f"{'trained' if optimizer >= 0 else role}.{dtype.lower()}"
    used[stem] = used.get(stem, 0) + 1
    name = stem if used[stem] == 1 else f"{stem}.{used[stem]}"
    slices, offset = [], 0
    for item, number in members:
        here = piece_of(item.tensor, group)
        piece = Slice(
            name=item.name, scope=here.scope, shape=here.shape, boxes=here.boxes, offset=offset,
            group=number, aliases=item.aliases,
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


def compare(
    binding: Binding, chain: Layout, wrong: Sequence[str] = (), **place: Any
) -> list[Match]:
    """Match a live model with a chain's layout by name.

    Raises `ModelMismatchError` naming both sides of every difference: missing and unexpected
    tensors, shapes, dtypes, groups, ties, the optimizer's class; ``wrong`` are further ones.
    """
    wrong = list(wrong)
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
            hint="build model and optimizer as they were at this step (groups that were added "
            "later, parameters that were frozen then), or start another run; nothing was changed",
            **place,
        )  # fmt: skip
    return matches


def _owner(section: Section, piece: Slice) -> str:
    """Group, and where it is not the first, optimizer of a slice."""
    of = f" of optimizer {section.optimizer}" if section.optimizer > 0 else ""
    return "none" if section.optimizer < 0 else f"{piece.group}{of}"


def _described(section: Section, piece: Slice) -> str:
    return f"{section.main_role} {piece.name!r} {section.roles[0][1]} {list(piece.shape)}"


def _differences(slot: Slot, section: Section, piece: Slice) -> list[str]:
    mine, name = slot.piece, slot.item.name
    pairs: list[tuple[str, Any, Any]] = [
        ("shape", list(piece.shape), list(mine.shape)),
        ("dtype", section.roles[0][1], slot.section.roles[0][1]),
        ("trained", section.optimizer >= 0, slot.section.optimizer >= 0),
        ("group", _owner(section, piece), _owner(slot.section, mine)),
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
    held = piece.scope in ("", mine.scope) and (piece.flat, piece.boxes) == (None, mine.boxes)
    if not wrong and not held:
        wrong.append(f"sharding of {name!r}: the chain has {_held(piece)}, this run {_held(mine)}")
    return wrong


def _held(piece: Slice) -> str:
    """What a slice is of its tensor, in words."""
    of = f" of {piece.scope} alone" if piece.scope else ""
    if piece.whole:
        return f"the whole{of}"
    boxes = [":".join(map(str, side)) for box in piece.boxes for side in box]
    what = f"elements {piece.flat}" if piece.flat is not None else f"[{', '.join(boxes)}]"
    return what + of
