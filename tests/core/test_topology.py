"""What a rank reads of another topology's chain: the blocks that cover its need, each once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from adacheck_store.arrays import dtype_name
from adacheck_store.config import Settings
from adacheck_store.format.bodies import decode_delta
from adacheck_store.format.dtypes import item_bytes
from adacheck_store.format.errors import ModelMismatchError
from adacheck_store.format.ids import BLOCK_BYTES
from adacheck_store.format.keys import parse_key, part_name, rank_name
from adacheck_store.format.layout import Layout, Section, Slice, align, whole_box
from adacheck_store.optimizers import group_values
from adacheck_store.restore import Restored, restore_state
from adacheck_store.session import RunSession
from adacheck_store.store import Store
from adacheck_store.tiers.wrappers import WrapperTier
from adacheck_store.topology import Need
from tests.core.kit import KeptTier
from tests.core.ranks import on_ranks
from tests.core.toy import Toy

SHAPES = {"w2": (), "w0": (1500, 601), "w1": (130,), "w3": (700, 301)}
STEPS = 3
SETTINGS = Settings(base_every=2, object_lag=100, grace_s=0.0)


class CountingTier(WrapperTier):
    """A tier that counts the blocks of bases and deltas that are read."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.blocks: list[tuple[str, str, int]] = []

    def read(self, key: str, array: str, first: int, count: int) -> bytes | memoryview:
        """Count, and hand on; whatever is read comes by here."""
        if parse_key(key).kind in ("base", "delta"):
            self.blocks += [(key, array, index) for index in range(first, first + count)]
        return super().read(key, array, first, count)


