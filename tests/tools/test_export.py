"""Restored and exported files: dtypes, pieces of ranks, many windows, what other programs read."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from adacheck_store.arrays import byte_view, dtype_name, scalar_of
from adacheck_store.format.bodies import SectionState
from adacheck_store.format.dtypes import ITEM_BYTES, SAFETENSORS_DTYPES
from adacheck_store.format.errors import UnsupportedError
from adacheck_store.format.layout import Layout, Section, Slice, align, whole_box
from adacheck_store.tools.safetensors_file import FilePlan, FileWriter, finish
from adacheck_store.tools.whole import PieceSink, Tensors, counters, runs


def section_of(name: str, dtype: str, shapes: list[tuple[int, ...]], state: bool) -> Section:
    """A section of whole tensors, with one role of state."""
    slices, offset = [], 0
    for index, shape in enumerate(shapes):
        piece = Slice(
            name=f"{name}.{index}", shape=shape, boxes=(whole_box(shape),), offset=offset,
            group=0 if state else -1, aliases=("tied",) if name == "s0" and not index else (),
        )  # fmt: skip
        slices.append(piece)
        offset = align(offset + piece.elements)
    roles = (("param", dtype), ("exp_avg", "F32")) if state else (("buffer", dtype),)
    return Section(name=name, optimizer=0 if state else -1, roles=roles, slices=tuple(slices))


def export(layout: Layout, path: Path, window: int) -> dict[str, torch.Tensor]:
    """Write random arrays through the sink, window by window; the expected tensors."""
    roles = {s.name: [role for role, _ in s.roles] for s in layout.sections}
    present = {s.name: [index % 2 == 0 for index in range(len(s.slices))] for s in layout.sections}
    tensors = Tensors(lambda part, piece: True)
    tensors.add("p", layout, roles, present)
    tensors.refuse_holes()
    plan = FilePlan({label: (each.dtype, each.shape) for label, each in tensors.all.items()})
    expected: dict[str, torch.Tensor] = {}
    states = {}
    with path.open("wb+") as file:
        room = plan.room(1000)
        sink = PieceSink("p", tensors, FileWriter(file.fileno(), room, plan).write)
        for section in layout.sections:
            arrays = {
                role: torch.randint(0, 2, (section.elements * ITEM_BYTES[dtype],)).byte()
                for role, dtype in section.roles
            }
            for start in range(0, section.elements, window):
                stop = min(start + window, section.elements)
                views = {}
                for role, dtype in section.roles:
                    size = ITEM_BYTES[dtype]
                    view = sink.window(section, role, start, stop)
                    view.view(torch.uint8).copy_(arrays[role][start * size : stop * size])
                    views[role] = view
                sink.done(section, start, stop, views)
            for index, piece in enumerate(section.slices):
                for role, dtype in section.roles:
                    if role == section.main_role or present[section.name][index]:
                        size = ITEM_BYTES[dtype]
                        name = f"model/{piece.name}"
                        if role != section.main_role:
                            name = f"optimizer/{piece.name}/{role}"
                        low = piece.offset * size
                        expected[name] = arrays[role][low : low + piece.elements * size]
            if section.optimizer >= 0:
                steps = tuple(
                    scalar_of(torch.tensor(float(i))) if here else None
                    for i, here in enumerate(present[section.name])
                )
                states[section.name] = SectionState(
                    present=tuple(present[section.name]), scalars={"step": steps}
                )
        finish(
            file.fileno(), room, plan, counters(layout, states, lambda piece: True), {"run": "r"}
        )
    return expected


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("window", [64, 640, 10**6])
@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_every_dtype(dtype: str, window: int, tmp_path: Path) -> None:
    """Every dtype of the format, in windows of any size, with odd and empty tensors."""
    shapes = [(3, 5), (0,), (1,), (130,), (), (2, 0, 3)]
    layout = Layout(
        optimizers=("torch.optim.AdamW",),
        sections=(section_of("s0", dtype, shapes, True), section_of("s1", dtype, shapes, False)),
    )
    path = tmp_path / "out"
    expected = export(layout, path, window)
    kept = load_file(path)
    steps = {name for name in kept if name.endswith("/step")}
    assert len(steps) == 3
    assert set(kept) - steps == set(expected)
    for name, data in expected.items():
        tensor = kept[name]
        assert bytes(byte_view(tensor.contiguous())) == bytes(byte_view(data)), name
        main = name.startswith("model/")
        index = int(name.split("/")[1].split(".")[1])
        kind = dtype if main else "F32"
        if kind in SAFETENSORS_DTYPES:
            assert dtype_name(tensor.dtype) == kind
            assert tuple(tensor.shape) == shapes[index]
        else:
            assert tensor.dtype == torch.uint8
            assert tuple(tensor.shape) == (*shapes[index], ITEM_BYTES[kind])


def test_tensors_lie_aligned(tmp_path: Path) -> None:
    """Every tensor begins at a multiple of its element's size, counted from the file's start."""
    layout = Layout(
        optimizers=("torch.optim.AdamW",),
        sections=(
            section_of("s0", "BF16", [(3,), (5,), (7,)], True),
            section_of("s1", "I8", [(3,), (1,)], False),
            section_of("s2", "F64", [(3,)], False),
        ),
    )
    path = tmp_path / "out"
    export(layout, path, 64)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"run": "r"}
    for entry in header.values():
        assert (8 + length + entry["data_offsets"][0]) % SAFETENSORS_DTYPES[entry["dtype"]] == 0
    assert len(data) == 8 + length + max(entry["data_offsets"][1] for entry in header.values())
    with safe_open(path, "pt") as file:
        assert len(list(file.keys())) == len(header)


def piece(name: str, shape: tuple[int, ...], offset: int, **more: Any) -> Slice:
    """A slice that may be a part of a tensor."""
    given = {"boxes": (whole_box(shape),), "group": 0, **more}
    return Slice(name=name, shape=shape, offset=offset, **given)


def layout_of(*slices: Slice) -> Layout:
    """A layout of one section without state."""
    section = Section(name="s0", optimizer=0, roles=(("param", "I64"),), slices=slices)
    return Layout(optimizers=("x",), sections=(section,))


CUTS = {
    "rows": [[((0, 2), (0, 5), (0, 4))], [((2, 3), (0, 5), (0, 4))]],
    "columns": [[((0, 3), (0, 5), (0, 1))], [((0, 3), (0, 5), (1, 4))]],
    "middle": [[((0, 3), (0, 2), (0, 4))], [((0, 3), (2, 5), (0, 4))]],
    "several": [
        [((0, 1), (0, 5), (0, 4)), ((2, 3), (1, 3), (0, 4))],
        [((1, 2), (0, 5), (0, 4)), ((2, 3), (0, 1), (0, 4)), ((2, 3), (3, 5), (0, 4))],
    ],
    "empty": [[((0, 3), (0, 5), (0, 4))], []],
}  # fmt: skip


@pytest.mark.parametrize("window", [1, 7, 64])
@pytest.mark.parametrize("cut", CUTS)
def test_pieces_are_put_together(cut: str, window: int) -> None:
    """Every element of every piece comes to its own place, in windows of any size."""
    whole = torch.arange(60).reshape(3, 5, 4)
    kept = torch.full((60,), -1)
    tensors = Tensors(lambda part, piece: True)
    parts = {
        f"p{i}": piece("w", (3, 5, 4), 0, boxes=tuple(boxes)) for i, boxes in enumerate(CUTS[cut])
    }
    for part, held in parts.items():
        tensors.add(part, layout_of(held), {"s0": ["param"]}, {"s0": [True]})
    tensors.refuse_holes()

    def write(label: str, at: int, elements: torch.Tensor) -> None:
        assert label == "model/w"
        kept[at : at + len(elements)] = elements

    for part, held in parts.items():
        cuts = [whole[tuple(slice(*side) for side in box)].reshape(-1) for box in held.boxes]
        flat = torch.cat([*cuts, torch.zeros(0, dtype=torch.int64)])
        section = layout_of(held).sections[0]
        sink = PieceSink(part, tensors, write)
        for start in range(0, len(flat), window):
            view = flat[start : start + window]
            sink.done(section, start, start + len(view), {"param": view})
    assert torch.equal(kept, whole.reshape(-1))


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_where_the_pieces_elements_are(seed: int) -> None:
    """Of any box of any tensor, and of several, from any place on: as indexing has them."""
    choose = random.Random(seed)
    shape = tuple(choose.randrange(1, 5) for _ in range(choose.randrange(0, 5)))
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    boxes = []
    for _ in range(2):
        sides = [sorted((choose.randrange(n + 1), choose.randrange(n + 1))) for n in shape]
        boxes.append(tuple((a, b) for a, b in sides))
    held = piece("w", shape, 0, boxes=tuple(boxes))
    wanted = torch.cat([whole[tuple(slice(a, b) for a, b in box)].reshape(-1) for box in boxes])
    low, high = sorted(choose.randrange(len(wanted) + 1) for _ in range(2))
    found, at = [], low
    for target, begin, length in runs(held, low, high):
        assert begin == at
        assert length > 0
        at += length
        found += range(target, target + length)
    assert found == wanted[low:high].tolist()
    flat = piece("w", (10,), 0, boxes=(), flat=(3, 7))
    assert list(runs(flat, 1, 4)) == [(4, 1, 3)]
    assert list(runs(piece("w", shape, 0), 0, whole.numel())) == [(0, 0, whole.numel())]


def test_holes_and_strangers_are_refused() -> None:
    """A tensor of which a piece is missing, or whose pieces disagree, is not written."""
    half = piece("w", (4,), 0, boxes=(((0, 2),),))
    tensors = Tensors(lambda part, piece: True)
    tensors.add("p0", layout_of(half), {"s0": []}, {"s0": [True]})
    tensors.add("p1", layout_of(half), {"s0": []}, {"s0": [True]})  # a copy is no other half
    with pytest.raises(UnsupportedError, match="2 elements of 4"):
        tensors.refuse_holes()
    with pytest.raises(UnsupportedError, match="disagree"):
        tensors.add("p1", layout_of(piece("w", (5,), 0)), {"s0": []}, {"s0": [True]})


def test_memory_is_that_of_a_window() -> None:
    """What is done with a window is used for the next: memory does not grow with the state."""
    layout = Layout(
        optimizers=("torch.optim.AdamW",), sections=(section_of("s0", "F32", [(10**5,)], True),)
    )
    sink = PieceSink("p", Tensors(lambda part, piece: True), lambda label, at, elements: None)
    section, places = layout.sections[0], set()
    for start in range(0, 10**5 - 640, 640):
        views = {
            role: sink.window(section, role, start, start + 640) for role in ("param", "exp_avg")
        }
        assert all(view.numel() == 640 for view in views.values())
        places |= {view.data_ptr() for view in views.values()}
        sink.done(section, start, start + 640, views)
    assert len(places) == 2
