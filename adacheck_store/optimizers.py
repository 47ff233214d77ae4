"""Optimizers we know: what state they keep, and the vector that names their arithmetic."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from adacheck_store.format import canonical
from adacheck_store.format.bodies import Groups
from adacheck_store.format.errors import MalformedError, UnsupportedError

from .arrays import byte_view, from_typed, to_typed, torch_dtype

IMPLEMENTATION_FLAGS = ("foreach", "fused", "capturable", "differentiable")
"""Keys of a group that choose an implementation, not a trajectory; restore leaves them alone."""

_SMALLEST = sys.float_info.min

VECTOR_ELEMENTS = 1031
VECTOR_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer and what state it keeps.

    ``name`` is ``module.Class``; ``roles(group)`` names its state tensors (each of the
    parameter's shape) under a group's flags; ``scalars`` its per-parameter counters. In class
    ``exact`` its update is elementwise and its fold is proven; in class ``unsupported`` nothing
    is known of it (roles and scalars are empty), for the reason ``why``. ``on_device`` counters
    lie where the parameter does, whatever the flags. ``steps`` are those of its vector: as many
    as it takes to come through every branch. ``check(group)`` says why the class is not proven
    under a group's flags, "" if it is.
    """

    name: str
    cls: type[torch.optim.Optimizer]
    roles: Callable[[Mapping[str, Any]], tuple[str, ...]]
    scalars: tuple[str, ...] = ()
    exactness: str = "exact"
    why: str = ""
    on_device: bool = False
    steps: int = VECTOR_STEPS
    check: Callable[[Mapping[str, Any]], str] | None = None

    @property
    def foldable(self) -> bool:
        """True if its updates can be folded: deltas are kept, not bases alone."""
        return self.exactness != "unsupported"


def _adam_roles(group: Mapping[str, Any]) -> tuple[str, ...]:
    third = ("max_exp_avg_sq",) if group.get("amsgrad") else ()
    return ("exp_avg", "exp_avg_sq", *third)


def _sgd_roles(group: Mapping[str, Any]) -> tuple[str, ...]:
    return ("momentum_buffer",) if group.get("momentum") else ()


def _rmsprop_roles(group: Mapping[str, Any]) -> tuple[str, ...]:
    momentum = ("momentum_buffer",) if group["momentum"] > 0 else ()
    mean = ("grad_avg",) if group["centered"] else ()
    return ("square_avg", *momentum, *mean)


def always(*roles: str) -> Callable[[Mapping[str, Any]], tuple[str, ...]]:
    """Roles that no flag changes."""
    return lambda group: roles


SHARED_ELEMENTS = 32768
"""Tensors above this size are shared out to several threads by torch's CPU kernels."""

HALVES = (torch.float16, torch.bfloat16)


def shared_half(param: torch.Tensor) -> bool:
    """Whether several threads may work on a parameter in half precision."""
    on_cpu = param.device.type == "cpu"
    return on_cpu and param.dtype in HALVES and param.numel() > SHARED_ELEMENTS


def _unsteady(cls: type, group: Mapping[str, Any]) -> str:
    """Why a group's bits cannot be folded for certain, "" if they can.

    In half precision torch's ``add`` with ``alpha`` rounds the last elements of a thread's share
    otherwise than the rest, and a fold shares out otherwise than a trainer. No other operation
    of these classes does so, and fused kernels share out whole cache lines (tests/optimizers
    shows both). SGD with momentum has two further flaws in half precision: fused it does not
    give the same bits twice, and foreach rounds otherwise as long as any parameter has no
    momentum yet, which a fold of a few parameters cannot know.
    """
    params = group["params"]
    if cls is torch.optim.SGD and group.get("momentum"):
        if any(param.dtype in HALVES for param in params):
            if group.get("fused"):
                return "fused SGD with momentum does not repeat its bits in half precision"
            if group.get("foreach"):
                return (
                    "in half precision foreach SGD with momentum rounds by what all of its "
                    "parameters have: use foreach=False"
                )
    if _adds_scaled(cls, group) and any(shared_half(param) for param in params):
        return "in half precision the bits of large parameters depend on the threads at work"
    return ""


def _adds_scaled(cls: type, group: Mapping[str, Any]) -> bool:
    """Whether an update uses ``add`` with ``alpha``: for its step, or for an L2 penalty."""
    if group.get("fused"):
        return False
    if cls in (torch.optim.SGD, torch.optim.ASGD, torch.optim.Adadelta):
        return True
    if cls is torch.optim.RMSprop and group["momentum"]:
        return True
    decoupled = cls is torch.optim.AdamW or group.get("decoupled_weight_decay")
    return bool(group.get("weight_decay")) and not decoupled


