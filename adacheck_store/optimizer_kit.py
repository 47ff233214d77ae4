"""A kit that proves an optimizer's fold, and the registration that will have nothing less.

An optimizer may be folded if its update is elementwise and all it needs is in its state and in
its groups: then a piece of a parameter, stepped alone, gives the bits that the whole would have.
`prove` does not believe this but tries it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adacheck_store.format.errors import UnsupportedError, UsageError
from adacheck_store.format.head import is_array_word

from .optimizer_trial import NotProvenError, run_trial
from .optimizers import OptimizerSpec, add_spec, always, class_name, shared_half, spec_named

Roles = Sequence[str] | Callable[[Mapping[str, Any]], Sequence[str]]

STEPS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What `prove` found: the class, ``exact`` or ``unsupported``, and why not more.

    ``compared`` counts tensors and counters whose bits were compared.
    """

    name: str
    exactness: str
    why: str = ""
    steps: int = 0
    compared: int = 0

    @property
    def proven(self) -> bool:
        """True in class ``exact``."""
        return self.exactness == "exact"


def prove(
    cls: type[torch.optim.Optimizer], *, roles: Roles | None = None,
    scalars: Sequence[str] | None = None, steps: int = STEPS, seed: int = 0,
    dtype: torch.dtype = torch.float32, absent: float = 0.1, large: bool | None = None,
    **flags: Any,
) -> Verdict:  # fmt: skip
    """Whether folding an optimizer gives its bits, tried on ``steps`` random steps.

    The class is made with ``flags`` and trained on parameters of many shapes, with gradients
    that are now and then absent (a share ``absent``; for optimizers that refuse this give 0), a
    changing learning rate and weight decay. Then the same is folded: cut at multiples of 64
    elements, piece after piece, under several thread counts. ``large`` is whether one parameter
    is so large that threads share it: in half precision many an optimizer's bits depend on the
    threads then, and the default is no. ``roles`` and ``scalars`` are as for
    `register_optimizer`; classes that are known need none. Draws nothing from any generator
    and never raises for an optimizer that fails: the verdict says why it is ``unsupported``.
    """
    spec = _spec(cls, roles, scalars)
    big = dtype.itemsize >= 4 if large is None else large
    return _prove(spec, flags, steps=steps, seed=seed, dtype=dtype, absent=absent, large=big)


def register_optimizer(
    cls: type[torch.optim.Optimizer], *, roles: Roles, scalars: Sequence[str] = (), **flags: Any
) -> Verdict:
    """Have updates of an optimizer of your own kept as deltas and folded, once it is proven.

    ``roles`` names its state tensors (each of its parameter's shape), or is a function of a
    parameter group that does, where flags change what is kept. ``scalars`` names its counters
    per parameter (numbers or 0-dim tensors). `prove` is run with ``flags`` now, and at attach
    under the flags of each group, in the dtypes of its parameters. Raises `UnsupportedError`
    with the reason if the proof fails; the optimizer then stays as it was: usable, with captured
    bases only. To restore in a process of its own, register there as well.
    """
    spec = _spec(cls, roles, scalars)
    if spec.name.startswith("torch.optim."):
        raise UsageError(f"{spec.name} is torch's own", hint="its class is known, do not register")
    verdict = _prove(spec, flags)
    if not verdict.proven:
        raise UnsupportedError(
            f"optimizer {spec.name} is not proven: {verdict.why}",
            hint="it can be used unregistered: captured bases are kept, no deltas",
        )
    proven: dict[str, str] = {}

    def check(group: Mapping[str, Any]) -> str:
        kinds = {(p.dtype, p.dtype.itemsize >= 4 or shared_half(p)) for p in group["params"]}
        for dtype, large in sorted(kinds, key=str):
            key = f"{dtype} {large} {_flags_key(group)}"
            if key not in proven:
                trial = _prove(spec, _without_params(group), dtype=dtype, large=large)
                proven[key] = f"{trial.why} ({dtype})" if trial.why else ""
            if proven[key]:
                return proven[key]
        return ""

    add_spec(dataclasses.replace(spec, check=check))
    return verdict


def _spec(
    cls: type[torch.optim.Optimizer], roles: Roles | None, scalars: Sequence[str] | None
) -> OptimizerSpec:
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise UsageError(f"{cls!r} is no optimizer", hint="give a subclass of Optimizer")
    name = class_name(cls)
    if roles is None:
        known = spec_named(name)
        return dataclasses.replace(known, check=None)
    if callable(roles):
        chosen = roles
        return OptimizerSpec(
            name=name, cls=cls, roles=lambda group: tuple(chosen(group)),
            scalars=tuple(scalars or ()),
        )  # fmt: skip
    words = tuple(roles)
    if isinstance(roles, str) or not all(is_array_word(str(word)) for word in words):
        raise UsageError(f"roles={roles!r}", hint="a list of words of letters, digits and _")
    return OptimizerSpec(name=name, cls=cls, roles=always(*words), scalars=tuple(scalars or ()))


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _flags_key(group: Mapping[str, Any]) -> str:
    """What of a group may choose another path through the code: all but the size of numbers."""
    parts = []
    for key, value in sorted(_without_params(group).items()):
        if isinstance(value, float | int) and not isinstance(value, bool):
            parts.append(f"{key}:{'zero' if value == 0 else 'number'}")
        elif isinstance(value, torch.Tensor):
            parts.append(f"{key}:{value.dtype}")
        else:
            parts.append(f"{key}={value!r}")
    return ",".join(parts)


def _prove(
    spec: OptimizerSpec, flags: Mapping[str, Any], *, steps: int = STEPS, seed: int = 0,
    dtype: torch.dtype = torch.float32, absent: float = 0.1, large: bool = True,
) -> Verdict:  # fmt: skip
    generators = (torch.get_rng_state(), random.getstate())
    threads = torch.get_num_threads()
    compared = 0
    try:
        compared = run_trial(
            spec, flags, steps=steps, seed=seed, dtype=dtype, absent=absent, large=large
        )
    except NotProvenError as error:
        why = str(error)
    except Exception as error:
        why = f"it fails on a piece of a parameter: {type(error).__name__}: {error}"[:300]
    else:
        return Verdict(name=spec.name, exactness="exact", steps=steps, compared=compared)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(generators[0])
        random.setstate(generators[1])
    return Verdict(name=spec.name, exactness="unsupported", why=why)
