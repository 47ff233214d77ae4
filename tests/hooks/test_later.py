"""What goes wrong after training has begun does not stop it; what the user raises comes out."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import adacheck_store as ada
from adacheck_store.format.bodies import decode_delta
from adacheck_store.format.errors import AdaCheckError, TierFullError, UnsupportedError
from adacheck_store.session import RunSession
from adacheck_store.store import Store
from adacheck_store.tiers.memory import MemoryTier
from tests.hooks.helpers import (
    adamw,
    attach,
    bits,
    check_records,
    mlp,
    new_url,
    restored,
    same,
    train,
)


def make(seed: int = 0) -> Any:
    """A model and its optimizer."""
    model = mlp(seed)
    return model, adamw(model)


class Moody:
    """An object whose state can be kept at some times only."""

    def __init__(self) -> None:
        self.value: Any = 1

    def state_dict(self) -> dict[str, Any]:
        """Whatever it is."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Back."""
        self.value = state["value"]


def test_a_tracked_state_that_becomes_unsupported_does_not_stop_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    url, moody = new_url(), Moody()
    model, optimizer = make()
    with ada.attach(model, optimizer, run="r", store=url) as ckpt:
        ckpt.track(moody=moody)
        ckpt.restore()
        for number in range(1, 9):
            moody.value = object() if 3 <= number <= 5 else number
            train(model, optimizer)
            assert ckpt.end_step() == number
            with contextlib.suppress(AdaCheckError):
                ckpt.flush(30)
            status = ckpt.status()
            assert status.exposed == (3 <= number <= 5), number
        state = bits(model, optimizer)
    assert any(
        "not kept after step 2" in text and "builtins.object" in text for text in caplog.messages
    )
    again = Moody()
    model, optimizer = make(9)
    with ada.attach(model, optimizer, run="r", store=url) as ckpt:
        ckpt.track(moody=again)
        assert ckpt.restore().step == 8
        same(bits(model, optimizer), state)
        assert again.value == 8


def test_the_same_at_the_first_boundary_is_a_refusal() -> None:
    moody = Moody()
    model, optimizer = make()
    with ada.attach(model, optimizer, run="r", store=new_url()) as ckpt:
        ckpt.track(moody=moody)
        ckpt.restore()
        moody.value = object()
        train(model, optimizer)
        with pytest.raises(UnsupportedError, match=r"builtins\.object"):
            ckpt.end_step()


def test_a_parameter_that_cannot_be_kept_and_comes_later_does_not_stop_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is looked for at multiples of base_every; once it is gone the chain starts anew."""
    url = new_url()
    model, optimizer = make()
    with ada.attach(model, optimizer, run="r", store=url, base_every=4) as ckpt:
        ckpt.restore()
        for number in range(1, 13):
            if number == 3:
                model.late = torch.nn.Parameter(torch.empty(3, device="meta"))
            if number == 7:
                del model.late
            train(model, optimizer)
            with contextlib.suppress(AdaCheckError):
                ckpt.flush(30)
        assert ckpt.step == 12
        assert not ckpt.status().exposed
        state = bits(model, optimizer)
    assert any("not kept after step 3" in text for text in caplog.messages)
    with restored(make, url) as (model, optimizer, _, report):
        assert report.step == 12
        same(bits(model, optimizer), state)


def test_a_group_that_cannot_be_kept_and_comes_later_does_not_stop_training() -> None:
    """No base is made without it; once it is gone the chain starts anew."""
    url = new_url()
    model, optimizer = make()
    with ada.attach(model, optimizer, run="r", store=url, base_every=100) as ckpt:
        ckpt.restore()
        for number in range(1, 13):
            if number == 3:
                late = torch.nn.Parameter(torch.empty(3, device="meta"))
                optimizer.add_param_group({"params": [late]})
            if number == 7:
                optimizer.param_groups.pop()
            train(model, optimizer)
            with contextlib.suppress(AdaCheckError):
                ckpt.flush(30)
            status = ckpt.status()
            assert status.step == number
            assert status.exposed == (3 <= number <= 6), number
            assert status.stored == (2 if status.exposed else number)
        state = bits(model, optimizer)
    with restored(make, url) as (model, optimizer, _, report):
        assert report.step == 12
        same(bits(model, optimizer), state)


class Mine(Exception):
    """The user's."""


class FullTier(MemoryTier):
    """A tier with no space left, that cannot be closed either."""

    full = False

    def put(self, sources: Any) -> None:
        """Fail once it is full."""
        if self.full:
            raise TierFullError("no space left")
        super().put(sources)

    def close(self) -> None:
        """Fail as well."""
        raise RuntimeError("close failed")


@pytest.mark.parametrize("mine", [True, False])
def test_leaving_by_an_exception_hides_it_behind_nothing_of_ours(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mine: bool
) -> None:
    tier = FullTier("near")

    def opened(store: str, run: str, *, settings: Any, **options: Any) -> RunSession:
        return RunSession(Store("memory://x", tier, tier), run, settings)

    monkeypatch.setattr(RunSession, "open", opened)

    def left() -> None:
        model, optimizer = make()
        with ada.attach(model, optimizer, run="r", store="memory://x") as ckpt:
            ckpt.restore()
            train(model, optimizer)
            ckpt.flush(30)
            tier.full = True
            train(model, optimizer)
            if mine:
                raise Mine

    caplog.set_level(logging.WARNING)
    with pytest.raises(Mine if mine else RuntimeError) as raised:
        left()
    if mine:
        assert raised.value.__cause__ is None
        assert any("no space left" in text for text in caplog.messages)
        assert any("close failed" in text for text in caplog.messages)


def test_an_exception_keeps_what_was_handed_over(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    model, optimizer = make()

    def left() -> None:
        with ada.attach(model, optimizer, run="r", store=url) as ckpt:
            ckpt.restore()
            for _ in range(5):
                train(model, optimizer)
            raise Mine

    with pytest.raises(Mine):
        left()
    state = bits(model, optimizer)
    with restored(make, url) as (again, fresh, _, report):
        assert report.step == 5
        same(bits(again, fresh), state)


def test_denormals_that_are_flushed_later_on_are_another_arithmetic() -> None:
    """The flag is a thread's: the writer's follows the trainer's, or its word is worth nothing."""
    if not torch.set_flush_denormal(False):
        return  # this processor has no such flag
    url = new_url()
    model, optimizer = make()
    try:
        with attach(model, optimizer, url, base_every=100) as ckpt:
            ckpt.restore()
            for number in range(4):
                torch.set_flush_denormal(number >= 2)
                train(model, optimizer)
    finally:
        torch.set_flush_denormal(False)
    told = {step: decode_delta(head).arithmetic for step, head in check_records(url).items()}
    assert told[1] == told[2] != told[3] == told[4]
    with restored(make, url) as (*_, report):
        assert report.step == 4
        assert report.certificate.exactness == "bounded"


def test_a_rate_that_becomes_an_array_is_said_at_once() -> None:
    """A base without it would leave the rate of a restored run as its maker had set it."""
    url = new_url()
    model, optimizer = make()
    ckpt = attach(model, optimizer, url, strict=False)
    with contextlib.closing(ckpt):
        ckpt.restore()
        train(model, optimizer)
        optimizer.param_groups[0]["lr"] = torch.tensor([1e-3])
        train(model, optimizer)
        with pytest.raises(UnsupportedError, match=r"\['lr'\] of group 0.*with dimensions"):
            ckpt.flush()
    with restored(make, url) as (*_, report):
        assert report.step == 1
