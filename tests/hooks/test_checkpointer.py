"""The training loop's side: boundaries, positions in loaders, extras, order of calls, failures."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from adacheck_store.config import Settings
from adacheck_store.format.bodies import decode_base
from adacheck_store.format.errors import (
    ModelMismatchError,
    OrderError,
    RestoreError,
    TierError,
    UnsupportedError,
)
from adacheck_store.format.keys import parse_key
from adacheck_store.store import open_store
from adacheck_store.trainer_hooks.checkpointer import Checkpointer
from adacheck_store.trainer_hooks.stager import Stager

from .helpers import (
    adamw,
    attach,
    bits,
    check_records,
    mlp,
    new_url,
    record_run,
    restored,
    same,
    train,
)

STEPS = 20


def make(seed=0):
    """An MLP with fused AdamW."""
    model = mlp(seed)
    return model, adamw(model)


class Loop:
    """A dropout model, a seeded sampler over odd passes, a schedule, and all three RNGs."""

    def __init__(self, seed, own_generator):
        self.model, self.opt = make(seed)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, 7)
        data = TensorDataset(torch.arange(28.0).view(28, 1).expand(28, 5).contiguous())
        own = torch.Generator().manual_seed(5) if own_generator else None
        sampler = RandomSampler(data, generator=own)
        self.loader = DataLoader(data, batch_size=4, sampler=sampler)
        self.losses, self.batches = {}, {}

    def run(self, ckpt, start, stop):
        """Steps ``start``+1 .. ``stop``, pass after pass."""
        step = start
        while step < stop:
            for (batch,) in ckpt.batches(self.loader) if ckpt else self.loader:
                self.opt.zero_grad()
                noise = random.random() + np.random.rand()
                loss = self.model(batch * noise).square().mean()
                loss.backward()
                self.opt.step()
                self.schedule.step()
                step += 1
                self.losses[step], self.batches[step] = loss.item(), batch[:, 0].tolist()
                if ckpt:
                    assert ckpt.end_step() == step
                if step == stop:
                    break


@pytest.mark.parametrize("own_generator", [False, True])
def test_f5_a_restored_run_goes_on_where_it_stopped(own_generator):
    """F5: killed after each k in 1..19, the losses and batches to come are the same bits."""

    def seed_all():
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)

    straight = Loop(0, own_generator)
    seed_all()
    straight.run(None, 0, STEPS)
    end = bits(straight.model, straight.opt)
    for k in range(1, STEPS):
        url = new_url()
        first = Loop(0, own_generator)
        with attach(first.model, first.opt, url, base_every=6) as ckpt:
            ckpt.track(schedule=first.schedule)
            seed_all()
            assert ckpt.restore().fresh
            first.run(ckpt, 0, k)
        second = Loop(9, own_generator)
        with attach(second.model, second.opt, url, base_every=6) as ckpt:
            ckpt.track(schedule=second.schedule)
            assert ckpt.restore().step == k
            second.run(ckpt, k, STEPS)
        assert {**first.losses, **second.losses} == straight.losses
        assert {**first.batches, **second.batches} == straight.batches
        same(end, bits(second.model, second.opt))


def test_a_loader_with_a_state_of_its_own_is_not_skipped_through():
    """A loader with ``state_dict`` gets it back; nothing is drawn twice."""

    class Stateful:
        def __init__(self):
            self.at = 0
            self.drawn = []

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

        def __iter__(self):
            while self.at < 6:
                self.at += 1
                self.drawn.append(self.at)
                yield torch.full((4, 5), float(self.at))
            self.at = 0

    def loop(model, opt, loader, ckpt, count):
        for number, batch in enumerate(ckpt.batches(loader), 1):
            opt.zero_grad()
            model(batch).sum().backward()
            opt.step()
            if number == count:
                return

    url = new_url()
    model, opt = make()
    with attach(model, opt, url) as ckpt:
        ckpt.restore()
        loop(model, opt, Stateful(), ckpt, 4)
    loader = Stateful()
    with restored(make, url) as (model, opt, ckpt, _):
        loop(model, opt, loader, ckpt, 0)
    assert loader.drawn == [5, 6]


def test_a_shorter_loader_is_refused():
    """The position cannot be found in a loader that ends before it."""
    url = new_url()
    model, opt = make()
    with attach(model, opt, url) as ckpt:
        ckpt.restore()
        for _ in ckpt.batches(range(5)):
            train(model, opt)
    with (
        restored(make, url) as (_, _, ckpt, _),
        pytest.raises(ModelMismatchError, match="ends after 2"),
    ):
        next(ckpt.batches(range(2)))


def test_end_step_is_required_with_tracked_objects():
    """A second update without it names the rule; a boundary of no update is one."""
    url = new_url()
    model, opt = make()
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2)
    with attach(model, opt, url) as ckpt:
        ckpt.track(schedule=schedule, nothing=None)
        ckpt.restore()
        train(model, opt)
        assert ckpt.step == 0
        before = bits(model, opt)
        with pytest.raises(OrderError, match="end_step"):
            train(model, opt)
        after = bits(model, opt)
        assert {k: v for k, v in before.items() if "running" not in k and "num" not in k} == {
            k: v for k, v in after.items() if "running" not in k and "num" not in k
        }
        assert ckpt.end_step() == 1
        schedule.step()
        assert ckpt.end_step() == 2  # skipped by AMP, say
        end = bits(model, opt)
        with pytest.raises(OrderError, match="before restore"):
            ckpt.track(other=schedule)
    check_records(url)
    model, opt = make(4)
    with attach(model, opt, url) as ckpt:
        with pytest.raises(OrderError, match="attached already"):
            Checkpointer(model, opt, ckpt._session, Settings())
        ckpt.track(schedule=torch.optim.lr_scheduler.StepLR(opt, 2))
        assert ckpt.restore().step == 2
        same(end, bits(model, opt))


def test_a_scheduler_that_is_not_tracked_is_an_error():
    """It would be lost: the error names track(), in restore() and in the first update."""
    model, opt = make()
    torch.optim.lr_scheduler.StepLR(opt, 2)
    with attach(model, opt, new_url()) as ckpt:
        with pytest.raises(OrderError, match="track"):
            ckpt.restore()
        with pytest.raises(OrderError, match="track"):
            train(model, opt)


def test_order_of_calls():
    """History needs restore(), restore() comes once, and a closed checkpointer is closed."""
    url, _, _ = record_run(make, 2)
    model, opt = make()
    with attach(model, opt, url) as ckpt:
        before = bits(model, opt)["0.weight"]
        with pytest.raises(OrderError, match="restore"):
            train(model, opt)
        assert bits(model, opt)["0.weight"] == before
    with attach(model, opt, url) as ckpt:
        ckpt.restore()
        with pytest.raises(OrderError):
            ckpt.restore()
    with pytest.raises(OrderError, match="closed"):
        ckpt.end_step()
    with attach(model, opt, new_url(), resume="must") as ckpt, pytest.raises(RestoreError):
        ckpt.restore()


def test_never_resuming_starts_a_line_of_its_own():
    """``resume='never'`` needs no restore() and starts at ``start_step``."""
    url, _, _ = record_run(make, 3)
    model, opt = make(7)
    with attach(model, opt, url, resume="never", start_step=50) as ckpt:
        train(model, opt)
        assert ckpt.step == 51
        end = bits(model, opt)
    with restored(make, url) as (model, opt, _, report):
        assert report.step == 51
        same(end, bits(model, opt))


def test_other_tracked_names_are_refused_before_anything_changes():
    """The chain's tracked objects and the run's must have the same names."""
    url = new_url()
    model, opt = make()
    with attach(model, opt, url) as ckpt:
        ckpt.track(schedule=torch.optim.lr_scheduler.StepLR(opt, 2))
        ckpt.restore()
        train(model, opt)
        ckpt.end_step()
    model, opt = make(1)
    before = bits(model, opt)
    with attach(model, opt, url) as ckpt, pytest.raises(ModelMismatchError, match="schedule"):
        ckpt.restore()
    same(before, bits(model, opt))


def test_what_cannot_be_tracked_is_named():
    """Objects without state, and states without a spelling."""

    class Odd:
        def state_dict(self):
            return {"inner": [1, {"bad": object()}]}

        def load_state_dict(self, state):
            raise NotImplementedError

    model, opt = make()
    with attach(model, opt, new_url()) as ckpt:
        with pytest.raises(UnsupportedError, match="without state_dict"):
            ckpt.track(thing=3)
        with pytest.raises(UnsupportedError, match=r"odd\.inner\[1\]\.bad is a builtins\.object"):
            ckpt.track(odd=Odd())


def test_a_failed_capture_leaves_a_gap_and_training_goes_on(monkeypatch):
    """A lost update costs a captured base, never the run; what follows is restored."""
    url = new_url()
    model, opt = make()
    with attach(model, opt, url, strict=False) as ckpt:
        ckpt.restore()
        train(model, opt)
        with monkeypatch.context() as patch:
            patch.setattr(Stager, "acquire", _refuse)
            train(model, opt)
        ckpt._session._writer.wait_stored(10)
        ckpt._session._writer._retry_at = 0.0
        for _ in range(3):
            train(model, opt)
        end = bits(model, opt)
        ckpt.flush()
        assert not ckpt.status().exposed
    store = open_store(url)
    gaps = [
        decode_base(store.near.head(key).head).gap
        for key in store.near.list("r/")
        if parse_key(key).kind == "base"
    ]
    assert any(gap and gap["from"] == 2 for gap in gaps)
    with restored(make, url) as (model, opt, _, report):
        assert report.step == 5
        same(end, bits(model, opt))


def test_strict_raises_at_the_next_boundary(monkeypatch):
    """With strict=True an error of saving stops training one boundary later."""
    model, opt = make()
    ckpt = attach(model, opt, new_url(), strict=True)
    ckpt.restore()
    monkeypatch.setattr(Stager, "acquire", _refuse)
    train(model, opt)
    ckpt._session._writer.wait_stored(10)
    with pytest.raises(TierError, match="refused"):
        train(model, opt)
    ckpt.close()


def _refuse(stager):
    raise TierError("refused")


def test_leaving_on_an_exception_closes_and_keeps_what_was_stored():
    """The exception comes out as it is, and the steps before it are there."""
    url = new_url()
    model, opt = make()
    ends = []

    def loop():
        with attach(model, opt, url) as ckpt:
            ckpt.restore()
            train(model, opt)
            ends.append(bits(model, opt))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert not opt._optimizer_step_pre_hooks
    with restored(make, url) as (again, other, _, _):
        same(ends[0], bits(again, other))


def test_bytes_per_parameter_and_a_store_on_disk(tmp_path):
    """A model over a million parameters, policy bf16, in files: at most 2.05 bytes a step."""

    def build(seed=0):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(5, 500), *(torch.nn.Linear(500, 500) for _ in range(4)),
            torch.nn.Dropout(0.1), torch.nn.Linear(500, 3),
        )  # fmt: skip
        return model, adamw(model)

    url = (tmp_path / "a b ☃").as_uri()
    model, opt = build()
    count = sum(p.numel() for p in model.parameters())
    with attach(model, opt, url, policy="bf16", base_every=8, object_lag=4) as ckpt:
        ckpt.restore()
        for _ in ckpt.batches(range(12)):
            train(model, opt, ckpt, clip=0.1)
        ckpt.flush()
        assert count > 1_000_000
        assert ckpt.status().bytes_stored / ckpt.step / count <= 2.05
        end = bits(model, opt)
    with restored(build, url, policy="bf16") as (model, opt, _, report):
        assert report.step == 12
        same(end, bits(model, opt))
