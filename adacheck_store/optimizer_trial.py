"""The trial of an optimizer: train on random steps, fold the same, compare every bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adacheck_store.format.bodies import Groups
from adacheck_store.format.canonical import Scalar
from adacheck_store.format.layout import align

from .arrays import byte_view, dtype_name, to_typed
from .engines import Piece, StepEngine
from .optimizers import OptimizerSpec, group_values, make_optimizer, vector_of

SHAPES = ((33, 7), (), (0,), (700,), (5,), (64,), (3, 41), (130,), (9, 9), (2, 17_001))
"""Shapes of a trial: scalar, empty, tails of every kind, a ``large`` one that threads share."""

LOOKED_AT = (1, 2, 3, 10, 50, 120)
"""Steps at which bits are compared, besides the last."""

THREADED_STEPS = 10
"""Steps that are folded again under several threads."""


class NotProvenError(Exception):
    """The proof has failed; the message says how."""


@dataclass(slots=True)
class _Member:
    """A parameter of the proof, and where it would lie in a section."""

    tensor: torch.Tensor
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.tensor.numel()


@dataclass(slots=True)
class _Seen:
    """One parameter's state at a step, as bytes by name, and its counters."""

    param: bytes
    roles: dict[str, bytes]
    scalars: dict[str, Any]


@dataclass(slots=True)
class _History:
    """What a trainer did: the start, gradients and groups of every step, and what came out."""

    start: list[torch.Tensor]
    initial: list[dict[str, Any]]
    grads: list[list[torch.Tensor | None]]
    groups: list[Groups]
    seen: dict[int, list[_Seen]]


def run_trial(
    spec: OptimizerSpec, flags: Mapping[str, Any], *, steps: int, seed: int, dtype: torch.dtype,
    absent: float, large: bool,
) -> int:  # fmt: skip
    """Train and fold; how many tensors and counters had the same bits.

    Raises `NotProvenError` saying what differs, or what the optimizer raises on a piece. Changes
    this thread's number of threads.
    """
    torch.set_num_threads(1)
    generators = (torch.get_rng_state(), random.getstate())
    members = _members(seed, dtype, large)
    history = _train(spec, flags, members, steps=steps, seed=seed, absent=absent)
    if not torch.equal(generators[0], torch.get_rng_state()) or generators[1] != random.getstate():
        raise NotProvenError("its step draws random numbers")
    _check_vector(spec, history.groups[-1], dtype)
    compared = 0
    for threads, cuts, some in ((1, 6, steps), (2, 0, THREADED_STEPS), (3, 3, THREADED_STEPS)):
        torch.set_num_threads(threads)
        windows = _windows(members, cuts, seed)
        compared += _fold(spec, members, history, windows, min(steps, some))
    return compared


def _members(seed: int, dtype: torch.dtype, large: bool) -> list[_Member]:
    generator = torch.Generator().manual_seed(seed)
    members, at = [], 0
    for shape in SHAPES if large else (*SHAPES[:-1], (2, 701)):
        tensor = torch.nn.Parameter(_random(shape, generator).to(dtype))
        members.append(_Member(tensor, at))
        at = align(at + tensor.numel())
    return members


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Random numbers over a few powers of two."""
    spread = torch.randint(-6, 3, shape, generator=generator).float()
    return torch.ldexp(torch.randn(shape, generator=generator), spread)


def _train(
    spec: OptimizerSpec, flags: Mapping[str, Any], members: Sequence[_Member], *, steps: int,
    seed: int, absent: float,
) -> _History:  # fmt: skip
    """The truth: the optimizer's own step on whole parameters."""
    generator = torch.Generator().manual_seed(seed + 1)
    params = [member.tensor for member in members]
    optimizer = make_optimizer(spec, params, flags)
    step: Any = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # no hook of the user's
    history = _History(
        start=[param.detach().clone() for param in params],
        initial=[_copied(optimizer.state.get(param, {})) for param in params],
        grads=[], groups=[], seen={},
    )  # fmt: skip
    for number in range(1, steps + 1):
        _schedule(optimizer.param_groups[0], number, steps)
        for param in params:
            gone = torch.rand((), generator=generator).item() < absent
            grad = (_random(tuple(param.shape), generator) * 1e-2).to(param.dtype)
            param.grad = None if gone else grad
        history.grads.append([None if p.grad is None else p.grad.clone() for p in params])
        step(optimizer)
        history.groups.append(tuple(group_values(group) for group in optimizer.param_groups))
        if number in LOOKED_AT or number == steps:
            group = optimizer.param_groups[0]
            history.seen[number] = [_look(spec, optimizer, group, param) for param in params]
    return history


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def _schedule(group: dict[str, Any], number: int, steps: int) -> None:
    """Change what users change while they train."""
    factor = 0.995 if number % 3 else 1.01
    if isinstance(group.get("lr"), torch.Tensor):
        group["lr"].mul_(factor)
    elif "lr" in group:
        group["lr"] *= factor
    if number == steps // 2 and "weight_decay" in group:
        group["weight_decay"] = 0.03


