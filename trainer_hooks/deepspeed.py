"""DeepSpeed's ZeRO: flat partitions of master weights, each as a tensor with its optimizer.

Each rank steps its partitions by an optimizer inside, one call for each, which is given the
partition for that call alone. The model's own parameters are halves of all ranks' masters; they
follow from these, so they are not kept: a restore makes them anew, and a base checks that they do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed

from adacheck_store.format.errors import ModelMismatchError, OrderError, UnsupportedError

STAGES = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")
"""Classes of ``engine.optimizer``: stages 1 and 2, and stage 3."""

TREE = "partitions"
"""Name of the tree in the extra."""

MOVED = ("cpu_offload", "offload_optimizer", "offload_param", "swap_optimizer", "zenflow")
"""What moves masters or their state about, and is not followed."""

_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, Zero] = weakref.WeakKeyDictionary()


class GroupView(MutableMapping[str, Any]):
    """A parameter group of the optimizer inside, with one partition as its parameter."""

    def __init__(self, group: dict[str, Any], flat: torch.Tensor) -> None:
        self._group, self._params = group, [flat]

    def __getitem__(self, key: str) -> Any:
        """A value of the group."""
        return self._params if key == "params" else self._group[key]

    def __setitem__(self, key: str, value: Any) -> None:
        """Set a value of the group; its parameter stays."""
        if key != "params":
            self._group[key] = value

    def __delitem__(self, key: str) -> None:
        """Drop a value of the group."""
        del self._group[key]

    def __iter__(self) -> Iterator[str]:
        """The group's keys."""
        return iter(self._group)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._group)


class StateView(MutableMapping[torch.Tensor, Any]):
    """What the optimizer inside keeps for one partition."""

    def __init__(self, state: MutableMapping[torch.Tensor, Any], flat: torch.Tensor) -> None:
        self._state, self._flat = state, flat

    def __getitem__(self, key: torch.Tensor) -> Any:
        """The state of the partition; it has none of other tensors."""
        if key is not self._flat or key not in self._state:
            raise KeyError(key)
        return self._state[key]

    def __setitem__(self, key: torch.Tensor, value: Any) -> None:
        """Give it another state."""
        self._state[key] = value

    def __delitem__(self, key: torch.Tensor) -> None:
        """Drop its state."""
        del self._state[key]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """The partition, if there is a state."""
        return iter([self._flat] if self._flat in self._state else [])

    def __len__(self) -> int:
        """1 if there is a state, else 0."""
        return int(self._flat in self._state)


