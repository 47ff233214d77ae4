"""Optimizers around another one: the outer has the groups, the inner keeps the state.

torch's `ZeroRedundancyOptimizer` is given all parameters. Each rank steps some of them by an
optimizer inside, and sends them to all others. So a rank has of the others' the parameter alone.
For DeepSpeed's see `deepspeed`.
"""

from __future__ import annotations

from typing import Any

import torch

from adacheck_store.format.errors import UnsupportedError

from .deepspeed import Masters

ZERO = "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer"


def keeper(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that keeps the state: the one inside, else itself.

    Its groups are the outer one's, with those parameters alone that are stepped here. Raises
    `UnsupportedError` for what steps while the backward pass is under way.
    """
    outer: Any = optimizer
    cls = type(optimizer)
    if f"{cls.__module__}.{cls.__qualname__}" != ZERO:
        return optimizer
    if outer._overlap_with_ddp:
        raise UnsupportedError(
            "ZeroRedundancyOptimizer with overlap_with_ddp=True is not supported: it steps within "
            "the backward pass, without optimizer.step()",
            hint="use overlap_with_ddp=False, and call optimizer.step()",
        )
    inner: torch.optim.Optimizer = outer.optim
    return inner


def no_optimizer(given: Any) -> UnsupportedError:
    """What to say of an object that is no optimizer of torch."""
    cls = type(given)
    if cls.__module__.partition(".")[0] == "megatron":
        return UnsupportedError(
            f"Megatron's {cls.__qualname__} is not supported: it keeps shards of the parameters in "
            "buffers of its own, which have no names",
            hint="use FSDP2 or ZeroRedundancyOptimizer",
        )
    return UnsupportedError(
        f"an optimizer of type {cls.__module__}.{cls.__qualname__}",
        hint="give the torch.optim optimizer itself",
    )


def stepper(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer whose class makes the step."""
    return optimizer.zero.inner if isinstance(optimizer, Masters) else keeper(optimizer)


def settle(optimizer: torch.optim.Optimizer) -> None:
    """Give the one inside the groups' values as the outer one has them; make what follows anew."""
    if isinstance(optimizer, Masters) and optimizer is optimizer.zero.masters[-1]:
        optimizer.zero.refresh()
    inner = keeper(optimizer)
    if inner is optimizer:
        return
    for group, values in zip(inner.param_groups, optimizer.param_groups, strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})
