"""Torch tensors and the format's arrays: dtype names, flat byte views, typed scalars."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from adacheck_store.format.canonical import Scalar
from adacheck_store.format.dtypes import item_bytes
from adacheck_store.format.errors import MalformedError, UnsupportedError

_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16",
    "F16": "float16", "BF16": "bfloat16", "U32": "uint32", "I32": "int32", "F32": "float32",
    "U64": "uint64", "I64": "int64", "F64": "float64", "C32": "complex32", "C64": "complex64",
    "C128": "complex128", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0FNU": "float8_e8m0fnu",
}  # fmt: skip

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, word) for name, word in _NAMES.items() if hasattr(torch, word)
}
"""Dtype name of the format -> torch dtype."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The format's name of a torch dtype; raises `UnsupportedError`."""
    try:
        return DTYPE_NAMES[dtype]
    except KeyError:
        raise UnsupportedError(f"tensors of {dtype} cannot be kept") from None


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a format name; raises `MalformedError` if this torch lacks it."""
    try:
        return TORCH_DTYPES[name]
    except KeyError:
        raise MalformedError(f"this torch has no dtype {name[:40]!r}", rule="dtype") from None


ALIGNED_BYTES = 64
"""What torch aligns its memory to."""


def untouched(elements: int, dtype: str) -> torch.Tensor:
    """Zeros, flat, that take no memory where nobody touches them, whatever torch is told to do with
    memory that is not initialized."""
    nbytes = elements * item_bytes(dtype)
    flat = numpy.zeros(nbytes + ALIGNED_BYTES, dtype=numpy.uint8)
    at = -flat.ctypes.data % ALIGNED_BYTES
    return torch.from_numpy(flat[at : at + nbytes]).view(torch_dtype(dtype))


def byte_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, flat uint8, sharing its memory."""
    return tensor.reshape(-1).view(torch.uint8)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor as a flat memoryview, sharing its memory."""
    flat = byte_tensor(tensor.detach())
    array: Any = flat.numpy()
    return memoryview(array).cast("B") if flat.numel() else memoryview(b"")


def from_bytes(data: bytes | bytearray | memoryview, dtype: str) -> torch.Tensor:
    """A flat tensor over the bytes (shared if writable, copied if read-only)."""
    kind = torch_dtype(dtype)
    if len(data) == 0:
        return torch.empty(0, dtype=kind)
    view = memoryview(data)
    writable = bytearray(view) if view.readonly else view
    return torch.frombuffer(writable, dtype=torch.uint8).view(kind)


def scalar_of(tensor: torch.Tensor) -> Scalar:
    """A 0-dim tensor as a typed value."""
    value = tensor.detach().to("cpu").clone()
    return Scalar(dtype_name(value.dtype), bytes(byte_view(value)))


def tensor_of(scalar: Scalar) -> torch.Tensor:
    """A typed scalar as a 0-dim CPU tensor."""
    flat = from_bytes(bytearray(scalar.data), scalar.dtype)
    if flat.numel() != 1:
        raise MalformedError(f"a scalar of {len(scalar.data)} bytes", rule="typed-value")
    return flat.reshape(())


def to_typed(value: Any) -> Any:
    """Replace 0-dim tensors by typed scalars, through tuples, lists and dicts."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return scalar_of(value)
    if isinstance(value, tuple | list):
        return type(value)(to_typed(item) for item in value)
    if isinstance(value, dict):
        return {key: to_typed(item) for key, item in value.items()}
    return value


def from_typed(value: Any) -> Any:
    """Inverse of `to_typed`; every call makes fresh tensors."""
    if isinstance(value, Scalar):
        return tensor_of(value)
    if isinstance(value, tuple | list):
        return type(value)(from_typed(item) for item in value)
    if isinstance(value, dict):
        return {key: from_typed(item) for key, item in value.items()}
    return value