def _torch(cls: type[torch.optim.Optimizer], roles: Any, *scalars: str, **more: Any) -> None:
    name = f"torch.optim.{cls.__name__}"
    check = partial(_unsteady, cls)
    _SPECS[name] = OptimizerSpec(
        name=name, cls=cls, roles=roles, scalars=scalars, check=check, **more
    )


_SPECS: dict[str, OptimizerSpec] = {}
_torch(torch.optim.AdamW, _adam_roles, "step")
_torch(torch.optim.Adam, _adam_roles, "step")
_torch(torch.optim.SGD, _sgd_roles)
_torch(torch.optim.Adagrad, always("sum"), "step")
_torch(torch.optim.RMSprop, _rmsprop_roles, "step")
_torch(torch.optim.Adamax, always("exp_avg", "exp_inf"), "step")
_torch(torch.optim.Adadelta, always("square_avg", "acc_delta"), "step")
_torch(torch.optim.NAdam, always("exp_avg", "exp_avg_sq"), "step", "mu_product")
_torch(torch.optim.RAdam, always("exp_avg", "exp_avg_sq"), "step", steps=8)
_torch(torch.optim.ASGD, always("ax"), "step", "eta", "mu", on_device=True)
_torch(torch.optim.Rprop, always("prev", "step_size"), "step")


_WHOLE = "its update of an element depends on the whole tensor"
_WHY = {
    "torch.optim.Adafactor": _WHOLE, "torch.optim.Muon": _WHOLE,
    "torch.optim.LBFGS": "its step is a search that calls the closure again",
    "torch.optim.SparseAdam": "its gradients are sparse",
}  # fmt: skip


def class_name(cls: type) -> str:
    """``module.Class`` of an optimizer; torch's own by the name users know."""
    if getattr(torch.optim, cls.__name__, None) is cls:
        return f"torch.optim.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def add_spec(spec: OptimizerSpec) -> None:
    """Make a class known (`optimizer_kit.register_optimizer` does, once it has proven it)."""
    _SPECS[spec.name] = spec
    _vector_digest.cache_clear()
    numbers_of.cache_clear()


