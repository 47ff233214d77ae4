"""A rank that needs a few tensors of another's part reads hardly more, and keeps no more of it."""

import pytest
import torch

from adacheck_store.arrays import byte_view
from adacheck_store.catalog import read_catalog
from adacheck_store.fetch import Fetcher
from adacheck_store.reading import fetch_parts, open_layouts
from adacheck_store.recovery import plan_restore
from adacheck_store.state import gathered
from tests.core.rig import PART, RUN, Rig, small_blocks

SHAPES = [(80, 64), (79, 64), (40,), (81, 64), (0, 64), (83, 64)]
NAMES = [f"w0.{index}" for index in range(len(SHAPES))]
EMPTY = "w0.4"


@pytest.fixture
def trained(monkeypatch) -> Rig:
    """A part of some steps, its tensors of many blocks each."""
    small_blocks(monkeypatch)
    rig = Rig(SHAPES, lambda groups: torch.optim.AdamW(groups[0], fused=True), absent=0.3)
    rig.put_base()
    for _ in range(17):  # at 16 every block has a fingerprint
        rig.train()
    return rig


def fetched(rig: Rig, held: dict[str, bool]):
    """What is wanted of the part alone, and how many bytes were read for it."""
    fetcher = Fetcher([rig.tier])
    plan = plan_restore(read_catalog([rig.tier], RUN))
    wanted = {PART: {("", name): state for name, state in held.items()}} if held else {}
    parts, reports = fetch_parts(fetcher, plan, open_layouts([rig.tier], plan), wanted)
    assert [report.checked > 0 for report in reports] == [True] * (held.keys() != {EMPTY})
    return parts, wanted, fetcher.bytes_read


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("state", [True, False])
def test_a_tensor_of_a_part(trained, name, state):
    """It is bit for bit as the whole part has it; of the other tensors nothing was read."""
    (whole, _, all_bytes) = fetched(trained, {})
    parts, wanted, nbytes = fetched(trained, {name: state})
    share = trained.layout.section("s0").slices[NAMES.index(name)].elements / sum(
        piece.elements for piece in trained.layout.section("s0").slices
    )
    assert nbytes < all_bytes * (share + 0.1)
    found, expected = (gathered(each, PART, wanted) for each in (parts, whole))
    assert found.layout == expected.layout
    ((made, piece),) = [(s, each) for s in found.layout.sections for each in s.slices]
    assert (piece.name, made.optimizer) == (name, 0 if state else -1)
    for role, _ in made.roles:
        mine, theirs = (
            bytes(byte_view(each.arrays[f"{made.name}/{role}"][piece.offset :][: piece.elements]))
            for each in (found, expected)
        )
        assert mine == theirs
    assert found.states == expected.states
    kept = {key.split("/")[1] for key in parts[PART].arrays}
    assert kept == ({"param", "exp_avg", "exp_avg_sq"} if state else {"param"})


def test_memory_that_is_not_wanted_is_not_touched(trained):
    """However large the part: blocks of other tensors are no memory of this process."""
    parts, _, _ = fetched(trained, {NAMES[2]: True})
    (piece,) = (p for p in trained.layout.section("s0").slices if p.name == NAMES[2])
    for array in parts[PART].arrays.values():
        unit = 1024 // 4
        low, high = piece.offset // unit * unit, -(-(piece.offset + piece.elements) // unit) * unit
        assert not array[:low].any()
        assert not array[high:].any()
        assert array[low:high].any()
