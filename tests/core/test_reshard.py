"""The planner of another topology against brute force, and the geometry below it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adacheck_store import reshard as planner
from adacheck_store.format.errors import ModelMismatchError
from adacheck_store.format.layout import Layout, Section, Slice, align
from adacheck_store.regions import Region, boxes_between, c_strides, less, overlap, regions_of
from adacheck_store.reshard import pieces_in, reshard, same_pieces

BLOCK = 16
"""Bytes of a block here: so that small tensors have many."""

ROLES = (("param", "F32"), ("exp_avg", "F32"))


def indexes(box):
    """All places in a box."""
    return [tuple(np.add(at, [s for s, _ in box])) for at in np.ndindex(*[b - a for a, b in box])]


def places(piece: Slice) -> list[tuple[int, ...]]:
    """Of each element of a slice, in order, its place in the tensor. The oracle's own."""
    whole = list(np.ndindex(*piece.shape))
    if piece.flat is not None:
        return whole[piece.flat[0] : piece.flat[1]]
    return [place for box in piece.boxes for place in indexes(box)]


def whole(shape):
    """The box of a whole tensor."""
    return tuple((0, size) for size in shape)


@st.composite
def cut(draw, shape):
    """A tensor in pieces, flat ranges or boxes; some of them once more."""
    total = math.prod(shape)
    if total > 1 and draw(st.booleans()):
        sides = [0, *sorted(draw(st.lists(st.integers(1, total - 1), min_size=1))), total]
        found = list(itertools.pairwise(sides))
    else:
        found = [whole(shape)]
        for _ in range(draw(st.integers(0, 4)) if total > 1 else 0):
            box = found.pop(draw(st.integers(0, len(found) - 1)))
            dim = draw(st.integers(0, len(shape) - 1))
            at = draw(st.integers(*box[dim]))
            sides = [(box[dim][0], at), (at, box[dim][1])]
            found += [(*box[:dim], side, *box[dim + 1 :]) for side in sides if side[0] < side[1]]
    return found + draw(st.lists(st.sampled_from(found), max_size=2))


@st.composite
def layouts(draw, shapes, most):
    """Layouts of parts that have all of the tensors between them; some parts have none of one."""
    count = draw(st.integers(1, most))
    held: list[list[Slice]] = [[] for _ in range(count)]
    for name, shape in shapes.items():
        rows: list[set] = [set() for _ in range(count)]
        for piece in draw(cut(shape)):
            rows[draw(st.integers(0, count - 1))].add(piece)
        for number, row in enumerate(rows):
            flat = min((each for each in row if len(each) == 2 and isinstance(each[0], int)),
                       default=None)  # fmt: skip
            boxes = () if flat else tuple(sorted(row))
            held[number].append(
                Slice(name=name, shape=shape, boxes=boxes, flat=flat, offset=0, group=0)
            )
    return [laid_out(draw(st.permutations(pieces))) for pieces in held]


def laid_out(pieces) -> Layout:
    """Slices one after another in one section."""
    offset, slices = 0, []
    for piece in pieces:
        slices.append(replace(piece, offset=offset))
        offset = align(offset + piece.elements)
    section = Section(name="t", optimizer=0, roles=ROLES, slices=tuple(slices))
    return Layout(optimizers=("torch.optim.AdamW",), sections=(section,))


def values(shapes):
    """A number for each element of all tensors."""
    found, at = {}, 1
    for name, shape in shapes.items():
        found[name] = np.arange(at, at + math.prod(shape), dtype=np.int64).reshape(shape)
        at += math.prod(shape)
    return found


def view(region: Region, array):
    """A region of a flat array."""
    return np.lib.stride_tricks.as_strided(
        array[region.base :], region.sizes, [stride * array.itemsize for stride in region.strides]
    )


