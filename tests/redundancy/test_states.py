"""States: a parameter with its optimizer, how redundant both are together, what is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_store.format.errors import GroupError
from adacheck_store.redundancy.detector import Finding
from adacheck_store.redundancy.exchange import Ranks
from adacheck_store.redundancy.pieces import covers, tile
from adacheck_store.redundancy.sighting import Identity, Piece
from adacheck_store.redundancy.states import (
    Degree,
    Holding,
    Keep,
    State,
    degree,
    holdings,
    keep,
    kept_bytes,
    meet,
    states,
    whole_bytes,
)
from tests.redundancy.kit import (
    ELEMENTS,
    SHAPE,
    WHOLE,
    ddp,
    everyone,
    figure6,
    held,
    shard,
    zero1,
    zero3,
)

FULL, PARTIAL, NONE = Degree.FULL, Degree.PARTIAL, Degree.NONE


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (FULL, FULL, FULL),
        (FULL, PARTIAL, PARTIAL),
        (FULL, NONE, NONE),
        (PARTIAL, PARTIAL, PARTIAL),
        (PARTIAL, NONE, NONE),
        (NONE, NONE, NONE),
    ],
)
def test_the_paper_s_rule(one: Degree, other: Degree, both: Degree) -> None:
    """Of parameter and optimizer the lesser."""
    assert meet(one, other) is meet(other, one) is both


@given(st.integers(1, 6), st.data())
def test_sets_in_common_are_at_most_what_the_rule_says(size: int, data: st.DataObject) -> None:
    """And just that, unless two partial sets differ."""
    ranks = st.sets(st.integers(0, size - 1)).map(lambda found: frozenset({0, *found}))
    one, other = data.draw(ranks), data.draw(ranks)
    rule = meet(degree(one, size), degree(other, size))
    common = degree(one & other, size)
    assert meet(rule, common) is common
    if one == other or degree(one, size) is not PARTIAL or degree(other, size) is not PARTIAL:
        assert common is rule


def alone(copies: Ranks) -> bool:
    """Safe is what two ranks have."""
    return len(copies) > 1


TABLE = [
    # strategy, states, degree, what is kept, bytes a step of what was there
    ("ddp", ddp(4), 1, FULL, Keep.NOTHING, None),
    ("zero-1", zero1(4), 4, NONE, Keep.GRADIENT, (2, 12)),
    ("zero-3", zero3(4), 4, NONE, Keep.GRADIENT, (2, 14)),
    ("mics", zero3(4, replicas=2), 2, PARTIAL, Keep.NOTHING, None),
    ("frozen", {r: [held("w", (WHOLE, {r}))] for r in range(4)}, 4, NONE, Keep.PARAMETER, (2, 2)),
    ("offload", {r: [held("w", None, (shard(r, 4), {r}))] for r in range(4)}, 4, NONE,
     Keep.GRADIENT, (2, 12)),
    ("param alone", {r: [held("w", (WHOLE, {r}), (WHOLE, everyone(4)))] for r in range(4)}, 4,
     NONE, Keep.PARAMETER, (2, 2)),
]  # fmt: skip


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case[0])
def test_strategies(case: tuple[str, dict[int, list[Holding]], int, Degree, Keep, object]) -> None:
    """What is kept of a state: nothing, the parameter, 1/6 (optimizer only), or 1/7 (both)."""
    _, by_rank, count, expected, kept, ratio = case
    found = states(by_rank)
    assert len(found) == count
    for state in found:
        assert degree(state.copies, 4) is expected
        assert keep(state, alone) is kept
        if ratio:
            step, whole = kept_bytes(state, kept, 2), whole_bytes(state, alone)
            assert (step, whole) == tuple(n * state.piece.elements for n in ratio)  # type: ignore[attr-defined]
        else:
            assert whole_bytes(state, alone) == kept_bytes(state, kept, 2) == 0


def test_figure_6() -> None:
    """EP with ZeRO-1: attention's parameter is full and its optimizer none, so the state is none.

    Dropping what has copies, tensor by tensor, would leave optimizers without parameters.
    """
    found = states(figure6(2))
    told = [
        (s.name, degree(s.param, 2), degree(s.optimizer, 2), degree(s.copies, 2), keep(s, alone),
         whole_bytes(s, alone) / kept_bytes(s, keep(s, alone), 2))
        for s in found
    ]  # fmt: skip
    assert told == [
        ("attention", FULL, NONE, NONE, Keep.GRADIENT, 6),
        ("attention", FULL, NONE, NONE, Keep.GRADIENT, 6),
        ("expert0", NONE, NONE, NONE, Keep.GRADIENT, 7),
        ("expert1", NONE, NONE, NONE, Keep.GRADIENT, 7),
    ]
    assert sum(s.nbytes for s in found) == 3 * 14 * ELEMENTS  # nothing twice, nothing left out


def test_zero_redundancy_optimizer() -> None:
    """Whole tensors by owner: the others' parameters are part of the owner's state."""
    both = (WHOLE, everyone(2))
    found = states({0: [held("a", both, (WHOLE, {0})), held("b", both)],
                    1: [held("a", both), held("b", both, (WHOLE, {1}))]})  # fmt: skip
    assert [(s.name, s.copies, s.param) for s in found] == [
        ("a", {0}, {0, 1}),
        ("b", {1}, {0, 1}),
    ]


def test_moments_on_more_ranks_than_the_parameter() -> None:
    """Those without a parameter are a state of their own, which nobody has to disagree about."""
    moments = (WHOLE, everyone(3))
    found = states({0: [held("w", (WHOLE, {0}), moments)], 1: [held("w", None, moments)],
                    2: [held("w", None, moments)]})  # fmt: skip
    assert [(s.copies, s.param, s.optimizer) for s in found] == [
        ({0}, {0}, {0, 1, 2}),
        ({0, 1, 2}, set(), {0, 1, 2}),
    ]


def test_flat_partitions() -> None:
    """Flat ranges make a parameter up; where one is missing the parameter is a state too."""
    both = (WHOLE, everyone(3))
    parts = [Piece(flat=(0, 10)), Piece(flat=(10, ELEMENTS))]
    by_rank = {0: [held("w", both, (parts[0], {0}))], 1: [held("w", both, (parts[1], {1}))],
               2: [held("w", both)]}  # fmt: skip
    assert [s.piece for s in states(by_rank)] == parts
    by_rank[1] = [held("w", both)]
    found = states(by_rank)
    assert [(s.piece, s.copies, bool(s.optimizer)) for s in found] == [
        (WHOLE, {0, 1, 2}, False),
        (parts[0], {0}, True),
    ] or [(s.piece, s.copies, bool(s.optimizer)) for s in found] == [
        (parts[0], {0}, True),
        (WHOLE, {0, 1, 2}, False),
    ]


def test_moments_that_are_not_proven_make_the_state_unproven() -> None:
    """An idle expert has zero moments on all ranks: its state is each rank's own, scoped."""
    why = "never changed"
    found = states({r: [held("w", (WHOLE, {r}), (WHOLE, {r}), why)] for r in range(2)})
    assert [(s.scope, s.copies, s.why) for s in found] == [
        ("r000000", {0}, why),
        ("r000001", {1}, why),
    ]


