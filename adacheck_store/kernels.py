"""Compiled loops for folding and capture, where there are any: torch's and numpy's bits, sooner.

`_kernels` is built at installation if a compiler is there (never at run time), and works on
processors with AVX-512. Nothing needs it. Each loop is held to its oracle once a process before
it is used, and left alone if a single bit differs.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from adacheck_store.format.ids import Buffer

WIDTH = 64
"""Elements that the kernel takes a multiple of; torch does the rest, whose arithmetic differs."""

log = logging.getLogger(__name__)

_STRANGE = (0, 1 << 31, 1, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12300, 0x7F7FFFFF, 0x00800000)
"""Bits of zeros, denormals, infinities, NaNs and the ends of the range."""


@lru_cache(maxsize=1)
def _compiled() -> Any:
    """The compiled module, None where there is none or the processor lacks what it needs."""
    try:
        return importlib.import_module("adacheck_store._kernels")
    except ImportError:
        return None


def in_use() -> bool:
    """Whether the loops are there and have proven themselves on this processor."""
    return _adamw_is_right() and _sum_is_right() and rounds()


def adamw(
    state: Sequence[torch.Tensor], grad: torch.Tensor, group: Mapping[str, Any], step: float
) -> None:
    """Torch's fused AdamW in place, as update number ``step`` (from 1).

    ``state`` is parameter, exp_avg and exp_avg_sq, float32, ``grad`` bfloat16: flat, contiguous,
    on the CPU, alike in length, a multiple of `WIDTH`. Raises `ValueError` for any other.
    """
    count = grad.numel()
    fits = grad.dtype == torch.bfloat16 and all(t.dtype == torch.float32 for t in state)
    for tensor in (*state, grad):
        alike = tensor.numel() == count and tensor.is_contiguous()
        fits = fits and alike and tensor.device.type == "cpu"
    if not fits or count % WIDTH or len(state) != 3:
        raise ValueError("tensors that the kernel does not take")
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    _compiled().adamw(
        *(tensor.data_ptr() for tensor in (*state, grad)), count,
        1 - lr * group["weight_decay"], 1 - beta1, beta2, 1 - beta2,
        math.sqrt(1 - beta2**step), group["eps"], -(lr / (1 - beta1**step)),
    )  # fmt: skip


def takes(cls: type, group: Mapping[str, Any]) -> bool:
    """Whether the kernel does what an optimizer of the class does under a group's values."""
    decoupled = cls is torch.optim.AdamW or (
        cls is torch.optim.Adam
        and (group.get("decoupled_weight_decay") or not group.get("weight_decay"))
    )
    flags = ("amsgrad", "maximize", "differentiable", "capturable")
    if not decoupled or not group.get("fused") or any(group.get(flag) for flag in flags):
        return False
    numbers = (group.get("lr"), group.get("eps"), group.get("weight_decay"))
    betas = group.get("betas", ())
    plain = all(type(value) is float for value in (*numbers, *betas)) and len(betas) == 2
    if not plain or not (0 < betas[0] < 1 and 0 <= betas[1] < 1):
        return False
    # Torch takes another form of the mean where the gradient's weight, in float32, is half or more.
    return bool(np.float32(1 - betas[0]) < 0.5) and _adamw_is_right()


def block_sum(data: Buffer, first: int = 0) -> int | None:
    """The fingerprint of whole 32-bit words (see `fingerprint`); None where it cannot be had.

    Of a piece of a block, whose words begin at number ``first`` of it, what it adds to the sum.
    """
    return int(_compiled().block_sum(data, first)) if _sum_is_right() else None


def round_half(values: torch.Tensor, halves: torch.Tensor) -> bool:
    """Round float32 to bfloat16, in place and into ``halves``, both alike; False: not done.

    As ``halves.copy_(values); values.copy_(halves)``, but that all NaNs become one.
    """
    for tensor, dtype in ((values, torch.float32), (halves, torch.bfloat16)):
        plain = tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.is_contiguous()
        if not plain or tensor.is_neg() or tensor.shape != values.shape:
            return False
    if not rounds():
        return False
    _compiled().round_half(values.data_ptr(), halves.data_ptr(), values.numel())
    torch.autograd.graph.increment_version(values)
    return True


