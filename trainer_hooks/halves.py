"""The smallest lossless form of a gradient: bf16, fp16, half times a scale, or as it is.

Exactness is decided on bits. A sample decides first, because most gradients that are no halves
show it at once; only those whose sample passes are read as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

_Floats = npt.NDArray[np.float32]

SAMPLE = 4096
JUDGES = 64
SEARCHES = 2
"""Slices per update whose data is searched for a scale before the rest is kept as it is."""

_MANTISSAS = (1.0 + np.arange(128, dtype=np.float64) / 128.0).astype(np.float64)


@dataclass(slots=True)
class Scales:
    """Scales to try in one update: those observed, then those found in its slices."""

    known: list[float] = field(default_factory=list)
    searches: int = SEARCHES


@dataclass(frozen=True, slots=True)
class Form:
    """An encoding, and the binary32 scale that the halves are to be multiplied with."""

    encoding: str
    scale: float | None = None

    @property
    def bits(self) -> int | None:
        """The scale's IEEE-754 bits."""
        return None if self.scale is None else int(np.float32(self.scale).view(np.uint32))


RAW = Form("raw")


def encode(grad: torch.Tensor, scales: Scales, out: torch.Tensor) -> Form:
    """Find the smallest exact form of a flat fp32 gradient and write its halves into ``out``.

    ``out`` is a flat int16 tensor of the same length; it is spoilt if the form is raw.
    """
    values: _Floats = grad.numpy()
    sample = _sample(values)
    if _low(sample) == 0 and _low(values) == 0:
        out.numpy()[:] = values.view(np.int16)[1::2]
        return Form("bf16")
    half = torch.from_numpy(sample.copy()).half()
    if _same(half.float(), sample):
        kept = out.view(torch.float16).copy_(grad)
        if _same(kept.float(), values):
            return Form("fp16")
    return _scaled(grad, sample, scales, out)


def _sample(values: _Floats) -> _Floats:
    sample = values[:: max(1, len(values) // SAMPLE)][:SAMPLE]
    if np.count_nonzero(sample) < JUDGES:
        found = np.flatnonzero(values)[:SAMPLE]
        if len(found):
            sample = values[found]
    return np.ascontiguousarray(sample)


def _low(values: _Floats) -> int:
    """Whether any element has bits below bf16's (0: none has)."""
    return int(values.view(np.uint16)[0::2].any())


def _same(decoded: torch.Tensor, values: _Floats) -> bool:
    return bool(np.array_equal(decoded.numpy().view(np.int32), values.view(np.int32)))


def _scaled(grad: torch.Tensor, sample: _Floats, scales: Scales, out: torch.Tensor) -> Form:
    judges = _judges(sample)
    if len(judges) == 0:
        return RAW
    for scale in scales.known:
        if _fits(judges, scale) and _write(grad, scale, out):
            return Form("bf16", scale)
    if scales.searches <= 0:
        return RAW
    scales.searches -= 1
    for scale in search(judges):
        if _write(grad, scale, out):
            scales.known.append(scale)
            return Form("bf16", scale)
    return RAW


def _judges(sample: _Floats) -> _Floats:
    """The largest finite elements of a sample: they are neither zero nor subnormal."""
    size = np.abs(sample[np.isfinite(sample)])
    size = size[size > np.finfo(np.float32).tiny * 65536]
    size = size[size < np.finfo(np.float32).max / 4]
    return np.asarray(np.sort(size)[::-1][:JUDGES], dtype=np.float32)


def _fits(judges: _Floats, scale: float) -> bool:
    return bool(_fitting(judges, np.array([scale], dtype=np.float32))[0])


def _fitting(judges: _Floats, scales: _Floats) -> npt.NDArray[np.bool_]:
    """Which scales give every judge back from a bf16."""
    with np.errstate(all="ignore"):
        quotient = (judges[None, :] / scales[:, None]).astype(np.float32)
        half = torch.from_numpy(quotient).to(torch.bfloat16).float().numpy()
        back = (half * scales[:, None]).astype(np.float32)
    return np.asarray((back == judges[None, :]).all(axis=1))


def search(judges: _Floats) -> Sequence[float]:
    """Scales c in (0.5, 1] with which every judge is ``float32(c * bf16)``, in fixed order."""
    if len(judges) < 4:
        return []
    mantissa = np.frexp(judges[0].astype(np.float64))[0] * 2.0
    near = (mantissa / _MANTISSAS).astype(np.float32)
    near = np.where(near > 1.0, near / 2, near).astype(np.float32)
    steps = np.arange(-3, 4, dtype=np.int32)
    tried = (near.view(np.int32)[:, None] + steps[None, :]).view(np.float32).reshape(-1)
    tried = np.unique(tried)
    tried = tried[_fitting(judges[:4], tried)]
    if len(tried) == 0:
        return []
    tried = tried[_fitting(judges, tried)]
    return [float(scale) for scale in tried[:8]]


def _write(grad: torch.Tensor, scale: float, out: torch.Tensor) -> bool:
    """Write the bf16 quotients; True if they give every bit back."""
    half = out.view(torch.bfloat16).copy_(grad / scale)
    return torch.equal((half.float() * scale).view(torch.int32), grad.view(torch.int32))


def usable_scale(value: float) -> float | None:
    """An observed clip coefficient as a scale to try, None where it cannot be one."""
    rounded = float(np.float32(value))
    return rounded if np.isfinite(rounded) and 0.0 < rounded != 1.0 else None
