"""States: what has to come back together, a parameter with its optimizer's state.

A copy of the one without the other is of no use. So a state's copies are the ranks that hold
both, and how redundant it is follows from those.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from adacheck_store.format.errors import GroupError
from adacheck_store.format.keys import rank_name

from .detector import Finding
from .exchange import Ranks
from .pieces import covers, tile
from .sighting import MAIN_ROLES, Piece

NOBODY: Ranks = frozenset()


class Degree(Enum):
    """How redundant something is: copies on all ranks, on several, on one alone."""

    FULL = "full"
    PARTIAL = "partial"
    NONE = "none"


def degree(copies: Ranks, size: int) -> Degree:
    """The degree of something with these copies, among ``size`` ranks."""
    if len(copies) < 2:
        return Degree.NONE
    return Degree.FULL if len(copies) == size else Degree.PARTIAL


def meet(one: Degree, other: Degree) -> Degree:
    """The paper's rule for a parameter and its optimizer: the lesser of the two.

    It tells the most there may be: two partial sets may have one rank in common, or none.
    """
    order = (Degree.NONE, Degree.PARTIAL, Degree.FULL)
    return min(one, other, key=order.index)


class Keep(Enum):
    """What of a state is kept at every step, so that it can be had again."""

    NOTHING = "nothing"
    PARAMETER = "parameter"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A rank's piece of a parameter, or of all that its optimizer keeps for it."""

    piece: Piece
    copies: Ranks
    nbytes: int
    changes: bool = True
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a rank has of a tensor: parameter (or buffer), optimizer's state, or both."""

    scope: str
    name: str
    shape: tuple[int, ...]
    param: Side | None = None
    optimizer: Side | None = None


class State(NamedTuple):
    """A state of the run: a piece of a tensor, and the ranks that hold it.

    ``copies`` hold all of it; ``param`` and ``optimizer`` are those that hold that side alone,
    empty where there is none. ``why`` says why further copies are not proven. In plans ``tensors``
    may be more than one: so many of equal placement.
    """

    scope: str
    name: str
    piece: Piece
    copies: Ranks
    param: Ranks = NOBODY
    optimizer: Ranks = NOBODY
    param_bytes: int = 0
    optimizer_bytes: int = 0
    changes: bool = True
    why: str = ""
    tensors: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the whole state."""
        return self.param_bytes + self.optimizer_bytes


def keep(state: State, safe: Callable[[Ranks], bool]) -> Keep:
    """What of a state to keep, if sets of copies for which ``safe`` is true need no keeping."""
    if safe(state.copies):
        return Keep.NOTHING
    if not state.optimizer or (safe(state.optimizer) and not safe(state.param)):
        return Keep.PARAMETER
    return Keep.GRADIENT


def kept_bytes(state: State, kept: Keep, gradient_bytes: int) -> int:
    """Bytes that a step costs; ``gradient_bytes`` is those of one element of a gradient."""
    if kept is Keep.NOTHING or not state.changes:
        return 0
    if kept is Keep.PARAMETER:
        return state.param_bytes
    return state.piece.elements * gradient_bytes


def whole_bytes(state: State, safe: Callable[[Ranks], bool]) -> int:
    """Bytes of what a step would have to keep without gradients: the sides that are not safe."""
    if safe(state.copies):
        return 0
    param = 0 if safe(state.param) else state.param_bytes
    optimizer = 0 if safe(state.optimizer) else state.optimizer_bytes
    return param + optimizer or state.nbytes


def holdings(findings: Iterable[Finding]) -> tuple[Holding, ...]:
    """A rank's findings, tensor by tensor: each piece of the optimizer with its parameter."""
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    params: dict[tuple[str, str], dict[Piece, Side]] = defaultdict(dict)
    others: dict[tuple[str, str], dict[Piece, Side]] = defaultdict(dict)
    for finding in findings:
        identity = finding.identity
        place = identity.scope, identity.name
        shapes[place] = identity.shape
        sides = (params if identity.role in MAIN_ROLES else others)[place]
        side = Side(
            piece=identity.piece, copies=finding.copies, nbytes=identity.nbytes,
            changes=finding.changes, why=finding.why,
        )  # fmt: skip
        before = sides.get(identity.piece)
        sides[identity.piece] = side if before is None else _both(before, side)
    found = []
    for (scope, name), shape in shapes.items():
        alone = dict(params[scope, name])
        for piece, optimizer in others[scope, name].items():
            around = [own for own in params[scope, name] if covers(own, piece, shape)]
            param = params[scope, name][around[0]] if around else None
            for own in around:
                alone.pop(own, None)
            found.append(
                Holding(scope=scope, name=name, shape=shape, param=param, optimizer=optimizer)
            )
        found += [Holding(scope=scope, name=name, shape=shape, param=s) for s in alone.values()]
    return tuple(found)


def _both(one: Side, other: Side) -> Side:
    """Two of the optimizer's tensors for one piece: copied where both are."""
    return replace(
        one, copies=one.copies & other.copies, nbytes=one.nbytes + other.nbytes,
        changes=one.changes or other.changes, why=one.why or other.why,
    )  # fmt: skip


