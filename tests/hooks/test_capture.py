"""What the hooks see: closures, edits, absent gradients, buffers, and what they refuse."""

import time

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from adacheck_store.format.bodies import decode_delta
from adacheck_store.format.errors import OrderError, UnsupportedError
from adacheck_store.trainer_hooks.encode import Encoder

from .helpers import (
    adamw,
    attach,
    bits,
    check_records,
    encodings,
    mlp,
    new_url,
    record_run,
    restored,
    same,
    train,
)


def make(seed=0):
    """An MLP with fused AdamW."""
    model = mlp(seed)
    return model, adamw(model)


def resumed(url, end, make=make, **options):
    """Assert that the newest step of a run is ``end``."""
    with restored(make, url, **options) as (model, opt, _, _):
        same(end, bits(model, opt))


@pytest.mark.parametrize("policy", ["lossless", "bf16"])
def test_a3_closures_give_the_final_gradient(policy):
    """A3: the gradient made inside ``step(closure)`` is the one that is kept."""

    def step(model, opt):
        def closure():
            opt.zero_grad()
            loss = model(torch.randn(4, 5)).square().mean()
            loss.backward()
            return loss

        return opt.step(closure=closure) if torch.rand(()) < 0.5 else opt.step(closure)

    url, losses, marks = record_run(make, 6, step=step, policy=policy)
    assert all(loss is not None for loss in losses)
    resumed(url, marks[6], policy=policy)


def test_a2_buffers_hold_copies(monkeypatch):
    """A2: a slow writer reads gradients that the next backward has overwritten in place."""
    quick = Encoder.update

    def slow(self, *update):
        time.sleep(0.02)
        return quick(self, *update)

    monkeypatch.setattr(Encoder, "update", slow)

    def build(seed=0):
        torch.manual_seed(seed)
        model = torch.nn.Linear(40, 50).to(torch.bfloat16)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    def step(model, opt):
        opt.zero_grad(set_to_none=False)
        model(torch.randn(4, 40, dtype=torch.bfloat16)).square().mean().backward()
        opt.step()

    url, _, marks = record_run(build, 12, step=step)
    resumed(url, marks[12], build)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_zeroed_gradients_are_not_dropped_ones(to_none, late):
    """A parameter out of use gets zero gradients after zero_grad(False), and none after True."""

    def build(seed=0):
        torch.manual_seed(seed)
        model = torch.nn.ModuleList([torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)])
        return model, adamw(model)

    def steps(model, opt, first, last):
        for number in range(first, last):
            if not late:
                opt.zero_grad(set_to_none=to_none)
            model[number % 3 != 0](torch.randn(4, 5)).square().mean().backward()
            opt.step()
            if late:
                opt.zero_grad(set_to_none=to_none)

    model, opt = build()
    steps(model, opt, 0, 9)
    end = bits(model, opt)
    url = new_url()
    model, opt = build()
    with attach(model, opt, url) as ckpt:
        ckpt.restore()
        steps(model, opt, 0, 5)
    with restored(build, url) as (model, opt, _, report):
        steps(model, opt, report.step, 9)
        same(end, bits(model, opt))


def test_a5_gradients_that_are_views_of_a_bucket(tmp_path):
    """A5: DDP overwrites its bucket in the next backward; the deltas hold 1, 2, 3, 4."""
    dist = torch.distributed
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        inner = torch.nn.Linear(1, 1, bias=False)
        model = torch.nn.parallel.DistributedDataParallel(inner, gradient_as_bucket_view=True)
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        url = new_url()
        with attach(model, opt, url) as ckpt:
            ckpt.restore()
            for value in (1.0, 2.0, 3.0, 4.0):
                opt.zero_grad()
                model(torch.tensor([[value]])).sum().backward()
                opt.step()
            end = inner.weight.detach().clone()
    finally:
        dist.destroy_process_group()

    def plain(seed):
        model = torch.nn.Linear(1, 1, bias=False)
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    with restored(plain, url) as (model, _, _, _):
        assert torch.equal(model.weight, end)
    with restored(plain, url, step=2) as (model, _, _, _):
        assert torch.equal(model.weight, end + 7)


