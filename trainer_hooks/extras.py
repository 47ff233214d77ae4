"""Extras: what is per rank and no tensor of the model, as a tree without pickles.

A tree holds dicts, lists, tuples, strings, numbers, bytes, None and tensors. A few library
types have a spelling of their own, ``{"adacheck.type": name, "value": ...}``. Anything else is
refused with its path in the tree.
"""

from __future__ import annotations

import collections
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from adacheck_store.arrays import dtype_name, from_typed, scalar_of
from adacheck_store.boundary import Link
from adacheck_store.format.bodies import ExtraBody
from adacheck_store.format.canonical import ArrayRef, Scalar
from adacheck_store.format.errors import MalformedError, UnsupportedError
from adacheck_store.format.record import Record

from .capture_base import sealed_record
from .copies import host_copy

MAX_DEPTH = 20

_TYPE, _VALUE = "adacheck.type", "value"

_SPELLINGS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    collections.Counter: ("counter", dict),
    collections.OrderedDict: ("ordered-dict", lambda value: list(value.items())),
    collections.deque: ("deque", lambda value: [list(value), value.maxlen]),
    set: ("set", lambda value: sorted(value, key=repr)),
    frozenset: ("frozenset", lambda value: sorted(value, key=repr)),
    complex: ("complex", lambda value: [value.real, value.imag]),
    io.BytesIO: ("bytes-io", lambda value: value.getvalue()),
    torch.Size: ("size", list),
    np.ndarray: ("ndarray", lambda value: torch.from_numpy(np.array(value))),
}

_MAKERS: dict[str, Callable[[Any], Any]] = {
    "counter": collections.Counter,
    "ordered-dict": lambda value: collections.OrderedDict((k, v) for k, v in value),
    "deque": lambda value: collections.deque(value[0], maxlen=value[1]),
    "set": set,
    "frozenset": frozenset,
    "complex": lambda value: complex(*value),
    "bytes-io": io.BytesIO,
    "size": torch.Size,
    "ndarray": lambda value: value.numpy(),
    "scalar": lambda value: value.numpy()[()],
}


@dataclass(frozen=True, slots=True, eq=False)
class LateNumber:
    """A number that a copy on its way to the host will tell; it is kept as a plain one."""

    kind: type[float] | type[int]
    tensor: torch.Tensor


def freeze(value: Any, path: str, depth: int = 0) -> Any:
    """A copy of a tree that later changes cannot reach; raises `UnsupportedError` at ``path``.

    Tensors of a device are on their way to the host: read them once the boundary has landed.
    """
    if depth > MAX_DEPTH:
        raise UnsupportedError(f"{path} is nested deeper than {MAX_DEPTH}", hint="flatten it")
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes, LateNumber):
        return value
    if isinstance(value, torch.Tensor):
        return _frozen_tensor(value, path)
    if isinstance(value, np.generic):
        tensor = _frozen_tensor(torch.from_numpy(np.array(value)), path)
        return {_TYPE: "scalar", _VALUE: tensor}
    if kind in _SPELLINGS:
        name, spell = _SPELLINGS[kind]
        try:
            spelled = spell(value)
        except TypeError as exc:
            raise UnsupportedError(f"{path} cannot be kept: {exc}", hint=_HINT) from exc
        return {_TYPE: name, _VALUE: freeze(spelled, path, depth + 1)}
    if kind is dict:
        if _TYPE in value:
            raise UnsupportedError(f"{path} has a key {_TYPE!r}", hint="rename it")
        if not all(_is_plain_key(key) for key in value):
            raise UnsupportedError(f"{path} has a key that is no string or number", hint=_HINT)
        return {key: freeze(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
    if kind in (list, tuple):
        return kind(freeze(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value))
    raise UnsupportedError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be kept", hint=_HINT
    )


_HINT = "have state_dict() return dicts, lists, numbers, strings, bytes and tensors"


def _is_plain_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(_is_plain_key(item) for item in key)
    return key is None or type(key) in (bool, int, float, str, bytes)


def _frozen_tensor(value: torch.Tensor, path: str) -> torch.Tensor:
    if value.layout != torch.strided or value.is_meta or hasattr(value, "placements"):
        raise UnsupportedError(f"{path} is a tensor that is not plain and dense", hint=_HINT)
    dtype_name(value.dtype)
    return host_copy(value)


def thaw(value: Any) -> Any:
    """The inverse of `freeze`; tensors are fresh at every call."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Scalar):
        return from_typed(value)
    if isinstance(value, dict):
        if _TYPE in value:
            maker = _MAKERS.get(value[_TYPE])
            if maker is None:
                raise MalformedError(f"a value of type {value[_TYPE]!r}", rule="extra")
            return maker(thaw(value[_VALUE]))
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(thaw(item) for item in value)
    return value


def extra_record(link: Link, step: int, trees: Mapping[str, Any]) -> Record:
    """The rank's extra of frozen trees: tensors become the record's arrays ``x/<n>``."""
    arrays: dict[str, torch.Tensor] = {}
    tree = {name: _referred(value, arrays) for name, value in trees.items()}
    return sealed_record("extra", link, step, arrays, ExtraBody(tree=tree).to_json())


def _referred(value: Any, arrays: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, LateNumber):
        return value.kind(value.tensor.item())
    if isinstance(value, torch.Tensor):
        if value.dim() == 0:
            return scalar_of(value)
        name = f"x/{len(arrays)}"
        arrays[name] = value.reshape(-1)
        return ArrayRef(name, dtype_name(value.dtype), tuple(value.shape))
    if isinstance(value, dict):
        return {key: _referred(item, arrays) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_referred(item, arrays) for item in value)
    return value


def resolve(value: Any, arrays: Mapping[str, torch.Tensor]) -> Any:
    """A decoded tree with its array references replaced by tensors."""
    if isinstance(value, ArrayRef):
        return arrays[value.array].view(value.shape)
    if isinstance(value, dict):
        return {key: resolve(item, arrays) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(resolve(item, arrays) for item in value)
    return value