class Masters(torch.optim.Optimizer):
    """One partition of master weights as an optimizer of its own; it is not stepped by itself.

    ``rows`` say what it is made of: a parameter's name, where in it, how many elements, and where
    in the partition.
    """

    def __init__(self, zero: Zero, number: int, flat: torch.Tensor, group: dict[str, Any]) -> None:
        super().__init__([flat], {})
        self.zero, self.number, self.flat = zero, number, flat
        self.state: Any = StateView(zero.inner.state, flat)
        self.param_groups: Any = [GroupView(group, flat)]
        self.rows = zero.rows(number)
        zero.inner.register_step_pre_hook(self._pre)
        zero.inner.register_step_post_hook(self._post)

    @property
    def name(self) -> str:
        """The partition's name."""
        return f"zero.{self.number}"

    def _pre(self, inner: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_stepped():
            for hook in tuple(self._optimizer_step_pre_hooks.values()):
                hook(self, args, kwargs)

    def _post(self, inner: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_stepped():
            for hook in tuple(self._optimizer_step_post_hooks.values()):
                hook(self, args, kwargs)

    def _is_stepped(self) -> bool:
        groups = self.zero.inner.param_groups
        return any(param is self.flat for group in groups for param in group["params"])


class Zero:
    """An engine's optimizer, taken apart into partitions."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._zero = engine, engine.optimizer
        self.inner: torch.optim.Optimizer = self._zero.optimizer
        self._third = type(self._zero).__name__ == STAGES[1]
        names = engine.module.named_parameters(remove_duplicate=False)
        self._names = {id(param): name for name, param in names}
        flats = (
            self._zero.fp32_partitioned_groups_flat
            if self._third else self._zero.single_partition_of_fp32_groups
        )  # fmt: skip
        group_of = self._zero.sub_group_to_group_id if self._third else range(len(flats))
        self.masters = [
            Masters(self, number, flat, self.inner.param_groups[group_of[number]])
            for number, flat in enumerate(flats)
        ]
        groups = self._zero.fp16_groups if self._third else self._zero.bit16_groups
        self.halves = {id(param) for group in groups for param in group}
        for param in engine.module.parameters():
            if self._third and id(param) not in self.halves:
                raise UnsupportedError(
                    f"parameter {self._names[id(param)]!r} is partitioned by DeepSpeed, and no "
                    "optimizer has it", hint="use ZeRO stage 1 or 2 where parameters are frozen",
                )  # fmt: skip

    def rows(self, number: int) -> list[list[Any]]:
        """What a partition is made of, see `Masters`."""
        found, offset = [], 0
        if self._third:
            for param in self._zero.fp16_groups[number]:
                size = param.ds_tensor.ds_numel
                at = torch.distributed.get_rank(param.ds_process_group) * size
                count = max(min(size, param.ds_numel - at), 0)
                found.append([self._names[id(param)], at, count, offset])
                offset += size
            return found
        size = int(self._zero.partition_size[number])
        start = self._rank(number) * size
        for param in self._zero.round_robin_bit16_groups[number]:
            low, high = max(offset, start), min(offset + param.numel(), start + size)
            if low < high:
                found.append([self._names[id(param)], low - offset, high - low, low - start])
            offset += param.numel()
        return found

    def _rank(self, number: int) -> int:
        return torch.distributed.get_rank(self._zero.real_dp_process_group[number])

    def _half(self, number: int) -> torch.Tensor:
        """This rank's partition of the halves."""
        found: torch.Tensor = (
            self._zero.fp16_partitioned_groups_flat[number]
            if self._third
            else self._zero.parallel_partitioned_bit16_groups[number][self._rank(number)]
        )
        return found

    def refresh(self) -> None:
        """Make the halves of all masters anew; on all ranks together."""
        if not self._third:
            self._zero.update_lp_params()
            return
        self._zero._partition_all_parameters()
        for each in self.masters:
            self._half(each.number).data.copy_(each.flat.data)
            self._zero._unflatten_partitioned_parameters(each.number)
        kept = self._zero.persistent_parameters
        if kept:
            kept[0].all_gather(kept)

    def check_between_steps(self) -> None:
        """Raise `OrderError` between micro-batches: what they have accumulated cannot be kept."""
        steps = self._engine.gradient_accumulation_steps()
        if self._engine.micro_steps % steps:
            raise OrderError(
                f"a boundary {self._engine.micro_steps % steps} micro-batches after a step: what "
                "DeepSpeed has accumulated cannot be kept",
                hint=f"call end_step() after every {steps} calls of engine.step()",
            )

    def check(self) -> None:
        """Raise `UnsupportedError` where halves are not what follows from the masters."""
        for each in self.masters:
            half = self._half(each.number)
            made = each.flat.detach().to(half.dtype)
            for name, _, count, offset in each.rows:  # what is between them is nobody's
                here = slice(offset, offset + count)
                if not torch.equal(half[here].view(torch.uint8), made[here].view(torch.uint8)):
                    raise UnsupportedError(
                        f"parameter {name!r} is not what follows from its master weights",
                        hint="change master weights, not what DeepSpeed makes of them",
                    )


def _refuse(zero: Any) -> None:
    name = type(zero).__name__
    why = "" if name in STAGES else f"is a {name}"
    moved = [each for each in MOVED if getattr(zero, each, False)]
    if not why and moved:
        why = f"has {moved[0]}"
    if not why and zero.dtype == torch.float16:
        why = "trains in fp16, by a loss scale that is not kept"
    if why:
        raise UnsupportedError(
            f"DeepSpeed's optimizer {why}",
            hint="use ZeRO stage 1, 2 or 3 in bf16, without offloading",
        )


def taken_apart(model: Any, optimizer: Any, names: Any) -> tuple[Any, Any, Any]:
    """The module, its partitions' optimizers and these by name, of an engine and its optimizer.

    What is none of DeepSpeed's is handed back as it is.
    """
    if not (_is_of(model, "deepspeed") or _is_of(optimizer, "deepspeed")):
        return model, optimizer, names
    stepped: Any = getattr(model, "optimizer", None)
    if stepped is None or optimizer is not stepped:
        raise UnsupportedError(
            "half of a DeepSpeed engine", hint="attach(engine, engine.optimizer, ...)"
        )
    _refuse(stepped)
    zero = _known.get(stepped.optimizer)
    if zero is None:
        zero = _known[stepped.optimizer] = Zero(model)
    found = {each.name: each.flat for each in zero.masters}
    return model.module, list(zero.masters), {**found, **(names or {})}


def _is_of(value: Any, package: str) -> bool:
    return type(value).__module__.partition(".")[0] == package


def partitions(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """What each partition is made of, as a tree of the extra; nothing without DeepSpeed.

    Raises `OrderError` between micro-batches.
    """
    masters = [each for each in optimizers if isinstance(each, Masters)]
    for each in masters:
        each.zero.check_between_steps()
    return {TREE: {each.name: each.rows for each in masters}} if masters else {}


def check_partitions(tree: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise `ModelMismatchError` if partitions are not made of what they were made of."""
    theirs, mine = tree.get(TREE, {}), partitions(optimizers).get(TREE, {})
    for name in sorted({*theirs, *mine}):
        before, now = (each.get(name, []) for each in (theirs, mine))
        if before != now:
            at = next((n for n, pair in enumerate(zip(before, now, strict=False))
                       if pair[0] != pair[1]), min(len(before), len(now)))  # fmt: skip
            was, here = (str(rows[at : at + 1])[1:-1] or "no more" for rows in (before, now))
            raise ModelMismatchError(
                f"partition {name!r} is made of other pieces: the chain has {was}, this run {here} "
                "(parameter, from where in it, elements, where in the partition)",
                hint="use the stage, groups and ranks of the run that wrote the chain",
            )


def check_derived(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise `UnsupportedError` where halves do not follow from masters."""
    for zero in {each.zero for each in optimizers if isinstance(each, Masters)}:
        zero.check()