def test_a6_experts_without_gradient_and_frozen_parameters():
    """A6: no gradient is not a zero gradient; a parameter may never step."""

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(4))
            self.frozen = torch.nn.Parameter(torch.randn(3, 3), requires_grad=False)
            self.turn = 0

        def forward(self, x):
            return self.experts[self.turn](x)

    def build(seed=0):
        torch.manual_seed(seed)
        model = Experts()
        params = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.AdamW(params, lr=1e-2, fused=True)

    def steps(model, opt, first, last, experts):
        for number in range(first, last):
            model.turn = number % experts
            train(model, opt)

    straight, opt = build()
    steps(straight, opt, 0, 6, 3)
    middle = bits(straight, opt)
    steps(straight, opt, 6, 9, 4)
    end = bits(straight, opt)
    url = new_url()
    model, opt = build()
    with attach(model, opt, url, base_every=4) as ckpt:
        ckpt.restore()
        steps(model, opt, 0, 6, 3)
        same(middle, bits(model, opt))
    assert all(decode_delta(head).updates[0].absent for head in check_records(url).values())
    with restored(build, url) as (model, opt, _, _):
        same(middle, bits(model, opt))
        steps(model, opt, 6, 9, 4)
        same(end, bits(model, opt))
    resumed(url, end, build)


def test_gradients_edited_by_a_later_hook_are_kept_as_they_are():
    """A pre-hook that insists on coming after ours changes a rounded gradient: kept losslessly."""

    def scale(grad):
        grad.mul_(0.3337)

    url = new_url()
    model, opt = make()
    with attach(model, opt, url, policy="bf16") as ckpt:
        ckpt.restore()
        theirs = opt.register_step_pre_hook(lambda *args: scale(model[0].weight.grad))
        train(model, opt)  # ours comes last, also after a hook registered later
        hooks = opt._optimizer_step_pre_hooks
        insists = register_optimizer_step_pre_hook(lambda *args: hooks.move_to_end(theirs.id))
        for _ in range(3):
            train(model, opt)
        insists.remove()
        end = bits(model, opt)
    kinds = [set(encodings(head).values()) for _, head in sorted(check_records(url).items())]
    assert [("raw", None) in found for found in kinds] == [False, True, True, True]
    resumed(url, end, policy="bf16")


def test_edits_outside_the_optimizer_are_sets():
    """In-place edits of trained, frozen and buffer tensors between updates are seen."""

    def build(seed=0):
        torch.manual_seed(seed)
        model = mlp(seed)
        model.register_parameter(
            "frozen", torch.nn.Parameter(torch.randn(300, 300), requires_grad=False)
        )
        model.register_buffer("table", torch.randn(7), persistent=False)
        model.register_buffer("big", torch.randn(300, 301))
        params = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.Adam(params, lr=1e-2, weight_decay=0.1, foreach=False)

    def step(model, opt):
        train(model, opt)
        with torch.no_grad():
            if train.count % 3 == 0:
                model[0].weight.clamp_(-0.2, 0.2)
            if train.count % 4 == 1:
                model.frozen.mul_(0.5)
            model.table = model.table + 1.0
            if train.count == 5:
                model.big = model.big.flip(0)
        train.count += 1

    train.count = 0
    url = new_url()
    model, opt = build()
    with attach(model, opt, url, base_every=5) as ckpt:
        ckpt.restore()
        for _ in range(9):
            step(model, opt)
        # The last edits stand after the last boundary: another update carries them.
        train(model, opt)
        end = bits(model, opt)
    check_records(url)
    resumed(url, end, build)


def test_f7_statistics_of_a_batch_norm_are_those_of_the_step():
    """F7: buffers change at every step without a version counter that says so."""
    url, _, marks = record_run(make, 7, at=(3,))
    for step in (7, 3):
        resumed(url, marks[step], step=step)
    sets = [decode_delta(head).sets for head in check_records(url).values()]
    assert all(len(found) == 3 for found in sets)


