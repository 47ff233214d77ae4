"""An engine that is wrong by one unit in the last place: found, disowned, re-based, told."""

from __future__ import annotations

import time

import pytest
import torch

from adacheck_store.engines import StepEngine
from adacheck_store.format.errors import NotProvableError
from adacheck_store.restore import restore_state
from tests.core.kit import QUICK, Journal, KeptTier, begin, make_toy, session_on, train

pytestmark = pytest.mark.fault


def test_one_ulp_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = StepEngine.apply
    wrong = [True]

    def apply(self, pieces, groups) -> None:
        sound(self, pieces, groups)
        if wrong[0] and pieces and pieces[0].param.numel():
            pieces[0].param.reshape(-1)[:1].view(torch.int32).add_(1)

    monkeypatch.setattr(StepEngine, "apply", apply)
    near, far = KeptTier("near"), KeptTier("far")
    session = session_on(near, far, QUICK)
    toy, journal = make_toy(absent=0.0), Journal()
    begin(session, toy, journal)
    train(session, toy, journal, 8)
    deadline = time.monotonic() + 120
    while session.wants_base() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    status = session.status()
    assert status.exposed
    assert "is not what the trainer had" in status.gap
    assert "is not what the trainer had" in status.last_error
    assert status.base == 0
    assert not any("/base/000000000008" in key for key in near.list("run/"))
    train(session, toy, journal, 1)
    assert session._writer.wait_stored(30)
    assert not session.status().exposed
    rebased = restore_state([near, far], "run")
    journal.assert_same(rebased)
    assert (rebased.step, rebased.certificate.base_step) == (9, 9)
    assert rebased.certificate.base_origin == "captured"
    for step in range(1, 9):
        with pytest.raises(NotProvableError):
            restore_state([near, far], "run", step=step)
    wrong[0] = False
    train(session, toy, journal, 8)
    while session.status().base != 16:  # the pause after the failure passes
        assert time.monotonic() < deadline
        time.sleep(0.005)
    session.flush(30)
    session.close()
    for tiers in ([near, far], [far]):
        done = restore_state(tiers, "run")
        journal.assert_same(done)
        assert done.step == 17
        assert done.certificate.base_origin == "replayed"
        assert done.certificate.verified_through >= 16
