"""Live state: when there is any, when it is not taken, and that what arrives is what was sent."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator, Sequence
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
from adacheck_store.trainer_hooks.narrow import narrowed
from tests.hooks.helpers import adamw, attach, mlp, new_url, raw, train
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
    assert values_of(live) == {name: raw(value) for name, value in kept.items()}


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


def test_an_update_that_failed_may_have_been_made_in_part() -> None:
    """ZeRO-1 sends weights by ``.data``, which no version counter sees, and a peer may be gone."""
    model, optimizer = made()
    with attach(model, optimizer, new_url()) as ckpt:
        ckpt.restore()
        train(model, optimizer, ckpt)
        assert ckpt.live() is not None

        def lost() -> None:
            model[0].weight.data.add_(1.0)
            raise RuntimeError("a peer is gone")

        with pytest.raises(RuntimeError, match="gone"):
            optimizer.step(lost)  # type: ignore[arg-type]
        assert ckpt.live() is None


def test_a_boundary_of_another_capture_has_no_live_state() -> None:
    """A group was added, and the update that would have been captured with it has failed."""
    model, optimizer = made()
    more = torch.nn.Parameter(torch.ones(3))
    with attach(model, optimizer, new_url(), names={"more": more}) as ckpt:
        ckpt.restore()
        train(model, optimizer, ckpt)
        assembly, last = ckpt._assembly, ckpt._last
        optimizer.add_param_group({"params": [more]})
        ckpt.before_update(0)
        assert ckpt._assembly is not assembly
        assert Live.of(ckpt._session, SOLO, ckpt._assembly, last) is None
        assert ckpt.live() is None


def test_what_others_keep_is_in_live_state_too() -> None:
    """Of it the boundary has copies where it is captured here, and marks where it is not.

    As after copies were found: the BatchNorm's weight and statistics are others' to keep, here
    too, and so is the last layer, which is not captured here (ZeRO-1).
    """
    model, optimizer = made()
    for param in model[4].parameters():
        param.requires_grad_(False)
    optimizer = adamw(model[:4])
    with attach(model, optimizer, new_url()) as ckpt:
        ckpt.restore()
        train(model, optimizer, ckpt)
        whole = ckpt._assembly.whole
        mine = dict.fromkeys(("0.weight", "0.bias"), "")
        norm = [slot.item.name for slot in whole.slots if slot.item.name.startswith("3.")]
        assembly = ckpt._assembly.narrowed(narrowed(whole, mine, norm))
        assert [slot.item.name for slot in assembly.watch._apart] == ["4.weight", "4.bias"]
        last = assembly.moment(1, {})
        kept = raw(model[3].running_mean)
        model(torch.randn(4, 5))
        assert raw(model[3].running_mean) != kept
        live = Live.of(ckpt._session, SOLO, assembly, last)
        assert live is not None
        assert values_of(live)["3.running_mean"] == kept
        with torch.no_grad():
            model[4].weight.add_(0.0)
        assert Live.of(ckpt._session, SOLO, assembly, last) is None
        again = assembly.moment(2, {})
        assert Live.of(ckpt._session, SOLO, assembly, again) is not None


def values_of(live: Live) -> dict[str, Any]:
    """Each tensor's bytes."""
    found = {}
    for section in live.state.layout.sections:
        array = live.state.arrays[f"{section.name}/{section.main_role}"]
        for piece in section.slices:
            flat = array[piece.offset : piece.offset + piece.elements]
            found[piece.name] = raw(flat.view(piece.shape))
    return found


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


class Probe:
    """Something that is tracked; it is loaded after all tensors are, and looks who is there."""

    def __init__(self, held: Sequence[weakref.ref[torch.Tensor]]) -> None:
        self._held = held
        self.seen = [False]

    def state_dict(self) -> dict[str, int]:
        """Nothing that matters."""
        return {"nothing": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Which of the held are still there."""
        gc.collect()
        self.seen = [ref() is not None for ref in self._held]


@pytest.mark.parametrize("begins", ["anew", "restored", "unasked"])
def test_live_state_that_is_not_used_is_not_kept(begins: str) -> None:
    """Of a run that goes on without it; else it would take memory for as long as that trains."""
    live = trained()[2].live()
    held = [weakref.ref(array) for array in live.state.arrays.values()]
    url, probe = new_url(), Probe(held)
    model, optimizer = made()
    if begins == "restored":
        with attach(model, optimizer, url) as ckpt:
            ckpt.track(probe=probe)
            train(model, optimizer)
            ckpt.end_step()
    with attach(model, optimizer, url, live=live) as ckpt:
        del live
        ckpt.track(probe=probe)
        if begins != "unasked":
            assert ckpt.restore().step == (begins == "restored")
        assert not any(probe.seen)
        train(model, optimizer, ckpt)
        gc.collect()
        assert [ref() for ref in held] == [None] * len(held)
