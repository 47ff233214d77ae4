"""The strategy of a plan: which rank holds which piece of which tensor, as states of the run."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from adacheck_store.format.errors import UsageError
from adacheck_store.redundancy.exchange import Ranks
from adacheck_store.redundancy.sighting import Piece
from adacheck_store.redundancy.states import Holding, Side, State

from .plan_models import Model, Tensor

STRATEGIES = ("ddp", "zero1", "zero3", "hsdp", "tp-fsdp", "ep-zero1")

Cells = tuple[Ranks, ...]
"""The ranks that hold the first flat shard of a tensor, the second, and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How training is made parallel.

    ``shard`` is the ranks of one replica (hsdp), ``tp`` the ranks that cut a layer (tp-fsdp, and
    zero1 and ep-zero1 if given), ``ep`` the groups that experts are dealt to (ep-zero1), ``pp`` the
    stages of a pipeline (any, if given), in each of which the rest goes on. Neighbours by rank are
    in one of them, first of tp, then of ep or shard, then of a stage.
    """

    kind: str
    shard: int = 0
    tp: int = 0
    ep: int = 0
    pp: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """Bytes of one element: of the parameter, its optimizer's state, the gradient that is kept."""

    param: int
    optimizer: int
    gradient: int


OPTIMIZERS = {
    "mixed": (2, 12, 2), "fp32": (4, 8, 4), "amsgrad": (4, 12, 4), "momentum": (4, 4, 4),
    "sgd": (4, 0, 4),
}  # fmt: skip
"""Bytes of a parameter, its optimizer's state and its gradient, all of 4 each but in ``mixed``.

That is AdamW with half parameters and gradients, masters of 4 bytes and two moments; ``fp32`` is
AdamW, ``amsgrad`` that with a third moment; ``momentum`` is SGD with one, RMSprop or Adagrad.
"""


def items(optimizer: str, gradients: str) -> Items:
    """Of an optimizer by name; gradients kept ``lossless``, or as ``bf16``."""
    if optimizer not in OPTIMIZERS:
        raise UsageError(f"optimizer {optimizer!r}", hint=f"one of {', '.join(OPTIMIZERS)}")
    if gradients not in ("lossless", "bf16"):
        raise UsageError(f"gradients {gradients!r}", hint="lossless or bf16")
    param, state, gradient = OPTIMIZERS[optimizer]
    return Items(param=param, optimizer=state, gradient=2 if gradients == "bf16" else gradient)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A tensor, or a rank's cut of it by tensor parallelism, and who holds its flat shards."""

    name: str
    scope: str
    elements: int
    params: Cells
    optimizer: Cells


def place(model: Model, strategy: Strategy, world: int) -> tuple[Placed, ...]:
    """Where the tensors of a model lie among ``world`` ranks.

    Raises `UsageError` for degrees that do not fit the ranks or the model.
    """
    _check(model, strategy, world)
    rules = _Rules(model, strategy, world)
    return tuple(placed for tensor in model.tensors for placed in rules.of(tensor))


