"""Live state: when there is any, when it is not taken, and that what arrives is what was sent."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from adacheck_store.format import canonical
from adacheck_store.format.errors import DigestMismatchError
from adacheck_store.group import SOLO
from adacheck_store.trainer_hooks.live import Handover, Live, packed, unpacked
from tests.hooks.helpers import adamw, attach, mlp, new_url, raw, record_run, train
from tests.redundancy.kit import ddp
from tests.redundancy.test_shares import manifest_of, of


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with a BatchNorm, and its optimizer."""
    model = mlp()
    return model, adamw(model)


def trained(steps: int = 3) -> Any:
    """A model, its optimizer, and the closed checkpointer it was trained with."""
    model, optimizer = made()
    with attach(model, optimizer, new_url()) as ckpt:
        assert ckpt.live() is None
        ckpt.restore()
        for _ in range(steps):
            train(model, optimizer, ckpt)
    return model, optimizer, ckpt


def test_live_state_is_that_of_the_last_boundary() -> None:
    """A forward has changed a BatchNorm's statistics since: they are as they were."""
    model, _, ckpt = trained()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.randn(4, 5)).square().mean().backward()
    live = ckpt.live()
    assert live is not None
    assert live.step == 3
    found = {}
    for section in live.state.layout.sections:
        array = live.state.arrays[f"{section.name}/{section.main_role}"]
        for piece in section.slices:
            flat = array[piece.offset : piece.offset + piece.elements]
            found[piece.name] = raw(flat.view(piece.shape))
    assert found == {name: raw(value) for name, value in kept.items()}


@pytest.mark.parametrize("edited", ["param", "moment", "update"])
def test_what_was_changed_since_is_no_live_state(edited: str) -> None:
    """A weight, a moment, or both by an update that no boundary has."""
    model, optimizer, ckpt = trained()
    with torch.no_grad():
        if edited == "param":
            model[0].weight.add_(0.0)
        elif edited == "moment":
            optimizer.state[model[0].weight]["exp_avg"].add_(0.0)
        else:
            optimizer.step()
    assert ckpt.live() is None


def plan_of(live: Live, ranks: int = 2, **more: Any) -> Any:
    """A plan of the step that is live."""
    manifest = manifest_of(of(ddp(ranks)))
    known = {"run": live.run, "term": live.term, "step": live.step, "manifest": manifest}
    return SimpleNamespace(manifest_id="ab" * 32, **known | more)


def test_a_state_arrives_as_it_was_sent() -> None:
    """Arrays, counters, hyper-parameters; one other bit is found."""
    live = trained()[2].live()
    layout, record = packed(plan_of(live), live.state, 1)
    arrays = {name: live.state.arrays[name].clone() for name in record.arrays}
    found = unpacked(layout, record, arrays)
    assert found == replace(live.state, part="p000001", arrays=arrays)
    name = next(iter(record.arrays))
    record.arrays[name][5] ^= 1
    with pytest.raises(DigestMismatchError):
        unpacked(layout, record, arrays)


class Two:
    """A group of two of which the other says what it is told to."""

    rank, size = 0, 2

    def __init__(self, *other: bool) -> None:
        self._other = canonical.dumps({"what": "live state", "value": other, "error": None})

    def gather(self, data: bytes, timeout_s: float | None = None) -> list[bytes]:
        """Mine and the other's."""
        return [data, self._other]


@pytest.mark.parametrize(
    ("other", "more", "words"),
    [
        ((False, False, True), {"step": 2}, "no rank still holds this step"),
        ((False, False, True), {"step": 2}, "it is of step 3 of run r, term t000001-"),
        ((False, False, True), {"term": "t000009-" + "a" * 16}, "no rank still holds this step"),
        ((False, False, True), {}, "not the ranks of torch.distributed"),
        ((True, True, True), {}, "not the ranks of torch.distributed"),
        ((True, True, True), {"manifest": manifest_of(of(ddp(3)))}, "there were other ranks"),
    ],
)
def test_what_is_live_and_not_taken_is_said(
    other: tuple[bool, bool, bool], more: dict[str, Any], words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """And read from the tiers by all ranks."""
    live = replace(trained()[2].live(), size=2)
    with caplog.at_level(logging.WARNING):
        assert Handover(live, Two(*other))(plan_of(live, **more)) is None  # type: ignore[arg-type]
    assert words in caplog.text


def test_nobody_has_lived_on(caplog: pytest.LogCaptureFixture) -> None:
    """As at every usual start: nothing is said."""
    live = trained()[2].live()
    assert Handover(None, Two(False, False, True))(plan_of(live)) is None  # type: ignore[arg-type]
    assert caplog.text == ""


@pytest.mark.parametrize(("rank", "size"), [(1, 2), (0, 3)])
def test_another_ranks_state_is_not_this_ranks(
    rank: int, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """After a failure ranks may be numbered anew: what rank 1 held is not what rank 0 held."""
    live = replace(trained()[2].live(), rank=rank, size=size)
    handover = Handover(live, Two(False, False, True))  # type: ignore[arg-type]
    assert handover(plan_of(live)) is None
    assert f"it was rank {rank}'s of {size}, and this is rank 0 of 2" in caplog.text
    assert "no rank still holds this step" in caplog.text


@pytest.fixture
def alone() -> Iterator[None]:
    """torch.distributed of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_live_state_is_used_once(caplog: pytest.LogCaptureFixture) -> None:
    """It is trained on in place: when it is given again, it is not the step's any more."""
    live = trained()[2].live()
    plan = plan_of(live, 1)
    found = Handover(live, SOLO)(plan)
    assert found is not None
    state, whose = found
    assert (state.step, whose) == (3, "rank 0 still held it, live")
    for array in state.arrays.values():
        array.zero_()
    assert Handover(live, SOLO)(plan) is None
    assert "it has been used already" in caplog.text


@pytest.mark.parametrize("begins", ["anew", "restored", "unasked"])
def test_live_state_that_is_not_used_is_not_kept(begins: str) -> None:
    """Of a run that goes on without it; else it would take memory for as long as that trains."""
    live = trained()[2].live()
    held = [weakref.ref(array) for array in live.state.arrays.values()]
    url = record_run(made, 2)[0] if begins == "restored" else new_url()
    model, optimizer = made()
    with attach(model, optimizer, url, live=live) as ckpt:
        del live
        if begins != "unasked":
            assert ckpt.restore().step == (2 if begins == "restored" else 0)
        train(model, optimizer, ckpt)
        gc.collect()
        assert [ref() for ref in held] == [None] * len(held)
