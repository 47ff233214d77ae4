"""The strategy of a plan: which rank holds which piece of which tensor, as states of the run."""

from __future__ import annotations

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

    ``shard`` is the ranks of one replica (hsdp), ``tp`` the ranks that cut a layer (tp-fsdp),
    ``ep`` the groups that experts are dealt to (ep-zero1). Neighbours by rank are in one of them.
    """

    kind: str
    shard: int = 0
    tp: int = 0
    ep: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """Bytes of one element: of the parameter, its optimizer's state, the gradient that is kept."""

    param: int
    optimizer: int
    gradient: int


OPTIMIZERS = {"mixed": (2, 12, 2), "fp32": (4, 8, 4)}
"""AdamW: half parameters and gradients with masters of 4 bytes and two moments; or all of 4."""


def items(optimizer: str, gradients: str) -> Items:
    """Of AdamW ``mixed`` or ``fp32``; gradients kept ``lossless``, or as ``bf16``."""
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
    rules = _Rules(strategy, world)
    return tuple(placed for tensor in model.tensors for placed in rules.of(tensor))


class _Rules:
    """Cells by strategy; the same objects for all tensors that are placed alike."""

    def __init__(self, strategy: Strategy, world: int) -> None:
        everyone = range(world)
        kind, tp, ep = strategy.kind, strategy.tp or 1, strategy.ep or 1
        shards = {"zero3": world, "hsdp": strategy.shard, "tp-fsdp": world // tp}.get(kind, 1)
        self._params = cells(everyone, shards, near=kind == "tp-fsdp")
        zero1 = kind in ("zero1", "ep-zero1")
        self._optimizer = cells(everyone, world) if zero1 else self._params
        self._cut = [cells(range(at, world, tp), world // tp) for at in range(tp)]
        groups = [range(at, world, ep) for at in range(ep)] if strategy.ep else []
        self._experts = [(cells(group, 1), cells(group, world // ep)) for group in groups]

    def of(self, tensor: Tensor) -> Iterator[Placed]:
        """A tensor, or its cuts."""
        if len(self._cut) > 1 and tensor.cut >= 0:
            for at, found in enumerate(self._cut):
                yield Placed(
                    name=tensor.name, scope=f"tp{at}", elements=tensor.elements // len(self._cut),
                    params=found, optimizer=found,
                )  # fmt: skip
            return
        params, optimizer = self._params, self._optimizer
        if self._experts and tensor.expert >= 0:
            params, optimizer = self._experts[tensor.expert % len(self._experts)]
        yield Placed(
            name=tensor.name, scope="", elements=tensor.elements, params=params,
            optimizer=optimizer,
        )  # fmt: skip


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
    for name in ("shard", "tp", "ep"):
        degree = getattr(strategy, name)
        if name == own and (degree < 1 or world % degree):
            raise UsageError(
                f"{kind} on {world} ranks with --{name} {degree}",
                hint=f"give a --{name} that divides the ranks",
            )
        if name != own and degree:
            raise UsageError(f"{kind} has no --{name}", hint="leave it out, or name the strategy")
    if kind == "tp-fsdp" and not model.cuts:
        raise UsageError(
            f"{model.name} does not say how tensor parallelism cuts it",
            hint="give its dimensions as a JSON file instead of a factory",
        )
    for tensor in model.tensors:
        if kind == "tp-fsdp" and tensor.cut >= 0 and tensor.shape[tensor.cut] % strategy.tp:
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


def _range(elements: int, at: int, of: int) -> tuple[int, int]:
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
        start, stop = _range(elements, at, len(shards))
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
    for each in placed:
        alike[each.params, each.optimizer][each.elements] += 1
    for number, ((params, optimizer), sizes) in enumerate(alike.items()):
        of = len(optimizer)
        for at, copies in enumerate(optimizer):
            total = 0
            for elements, count in sizes.items():
                start, stop = _range(elements, at, of)
                total += count * (stop - start)
            if total:
                yield State(
                    scope="", name=f"tensors{number}", piece=Piece(flat=(0, total)), copies=copies,
                    param=params[at * len(params) // of], optimizer=copies,
                    param_bytes=total * item.param, optimizer_bytes=total * item.optimizer,
                )  # fmt: skip
