"""Optimizer state that the loop itself changes: what no delta can tell is kept by a base."""

import copy

import pytest
import torch

from adacheck_store.trainer_hooks.layouts import bind
from adacheck_store.trainer_hooks.outside import OutsideWatch
from tests.hooks.helpers import adamw, attach, bits, mlp, new_url, restored, same, train


def make(seed=0):
    """A model and its optimizer."""
    model = mlp(seed)
    return model, adamw(model)


def zeroed(optimizer, saved):
    """A moment of one parameter."""
    next(iter(optimizer.state.values()))["exp_avg"].zero_()


def counted(optimizer, saved):
    """A counter of one parameter, which no fingerprint has."""
    next(iter(optimizer.state.values()))["step"].fill_(1)


def dropped(optimizer, saved):
    """The state of one parameter."""
    del optimizer.state[optimizer.param_groups[0]["params"][2]]


def rolled_back(optimizer, saved):
    """All of it, to an earlier one."""
    optimizer.load_state_dict(saved)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("edit", [zeroed, counted, dropped, rolled_back])
def test_an_edited_state_is_kept(edit, late, caplog):
    """Before the boundary it is in it; after it, in the next one."""
    url, marks = new_url(), {}
    model, optimizer = make()
    with attach(model, optimizer, url, base_every=100) as ckpt:
        ckpt.track()
        ckpt.restore()
        saved = None
        for step in range(1, 7):
            train(model, optimizer)
            if step == 4 and not late:
                edit(optimizer, saved)
            ckpt.end_step()
            marks[step] = bits(model, optimizer)
            if step == 2:
                saved = copy.deepcopy(optimizer.state_dict())
            if step == 4 and late:
                edit(optimizer, saved)
    assert caplog.text.count("state was changed between its steps") == 1
    for step in (6, 5, 4, 3):
        with restored(make, url, step=step) as (model, optimizer, _, report):
            assert report.step == step
            same(bits(model, optimizer), marks[step])


def test_steps_alone_are_no_edits():
    """No base comes where nobody has touched anything; absent gradients are no edit either."""
    url = new_url()
    model, optimizer = make()
    with attach(model, optimizer, url, base_every=100) as ckpt:
        ckpt.track()
        ckpt.restore()
        for number in range(5):
            train(model, optimizer)
            if number == 2:
                optimizer.state_dict()
                model[0].weight.grad = None
                torch.manual_seed(number)
            ckpt.end_step()
    with restored(make, url) as (*_, report):
        assert report.certificate.base_step == 0
        assert report.certificate.deltas == 5


def test_to_ask_whether_something_was_changed_does_not_forget_it():
    """A flush asks; the boundary after it has to know, too, and once."""
    model, optimizer = make()
    train(model, optimizer)
    whole = bind(model, optimizer)
    watch = OutsideWatch(whole, whole)
    zeroed(optimizer, None)
    assert watch.changed()
    assert watch.state_touched()
    assert not watch.state_touched()