_Place = tuple[Piece, Ranks]
_Held = tuple[list[int], list[Holding]]


def states(by_rank: Mapping[int, Iterable[Holding]]) -> tuple[State, ...]:
    """The states of a run from what its ranks hold, each once, in order of name and rank.

    A parameter without optimizer's state here is part of the states that others hold of it,
    where those make it up; else it is a state of its own. Raises `GroupError` where ranks do not
    agree on who holds what.
    """
    tensors: dict[tuple[str, str], _Held] = {}
    for rank in sorted(by_rank):
        for held in by_rank[rank]:
            ranks, holdings_ = tensors.setdefault((held.name, held.scope), ([], []))
            ranks.append(rank)
            holdings_.append(held)
    common = _Common()
    return tuple(state for place in sorted(tensors) for state in _states_of(tensors[place], common))


class _Common(dict[tuple[int, int], Ranks]):
    """The common part of two sets of ranks, by their ids: the same few objects, a million times."""

    def of(self, held: Holding) -> Ranks:
        """The ranks that hold what this holding is of: both sides, where there are both."""
        param, optimizer = held.param, held.optimizer
        if param is None or optimizer is None:
            main = optimizer or param
            assert main is not None
            return main.copies
        key = id(param.copies), id(optimizer.copies)
        found = self.get(key)
        if found is None:
            both = param.copies & optimizer.copies
            same = (each for each in (param.copies, optimizer.copies) if each == both)
            found = self[key] = next(same, both)
        return found


def _states_of(tensor: _Held, common: _Common) -> list[State]:
    """The states of one tensor, from all ranks that hold something of it."""
    found: dict[_Place, State] = {}
    seen: dict[_Place, int] = defaultdict(int)
    lone: dict[_Place, Holding] = {}
    for rank, held in zip(*tensor, strict=True):
        copies = common.of(held)
        main = held.optimizer or held.param
        if main is None:
            continue
        place = main.piece, copies
        if held.optimizer is None or held.param is None:
            lone.setdefault(place, held)
            continue
        seen[place] += rank in copies
        if place not in found:
            found[place] = _state(held, *place)
    if lone:
        made: dict[Ranks, set[Piece]] = defaultdict(set)
        for state in found.values():
            made[state.param].add(state.piece)
        for place, held in lone.items():
            part = held.optimizer is None and tile(place[0], made.get(place[1], ()), held.shape)
            if not part:
                found[place] = _state(held, *place)
                seen[place] = len(_holders(tensor, place, held.optimizer is None) & place[1])
    for place, count in seen.items():
        if count != len(place[1]):
            raise GroupError(
                f"{found[place].name}: {count} ranks say that it is on {len(place[1])}: "
                f"{sorted(place[1])[:20]}",
                hint="run the same version of adacheck-store on all ranks",
            )
    size = min(map(math.prod, {held.shape for held in tensor[1]}), default=0)
    return sorted(_scoped(list(found.values()), size), key=_order)


def _holders(tensor: _Held, place: _Place, params: bool) -> Ranks:
    """Who holds this side, the parameter or the optimizer's, with the other or without."""
    sides = (
        (rank, held.param if params else held.optimizer) for rank, held in zip(*tensor, strict=True)
    )
    return frozenset(rank for rank, side in sides if side and (side.piece, side.copies) == place)


def _state(held: Holding, piece: Piece, copies: Ranks) -> State:
    """The state that a holding is of."""
    param, optimizer = held.param, held.optimizer
    share = param.nbytes if param else 0
    if param is not None and param.piece != piece:
        share = param.nbytes * piece.elements // (param.piece.elements or 1)
    return State(
        scope=held.scope, name=held.name, piece=piece, copies=copies,
        param=param.copies if param else NOBODY, param_bytes=share,
        optimizer=optimizer.copies if optimizer else NOBODY,
        optimizer_bytes=optimizer.nbytes if optimizer else 0,
        changes=bool((param and param.changes) or (optimizer and optimizer.changes)),
        why=(param and param.why) or (optimizer and optimizer.why) or "",
    )  # fmt: skip


def _scoped(found: list[State], size: int) -> list[State]:
    """Where one name means several tensors, each state gets the scope of its first rank.

    So it is where pieces have more elements together than one tensor, of ``size`` or more, has;
    where one piece means two contents only these get it.
    """
    count = Counter(state.piece for state in found)
    one = sum(piece.elements for piece in count) <= size
    if one and len(count) == len(found):
        return found
    return [state if one and count[state.piece] == 1 else alone(state) for state in found]


def alone(state: State) -> State:
    """The state under a scope of its own: what its first rank has by that name."""
    own = rank_name(min(state.copies))
    return state._replace(scope=f"{state.scope}.{own}" if state.scope else own)


def _order(state: State) -> tuple[int, str, Sequence[int]]:
    return min(state.copies), state.scope, state.piece.flat or (0, 0)