def test_a_name_that_means_one_content_needs_no_scope() -> None:
    """Shards are told apart by their boxes, copies are one state."""
    for by_rank in (zero3(4), zero1(4), ddp(4), zero3(4, replicas=2)):
        assert {state.scope for state in states(by_rank)} == {""}
    local = states({0: [held("layers.0", (WHOLE, {0}))], 1: [held("layers.0", (WHOLE, {1}))]})
    assert [state.scope for state in local] == ["r000000", "r000001"]


def test_a_name_that_means_several_tensors_is_scoped() -> None:
    """Stages of a pipeline, each with a tensor of that name: other shapes, or cut otherwise."""
    shapes = states({
        rank: [held("layers.0", (Piece((((0, size),),)), {rank}), shape=(size,))]
        for rank, size in enumerate((8, 9))
    })  # fmt: skip
    assert [state.scope for state in shapes] == ["r000000", "r000001"]
    pieces = [shard(0, 2), shard(1, 2), *(shard(at, 3) for at in range(3))]
    cut = states({rank: [held("layers.0", (each, {rank}))] for rank, each in enumerate(pieces)})
    assert [state.scope for state in cut] == [f"r{rank:06d}" for rank in range(5)]
    whole = states(
        {rank: [held("layers.0", (each, {rank}))] for rank, each in enumerate(pieces[:2])}
    )
    assert [state.scope for state in whole] == ["", ""]


@pytest.mark.parametrize(
    "by_rank",
    [
        {0: [held("w", (WHOLE, {0, 1}))], 1: [held("w", (WHOLE, {1}))]},
        {0: [held("w", (WHOLE, {1}))], 1: []},
        {0: [held("w", (WHOLE, {1}), (WHOLE, {1}))], 1: []},
        {0: [held("w", (WHOLE, {0, 1}), (WHOLE, {0, 1}))], 1: [held("w", (WHOLE, {0, 1}))]},
    ],
)
def test_ranks_that_do_not_agree_on_copies(by_rank: dict[int, list[Holding]]) -> None:
    """Whatever brought that about: no state counts a copy that its rank does not know of."""
    with pytest.raises(GroupError, match="w"):
        states(by_rank)


def finding(role: str, copies: set[int], piece: Piece = WHOLE, dtype: str = "F32") -> Finding:
    """A finding about tensor w."""
    identity = Identity(name="w", role=role, dtype=dtype, shape=SHAPE, piece=piece)
    return Finding(identity=identity, copies=frozenset(copies), changes=role != "exp_avg_sq")


