"""Shards: where a rank's piece of a DTensor lies, what is refused, and which edits are seen."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from adacheck_store.format.errors import ModelMismatchError, UnsupportedError
from adacheck_store.group import SOLO
from adacheck_store.trainer_hooks.layouts import bind, compare
from adacheck_store.trainer_hooks.outside import mark_of
from adacheck_store.trainer_hooks.shards import local, odd_gradient, piece_of, refusal
from tests.hooks.helpers import adamw


def ranks(rank: int, size: int) -> SimpleNamespace:
    """A group that says nothing."""
    return SimpleNamespace(rank=rank, size=size)


def fake(whole: torch.Tensor, placements, mesh: tuple[int, ...], at: tuple[int, ...]):
    """What a rank at a mesh coordinate holds, cut by torch.chunk itself: strided shards at last."""
    here = whole
    cuts = list(zip(placements, mesh, at, strict=True))
    strided = [cut for cut in cuts if isinstance(cut[0], _StridedShard)]
    for placement, size, index in [cut for cut in cuts if cut not in strided] + strided[::-1]:
        if isinstance(placement, Shard | _StridedShard):
            chunks = here.chunk(size, placement.dim)
            empty = here.narrow(placement.dim, 0, 0)
            here = chunks[index] if index < len(chunks) else empty
    size = torch.Size(mesh).numel()
    device_mesh = SimpleNamespace(shape=mesh, get_coordinate=lambda: list(at), size=lambda: size)
    return SimpleNamespace(
        shape=whole.shape, placements=placements, device_mesh=device_mesh, _local_tensor=here
    )


class Odd(Shard):
    """A placement of somebody's own."""


MESHES = [
    ((4,), (Shard(0),)), ((4,), (Shard(1),)), ((4,), (Replicate(),)),
    ((2, 3), (Replicate(), Shard(0))), ((2, 2), (Shard(0), Shard(1))),
    ((2, 2), (Shard(0), Shard(0))), ((3, 2), (Shard(1), Replicate())),
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((2, 3, 2), (_StridedShard(0, split_factor=6), _StridedShard(0, split_factor=2), Shard(0))),
    ((2, 2, 2), (Shard(0), _StridedShard(0, split_factor=2), Shard(0))),
    ((2, 2), (_StridedShard(0, split_factor=1), Shard(1))),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "placements"), MESHES)
@pytest.mark.parametrize("shape", [(5, 3), (1, 7), (8, 4), (2, 2), (9, 1), (4, 0)])
def test_boxes_are_what_each_rank_holds(mesh, placements, shape):
    """Uneven and empty shards too: a piece's box, cut out of the whole, is the local tensor."""
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    seen = torch.zeros(shape, dtype=torch.int64)
    size = torch.Size(mesh).numel()
    for at in itertools.product(*map(range, mesh)):
        tensor = fake(whole, placements, mesh, at)
        piece = piece_of(tensor, ranks(0, size))
        assert (piece.scope, piece.shape) == ("", shape)
        if not piece.boxes:
            assert tensor._local_tensor.numel() == 0
            continue
        (((top, bottom), (left, right)),) = piece.boxes
        assert torch.equal(whole[top:bottom, left:right], tensor._local_tensor)
        seen[top:bottom, left:right] += 1
    copies = [size for size, place in zip(mesh, placements, strict=True) if place == Replicate()]
    assert (seen == torch.Size(copies).numel()).all()


def test_a_shard_that_is_cut_otherwise_is_refused():
    """What does not lie as its placements say is not guessed."""
    tensor = fake(torch.zeros(5, 3), (Shard(0),), (4,), (1,))
    tensor._local_tensor = torch.zeros(1, 3)
    with pytest.raises(UnsupportedError, match=r"shape \[5, 3\] has a shard of \[1, 3\] here"):
        piece_of(tensor, ranks(1, 4))


def test_names_are_global_only_where_all_ranks_hold_pieces():
    """A plain tensor, or a DTensor of some ranks, is its rank's alone; of one process, global."""
    assert piece_of(torch.zeros(2), SOLO).scope == ""
    assert piece_of(torch.zeros(2), ranks(3, 4)).scope == "r000003"
    some = fake(torch.zeros(4, 2), (Shard(0),), (2,), (1,))
    assert piece_of(some, ranks(3, 4)).scope == "r000003"


@pytest.mark.parametrize(
    ("placement", "name"),
    [(Partial(), "Partial"), (Odd(0), "Odd")],
)
def test_other_placements_are_refused_by_name(placement, name):
    """They mean another arithmetic, or another order of elements."""
    tensor = SimpleNamespace(placements=(placement,), _local_tensor=torch.zeros(1))
    assert refusal(tensor) == f"is a DTensor with placement {name}"


def test_strides_of_no_known_order_are_refused():
    """As many pieces as are cut to the right are known; more or fewer are another order."""
    for factor, why in ((2, ""), (3, "in no order of torch's own"), (4, "in no order")):
        placements = (_StridedShard(0, split_factor=factor), Shard(0))
        tensor = fake(torch.zeros(8, 3), placements, (2, 2), (0, 1))
        assert why in refusal(tensor)
        assert bool(refusal(tensor)) == bool(why)


def test_what_another_rank_holds_is_not_loaded():
    """Scope and box are compared, and both are named."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = adamw(model)
    mine, other = (bind(model, optimizer, group=ranks(rank, 2)) for rank in (0, 1))
    assert len(compare(mine, mine.layout)) == 2
    with pytest.raises(ModelMismatchError) as caught:
        compare(mine, other.layout)
    assert (
        "sharding of 'weight': the chain has the whole of r000001 alone, this run the whole of "
        "r000000 alone"
    ) in str(caught.value)


@pytest.fixture(scope="module")
def mesh():
    """A mesh of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_edits_of_a_dtensor_are_seen_in_either_of_its_tensors(mesh):
    """Through the DTensor, and through what it holds."""
    tensor = DTensor.from_local(torch.zeros(3), mesh, [Shard(0)])
    marks = [mark_of(tensor)]
    for edit in (lambda: tensor.add_(1), lambda: tensor.to_local().add_(1)):
        edit()
        marks.append(mark_of(tensor))
    assert len(set(marks)) == 3
    assert local(tensor).tolist() == [2.0] * 3


def test_a_gradient_lies_as_its_parameter(mesh):
    """One that does not is named."""
    param = DTensor.from_local(torch.zeros(3), mesh, [Shard(0)])
    assert odd_gradient(param, DTensor.from_local(torch.zeros(3), mesh, [Shard(0)])) == ""
    other = DTensor.from_local(torch.zeros(3), mesh, [Replicate()])
    assert odd_gradient(param, other) == "sharded in another way than the parameter"
    assert odd_gradient(param, torch.zeros(3)) == "sharded in another way than the parameter"
    assert odd_gradient(param, other.to(torch.float64)) == "of torch.float64"


def test_an_optimizer_that_cannot_be_folded_is_refused_with_shards(mesh):
    """Its state is kept as trees, which hold plain tensors."""
    model = torch.nn.Linear(3, 2)
    sharded = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)])
    model.weight = torch.nn.Parameter(sharded)
    with pytest.raises(UnsupportedError, match="LBFGS cannot be folded, and parameter 'weight'"):
        bind(model, torch.optim.LBFGS(model.parameters()))
