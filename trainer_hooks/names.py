"""Canonical names of a model's tensors, the same whatever wraps the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from adacheck_store.format.errors import NameRefusedError, UnsupportedError

from .deepspeed import Masters
from .shards import is_sharded, local, refusal

Model = torch.nn.Module | Sequence[torch.nn.Module]

_WRAPPERS = (DataParallel, DistributedDataParallel)


@dataclass(slots=True, eq=False)
class NamedTensor:
    """A parameter or buffer by its canonical name.

    ``owner[key]`` is the tensor as it stands now: modules replace buffers by assignment. A
    sharded one is ``held``: FSDP2 puts the whole tensor in its place during forward and backward.
    ``aliases`` are the further names of a tied tensor, in the order of the walk. ``elsewhere`` if
    another rank may train it, and what it sends is written here where no version counter sees it.
    """

    name: str
    owner: MutableMapping[str, Any]
    key: str
    parameter: bool
    aliases: tuple[str, ...] = ()
    held: torch.Tensor | None = None
    elsewhere: bool = False

    @property
    def local(self) -> torch.Tensor:
        """What this rank holds of the tensor: a plain one."""
        return local(self.tensor)

    @property
    def current(self) -> torch.Tensor | None:
        """The tensor that stands there now, if one does."""
        return self.owner.get(self.key) if self.held is None else self.held

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that stands there now; raises `UnsupportedError` if there is none."""
        found = self.current
        if not isinstance(found, torch.Tensor):
            raise UnsupportedError(
                f"tensor {self.name!r} is gone from the model",
                hint="the set of tensors cannot change during a run: start a new run",
            )
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """The name and the aliases."""
        return (self.name, *self.aliases)


def modules_of(model: Model) -> list[torch.nn.Module]:
    """The modules of a model given as one module or as several."""
    if isinstance(model, torch.nn.Module):
        return [model]
    modules = list(model) if isinstance(model, Sequence) else []
    if not modules or not all(isinstance(item, torch.nn.Module) for item in modules):
        raise UnsupportedError(
            f"a model of type {type(model).__qualname__}", hint="give a module or a list of modules"
        )
    return modules


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside torch.compile, DataParallel and DistributedDataParallel."""
    while True:
        if type(module).__name__ == "FullyShardedDataParallel":
            raise UnsupportedError(
                "FullyShardedDataParallel (FSDP1) is not supported",
                hint="use FSDP2 (torch.distributed.fsdp.fully_shard)",
            )
        inner = module._modules.get("_orig_mod")
        if inner is None and isinstance(module, _WRAPPERS):
            inner = module.module
        if inner is None:
            return module
        module = inner


def walk(module: torch.nn.Module, prefix: str = "") -> Iterable[tuple[str, torch.nn.Module]]:
    """(path, module) of every module below, wrappers left out; shared modules come again."""
    stack = [(prefix, unwrapped(module), frozenset[int]())]
    while stack:
        path, here, above = stack.pop()
        if id(here) in above:
            raise UnsupportedError(f"module {path!r} contains itself", hint="break the cycle")
        yield path, here
        inside = above | {id(here)}
        children = [
            (f"{path}{name}.", unwrapped(child), inside)
            for name, child in here._modules.items()
            if child is not None
        ]
        stack.extend(reversed(children))


def named_tensors(
    model: Model,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    names: Mapping[str, torch.Tensor] | None = None, *, dense: bool = True,
) -> list[NamedTensor]:  # fmt: skip
    """Every parameter and buffer of the model and every tensor of ``names``, each once.

    Tied tensors appear under their first name with the others as aliases. Raises
    `NameRefusedError` for two tensors of one name, `UnsupportedError` for a tensor that cannot
    be kept, for one that gets sparse gradients (if they must be ``dense``), and for a parameter
    of the optimizer that has no name.
    """
    by_id: dict[int, NamedTensor] = {}
    taken: dict[str, int] = {}
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    halves = {key for each in given if isinstance(each, Masters) for key in each.zero.halves}
    for module in modules_of(model):
        for path, part in walk(module):
            if dense:
                _check_module(path, part)
            if hasattr(part, "_get_fsdp_state"):  # after an evaluation it has the whole tensors
                part.reshard()  # type: ignore[operator]
            places: tuple[tuple[dict[str, Any], bool], ...]
            places = ((part._parameters, True), (part._buffers, False))
            for owner, parameter in places:
                for name, value in owner.items():
                    if id(value) in halves:
                        continue  # they follow from their masters
                    _add(by_id, taken, f"{path}{name}", value, owner, name, parameter)
    extra = dict(names or {})
    for name, value in extra.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise NameRefusedError(f"names={{{name!r}: ...}}", hint="map names to tensors")
        _add(by_id, taken, name, value, extra, name, True)
    found = list(by_id.values())
    for number, optimizer in enumerate(given):
        _check_optimizer("the optimizer" if len(given) == 1 else f"optimizer {number}",
                         optimizer, by_id)  # fmt: skip
    for item in found:
        _check_kind(item)
    return found


def _check_module(path: str, module: torch.nn.Module) -> None:
    if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
        raise UnsupportedError(
            f"module {path.rstrip('.')!r} has sparse gradients", hint="use sparse=False"
        )


def _add(
    by_id: dict[int, NamedTensor], taken: dict[str, int], name: str, value: torch.Tensor | None,
    owner: MutableMapping[str, Any], key: str, parameter: bool,
) -> None:  # fmt: skip
    if value is None:
        return
    if not name:
        raise NameRefusedError("a tensor with an empty name", hint="name it")
    if taken.setdefault(name, id(value)) != id(value):
        raise NameRefusedError(
            f"two tensors are called {name!r}",
            hint="rename one; modules alike go into a torch.nn.ModuleDict, which gives them names",
        )
    known = by_id.get(id(value))
    if known is None:
        held = value if is_sharded(value) else None
        by_id[id(value)] = NamedTensor(name, owner, key, parameter, held=held)
    elif name not in known.names:
        known.aliases = (*known.aliases, name)


def _check_optimizer(
    which: str, optimizer: torch.optim.Optimizer, by_id: Mapping[int, NamedTensor]
) -> None:
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            if id(param) not in by_id:
                raise UnsupportedError(
                    f"parameter {index} of group {number} (shape {tuple(param.shape)}) of {which} "
                    "is not in the model",
                    hint="give it a name: attach(..., names={'some.name': tensor})",
                )
            if not by_id[id(param)].parameter:
                raise UnsupportedError(
                    f"buffer {by_id[id(param)].name!r} is trained by {which}",
                    hint="make it a Parameter",
                )


def _check_kind(item: NamedTensor) -> None:
    tensor = item.local
    kind, hint = refusal(item.tensor), "shard with Shard or Replicate along each mesh dimension"
    if kind:
        pass
    elif torch.nn.parameter.is_lazy(tensor):
        kind, hint = "is not initialised yet", "run a forward pass before attach"
    elif tensor.is_meta:
        kind, hint = "is on the meta device", "materialise the model before attach"
    elif tensor.layout != torch.strided:
        kind, hint = f"has layout {tensor.layout}", "use dense tensors"
    elif tensor.is_quantized:
        kind, hint = "is quantized", "use dense tensors"
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and (
        hasattr(type(tensor), "__torch_dispatch__")
        and type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    ):
        kind, hint = f"is a {type(tensor).__qualname__}", "use plain tensors"
    if kind:
        raise UnsupportedError(f"tensor {item.name!r} {kind}", hint=hint)