def test_holdings_from_findings() -> None:
    """All of the optimizer's tensors have to be copied; sides are put together by piece."""
    (found,) = holdings(
        [finding("param", {0, 1, 2}, dtype="BF16"), finding("exp_avg", {0, 1}),
         finding("exp_avg_sq", {0, 2})]
    )  # fmt: skip
    assert found.param is not None
    assert found.optimizer is not None
    assert (found.param.copies, found.param.nbytes) == ({0, 1, 2}, 2 * ELEMENTS)
    assert (found.optimizer.copies, found.optimizer.nbytes) == ({0}, 8 * ELEMENTS)
    assert found.optimizer.changes
    (buffer,) = holdings([finding("buffer", {0})])
    assert (buffer.param is not None, buffer.optimizer) == (True, None)
    first, second = holdings(
        [finding("param", {0, 1}), finding("exp_avg", {0}, shard(0, 4)),
         finding("exp_avg", {0}, shard(2, 4))]
    )  # fmt: skip
    assert first.param == second.param is not None
    assert [h.optimizer.piece for h in (first, second) if h.optimizer] == [shard(0, 4), shard(2, 4)]


def test_a_piece_of_the_optimizer_goes_with_the_parameter_around_it() -> None:
    """Where a rank holds several pieces of a parameter; those without one stand alone."""
    found = holdings(
        [finding("param", {0}, shard(0, 2)), finding("param", {0, 1}, shard(1, 2)),
         finding("exp_avg", {0}, shard(3, 4))]
    )  # fmt: skip
    pieces = [(h.param and h.param.piece, h.optimizer and h.optimizer.piece) for h in found]
    assert pieces == [(shard(1, 2), shard(3, 4)), (shard(0, 2), None)]


@pytest.mark.parametrize(
    ("outer", "inner", "inside"),
    [
        (WHOLE, Piece(flat=(3, 9)), True),
        (WHOLE, shard(1, 4), True),
        (shard(1, 4), shard(1, 4), True),
        (shard(1, 2), shard(3, 4), True),
        (shard(0, 2), shard(3, 4), False),
        (Piece(flat=(0, 50)), Piece(flat=(10, 50)), True),
        (Piece(flat=(0, 50)), Piece(flat=(10, 51)), False),
        (Piece(flat=(0, 50)), shard(0, 4), False),
        (shard(0, 4), WHOLE, False),
    ],
)
def test_covers(outer: Piece, inner: Piece, inside: bool) -> None:
    """Where it is not certain, it is not so."""
    assert covers(outer, inner, SHAPE) is inside


def box(*sides: tuple[int, int]) -> Piece:
    """A piece of one box."""
    return Piece((tuple(sides),))


@pytest.mark.parametrize(
    ("whole", "pieces", "shape", "made"),
    [
        (WHOLE, [shard(i, 4) for i in range(4)], SHAPE, True),
        (WHOLE, [shard(i, 4) for i in range(3)], SHAPE, False),
        (WHOLE, [Piece(flat=(50, 96)), Piece(flat=(0, 50))], SHAPE, True),
        (WHOLE, [Piece(flat=(50, 96)), Piece(flat=(0, 49))], SHAPE, False),
        (WHOLE, [Piece(flat=(0, 60)), Piece(flat=(30, 95))], SHAPE, False),
        (WHOLE, [Piece(flat=(0, 60)), Piece(flat=(30, 96))], SHAPE, True),
        (WHOLE, [Piece(flat=(0, 60)), shard(1, 2)], SHAPE, False),
        (box((0, 4), (0, 6)), [box((0, 4), (0, 2)), box((0, 4), (2, 6))], (4, 6), True),
        (box((0, 4), (0, 6)), [box((0, 2), (0, 6)), box((2, 4), (0, 6))], (4, 6), True),
        (box((0, 4), (0, 6)), [box((0, 2), (0, 6)), box((2, 4), (0, 5))], (4, 6), False),
        (box((0, 2), (0, 6)), [box((2, 4), (0, 6)), box((0, 1), (0, 6))], (4, 6), False),
        (box((0, 4), (0, 6)), [box((0, 4), (0, 6))], (4, 6), True),
        (box((0, 4), (0, 6)), [Piece(()), box((0, 4), (0, 5))], (4, 6), False),
        (box((0, 0)), [Piece(())], (0,), True),
        (box((0, 0)), [], (0,), False),
    ],
)
def test_tile(whole: Piece, pieces: list[Piece], shape: tuple[int, ...], made: bool) -> None:
    """Pieces make a whole up only if they certainly do."""
    assert tile(whole, pieces, shape) is made


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5))
def test_tile_agrees_with_counting(ranges: list[tuple[int, int]]) -> None:
    """Of flat ranges, by elements."""
    pieces = [Piece(flat=(min(pair), max(pair))) for pair in ranges]
    marked = {i for piece in pieces if piece.flat for i in range(*piece.flat)}
    assert tile(Piece(flat=(2, 7)), pieces, (10,)) is (set(range(2, 7)) <= marked)


def test_a_tensor_that_never_changes_costs_no_step() -> None:
    """Only its place in the base."""
    (found,) = states({0: [held("w", (WHOLE, {0}))]})
    still: Callable[[State], State] = lambda state: state._replace(changes=False)  # noqa: E731
    assert kept_bytes(found, Keep.PARAMETER, 2) == 2 * ELEMENTS
    assert kept_bytes(still(found), Keep.PARAMETER, 2) == 0
