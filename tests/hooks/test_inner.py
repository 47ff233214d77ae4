"""Optimizers around others: ZeroRedundancyOptimizer has the groups, the one inside the state."""

import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from adacheck_store.format.errors import UnsupportedError
from adacheck_store.trainer_hooks.inner import keeper, settle
from adacheck_store.trainer_hooks.layouts import bind
from adacheck_store.trainer_hooks.outside import OutsideWatch
from adacheck_store.trainer_hooks.stager import SMALL_BYTES
from tests.hooks.helpers import adamw


@pytest.fixture(scope="module")
def process_group():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def zero(model, cls=torch.optim.AdamW, **options):
    """The optimizer under test; to import it warns of torch's own use of ``torch.jit``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), cls, **options)


def test_the_layout_is_that_of_the_optimizer_inside(process_group):
    """Its class, its parameters, its state; what a scheduler sets is the outer one's."""
    model = torch.nn.Linear(3, 2)
    optimizer = zero(model, lr=0.5)
    binding = bind(model, optimizer)
    assert binding.layout.optimizers == ("torch.optim.AdamW",)
    assert binding.optimizers == (optimizer,)
    assert binding.keepers == (optimizer.optim,)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert all(binding.present(slot) for slot in binding.trained)
    optimizer.param_groups[0]["lr"] = 0.25
    settle(optimizer)
    assert optimizer.optim.param_groups[0]["lr"] == 0.25
    assert len(optimizer.optim.param_groups[0]["params"]) == 2


def test_what_steps_within_the_backward_pass_is_refused(process_group):
    """With what to do instead."""
    model = torch.nn.Linear(3, 2)
    with pytest.raises(UnsupportedError, match="overlap_with_ddp=True is not supported") as caught:
        bind(model, zero(model, overlap_with_ddp=True, lr=0.5))
    assert "overlap_with_ddp=False" in str(caught.value.hint)


def test_what_cannot_be_folded_inside_is_refused(process_group):
    """Its state would be a tree in the extra, which knows nothing of other ranks."""
    model = torch.nn.Linear(3, 2)
    with pytest.raises(UnsupportedError, match="LBFGS, which cannot be folded"):
        bind(model, zero(model, torch.optim.LBFGS, lr=0.5))


def test_what_another_rank_sends_is_kept_though_no_counter_moves():
    """A broadcast writes through ``.data``; the tensor is too large to be copied on suspicion."""
    model = torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(300, SMALL_BYTES // 1000)])
    optimizer = adamw(model[0])
    assert keeper(optimizer) is optimizer
    whole = bind(model, optimizer, group=SimpleNamespace(rank=1, size=2))
    watch = OutsideWatch(whole, whole)
    before = model[1].weight._version
    model[1].weight.data.fill_(3.0)
    assert model[1].weight._version == before
    kept = {item.slot.item.name: item.data for item in watch.stage(None)}
    assert kept["1.weight"].eq(3.0).all()
