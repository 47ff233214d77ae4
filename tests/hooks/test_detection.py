"""What a rank sees of its model when it looks for copies, and when it looks."""

import pytest
import torch

from adacheck_store.config import Settings
from adacheck_store.format.errors import GroupError
from adacheck_store.redundancy.sighting import Standing
from adacheck_store.trainer_hooks.detection import MOST_RANKS, Agreement, Detection, sightings
from adacheck_store.trainer_hooks.layouts import bind
from adacheck_store.trainer_hooks.narrow import narrowed


@pytest.fixture
def trained():
    """A model with a frozen bias and a BatchNorm after one step, and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def seen(model, optimizer):
    """Sightings by name and role."""
    found = sightings(bind(model, optimizer), 2)
    return {(each.identity.name, each.identity.role): each for each in found}


def test_everything_is_seen_with_its_standing(trained):
    """A frozen parameter may stand still; a buffer that does may move on one rank alone later."""
    found = seen(*trained)
    roles = ("param", "exp_avg", "exp_avg_sq")
    names = ("0.weight", "1.weight", "1.bias")
    buffers = {
        (f"1.{name}", "buffer") for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert set(found) == {(n, r) for n in names for r in roles} | {("0.bias", "param")} | buffers
    frozen = [place for place, each in found.items() if each.standing is Standing.FROZEN]
    assert frozen == [("0.bias", "param")]
    assert all(each.digest and not each.trouble for each in found.values())


def test_a_counter_is_seen_with_the_moments(trained):
    """Equal moments of another step are no copies."""
    model, optimizer = trained
    before = seen(model, optimizer)
    optimizer.state[model[0].weight]["step"] += 1
    after = seen(model, optimizer)
    changed = {place for place, each in after.items() if each.digest != before[place].digest}
    assert changed == {("0.weight", "exp_avg"), ("0.weight", "exp_avg_sq")}


def test_the_tensors_that_a_rank_writes(trained):
    """Slices of the others are left out, in order; gradients of all are still looked after."""
    whole = bind(*trained)
    mine = narrowed(whole, {"1.weight": "", "0.bias": "r000001"})
    pieces = [piece for section in mine.layout.sections for piece in section.slices]
    assert [(piece.name, piece.scope, piece.offset) for piece in pieces] == [
        ("1.weight", "", 0), ("0.bias", "r000001", 0)
    ]  # fmt: skip
    assert [slot.item.name for slot in mine.given] == ["0.weight", "1.weight", "1.bias"]
    assert narrowed(whole, {}).layout.seal("run")


class Two:
    """As much of a group as is asked here."""

    rank, size, lost = 0, 2, ()


def test_ranks_look_in_pairs_and_then_where_bases_are_due():
    """At the boundary before, too; a change of the model begins anew."""
    detection = Detection(Two(), Settings(base_every=20, redundancy="auto"))
    looked = [step for step in range(1, 70) if detection.due(step)]
    assert looked == [1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64]
    detection._by = Agreement(anything=True)
    looked = [step for step in range(1, 70) if detection.due(step)]
    assert looked == [1, 2, 3, 4, 7, 8, 15, 16, 19, 20, 31, 32, 39, 40, 59, 60, 63, 64]
    detection._failed(60, GroupError("rank 1 did not come"))
    assert detection._vigil._failed == 60
    looked = [step for step in range(61, 130) if detection.due(step)]
    assert looked == [63, 64, 127, 128]  # where all come, whatever they know
    detection.begin(30, True)
    assert [step for step in range(1, 40) if detection.due(step)] == [31, 32, 33, 34, 37, 38]
    detection.begin(30, False)
    assert not any(detection.due(step) for step in range(1, 99))
    off = Detection(Two(), Settings(redundancy="off"))
    assert (off.said, any(off.due(step) for step in range(1, 99))) == ("off", False)


def test_more_ranks_than_one_store_serves_do_not_look():
    """It is said; asking for it changes nothing."""
    many = Two()
    many.size = MOST_RANKS
    asked = Settings(redundancy="auto")
    assert Detection(many, asked).due(1)
    many.size += 1
    found = Detection(many, asked)
    assert found.said == "more than 512 ranks are not compared"
    assert not any(found.due(step) for step in range(1, 99))
