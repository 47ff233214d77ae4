"""Edits that nothing announces: found by version counters, or by fingerprints within a turn."""

import contextlib
import logging

import pytest
import torch

from adacheck_store.format.errors import NotProvableError
from adacheck_store.restore import restore_state
from adacheck_store.store import open_store
from tests.hooks.helpers import attach, bits, new_url, same
from tests.matrix import cases_edits, cases_gradients, cases_loops

LATE = "changed after the boundary"


def _train(case, ckpt, first, last, edit=lambda number: None):
    for number in range(first, last + 1):
        case.step(number)
        edit(number)
        case.ckpt = ckpt
        case.end(number)


def test_an_edit_through_data_costs_a_base_and_no_truth():
    """No version counter moves: the next full fingerprint differs, and the chain starts anew."""
    case, url = cases_gradients.Plain(), new_url()
    marks = {}
    with attach(case.model, case.optimizers, url, base_every=8, keep=100, strict=False) as ckpt:
        ckpt.track()
        ckpt.restore()
        case.ends = True

        def edit(number):
            if number == 10:
                case.model[2].weight.data.mul_(0.5)

        for number in range(1, 31):
            _train(case, ckpt, number, number, edit)
            ckpt._session._writer.wait_stored(30)
            marks[number] = bits(case.model, case.optimizers[0])
            ckpt.flush(60)
        assert ckpt.status().gap == ""
    refused = []
    for step in range(30, 0, -1):
        again = cases_gradients.Plain()
        with attach(again.model, again.optimizers, url, keep=100) as ckpt:
            ckpt.track()
            with contextlib.suppress(NotProvableError):
                ckpt.restore(step)
                same(marks[step], bits(again.model, again.optimizers[0]))
                continue
            refused.append(step)
    assert refused, "the edit was never found"
    assert min(refused) >= 9
    assert max(refused) <= 10 + 16


def test_an_edit_of_one_number_of_a_large_array_is_found_within_sixteen_steps():
    """64 blocks, one in 16 fingerprinted by a step; edited just after its block's turn."""
    model, url, edited = torch.nn.Module(), new_url(), 5
    model.large = torch.nn.Parameter(torch.zeros(64 << 18))
    model.small = torch.nn.Parameter(torch.randn(33))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, url, strict=False, base_every=64) as ckpt:
        ckpt.restore()
        for number in range(1, 24):
            model.small.grad = torch.randn(33)
            optimizer.step()
            if number == edited:
                model.large.data[((16 + edited) << 18) + 11] += 1e-30
    with open_store(url) as store:
        newest = restore_state(store.tiers, "r")
        assert (newest.step, newest.lost) == (edited, 23 - edited)
        assert any(f"block {16 + edited}" in reason for reason in newest.reasons)
        for step in (22, edited + 16):
            with pytest.raises(NotProvableError, match="is not what the trainer had"):
                restore_state(store.tiers, "r", step=step)
        for step in (edited + 1, edited + 15):
            certificate = restore_state(store.tiers, "r", step=step).certificate
            assert certificate.verified_through <= edited, "the certificate does not tell"


@pytest.mark.parametrize(
    ("case", "late"),
    [
        (cases_gradients.Plain, False), (cases_loops.Groups, False), (cases_edits.Clipped, True),
        (cases_edits.Averaged, True), (cases_edits.SpectralNorm, False),
    ],
)  # fmt: skip
def test_an_edit_after_the_boundary_is_said(case, late, caplog):
    """Without track() the boundary lies in optimizer.step(): later edits are not in it."""
    run = case()
    with attach(run.model, run.optimizers, new_url()) as ckpt:
        if run.tracked:
            ckpt.track(**run.tracked)
        ckpt.restore()
        with caplog.at_level(logging.WARNING):
            for number in range(1, 5):
                run.step(number)
                if run.tracked:
                    ckpt.end_step()
    assert sum(LATE in record.getMessage() for record in caplog.records) == int(late)


def test_with_end_step_nothing_is_late(caplog):
    """Clipped and averaged before the boundary."""
    for case in (cases_edits.Clipped(), cases_edits.Averaged()):
        with attach(case.model, case.optimizers, new_url()) as ckpt:
            ckpt.track()
            ckpt.restore()
            with caplog.at_level(logging.WARNING):
                _train(case, ckpt, 1, 4)
    assert not [record for record in caplog.records if LATE in record.getMessage()]


def test_capture_draws_from_no_generator_and_changes_no_flag():
    """Part C: beyond the bits of the run itself, nothing of the process is touched."""

    def flags():
        return (
            torch.get_rng_state().tolist(), torch.is_grad_enabled(), torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(),
        )  # fmt: skip

    case = cases_gradients.Plain()
    before = flags()
    with attach(case.model, case.optimizers, new_url()) as ckpt:
        ckpt.restore()
        assert flags() == before
        for param in case.model.parameters():
            param.grad = torch.ones_like(param)
        case.optimizers[0].step()
        ckpt.flush(30)
        assert flags() == before