def find_spec(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """The spec of an optimizer, of class ``unsupported`` where nothing is proven of it.

    Only the exact class counts: a subclass may do anything.
    """
    name = class_name(type(optimizer))
    spec = _SPECS.get(name)
    if spec is None or type(optimizer) is not spec.cls:
        return _unsupported(optimizer, _WHY.get(name, "nothing is known of it"))
    for group in optimizer.param_groups if spec.check else ():
        assert spec.check is not None
        if why := spec.check(group):
            return _unsupported(optimizer, why)
    return spec


def _unsupported(optimizer: torch.optim.Optimizer, why: str) -> OptimizerSpec:
    cls = type(optimizer)
    name = class_name(cls)
    return OptimizerSpec(name=name, cls=cls, roles=always(), exactness="unsupported", why=why)


def spec_of(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """The spec of an optimizer that can be folded; raises `UnsupportedError` naming another."""
    spec = find_spec(optimizer)
    if spec.foldable:
        return spec
    raise UnsupportedError(
        f"optimizer {spec.name} is not supported: {spec.why}",
        hint="use one of " + ", ".join(sorted(_SPECS)) + ", or prove it: register_optimizer",
    )


def spec_named(name: str) -> OptimizerSpec:
    """The spec by ``module.Class``; raises `UnsupportedError`."""
    try:
        return _SPECS[name]
    except KeyError:
        raise UnsupportedError(
            f"the chain was written by optimizer {name[:80]!r}, which cannot be folded here",
            hint="if it is your own, register_optimizer it first; else upgrade adacheck-store",
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


def check_groups(name: str, groups: Groups) -> None:
    """Refuse a group without a number that the class updates by: it is not guessed.

    Flags may be missing: an older torch had not all of them. Raises `MalformedError` (rule
    ``groups``), `UnsupportedError` for a class that is not known here.
    """
    missing = {key for group in groups for key in numbers_of(name) if key not in group}
    if missing:
        raise MalformedError(f"a group of {name} without {sorted(missing)}", rule="groups")


@lru_cache(maxsize=64)
def numbers_of(name: str) -> tuple[str, ...]:
    """Keys of a group that are numbers the class updates by."""
    defaults = make_optimizer(spec_named(name)).defaults
    return tuple(k for k, v in sorted(defaults.items()) if not isinstance(v, bool | str | None))


def raw_step(spec: OptimizerSpec) -> Callable[[torch.optim.Optimizer], Any]:
    """The class's ``step`` without hooks: folding must not fire a user's global hooks."""
    step: Callable[[torch.optim.Optimizer], Any] = inspect.unwrap(spec.cls.step)
    return step


def make_optimizer(
    spec: OptimizerSpec, params: Sequence[torch.Tensor] = (), flags: Mapping[str, Any] | None = None
) -> torch.optim.Optimizer:
    """An optimizer of the class, over a dummy if need be; flags its maker does not take are left.

    Groups are set by the caller; state that the class makes at construction is there.
    """
    make: Callable[..., torch.optim.Optimizer] = spec.cls
    taken = inspect.signature(spec.cls).parameters
    values = {"lr": 1e-3, **(flags or {})}
    return make(
        list(params) or [torch.nn.Parameter(torch.zeros(1))],
        **{key: value for key, value in values.items() if key in taken},
    )


def on_cpu(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's values as the CPU takes them: ``capturable`` is for devices.

    Without it foreach refuses tensors as numbers; one tensor after another gives the same bits.
    """
    if not group.get("capturable"):
        return dict(group)
    return {**group, "capturable": False, "foreach": False}


def arithmetic_digest(name: str, groups: Groups, dtypes: Sequence[str], device: str = "cpu") -> str:
    """Digest of an optimizer's arithmetic on a device, for its groups' flags.

    A throw-away optimizer runs `VECTOR_STEPS` steps or more on fixed inputs of `VECTOR_ELEMENTS`
    elements, once per distinct set of flags and per dtype, with and without weight decay. Equal
    digests mean that a fold here gives the trainer's bits. Draws nothing from any RNG.
    """
    signatures = sorted({_signature(group) for group in groups})
    key = (name, tuple(signatures), tuple(sorted(set(dtypes))), device)
    return _vector_digest(*key, flushes_denormals())


def folds_alike(name: str, groups: Groups, dtypes: Sequence[str], digest: str) -> bool:
    """Whether folds here give the bits of a trainer whose arithmetic has this digest."""
    return arithmetic_digest(name, groups, dtypes) == digest


def flushes_denormals() -> bool:
    """Whether this thread's arithmetic takes the smallest numbers for zero (a flag per thread)."""
    return _SMALLEST * 0.5 == 0.0


_FIXED: dict[str, Any] = {
    "lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "dampening": 0.0,
    "alpha": 0.9, "lambd": 1e-4, "t0": 1.0, "rho": 0.9, "etas": (0.5, 1.2), "lr_decay": 0.01,
    "step_sizes": (1e-6, 50.0), "momentum_decay": 4e-3, "initial_accumulator_value": 0.1,
}  # fmt: skip


def _signature(group: Mapping[str, Any]) -> str:
    """The flags of a group: numbers are reduced to their type, so that schedules share it."""
    flags: dict[str, Any] = {}
    for key, value in group.items():
        if value is None or isinstance(value, bool | str):
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


def _on_device(value: Any, device: str) -> Any:
    """Values with tensors where a capturable optimizer wants them, and any other takes them."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple | list):
        return type(value)(_on_device(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _on_device(item, device) for key, item in value.items()}
    return value


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


def vector_of(spec: OptimizerSpec, groups: Groups, dtype: str) -> list[bytes]:
    """What the arithmetic vector gives for each group of a class that need not be known."""
    flags = [canonical.from_json(canonical.loads(_signature(group).encode())) for group in groups]
    return [_run_vector(spec, values, dtype, "cpu") for values in flags]


def _run_vector(spec: OptimizerSpec, flags: Mapping[str, Any], dtype: str, device: str) -> bytes:
    kind = torch_dtype(dtype)
    param = _vector_input(kind, 1, 4).to(device)
    values = from_typed(dict(flags))
    values = on_cpu(values) if device == "cpu" else _on_device(values, device)
    optimizer = make_optimizer(spec, [param], values)
    optimizer.param_groups = [{**optimizer.defaults, **values, "params": [param]}]
    # Else torch warns that a capturable optimizer is not captured.
    optimizer._warned_capturable_if_run_uncaptured = True
    step = raw_step(spec)
    out = bytearray()
    with torch.no_grad():
        for number in range(spec.steps):
            param.grad = _vector_input(kind, 7 + number, 20).to(device)
            step(optimizer)
    for tensor in [param, *optimizer.state[param].values()]:
        if isinstance(tensor, torch.Tensor):
            out += byte_view(tensor.detach().to("cpu").contiguous())
    return bytes(out)