def test_f7_extra_state_of_modules():
    """F7: a module with ``get_extra_state`` gets it back."""

    class Counting(torch.nn.Linear):
        count = 0

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

        def forward(self, x):
            self.count += 1
            return super().forward(x)

    def build(seed=0):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(Counting(5, 5))
        return model, adamw(model)

    url, _, _ = record_run(build, 4)
    with restored(build, url) as (model, _, _, _):
        assert model[0].count == 4


def test_unchanged_tensors_are_stored_once():
    """Frozen parameters and buffers that stay as they are leave no trace in deltas."""

    def build(seed=0):
        torch.manual_seed(seed)
        model = mlp(seed, norm=False)
        model.register_buffer("mask", torch.ones(9, 9))
        return model, adamw(model)

    url, _, _ = record_run(build, 3)
    assert not any(decode_delta(head).sets for head in check_records(url).values())


@pytest.mark.parametrize("observed", [True, False])
def test_the_clip_coefficient_is_observed_or_found(observed):
    """bf16 gradients times a clip coefficient stay half size, without loss."""

    def build(seed=0):
        torch.manual_seed(seed)
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.randn(70, 70))
        model.bias = torch.nn.Parameter(torch.randn(67))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    url = new_url()
    model, opt = build()
    with attach(model, opt, url) as ckpt:
        ckpt.restore()
        for _ in range(4):
            for param in model.parameters():
                param.grad = torch.randn(param.shape).to(torch.bfloat16).float()
            if observed:
                ckpt.clip_grad_norm_(model.parameters(), 0.5)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
        end = bits(model, opt)
    for head in check_records(url).values():
        for encoding, scale in encodings(head).values():
            assert encoding == "bf16"
            assert scale is not None
    resumed(url, end, build)


def test_a7_values_outside_half_precision():
    """A7: overflow, underflow, infinities and NaN are kept bit for bit."""
    values = [7e4, 1e5, 1e-8, 1e-42, float("inf"), float("-inf"), float("nan"), -0.0, 0.1, 3e38]

    def build(seed=0):
        torch.manual_seed(seed)
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.randn(len(values)))
        return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.5, foreach=False)

    def step(model, opt):
        model.weight.grad = torch.tensor(values)
        opt.step()

    url, _, marks = record_run(build, 3, step=step)
    resumed(url, marks[3], build)


def test_a1_a_fused_step_that_skips_itself_is_no_boundary():
    """A1: with found_inf set the fused kernel does nothing, and no step is counted."""
    url = new_url()
    model, opt = make()
    with attach(model, opt, url) as ckpt:
        ckpt.restore()
        train(model, opt)
        opt.grad_scale, opt.found_inf = torch.tensor(1024.0), torch.tensor(1.0)
        for param in model.parameters():
            param.grad = torch.full_like(param, float("inf"))
        opt.step()
        assert ckpt.step == 1
        for param in model.parameters():
            param.grad = torch.randn(param.shape) * 1024
        opt.found_inf = torch.tensor(0.0)
        opt.step()
        del opt.grad_scale, opt.found_inf
        assert ckpt.step == 2
        end = bits(model, opt)
    resumed(url, end)


def test_a_new_parameter_that_the_model_does_not_have_is_refused():
    """It has no name to be kept under; the error comes before the first update (see test_later)."""
    model, opt = make()
    with attach(model, opt, new_url()) as ckpt:
        ckpt.restore()
        opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        with pytest.raises(UnsupportedError, match=r"parameter 0 of group 1.*not in the model"):
            train(model, opt)


def test_hooks_go_when_the_checkpointer_closes():
    """A4: attaching twice is refused; after close nothing of ours is left on the optimizer."""
    model, opt = make()
    with attach(model, opt, new_url()) as ckpt:
        with pytest.raises(OrderError, match="attached already"):
            attach(model, opt, new_url())
        train(model, opt)
        assert ckpt.step == 1
    assert not opt._optimizer_step_pre_hooks
    assert not opt._optimizer_step_post_hooks
    train(model, opt)
    assert ckpt.step == 1