class _Rules:
    """Cells by strategy; the same objects for all tensors that are placed alike."""

    def __init__(self, model: Model, strategy: Strategy, world: int) -> None:
        self._strategy = strategy
        self._tp, self._ep, self._pp = strategy.tp or 1, strategy.ep or 1, strategy.pp or 1
        self._width = world // self._pp
        self._layers = stages_of(model, self._pp)
        self._known: dict[tuple[int, int, int], tuple[Cells, Cells]] = {}

    def of(self, tensor: Tensor) -> Iterator[Placed]:
        """A tensor, or its cuts."""
        stage = self._layers[tensor.name]
        group = tensor.expert % self._ep if tensor.expert >= 0 and self._ep > 1 else -1
        cuts = range(self._tp) if self._tp > 1 and tensor.cut >= 0 else (-1,)
        for cut in cuts:
            key = stage, group, cut
            if key not in self._known:
                self._known[key] = self._cells(*key)
            params, optimizer = self._known[key]
            yield Placed(
                name=tensor.name, scope="" if cut < 0 else f"tp{cut}",
                elements=tensor.elements // len(cuts), params=params, optimizer=optimizer,
            )  # fmt: skip

    def _cells(self, stage: int, group: int, cut: int) -> tuple[Cells, Cells]:
        """Of what is of one stage, one group of experts (-1: all) and one cut (-1: whole)."""
        members = [
            self._width * stage + at
            for at in range(self._width)
            if (group < 0 or at // self._tp % self._ep == group)
            and (cut < 0 or at % self._tp == cut)
        ]
        kind, tp = self._strategy.kind, self._tp if cut < 0 else 1
        shards = {
            "zero3": len(members), "hsdp": self._strategy.shard, "tp-fsdp": len(members) // tp
        }.get(kind, 1)  # fmt: skip
        params = cells(members, shards, near=kind == "tp-fsdp")
        if kind in ("zero1", "ep-zero1"):
            return params, cells(members, len(members))
        return params, params


def stages_of(model: Model, stages: int) -> dict[str, int]:
    """The stage of each tensor: layers dealt out evenly; what is before them is in the first.

    What comes after them is in the last. Raises `UsageError` for fewer layers than stages.
    """
    found = {tensor.name: re.search(r"(?:^|\.)(\d+)\.", tensor.name) for tensor in model.tensors}
    numbers = {name: int(match[1]) for name, match in found.items() if match}
    layers = 1 + max(numbers.values(), default=-1)
    if stages > 1 and layers < stages:
        raise UsageError(
            f"{model.name} has {layers} numbered layers, --pp is {stages}",
            hint="give a --pp of at most as many",
        )
    placed, last = {}, 0
    for name in found:
        if name in numbers:
            last = numbers[name] * stages // layers
        placed[name] = last
    return placed


def cells(members: Sequence[int], shards: int, *, near: bool = False) -> Cells:
    """Members dealt to shards in turn; with ``near`` each shard's are neighbours."""
    copies = len(members) // shards
    if near:
        return tuple(frozenset(members[i * copies : (i + 1) * copies]) for i in range(shards))
    return tuple(frozenset(members[i::shards]) for i in range(shards))


def _check(model: Model, strategy: Strategy, world: int) -> None:
    kind = strategy.kind
    if kind not in STRATEGIES:
        raise UsageError(f"strategy {kind!r}", hint=f"one of {', '.join(STRATEGIES)}")
    own = {"hsdp": "shard", "tp-fsdp": "tp", "ep-zero1": "ep"}.get(kind, "")
    more = ("tp", "pp") if kind in ("zero1", "ep-zero1") else ("pp",)
    for name in ("pp", "tp", "shard", "ep"):
        degree = getattr(strategy, name)
        if name not in (own, *more) and degree:
            raise UsageError(f"{kind} has no --{name}", hint="leave it out, or name the strategy")
        if (name == own and degree < 1) or (degree and (degree < 0 or world % degree)):
            raise UsageError(
                f"{kind} on {world} ranks with --{name} {degree}",
                hint=f"give a --{name} that divides the ranks{' of a stage' * bool(strategy.pp)}",
            )
        world //= degree or 1
    if strategy.tp and not model.cuts:
        raise UsageError(
            f"{model.name} does not say how tensor parallelism cuts it",
            hint="give its dimensions as a JSON file instead of a factory",
        )
    for tensor in model.tensors:
        if strategy.tp and tensor.cut >= 0 and tensor.shape[tensor.cut] % strategy.tp:
            raise UsageError(
                f"{tensor.name} of {tensor.shape} is not cut evenly by --tp {strategy.tp}",
                hint="give a --tp that divides it",
            )
    experts = 1 + max(tensor.expert for tensor in model.tensors)
    if kind == "ep-zero1" and (not experts or experts % strategy.ep):
        raise UsageError(
            f"{model.name} has {experts} experts, --ep is {strategy.ep}",
            hint="give a model with experts and an --ep that divides them",
        )


def shard_range(elements: int, at: int, of: int) -> tuple[int, int]:
    """The flat range of one shard; shards differ by one element at most."""
    return at * elements // of, (at + 1) * elements // of


def holdings(placed: Iterable[Placed], item: Items) -> dict[int, list[Holding]]:
    """What every rank would find itself to hold: what `states` takes."""
    found: dict[int, list[Holding]] = defaultdict(list)
    for each in placed:
        params = _sides(each.params, each.elements, item.param)
        optimizer = _sides(each.optimizer, each.elements, item.optimizer)
        for rank in sorted(params | optimizer):
            found[rank].append(
                Holding(
                    scope=each.scope, name=each.name, shape=(each.elements,),
                    param=params.get(rank), optimizer=optimizer.get(rank),
                )
            )  # fmt: skip
    return found


def _sides(shards: Cells, elements: int, item: int) -> dict[int, Side]:
    found = {}
    for at, copies in enumerate(shards):
        start, stop = shard_range(elements, at, len(shards))
        if stop > start:
            side = Side(
                piece=Piece(flat=(start, stop)), copies=copies, nbytes=(stop - start) * item
            )
            found.update(dict.fromkeys(copies, side))
    return found


def merged(placed: Iterable[Placed], item: Items) -> Iterator[State]:
    """The states of the same run, those of equal placement as one: for models of any size.

    Exact, because shards of tensors that are placed alike have the same holders, and what a step
    keeps of a state is in proportion to its elements.
    """
    alike: dict[tuple[Cells, Cells], Counter[int]] = defaultdict(Counter)
    names: dict[tuple[Cells, Cells], dict[str, None]] = defaultdict(dict)
    for each in placed:
        alike[each.params, each.optimizer][each.elements] += 1
        names[each.params, each.optimizer][each.name] = None
    for (params, optimizer), sizes in alike.items():
        of = len(optimizer)
        first, *others = names[params, optimizer]
        name = f"{first} and {len(others)} alike" if others else first
        for at, copies in enumerate(optimizer):
            total = tensors = 0
            for elements, count in sizes.items():
                start, stop = shard_range(elements, at, of)
                total += count * (stop - start)
                tensors += count if stop > start else 0
            if total:
                yield State(
                    scope="", name=name, piece=Piece(flat=(0, total)), copies=copies,
                    param=params[at * len(params) // of], optimizer=copies,
                    param_bytes=total * item.param, optimizer_bytes=total * item.optimizer,
                    tensors=tensors,
                )  # fmt: skip