def _numbers(seed: int, count: int) -> torch.Tensor:
    """Float32 numbers of many sizes, one in eight of them strange; draws from no generator."""
    i = np.arange(count, dtype=np.uint64)
    h = (i * np.uint64(2654435761) + np.uint64(seed * 40503 + 12345)) % np.uint64(2147483647)
    h = (h * np.uint64(48271)) % np.uint64(2147483647)
    values = (h.astype(np.float64) / 1073741823.5 - 1.0) * 2.0 ** -(h % 60).astype(np.float64)
    bits = values.astype(np.float32).view(np.uint32)
    strange = np.array(_STRANGE, dtype=np.uint32)[(h // 8 % len(_STRANGE)).astype(np.int64)]
    return torch.from_numpy(np.where(h % 8 == 0, strange, bits).view(np.float32))


def _proven(proof: Callable[[], bool]) -> bool:
    """What a proof says, False without a module; one that fails (of another version) is said."""
    try:
        return _compiled() is not None and proof()
    except Exception as error:
        log.warning("the compiled kernels are not used: %s", error)
        return False


@lru_cache(maxsize=1)
def _adamw_is_right() -> bool:
    return _proven(_prove_adamw)


@lru_cache(maxsize=1)
def _sum_is_right() -> bool:
    return _proven(_prove_sum)


@lru_cache(maxsize=1)
def rounds() -> bool:
    """Whether `round_half` is there and has proven itself."""
    return _proven(_prove_round)


def _prove_adamw() -> bool:
    """Hold the kernel to torch's own fused step, strange numbers included."""
    count = 64 * WIDTH
    for decay in (0.0, 0.1):
        group = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": decay}
        ours = [_numbers(seed, count) for seed in range(3)]
        theirs = [tensor.clone() for tensor in ours]
        for step in (1.0, 2.0, 3.0, 1e5):
            grad = _numbers(int(step) + 7, count).bfloat16()
            adamw(ours, grad, group, step)
            torch._fused_adamw_(
                theirs[:1], [grad.float()], theirs[1:2], theirs[2:], [], [torch.tensor(step)],
                lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=decay, amsgrad=False,
                maximize=False,
            )  # fmt: skip
            for one, other in zip(ours, theirs, strict=True):
                if not torch.equal(one.view(torch.int32), other.view(torch.int32)):
                    return False
    return True


def _prove_sum() -> bool:
    """Hold the sum to numpy's, at whole vectors and beside, of blocks and of pieces."""
    for count, first in ((0, 0), (1, 0), (7, 3), (8, 0), (4099, 0), (4099, 77_777)):
        words = _numbers(5, count).numpy().view(np.int32)
        weights = 2 * np.arange(first, first + count, dtype=np.int64) + 1
        right = int(np.dot(words.astype(np.int64), weights)) & (2**64 - 1)
        if _compiled().block_sum(words.tobytes(), first) != right:
            return False
    return True


def _prove_round() -> bool:
    """Hold the rounding to torch's, strange numbers and ties included; NaNs are NaNs."""
    for count in (1, 15, 16, 4099):
        values = _numbers(9, count)
        values.view(torch.int32)[::3].bitwise_and_(~0xFFFF).bitwise_or_(0x8000)
        right = values.bfloat16()
        halves = torch.zeros_like(right)
        _compiled().round_half(values.data_ptr(), halves.data_ptr(), count)
        alike = (halves.view(torch.int16) == right.view(torch.int16)) | (
            halves.isnan() & right.isnan()
        )
        same = torch.equal(values.view(torch.int32), halves.float().view(torch.int32))
        if not same or not bool(alike.all()):
            return False
    return True
