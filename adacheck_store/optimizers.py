"""Optimizers we know: what state they keep, and the vector that names their arithmetic."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from adacheck_store.format import canonical
from adacheck_store.format.bodies import Groups
from adacheck_store.format.errors import UnsupportedError

from .arrays import byte_view, from_typed, to_typed, torch_dtype

IMPLEMENTATION_FLAGS = ("foreach", "fused", "capturable", "differentiable")
"""Keys of a group that choose an implementation, not a trajectory; restore leaves them alone."""

VECTOR_ELEMENTS = 1031
VECTOR_STEPS = 3


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer whose update is elementwise and whose fold is proven.

    ``name`` is ``module.Class``; ``roles(group)`` names its state tensors (each of the
    parameter's shape and dtype) under a group's flags; ``scalars`` its per-parameter counters.
    """

    name: str
    cls: type[torch.optim.Optimizer]
    roles: Callable[[Mapping[str, Any]], tuple[str, ...]]
    scalars: tuple[str, ...]


def _adam_roles(group: Mapping[str, Any]) -> tuple[str, ...]:
    third = ("max_exp_avg_sq",) if group.get("amsgrad") else ()
    return ("exp_avg", "exp_avg_sq", *third)


def _sgd_roles(group: Mapping[str, Any]) -> tuple[str, ...]:
    return ("momentum_buffer",) if group.get("momentum") else ()


_SPECS = {
    spec.name: spec
    for spec in (
        OptimizerSpec("torch.optim.AdamW", torch.optim.AdamW, _adam_roles, ("step",)),
        OptimizerSpec("torch.optim.Adam", torch.optim.Adam, _adam_roles, ("step",)),
        OptimizerSpec("torch.optim.SGD", torch.optim.SGD, _sgd_roles, ()),
    )
}


def spec_of(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """The spec of an optimizer's exact class; raises `UnsupportedError` naming it."""
    for spec in _SPECS.values():
        if type(optimizer) is spec.cls:
            return spec
    kind = type(optimizer)
    raise UnsupportedError(
        f"optimizer {kind.__module__}.{kind.__qualname__} is not supported",
        hint="use " + ", ".join(sorted(_SPECS)),
    )


def spec_named(name: str) -> OptimizerSpec:
    """The spec by ``module.Class``; raises `UnsupportedError`."""
    try:
        return _SPECS[name]
    except KeyError:
        raise UnsupportedError(
            f"the chain was written by optimizer {name[:80]!r}, which cannot be folded here",
            hint="upgrade adacheck-store",
        ) from None


def group_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a parameter group that have a typed value (``params`` and names left out).

    In sorted order: the order of a group's keys has no meaning.
    """
    values: dict[str, Any] = {}
    for key, value in sorted(group.items()):
        if key in ("params", "param_names"):
            continue
        typed = to_typed(value)
        try:
            canonical.to_json(typed)
        except TypeError:
            continue
        values[key] = typed
    return values


def raw_step(spec: OptimizerSpec) -> Callable[[torch.optim.Optimizer], Any]:
    """The class's ``step`` without hooks: folding must not fire a user's global hooks."""
    step: Callable[[torch.optim.Optimizer], Any] = inspect.unwrap(spec.cls.step)
    return step


def make_optimizer(spec: OptimizerSpec) -> torch.optim.Optimizer:
    """An optimizer of the class over a dummy; groups and state are set by the caller."""
    make: Callable[..., torch.optim.Optimizer] = spec.cls
    return make([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)


def arithmetic_digest(name: str, groups: Groups, dtypes: Sequence[str], device: str = "cpu") -> str:
    """Digest of an optimizer's arithmetic on a device, for its groups' flags.

    A throw-away optimizer runs `VECTOR_STEPS` steps on fixed inputs of `VECTOR_ELEMENTS`
    elements, once per distinct set of flags and per dtype, with and without weight decay. Equal
    digests mean that a fold here gives the trainer's bits. Draws nothing from any RNG.
    """
    signatures = sorted({_signature(group) for group in groups})
    key = (name, tuple(signatures), tuple(sorted(set(dtypes))), device)
    return _vector_digest(*key, _flushes_denormals())


def _flushes_denormals() -> bool:
    """Whether this thread's arithmetic takes the smallest numbers for zero (a flag per thread)."""
    return (torch.full((), 2.0**-126) * 0.5).item() == 0.0


_FIXED = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "dampening": 0.0}


def _signature(group: Mapping[str, Any]) -> str:
    """The flags of a group: numbers are reduced to their type, so that schedules share it."""
    flags: dict[str, Any] = {}
    for key, value in group.items():
        if value is None or isinstance(value, bool):
            flags[key] = value
        elif key == "momentum":
            flags[key] = 0.9 if value else 0.0
        elif key in _FIXED:
            flags[key] = _typed_like(value, _FIXED[key])
    return canonical.dumps(canonical.to_json(flags)).decode()


def _typed_like(value: Any, fixed: Any) -> Any:
    """The fixed number, in the representation (float, or tensor of a dtype) of the value."""
    if isinstance(value, canonical.Scalar):
        return to_typed(torch.tensor(fixed, dtype=torch_dtype(value.dtype)))
    if isinstance(value, tuple | list):
        return tuple(_typed_like(v, f) for v, f in zip(value, fixed, strict=True))
    return fixed


def _vector_input(dtype: torch.dtype, seed: int, spread: int) -> torch.Tensor:
    """Fixed numbers of both signs over ``spread`` powers of two, from integers alone.

    One in eight is so small that its square is denormal in float32, half of those are themselves.
    """
    i = torch.arange(VECTOR_ELEMENTS, dtype=torch.int64)
    h = (i * 2654435761 + seed * 40503 + 12345) % 2147483647
    h = (h * 48271) % 2147483647
    mantissa = (h % 1000003).to(torch.float64) / 500001.5 - 1.0
    tiny = 66 * (i % 8 == 7).to(torch.int64) + 62 * (i % 16 == 15).to(torch.int64)
    values = torch.ldexp(mantissa, -(h % spread) - tiny)
    return values.to(dtype)


@lru_cache(maxsize=64)
def _vector_digest(
    name: str, signatures: tuple[str, ...], dtypes: tuple[str, ...], device: str, flushes: bool
) -> str:
    spec = spec_named(name)
    digest = hashlib.blake2b(name.encode(), digest_size=16)
    for signature in signatures:
        flags = canonical.from_json(canonical.loads(signature.encode()))
        for dtype in dtypes:
            if not torch_dtype(dtype).is_floating_point and not torch_dtype(dtype).is_complex:
                continue
            for decay in (flags.get("weight_decay", 0.0), 0.0):
                digest.update(_run_vector(spec, {**flags, "weight_decay": decay}, dtype, device))
    return digest.hexdigest()


def _run_vector(spec: OptimizerSpec, flags: Mapping[str, Any], dtype: str, device: str) -> bytes:
    kind = torch_dtype(dtype)
    param = _vector_input(kind, 1, 4).to(device)
    optimizer = make_optimizer(spec)
    group = {**optimizer.defaults, **from_typed(dict(flags)), "params": [param]}
    optimizer.param_groups = [group]
    optimizer.state.clear()
    step = raw_step(spec)
    out = bytearray()
    with torch.no_grad():
        for number in range(VECTOR_STEPS):
            param.grad = _vector_input(kind, 7 + number, 20).to(device)
            step(optimizer)
    tensors = [param, *optimizer.state[param].values()]
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            out += byte_view(tensor.detach().to("cpu").contiguous())
    return bytes(out)
