"""A wrong fold is found at the next full fingerprint, quarantined, re-based and reported."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from adacheck_store.catalog import read_catalog
from adacheck_store.engines import StepEngine
from adacheck_store.store import open_store
from tests.hooks.helpers import adamw, attach, bits, mlp, new_url, restored, same, train

BASE_EVERY, PLANTED_AT = 8, 11


def make(seed: int = 0) -> Any:
    """A model and its optimizer."""
    model = mlp(seed)
    return model, adamw(model)


def one_ulp(monkeypatch: pytest.MonkeyPatch, at: int = PLANTED_AT) -> None:
    """At some update the engine's result is off by one place in one number."""
    right = StepEngine.apply
    done = {"n": 0}

    def wrong(self: StepEngine, pieces: Any, groups: Any) -> None:
        right(self, pieces, groups)
        done["n"] += 1
        if done["n"] == at:
            pieces[0].param.view(torch.int32).reshape(-1)[3] += 1

    monkeypatch.setattr(StepEngine, "apply", wrong)


def wrong_beta(monkeypatch: pytest.MonkeyPatch, at: int = PLANTED_AT) -> None:
    """The engine takes another beta than the trainer from some update on."""
    right = StepEngine._keywords
    done = {"n": 0}

    def wrong(self: StepEngine, groups: Any) -> Any:
        done["n"] += 1
        found = right(self, groups)
        if done["n"] < at:
            return found
        return [{**group, "betas": (0.9, 0.999 - 1e-7)} for group in found]

    monkeypatch.setattr(StepEngine, "_keywords", wrong)


def until(true: Callable[[], bool]) -> None:
    """Wait for a background thread."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("plant", [one_ulp, wrong_beta])
def test_a_planted_wrong_fold(
    plant: Callable[[pytest.MonkeyPatch, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = new_url()
    model, optimizer = make()
    marks = {}
    with (
        monkeypatch.context() as planted,
        attach(model, optimizer, url, strict=False, base_every=BASE_EVERY, keep=9) as ckpt,
    ):
        ckpt.restore()
        for number in range(1, 2 * BASE_EVERY + 1):  # the fold to step 16 is the wrong one
            train(model, optimizer)
            marks[number] = bits(model, optimizer)
            ckpt.flush(far=False)
            if number == BASE_EVERY:
                until(lambda: ckpt.status().base == BASE_EVERY)
                plant(planted, 3)
        until(lambda: ckpt.status().mismatch != "")
        assert "is not what the trainer had" in ckpt.status().mismatch
        planted.undo()
        for number in range(2 * BASE_EVERY + 1, 3 * BASE_EVERY + 4):
            train(model, optimizer)
            marks[number] = bits(model, optimizer)
            ckpt.flush(far=False)
        until(lambda: ckpt.status().base == 3 * BASE_EVERY)
        status = ckpt.status()
        assert "is not what the trainer had" in status.mismatch
        assert not status.gap
        assert not status.exposed
    with open_store(url) as store:
        bases = [ref for refs in read_catalog(store.tiers, "r").bases.values() for ref in refs]
    replayed = sorted(ref.step for ref in bases if ref.origin == "replayed")
    assert replayed == [BASE_EVERY, 3 * BASE_EVERY], "a wrong base was published"
    (rebased,) = [ref for ref in bases if ref.gap is not None]
    assert rebased.origin == "captured"
    assert "is not what the trainer had" in str(rebased.gap)
    for asked in (None, rebased.step):
        with restored(make, url, step=asked) as (again, mine, _, report):
            assert report.step == asked or report.step == max(marks)
            assert report.certificate.exactness == "exact"
            same(bits(again, mine), marks[report.step])
            if asked:
                assert "is not what the trainer had" in report.certificate.gap
                assert "started anew" in str(report.certificate)


def test_a_wrong_fold_in_restore_ends_the_chain_at_the_last_match(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine that restores folds wrongly: it gives the last state that it can prove."""
    url = new_url()
    model, optimizer = make()
    marks = {0: bits(model, optimizer)}
    with attach(model, optimizer, url, base_every=100) as ckpt:
        ckpt.restore()
        for number in range(1, 20):
            train(model, optimizer)
            marks[number] = bits(model, optimizer)
    one_ulp(monkeypatch)
    with restored(make, url, strict=False) as (again, mine, _, report):
        assert report.step < PLANTED_AT
        assert report.lost == 19 - report.step
        assert any("is not what the trainer had" in reason for reason in report.reasons)
        assert report.certificate.verified_through == report.step
        monkeypatch.undo()
        same(bits(again, mine), marks[report.step])
