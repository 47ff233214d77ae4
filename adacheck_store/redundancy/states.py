"""States: what has to come back together, a parameter with its optimizer's state.

A copy of the one without the other is of no use. So a state's copies are the ranks that hold
both, and how redundant it is follows from those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

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


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A state of the run: a piece of a tensor, and the ranks that hold it.

    ``copies`` hold all of it; ``param`` and ``optimizer`` are those that hold that side alone,
    empty where there is none. ``why`` says why further copies are not proven.
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


_Place = tuple[str, str, Piece, Ranks]


def states(by_rank: Mapping[int, Sequence[Holding]]) -> tuple[State, ...]:
    """The states of a run from what its ranks hold, each once, in order of name and rank.

    A parameter without optimizer's state here is part of the states that others hold of it,
    where those make it up; else it is a state of its own. Raises `GroupError` where ranks do not
    agree on who holds what.
    """
    found: dict[_Place, State] = {}
    named: dict[_Place, int] = defaultdict(int)
    lone: dict[_Place, Holding] = {}
    for rank in sorted(by_rank):
        for held in by_rank[rank]:
            if held.optimizer is not None:
                place = _place(held)
                named[place] += rank in place[3]
                if place not in found:
                    found[place] = _state(held, place)
            elif held.param is not None:
                lone.setdefault(_place(held), held)
    pieces: dict[tuple[str, str, Ranks], set[Piece]] = defaultdict(set)
    for state in found.values() if lone else ():
        pieces[state.scope, state.name, state.param].add(state.piece)
    for (scope, name, piece, copies), held in list(lone.items()):
        if tile(piece, pieces.get((scope, name, copies), ()), held.shape):
            del lone[scope, name, piece, copies]
    for place, ranks in _holders(by_rank, lone).items():
        named[place] = len(ranks & place[3])
        found[place] = _state(lone[place], place)
    for (_, name, _, copies), count in named.items():
        if count != len(copies):
            raise GroupError(
                f"{name}: {count} ranks say that it is on {len(copies)}: {sorted(copies)[:20]}",
                hint="run the same version of adacheck-store on all ranks",
            )
    return tuple(sorted(_scoped(found.values()), key=_order))


def _place(held: Holding) -> _Place:
    """Which state a holding is of: that of its optimizer's piece, where it has one."""
    param, optimizer = held.param, held.optimizer
    main = optimizer or param
    assert main is not None
    copies = main.copies if param is None or optimizer is None else param.copies & main.copies
    return held.scope, held.name, main.piece, copies


def _holders(
    by_rank: Mapping[int, Sequence[Holding]], lone: Mapping[_Place, Holding]
) -> dict[_Place, set[int]]:
    """Who holds these parameters, with optimizer's state or without."""
    ranks: dict[_Place, set[int]] = defaultdict(set)
    for rank, mine in by_rank.items() if lone else ():
        for held in mine:
            if held.param is not None:
                place = held.scope, held.name, held.param.piece, held.param.copies
                if place in lone:
                    ranks[place].add(rank)
    return ranks


def _state(held: Holding, place: _Place) -> State:
    """The state of a holding."""
    scope, name, piece, copies = place
    param, optimizer = held.param, held.optimizer
    sides = [side for side in (param, optimizer) if side is not None]
    share = 0
    if param is not None:
        share = param.nbytes * piece.elements // (param.piece.elements or 1)
    return State(
        scope=scope, name=name, piece=piece, copies=copies,
        param=param.copies if param else NOBODY, param_bytes=share,
        optimizer=optimizer.copies if optimizer else NOBODY,
        optimizer_bytes=optimizer.nbytes if optimizer else 0,
        changes=any(side.changes for side in sides),
        why=next((side.why for side in sides if side.why), ""),
    )  # fmt: skip


def _scoped(found: Iterable[State]) -> Iterable[State]:
    """Where one name and piece means several contents, each gets the scope of its first rank."""
    many: dict[tuple[str, str, Piece], list[State]] = defaultdict(list)
    for state in found:
        many[state.scope, state.name, state.piece].append(state)
    for same in many.values():
        if len(same) == 1:
            yield same[0]
            continue
        for state in same:
            own = rank_name(min(state.copies))
            yield replace(state, scope=f"{state.scope}.{own}" if state.scope else own)


def _order(state: State) -> tuple[str, int, str, Sequence[int]]:
    flat = state.piece.flat or (0, 0)
    return state.name, min(state.copies), state.scope, flat