def rows(shape: tuple[int, ...], rank: int, ranks: int) -> tuple[tuple[int, int], ...] | None:
    """The box of a tensor that a rank has, cut along the first dimension; None: nothing."""
    if not shape:
        return () if rank == 0 else None
    width = -(-shape[0] // ranks)
    low = min(rank * width, shape[0])
    high = min(low + width, shape[0])
    return ((low, high), *whole_box(shape[1:])) if low < high else None


def columns(shape: tuple[int, ...], rank: int, ranks: int) -> tuple[tuple[int, int], ...] | None:
    """So, along the last dimension."""
    if len(shape) < 2:
        return rows(shape, rank, ranks)
    width = -(-shape[-1] // ranks)
    return (*whole_box(shape[:-1]), (rank * width, min((rank + 1) * width, shape[-1])))


def whole(shape: tuple[int, ...], rank: int, ranks: int) -> tuple[tuple[int, int], ...] | None:
    """All of it on every rank."""
    return whole_box(shape)


def pieces(cut: Any, rank: int, ranks: int, scope: str = "") -> list[Slice]:
    """A rank's slices, one after another."""
    found, offset = [], 0
    for name, shape in SHAPES.items():
        box = cut(shape, rank, ranks)
        boxes = () if box is None else (box,)
        piece = Slice(name=name, shape=shape, boxes=boxes, offset=offset, group=0, scope=scope)
        found.append(piece)
        offset = align(offset + piece.elements)
    return found


def adamw(params: Any) -> torch.optim.Optimizer:
    """Two moments, as wide as the parameters."""
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def rmsprop(params: Any) -> torch.optim.Optimizer:
    """One moment, which is of whole floats whatever the parameters are."""
    optimizer = torch.optim.RMSprop(params, lr=1e-3, foreach=False)
    for param in params:
        optimizer.state[param] |= {"step": torch.zeros(()), "square_avg": torch.zeros(param.shape)}
    return optimizer


WIDTHS: dict[str, tuple[Any, torch.dtype, dict[str, str]]] = {
    "whole": (adamw, torch.float32, {}),
    "half": (adamw, torch.bfloat16, {}),
    "mixed": (rmsprop, torch.bfloat16, {"square_avg": "F32"}),
}  # fmt: skip
"""Optimizer, dtype of the parameters, and roles that have another one."""


class ShardToy(Toy):
    """A toy whose parameters are pieces of tensors, of some `WIDTHS`."""

    def __init__(
        self, cut: Any, rank: int, ranks: int, *, seed: int, scope: str = "", widths: str = "whole"
    ) -> None:  # fmt: skip
        slices = pieces(cut, rank, ranks, scope)
        sizes = [
            tuple(high - low for low, high in piece.boxes[0]) if piece.boxes else (0,)
            for piece in slices
        ]
        make, dtype, others = WIDTHS[widths]
        super().__init__(sizes, make, seed=seed, dtype=dtype)
        roles = tuple((role, others.get(role, kind)) for role, kind in self.section.roles)
        self.section = dataclasses.replace(self.section, slices=tuple(slices), roles=roles)
        self.layout = dataclasses.replace(self.layout, sections=(self.section,))

    def train(self, grads: Any = None) -> None:
        """One step; of each tensor a gradient is absent now and then, on all ranks alike."""
        for index, param in enumerate(self.params):
            param.grad = None
            if (self.step + index) % 3:
                grad = torch.randn(param.shape, generator=self.generator) * 1e-2
                param.grad = grad.bfloat16().to(param.dtype)
        self.optimizer.step()
        self.used = tuple(group_values(group) for group in self.optimizer.param_groups)
        self.step += 1


def written(
    cut: Any, ranks: int, *, alike: bool = False, steps: int = STEPS, widths: str = "whole"
) -> Any:  # fmt: skip
    """A chain of so many ranks: the far tier, all tiers, and the toys as they ended."""
    nears, far = [KeptTier(f"near{rank}") for rank in range(ranks)], KeptTier("far")
    toys = []
    for rank in range(ranks):
        scope = rank_name(rank) if alike else ""
        seed = 0 if alike else rank
        toys.append(ShardToy(cut, rank, ranks, seed=seed, scope=scope, widths=widths))

    def live(group: Any) -> None:
        toy = toys[group.rank]
        session = RunSession(Store("memory://x", nears[group.rank], far), "run", SETTINGS, group)
        assert session.restore() is None
        session.start(toy.layout, start_step=0, base=toy.base, extra=toy.extra)
        for _ in range(steps):
            toy.train()
            session.append(toy.boundary(session.wants_base()))
        session.flush(120)
        session.close()

    assert on_ranks(ranks, live) == [None] * ranks
    return far, nears, toys


def layout_of(toy: Toy, slices: list[Slice]) -> Layout:
    """What a rank needs, with the sections of a toy."""
    return dataclasses.replace(
        toy.layout, sections=(dataclasses.replace(toy.section, slices=tuple(slices)),)
    )


def read(tier: Any, need: Need) -> tuple[Restored, list[tuple[str, str, int]]]:
    """What a rank gets, and the blocks that it reads for it."""
    counting = CountingTier(tier)
    return restore_state([counting], "run", need=need), counting.blocks


def places(box: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The flat indexes of a box's elements in the tensor."""
    grid = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)
    return grid[tuple(slice(low, high) for low, high in box)].reshape(-1)


def covering(tier: Any, restored: Restored, layouts: dict[str, Layout], wanted: list[Slice]):
    """Blocks that have anything of what is wanted, found element by element."""
    found: set[tuple[str, str, int]] = set()
    taken: dict[str, np.ndarray] = {
        piece.name: places(piece.boxes[0], piece.shape) if piece.boxes else np.array([], int)
        for piece in wanted
    }
    for part in restored.plan.parts:
        (section,) = layouts[part.part].sections
        for index, piece in enumerate(section.slices):
            if not piece.boxes:
                continue
            here = places(piece.boxes[0], piece.shape)
            at = np.flatnonzero(np.isin(here, taken[piece.name]))
            taken[piece.name] = np.setdiff1d(taken[piece.name], here)  # once is enough
            for ref, array, size, offset in arrays(tier, part, section, index):
                blocks = np.unique((at + offset) * size // BLOCK_BYTES)
                found |= {(ref.key, array, int(block)) for block in blocks}
    return found


def arrays(tier: Any, part: Any, section: Section, index: int) -> Iterator[tuple]:
    """Where a slice lies in base and deltas: record, array, bytes of an element, offset."""
    head = tier.head(part.base.key).head
    for info in head.arrays:
        yield part.base, info.name, item_bytes(info.dtype), section.slices[index].offset
    for ref in part.deltas:
        head = tier.head(ref.key).head
        for update in decode_delta(head).updates:
            for grad in update.grads:
                if grad.slice == index:
                    (info,) = (i for i in head.arrays if i.name.endswith(f"grad.{grad.encoding}"))
                    yield ref, info.name, item_bytes(info.dtype), grad.offset


def nbytes(tier: Any, blocks: Any) -> int:
    """Bytes of blocks."""
    total = 0
    for key, array, index in blocks:
        info = tier.head(key).head.array(array)
        total += min(BLOCK_BYTES, info.nbytes - index * BLOCK_BYTES)
    return total


def full(toys: list[Toy], role: str) -> dict[str, np.ndarray]:
    """All tensors, from the toys that have their pieces."""
    found = {name: np.full(shape, np.nan, np.float32) for name, shape in SHAPES.items()}
    for toy in toys:
        array = toy.arrays().get(f"s0/{role}")
        for piece in toy.section.slices if array is not None else ():
            for box in piece.boxes:
                cut = array[piece.offset : piece.offset + piece.elements].float().numpy()
                place = tuple(slice(low, high) for low, high in box)
                found[piece.name][place] = cut.reshape([high - low for low, high in box])
    return found


def assert_right(restored: Restored, toys: list[Toy]) -> None:
    """Every element of every role is what the toys ended with, and so are the counters."""
    (state,) = restored.parts.values()
    steps = toys[0].states()["s0"].scalars.get("step", [None] * len(SHAPES))
    counted = {
        piece.name: state.states[section.name].scalars.get("step", [None] * len(SHAPES))[index]
        for section in state.layout.sections for index, piece in enumerate(section.slices)
    }  # fmt: skip
    assert counted == dict(zip(SHAPES, steps, strict=True))
    for role, kind in toys[0].section.roles:
        truth = full(toys, role)
        for section in state.layout.sections:
            for index, piece in enumerate(section.slices):
                if role != "param" and not state.states[section.name].present[index]:
                    continue
                for box in piece.boxes:
                    got = state.arrays[f"{section.name}/{role}"]
                    assert (section.dtypes[role], dtype_name(got.dtype)) == (kind, kind)
                    got = got[piece.offset : piece.offset + piece.elements].float().numpy()
                    want = truth[piece.name][tuple(slice(low, high) for low, high in box)]
                    assert got.tobytes() == np.ascontiguousarray(want).tobytes(), (role, piece)


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize(
    ("before", "had", "after", "have"),
    [(rows, 3, rows, 2), (rows, 2, columns, 3), (columns, 2, whole, 1), (whole, 1, rows, 4)],
)  # fmt: skip
def test_blocks_read(before, had, after, have, widths):
    """At most a tenth more than those that cover the need, and none twice, whatever is how wide."""
    far, _, toys = written(before, had, widths=widths)
    layouts = {part_name(rank): toy.layout for rank, toy in enumerate(toys)}
    for rank in range(have):
        wanted = pieces(after, rank, have)
        need = Need(rank=rank, ranks=have, layout=layout_of(toys[0], wanted))
        restored, blocks = read(far, need)
        assert restored.step == STEPS
        assert_right(restored, toys)
        assert len(blocks) == len(set(blocks))
        cover = covering(far, restored, layouts, wanted)
        assert cover <= set(blocks)
        assert nbytes(far, blocks) <= 1.1 * nbytes(far, cover)
        said = restored.certificate.topology
        assert f"written by {had} rank" in said
        assert (f"rank {rank} was not among them" in said) == (rank >= had)
        assert restored.alike == (None if rank < had else {"n"})


def test_of_equal_copies_one_is_read():
    """Each rank's own, and proven equal by what their records say: no block of a second one."""
    far, _, toys = written(whole, 3, alike=True)
    layouts = {part_name(rank): toy.layout for rank, toy in enumerate(toys)}
    wanted = pieces(rows, 1, 2)
    need = Need(rank=1, ranks=2, layout=layout_of(toys[0], wanted))
    restored, blocks = read(far, need)
    assert_right(restored, toys[:1])
    assert {parse_key(key).part for key, _, _ in blocks} == {"p000001"}
    cover = covering(far, restored, layouts, wanted)
    assert len(blocks) == len(set(blocks))
    assert nbytes(far, blocks) <= 1.1 * nbytes(far, cover)


def test_copies_whose_records_do_not_tell_are_compared():
    """One rank's base is gone, its chain begins earlier: what both fold to is compared."""
    far, _, toys = written(whole, 2, alike=True)
    for key in list(far.list("run/")):
        if parse_key(key).kind == "base" and parse_key(key).part == "p000001":
            if parse_key(key).step > 0:
                far.delete([key])
    need = Need(rank=0, ranks=1, layout=layout_of(toys[0], pieces(whole, 0, 1)))
    restored, blocks = read(far, need)
    assert_right(restored, toys[:1])
    assert {parse_key(key).part for key, _, _ in blocks} == {"p000000", "p000001"}
    assert len(blocks) == len(set(blocks))


def test_copies_that_differ_are_refused():
    """Two ranks that trained apart, under the same names."""
    toys = [ShardToy(whole, rank, 2, seed=rank, scope=rank_name(rank)) for rank in range(2)]
    nears, far = [KeptTier("near0"), KeptTier("near1")], KeptTier("far")

    def live(group: Any) -> None:
        toy = toys[group.rank]
        session = RunSession(Store("memory://x", nears[group.rank], far), "run", SETTINGS, group)
        session.restore()
        session.start(toy.layout, start_step=0, base=toy.base, extra=toy.extra)
        session.close()

    assert on_ranks(2, live) == [None, None]
    need = Need(rank=0, ranks=1, layout=layout_of(toys[0], pieces(whole, 0, 1)))
    with pytest.raises(ModelMismatchError, match="is not the same on all ranks that wrote"):
        restore_state([*nears, far], "run", need=need)
    for ranks in (1, 3):  # also where the rank had it: what the others had would be nobody's
        own = Need(rank=0, ranks=ranks, layout=toys[0].layout)
        with pytest.raises(ModelMismatchError, match="is not the same on all ranks that wrote"):
            restore_state([*nears, far], "run", need=own)
    own = Need(rank=0, ranks=2, layout=toys[0].layout)
    assert_right(restore_state([*nears, far], "run", need=own), toys[:1])