SHAPES = st.dictionaries(
    st.sampled_from("abcd"), st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_what_is_put_together_is_what_was_cut(data):
    """Random cuts on both sides: each element arrives, once, from blocks that have some alone."""
    shapes = data.draw(SHAPES)
    sources = data.draw(layouts(shapes, 4))
    need = data.draw(
        layouts(shapes, 1).map(lambda found: found[0]) | layouts(shapes, 3).map(max_of)
    )
    truth = values(shapes)
    parts = {f"p{number:06}": layout for number, layout in enumerate(sources)}
    has = {
        name: {place for layout in sources for piece in layout.sections[0].slices
               if piece.name == name for place in places(piece)}
        for name in shapes
    }  # fmt: skip
    whole = all(
        set(places(piece)) <= has[piece.name] for piece in need.sections[0].slices
    )  # fmt: skip
    before, planner.BLOCK_BYTES = planner.BLOCK_BYTES, BLOCK
    try:
        if not whole:
            with pytest.raises(ModelMismatchError, match="there is only"):
                reshard(need, parts, rank="r000000", own={}, alike={})
            return
        plan = reshard(need, parts, rank="r000000", own={}, alike={})
        spans = {part: plan.spans(part) for part in plan.parts}
    finally:
        planner.BLOCK_BYTES = before
    assert (
        same_pieces(need, ((piece, True) for piece in pieces_in(plan.layout)))
        or not need.sections[0].slices
    )
    check_units(plan, spans)
    check_values(plan, spans, parts, truth)


def max_of(found):
    """The layout that has most."""
    return max(found, key=lambda layout: layout.sections[0].elements)


def check_units(plan, spans):
    """The units folded are those that have an element which is copied, and no others."""
    unit = BLOCK // 4
    for part, sections in spans.items():
        for name, found in sections.items():
            units = {at // unit for low, high in found for at in range(low, high, unit)}
            used = set()
            for copy in plan.copies:
                if copy.source.part == part and copy.source.section.name == name:
                    piece = copy.source.piece
                    boxes = [t.box for t in copy.targets]
                    used |= {
                        (piece.offset + at) // unit for at, place in enumerate(places(piece))
                        if any(all(a <= i < b for i, (a, b) in zip(place, box, strict=True))
                               for box in boxes)
                    }  # fmt: skip
            assert units == used


def check_values(plan, spans, parts, truth):
    """Carry the plan out in windows of a unit, from arrays that are poison outside the spans."""
    made = {s.name: np.zeros(s.elements, np.int64) for s in plan.layout.sections}
    written = {s.name: np.zeros(s.elements, np.int64) for s in plan.layout.sections}
    for part in plan.parts:
        (section,) = parts[part].sections
        array = np.full(section.elements, -1, np.int64)
        for piece in section.slices:
            for at, place in enumerate(places(piece)):
                array[piece.offset + at] = truth[piece.name][place]
        for low, high in spans[part].get(section.name, ()):
            for start in range(low, high, BLOCK // 4):
                window = array[start : start + BLOCK // 4]
                for copy in plan.copies:
                    if copy.source.part == part:
                        for source, target in copy.moves(start, start + len(window)):
                            here = replace(source, base=source.base - start)
                            view(target, made[copy.target])[...] = view(here, window)
                            view(target, written[copy.target])[...] += 1
    for section in plan.layout.sections:
        for index, piece in enumerate(section.slices):
            span = slice(piece.offset, piece.offset + piece.elements)
            expected = [truth[piece.name][place] for place in places(piece)]
            assert made[section.name][span].tolist() == expected
            assert written[section.name][span].tolist() == [1] * piece.elements
            assert plan.givers[section.name, index]


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_range_in_boxes(shape, data):
    """They make it up in order, and are few."""
    total = math.prod(shape)
    low = data.draw(st.integers(0, total))
    high = data.draw(st.integers(0, total))
    found = boxes_between(shape, low, high)
    assert [at for box in found for at in indexes(box)] == list(np.ndindex(*shape))[low:high]
    assert len(found) <= 2 * max(len(shape), 1)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4),
                          st.integers(0, 4)), max_size=3))  # fmt: skip
def test_a_box_less_another(sides):
    """Each place of the first that is not in the second, once."""
    one = tuple((a, a + b) for a, b, _, _ in sides)
    other = tuple((c, c + d) for _, _, c, d in sides)
    both = overlap(one, other)
    common = set(indexes(one)) & set(indexes(other))
    assert set(indexes(both) if both is not None else []) == common
    if both is not None:
        left = [place for box in less(one, both) for place in indexes(box)]
        assert sorted(left) == sorted(set(indexes(one)) - common)


def test_a_narrow_column_touches_few_blocks_of_long_rows():
    """Rows longer than a block: those between are not read."""
    piece = Slice(name="a", shape=(4, 60), boxes=(((0, 4), (0, 60)),), offset=0)
    (region,) = regions_of(piece)
    column = region.at(((0, 4), (50, 52)))
    assert list(column.touched(16)) == [(48, 64), (96, 112), (160, 176), (224, 240)]
    assert c_strides((4, 60)) == (60, 1)
