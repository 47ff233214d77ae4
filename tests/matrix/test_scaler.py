"""GradScaler: what it skips is no update, and its own state is restored."""

import pytest

from adacheck_store.format.bodies import decode_delta
from tests.hooks.helpers import attach, bits, check_records, new_url, same
from tests.matrix import cases_scaler as cases
from tests.matrix.kit import prove

ALL = [
    cases.Scaled, cases.ScaledFused, cases.ScaledClip, cases.ScaledFusedClip, cases.ScaledNesterov,
]  # fmt: skip


@pytest.mark.parametrize("case", ALL)
def test_restored_bit_for_bit(tmp_path, case):
    """Killed right after two skipped steps, and restored to one before them."""
    prove(tmp_path, case, steps=(4,))


@pytest.mark.parametrize("case", ALL)
def test_a1_a_skipped_step_is_a_boundary_without_update(case):
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