def _look(
    spec: OptimizerSpec, optimizer: torch.optim.Optimizer, group: Mapping[str, Any],
    param: torch.Tensor,
) -> _Seen:  # fmt: skip
    """A parameter's state; refuses what fits neither roles nor scalars."""
    roles = set(spec.roles(group))
    seen = _Seen(_bits(param), {}, {})
    for key, value in optimizer.state.get(param, {}).items():
        if value is None:
            continue
        if key in roles and isinstance(value, torch.Tensor) and value.shape == param.shape:
            if value.dtype != param.dtype:
                raise NotProvenError(f"state {key!r} is {value.dtype}, not {param.dtype}")
            seen.roles[key] = _bits(value)
        elif key in spec.scalars and _is_scalar(value):
            seen.scalars[key] = to_typed(value)
        else:
            raise NotProvenError(
                f"state {key!r} is {_described(value)}, and is not named as a role of the "
                "parameter's shape or as a scalar"
            )
    if seen.scalars and not seen.roles:
        raise NotProvenError("counters without a state tensor")
    return seen


def _is_scalar(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return type(value) in (bool, int, float)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__qualname__}"


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(byte_view(tensor.detach().contiguous()))


def _check_vector(spec: OptimizerSpec, groups: Groups, dtype: torch.dtype) -> None:
    """The arithmetic vector must come through, and give the same twice."""
    if vector_of(spec, groups, dtype_name(dtype)) != vector_of(spec, groups, dtype_name(dtype)):
        raise NotProvenError("its arithmetic vector is not the same twice")


def _windows(members: Sequence[_Member], cuts: int, seed: int) -> list[tuple[int, int]]:
    """Stretches of the section that are folded one after another, cut at multiples of 64."""
    end, small = align(members[-1].stop), members[-1].offset
    rng = random.Random(seed * 7 + cuts)
    places = {64 * rng.randrange(1, small // 64) for _ in range(cuts)}
    if cuts:
        places.add(64 * rng.randrange(small // 64, end // 64))
    return list(itertools.pairwise([0, *sorted(places), end]))


def _fold(
    spec: OptimizerSpec, members: Sequence[_Member], history: _History,
    windows: Sequence[tuple[int, int]], steps: int,
) -> int:  # fmt: skip
    """Fold window by window, as `fold.Fold` does; the number of tensors and counters compared."""
    engine = StepEngine(spec)
    compared = 0
    for start, stop in windows:
        pieces = _pieces(spec, members, history, start, stop)
        for number in range(1, steps + 1):
            stepping = []
            for piece in pieces:
                grad = history.grads[number - 1][piece.slice]
                if grad is not None:
                    piece.grad = grad.reshape(-1)[piece.start : piece.stop].view_as(piece.param)
                    piece.grad = piece.grad.clone()
                    stepping.append(piece)
            engine.apply(stepping, history.groups[number - 1])
            for piece in pieces if number in history.seen else ():
                compared += _compare(piece, history.seen[number][piece.slice], number)
    return compared


def _pieces(
    spec: OptimizerSpec, members: Sequence[_Member], history: _History, start: int, stop: int
) -> list[Piece]:
    roles = spec.roles(history.groups[0][0])
    pieces = []
    for index, member in enumerate(members):
        low, high = max(member.offset, start), min(member.stop, stop)
        if low >= high and not (member.tensor.numel() == 0 and start <= member.offset < stop):
            continue
        cut = slice(low - member.offset, max(low, high) - member.offset)
        shape = () if member.tensor.dim() == 0 else (-1,)
        state = history.initial[index]

        def piece_of(whole: torch.Tensor, cut: slice = cut, shape: Any = shape) -> torch.Tensor:
            flat = whole.reshape(-1)[cut].clone()
            return flat.reshape(shape) if flat.numel() else flat

        param = piece_of(history.start[index])
        pieces.append(
            Piece(
                slice=index, group=0, start=cut.start, stop=cut.stop, param=param, grad=param,
                roles={
                    role: piece_of(state[role]) if role in state else torch.zeros_like(param)
                    for role in roles
                },
                present=bool(state),
                scalars=_copied({key: state[key] for key in spec.scalars if key in state}),
            )
        )  # fmt: skip
    return pieces


def _compare(piece: Piece, seen: _Seen, step: int) -> int:
    size = piece.param.element_size()
    cut = slice(piece.start * size, piece.stop * size)
    if _bits(piece.param) != seen.param[cut]:
        raise NotProvenError(f"a piece of a parameter has other bits after step {step}")
    for role, data in seen.roles.items():
        if _bits(piece.roles[role]) != data[cut]:
            raise NotProvenError(f"a piece of state {role!r} has other bits after step {step}")
    for key, value in seen.scalars.items():
        mine = to_typed(piece.scalars.get(key))
        if type(mine) is not type(value) or mine != value:
            shown = "" if isinstance(value, Scalar) else f" ({mine!r}, not {value!r})"
            raise NotProvenError(f"counter {key!r} differs after step {step}{shown}")
    return 1 + len(seen.roles) + len(seen.scalars)
