"""Files of others as a source of states: of torch, torch.distributed.checkpoint, safetensors.

Nothing in them is executed. Tensors stay in the files, mapped, or are read one at a time.
"""

from __future__ import annotations

import functools
import io
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from adacheck_store.arrays import DTYPE_NAMES
from adacheck_store.foreign import Found, tied, whole
from adacheck_store.foreign_keys import GROUPS, Keys, under
from adacheck_store.format.errors import (
    AdaCheckError,
    MalformedError,
    UnsupportedError,
    UsageError,
)
from adacheck_store.format.layout import whole_box
from adacheck_store.regions import Box, clash

from .export import HF_INDEX, sorted_out
from .pickled import Thing, read_pickle
from .safetensors_file import mapped

MODEL_KEYS = ("model", "model_state_dict", "state_dict")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim")

OURS = "adacheck-store restore"
"""What a safetensors file says of its format that `restore` has written."""

_DTYPES = {str(dtype): dtype for dtype in DTYPE_NAMES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a source has: tensors and other values by flat key (see `foreign_keys`).

    ``keys`` are where model and optimizer stand, ``step`` and the ``optimizer``'s class what it
    says of them, ``aliases`` further names of tied tensors.
    """

    form: str
    pieces: Mapping[str, Found]
    values: Mapping[str, Any] = field(default_factory=dict)
    keys: Keys = field(default_factory=Keys)
    aliases: Mapping[str, str] = field(default_factory=dict)
    step: int | None = None
    optimizer: str = ""


def open_source(path: Path, model: str | None = None, optimizer: str | None = None) -> Contents:
    """What a file or folder has; ``model`` and ``optimizer`` are the keys of the two in it.

    Raises `UsageError` for a place where nothing known lies, `MalformedError` for what is damaged,
    `UnsupportedError` naming what would have to be executed, or is in a form of its own.
    """
    read: Callable[[Path, Keys | None], Contents] | None = None
    if (path / ".metadata").is_file():
        read = _dcp
    elif (path / HF_INDEX).is_file() or path.suffix == ".safetensors":
        read = _safetensors
    elif path.is_file():
        read = _torch
    if read is None:
        raise UsageError(
            "no state lies there", path=str(path),
            hint="name a file of torch.save or safetensors, or a folder of either "
            "torch.distributed.checkpoint or Hugging Face",
        )  # fmt: skip
    told = None
    if model is not None or optimizer is not None:
        told = Keys(
            "model" if model is None else model, "optimizer" if optimizer is None else optimizer
        )
    try:
        return read(path, told)
    except AdaCheckError as error:
        raise error.at(path=str(path)) from error.__cause__
    except (KeyError, ValueError, TypeError, AttributeError, OSError) as error:
        raise MalformedError(
            f"it cannot be read: {type(error).__name__}: {error}"[:300], rule="source"
        ).at(path=str(path)) from error


def _torch(path: Path, told: Keys | None) -> Contents:
    """A file of ``torch.save``: tensors are mapped from it."""
    try:
        with torch.serialization.safe_globals([io.BytesIO]):
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        why = " ".join(str(error).split())[:300]
        raise UnsupportedError(
            f"torch.load(mmap=True, weights_only=True) refuses it: {why}",
            hint="save state dicts of tensors and plain values, by a torch of this decade",
        ) from error
    if not isinstance(state, Mapping):
        raise UnsupportedError(
            f"it holds a {type(state).__name__}", hint="save a dict of state dicts"
        )
    keys = told or Keys(
        next((key for key in MODEL_KEYS if isinstance(state.get(key), Mapping)), ""),
        next((key for key in OPTIMIZER_KEYS if isinstance(state.get(key), Mapping)), "optimizer"),
    )
    return nested(state, keys, "torch")


def nested(
    state: Mapping[str, Any], keys: Keys, form: str, optimizer: str = ""
) -> Contents:  # fmt: skip
    """A state of nested dicts: a model's and, where it is there, an optimizer's state dict."""
    model = state[keys.model] if keys.model else state
    found = {name: each for name, each in model.items() if isinstance(each, torch.Tensor)}
    front = "module." if all(name.startswith("module.") for name in found) else ""
    found = {name.removeprefix(front): each for name, each in found.items()}
    inner: Mapping[str, Any] = state.get(keys.optimizer) or {}
    states, groups = named_states(inner, found)
    trained = [name for group in groups for name in group["params"]]
    pieces = {under(keys.model) + name: whole(each) for name, each in found.items()}
    values: dict[str, Any] = {under(keys.optimizer) + GROUPS: groups} if groups else {}
    values |= {  # what a model has besides tensors (``_extra_state``) is named, and left out
        under(keys.model) + name: each for name, each in model.items()
        if not isinstance(each, torch.Tensor) and (keys.model or name != keys.optimizer)
    }  # fmt: skip
    for name, roles in states.items():
        for role, value in roles.items():
            key = under(keys.optimizer, "state", name.removeprefix(front)) + role
            if isinstance(value, torch.Tensor):
                pieces[key] = whole(value)
            else:
                values[key] = value
    for key, value in state.items() if keys.model else ():
        if key not in (keys.model, keys.optimizer):
            values[key] = value
    step = state.get("step")
    return Contents(
        form=form, pieces=pieces, values=values, keys=keys, aliases=tied(found, trained),
        step=step if type(step) is int else None, optimizer=optimizer,
    )  # fmt: skip


def named_states(
    optimizer: Mapping[str, Any], model: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """An optimizer's state by parameter, and its groups, whose ``params`` are names.

    ``Optimizer.state_dict()`` has numbers instead. Names are taken from ``param_names``, which
    groups have if the optimizer was given named parameters; else, of one group alone, the numbers
    count the model's parameters in its own order, as ``model.parameters()`` gives them.
    Raises `UnsupportedError` where that is not certain.
    """
    groups = [dict(group) for group in optimizer.get("param_groups", ())]
    named = dict[Any, str]()
    for group in groups:
        numbers = group["params"]
        if all(isinstance(number, str) for number in numbers):
            named |= {name: name for name in numbers}
        elif len(group.get("param_names", ())) == len(numbers):
            named |= dict(zip(numbers, group["param_names"], strict=True))
        else:
            named |= _counted(optimizer, groups, model)
        group["params"] = [named[number] for number in numbers]
        group.pop("param_names", None)
    return {named[number]: state for number, state in optimizer.get("state", {}).items()}, groups


def _counted(
    optimizer: Mapping[str, Any], groups: list[dict[str, Any]], model: Mapping[str, torch.Tensor]
) -> dict[Any, str]:  # fmt: skip
    """Names for numbers that count ``model.parameters()``."""
    aliases, statistics = tied(model), ("running_mean", "running_var", "num_batches_tracked")
    names = [
        name for name, tensor in model.items()
        if tensor.is_floating_point() and name not in aliases
        and not (
            name.rpartition(".")[2] in statistics
            and f"{name.rpartition('.')[0]}.num_batches_tracked".removeprefix(".") in model
        )
    ]  # fmt: skip
    numbers = groups[0]["params"]
    fits = len(groups) == 1 and len(names) == len(numbers) and all(
        value.shape in (model[name].shape, ())
        for number, name in zip(numbers, names, strict=True)
        for value in optimizer.get("state", {}).get(number, {}).values()
        if isinstance(value, torch.Tensor)
    )  # fmt: skip
    if not fits:
        raise UnsupportedError(
            f"which of the model's {len(names)} parameters the optimizer's numbers mean is not "
            f"certain ({len(numbers)} in the first of {len(groups)} groups)",
            hint="save by torch.distributed.checkpoint.state_dict.get_state_dict, or give the "
            "optimizer model.named_parameters()",
        )
    return dict(zip(numbers, names, strict=True))


def _safetensors(path: Path, told: Keys | None) -> Contents:
    """A file that `restore` has written; any other, or a folder of them, is a model alone."""
    if path.is_dir():
        index = json.loads((path / HF_INDEX).read_text())
        tensors: dict[str, torch.Tensor] = {}
        for name in sorted(set(index["weight_map"].values())):
            tensors |= mapped(_inside(path, name))[1]
        return nested(tensors, Keys(""), "hf")
    said, tensors = mapped(path)
    if said.get("format") != OURS:
        return nested(tensors, told or Keys(""), "safetensors")
    optimizers = json.loads(said["optimizers"])
    if len(optimizers) > 1:
        raise UnsupportedError("it has several optimizers", hint="restore it from its own run")
    model, states = sorted_out(said, tensors)
    groups = optimizers[0]["groups"] if optimizers else []
    state = {
        "model": model, "optimizer": {"state": states, "param_groups": groups},
        "step": int(said["step"]),
    }  # fmt: skip
    return nested(state, Keys(), "safetensors", optimizers[0]["class"] if optimizers else "")


def _inside(folder: Path, name: str) -> Path:
    """A file of a folder, by the name that another file of it gives."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise MalformedError(f"it names a file outside its folder, {name[:100]!r}", rule="source")
    return path


def _dcp(folder: Path, told: Keys | None) -> Contents:
    """A folder of torch.distributed.checkpoint; its index is a pickle, and read as data."""
    index = read_pickle((folder / ".metadata").read_bytes())
    places = {
        (key.state["fqn"], _sizes(key.state.get("offset"))): _Place(folder, info.state)
        for key, info in index.state["storage_data"].items()
    }
    pieces: dict[str, Found] = {}
    values: dict[str, Any] = {}
    for key, entry in index.state["state_dict_metadata"].items():
        if entry.name.endswith(".BytesStorageMetadata"):
            values[key] = places[key, None].read()
            continue
        shape = _sizes(entry.state["size"])
        assert shape is not None
        chunks: list[tuple[Box, _Place]] = []
        for chunk in entry.state["chunks"]:
            offsets, sizes = _sizes(chunk.state["offsets"]), _sizes(chunk.state["sizes"])
            assert offsets is not None
            assert sizes is not None
            box = tuple((low, low + size) for low, size in zip(offsets, sizes, strict=True))
            if 0 not in sizes or 0 in shape:
                chunks.append((box, places[key, offsets]))
        dtype = _DTYPES[entry.state["properties"].state[0].name]
        pieces[key] = Found(
            shape=shape, boxes=(whole_box(shape),), dtype=dtype,
            read=functools.partial(_assembled, key, shape, dtype, chunks),
        )  # fmt: skip
    step = values.get("step")
    return Contents(
        form="dcp", pieces=pieces, values=values, keys=told or Keys(),
        step=step if type(step) is int else None,
    )  # fmt: skip


def _sizes(size: Thing | None) -> tuple[int, ...] | None:
    """A ``torch.Size`` of the index."""
    return None if size is None else tuple(int(each) for each in size.args[0])


class _Place:
    """Where a value, or a chunk of a tensor, lies in a file of the folder."""

    def __init__(self, folder: Path, info: Mapping[str, Any]) -> None:
        if info.get("transform_descriptors"):
            raise UnsupportedError(
                f"its files are transformed by {info['transform_descriptors']}",
                hint="save it without extensions",
            )
        self._path = _inside(folder, info["relative_path"])
        self._offset, self._length = int(info["offset"]), int(info["length"])

    def read(self) -> Any:
        """The value; raises `UnsupportedError` for one that would have to be executed."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = io.BytesIO(file.read(self._length))
        try:
            with torch.serialization.safe_globals([io.BytesIO]):
                return torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:
            why = " ".join(str(error).split())[:300]
            raise UnsupportedError(
                f"torch.load(weights_only=True) refuses a value in {self._path.name}: {why}",
                hint="save plain values and tensors; other files of this folder may be damaged",
            ) from error


def _assembled(
    key: str, shape: tuple[int, ...], dtype: torch.dtype, chunks: list[tuple[Box, _Place]]
) -> torch.Tensor:  # fmt: skip
    """A whole tensor of its chunks; raises `MalformedError` where they do not make it up."""
    made = torch.empty(shape, dtype=dtype)
    covered = 0
    if over := clash([box for box, _ in chunks]):
        raise MalformedError(
            f"chunks of {key[:100]!r} overlap: {over[0]} and {over[1]}", rule="source"
        )
    for box, place in chunks:
        target = made[tuple(slice(*side) for side in box)]
        found = place.read()
        if not isinstance(found, torch.Tensor) or (found.shape, found.dtype) != (
            target.shape, dtype
        ):  # fmt: skip
            raise MalformedError(f"a chunk of {key[:100]!r} is another tensor", rule="source")
        target.copy_(found)
        covered += found.numel()
    if covered != math.prod(shape):
        raise MalformedError(
            f"of {key[:100]!r} there are {covered} elements of {math.prod(shape)}", rule="source"
        )
    return made
