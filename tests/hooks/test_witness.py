"""What a rank witnesses: all that changes a shared state, and that it does not know, if so."""

from types import SimpleNamespace

import pytest
import torch

from adacheck_store.trainer_hooks.held import held_groups
from adacheck_store.trainer_hooks.layouts import bind
from adacheck_store.trainer_hooks.outside import SetCopy
from adacheck_store.trainer_hooks.updates import CapturedUpdate
from adacheck_store.trainer_hooks.witness import STATE_EDITED, Witnessing

SETS = {("p000000", "", "bias"): "0.1", ("p000001", "", "weight"): "0.1"}


@pytest.fixture
def bound():
    """A layer with its optimizer, bound."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return bind(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def update(bound, *, lr: float = 0.1, add: float = 0.0, without: int = -1) -> CapturedUpdate:
    """An update with gradients of ones, that of the first slot with something added."""
    (optimizer,) = bound.optimizers
    optimizer.param_groups[0]["lr"] = lr
    views = {n: torch.ones(slot.shape) for n, slot in enumerate(bound.captured)}
    views[0] += add
    given = set(views) - {without}
    area = SimpleNamespace(views=views)
    return CapturedUpdate(0, held_groups(optimizer.param_groups), area, given=given)


def after(bound, *boundaries) -> Witnessing:
    """One that began at step 2 and has taken in a list of updates for each step."""
    made = Witnessing(bound)
    made.begin(2, SETS)
    for step, updates in enumerate(boundaries, 3):
        made.advance(step, updates, ())
    return made


def told(bound, *boundaries) -> bytes:
    """The digests after these."""
    witness = after(bound, *boundaries).of(2 + len(boundaries))
    assert witness.since == 2
    return witness.digests


def test_the_same_changes_give_the_same_digests(bound):
    """And each step another one; what is not the slot's own does not matter to it."""
    same = [update(bound)]
    assert told(bound, same, same) == told(bound, [update(bound)], [update(bound)])
    assert told(bound, same) != told(bound, same, same)
    assert told(bound) == bytes(32)


@pytest.mark.parametrize(
    "other",
    [{"add": 1e-7}, {"lr": 0.2}, {"without": 0}],
    ids=["one ulp", "learning rate", "no gradient"],
)
def test_any_difference_shows_at_once_and_for_ever(bound, other):
    """Whatever comes after it."""
    same = [update(bound)]
    differs = [update(bound, **other)]
    assert told(bound, same) != told(bound, differs)
    assert told(bound, same, same, same) != told(bound, differs, same, same)
    assert told(bound, same, same) != told(bound, same, [*same, *same])
    assert told(bound, same, differs) != told(bound, differs, same)


def test_edits_are_changes_too(bound):
    """A tensor that the loop has set besides."""
    slot = bound.captured[0]
    made = [Witnessing(bound) for _ in range(3)]
    for number, each in enumerate(made):
        each.begin(2, SETS)
        copy = SetCopy(slot, "param", torch.full(slot.shape, float(number > 1)))
        each.advance(3, [update(bound)], [copy])
    one, two, other = (each.of(3).digests for each in made)
    assert one == two != other


def test_a_step_that_is_missing_ends_it_until_all_are_equal_again(bound):
    """So does a state that somebody has edited, which is said for good."""
    made = after(bound, [update(bound)])
    made.advance(5, [update(bound)], ())
    assert (made.of(3).since, made.of(5).since, made.of(4).since) == (2, -1, -1)
    made.begin(6, SETS)
    made.advance(7, [update(bound)], ())
    assert made.of(7).since == 6
    made.advance(8, [update(bound)], (), True)
    made.advance(9, [update(bound)], ())
    assert (made.of(8).since, made.of(9).since) == (-1, -1)
    assert made.awaited(8, 0.0).trouble == STATE_EDITED
    assert made.awaited(10, 0.01) is None


def test_what_is_told_of_a_step_stays(bound):
    """A record may be made again; a second time a step changes nothing."""
    made = after(bound, [update(bound)], [update(bound)])
    before = made.of(3)
    made.advance(3, [update(bound, add=1.0)], ())
    made.begin(2, SETS)
    assert made.of(3) == before
    assert Witnessing(bound).of(3) is None


def test_boundaries_are_taken_in_in_turn(bound):
    """Each once; one that cannot be read ends it, and those after it do not hide that."""
    made = after(bound)
    for step in (3, 4):
        made.coming(step, lambda step=step: made.advance(step, [update(bound)], ()))
    made.take_in(4)
    made.take_in(3)
    known = after(bound, [update(bound)], [update(bound)])
    assert [made.of(step) for step in (3, 4)] == [known.of(step) for step in (3, 4)]
    made.coming(5, lambda: made.advance(5, [None], ()))
    made.coming(6, lambda: made.advance(6, [update(bound)], ()))
    made.take_in(6)
    assert (made.of(5).since, made.of(6).since) == (-1, -1)
    assert made.unknown(6)
