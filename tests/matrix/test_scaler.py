"""GradScaler: what it skips is no update, and its own state is restored."""

import logging

import pytest
import torch

from adacheck_store.format.bodies import decode_delta
from tests.hooks.helpers import attach, bits, check_records, new_url, same
from tests.matrix import cases_scaler as cases
from tests.matrix.kit import prove

ALL = [
    cases.Scaled, cases.ScaledFused, cases.ScaledClip, cases.ScaledFusedClip, cases.ScaledNesterov,
    cases.Autocast,
]  # fmt: skip


@pytest.mark.parametrize("case", ALL)
def test_restored_bit_for_bit(tmp_path, case):
    """Killed right after two skipped steps, and restored to one before them."""
    prove(tmp_path, case, steps=(4,))


@pytest.mark.parametrize("case", ALL)
def test_a1_a_skipped_step_is_a_boundary_without_update(case, caplog):
    """A1: with end_step() the deltas of skipped steps hold no update, the others one."""
    run, url = case(), new_url()
    with attach(run.model, run.optimizers, url) as ckpt:
        ckpt.track(scaler=run.scaler)
        ckpt.restore()
        for number in range(1, 8):
            run.step(number)
            assert ckpt.end_step() == number
    counts = [len(decode_delta(head).updates) for _, head in sorted(check_records(url).items())]
    assert counts == [0 if n in cases.INFINITE else 1 for n in range(1, 8)]
    assert "dropped unused" not in caplog.text


@pytest.mark.parametrize("case", ALL)
def test_a1_without_end_step_a_skipped_step_is_no_boundary(case):
    """A1: nothing tracked; the chain counts applied steps, and folds to the live state."""
    run, url = case(), new_url()
    with attach(run.model, run.optimizers, url) as ckpt:
        ckpt.restore()
        for number in range(1, 8):
            run.step(number)
        assert ckpt.step == 7 - len(cases.INFINITE)
        end = bits(run.model, run.optimizers[0])
    again = case()
    with attach(again.model, again.optimizers, url) as ckpt:
        assert ckpt.restore().step == 7 - len(cases.INFINITE)
        now = bits(again.model, again.optimizers[0])
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    same(*({k: v for k, v in b.items() if not k.endswith(buffers)} for b in (end, now)))


def forgotten(caplog):
    """How often the log says that a scaler is not tracked."""
    return sum("scaler that is not tracked" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("case", ALL)
def test_a_scaler_that_is_not_tracked_is_said_once(case, caplog):
    """Like a scheduler it would be lost: the warning names track(); a tracked one is not named."""
    run = case()
    with attach(run.model, run.optimizers, new_url()) as ckpt, caplog.at_level(logging.WARNING):
        ckpt.restore()
        for number in range(1, 4):
            run.step(number)
        assert forgotten(caplog) == 1
        assert "track(scaler=...) before restore()" in caplog.text
    caplog.clear()
    run = case()
    with attach(run.model, run.optimizers, new_url()) as ckpt, caplog.at_level(logging.WARNING):
        ckpt.track(scaler=run.scaler)
        ckpt.restore()
        run.step(1)
        ckpt.end_step()
        assert forgotten(caplog) == 0


def test_scalers_of_all_kinds_are_seen(caplog):
    """One of two tracked; a subclass with a step of its own, under a schedule; one not enabled."""

    class Own(torch.amp.GradScaler):
        def step(self, optimizer, *args, **kwargs):
            return super().step(optimizer, *args, **kwargs)

    for scaler, told in [
        (torch.amp.GradScaler("cpu"), 1), (Own("cpu"), 1),
        (torch.amp.GradScaler("cpu", enabled=False), 0),
    ]:  # fmt: skip
        run = cases.Scaled()
        other = run.scaler
        run.scaler = scaler
        schedule = torch.optim.lr_scheduler.StepLR(run.optimizers[0], 2)
        caplog.clear()
        with attach(run.model, run.optimizers, new_url()) as ckpt, caplog.at_level(logging.WARNING):
            ckpt.track(other=other, schedule=schedule)
            ckpt.restore()
            run.step(1)
            ckpt.end_step()
        assert forgotten(caplog) == told, scaler


def test_a_scaler_of_another_library_is_seen_by_what_it_hands_to_a_fused_step(caplog):
    """`grad_scale` and `found_inf` on the optimizer; with any object tracked it may be that one."""
    for tracked, told in (({}, 1), ({"scaler": torch.amp.GradScaler("cpu")}, 0)):
        run = cases.ScaledFused()
        (optimizer,) = run.optimizers
        caplog.clear()
        with attach(run.model, optimizer, new_url()) as ckpt, caplog.at_level(logging.WARNING):
            ckpt.track(**tracked)
            ckpt.restore()
            run.model(torch.randn(4, 5)).square().mean().backward()
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(0.0)
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
            ckpt.end_step()
        assert forgotten(caplog) == told
