"""Training under capture, restored and continued, against training that never stopped."""

import itertools

import pytest
import torch

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

IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "plain": {"foreach": False},
}
OPTIMIZERS = {
    "adamw": lambda p, **o: torch.optim.AdamW(p, lr=1e-2, **o),
    "adamw-amsgrad": lambda p, **o: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, **o),
    "adam-l2": lambda p, **o: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, **o),
    "adam-maximize": lambda p, **o: torch.optim.Adam(p, lr=1e-3, maximize=True, **o),
    "sgd": lambda p, **o: torch.optim.SGD(p, lr=1e-2, **o),
    "sgd-momentum": lambda p, **o: torch.optim.SGD(
        p, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.01, **o
    ),
    "sgd-nesterov": lambda p, **o: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, **o),
}  # fmt: skip


def maker(build, **options):
    """A function that makes a model and an optimizer from a seed."""

    def make(seed=0):
        model = mlp(seed)
        return model, build(model.parameters(), **options)

    return make


@pytest.mark.parametrize("policy", ["lossless", "bf16"])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_restored_bits_are_the_trainers(optimizer, impl, policy):
    """Every optimizer, implementation and policy: the fold has the trainer's bits."""
    make = maker(OPTIMIZERS[optimizer], **IMPLEMENTATIONS[impl])
    url, _, marks = record_run(make, 9, at=(5,), policy=policy, base_every=4)
    with restored(make, url, policy=policy, step=9) as (model, opt, _, report):
        same(marks[9], bits(model, opt))
        assert report.step == 9
        assert report.certificate.exactness == "exact"
        assert report.certificate.verified_through >= 8


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-nesterov"])
def test_capture_does_not_change_training(optimizer):
    """Under lossless, training with and without capture has the same bits."""
    for impl in IMPLEMENTATIONS.values():
        make = maker(OPTIMIZERS[optimizer], **impl)
        model, opt = make()
        losses = [train(model, opt) for _ in range(6)]
        _, captured, marks = record_run(make, 6)
        assert captured == losses
        same(marks[6], bits(model, opt))


@pytest.mark.parametrize(("saved", "loaded"), [*itertools.product(IMPLEMENTATIONS, repeat=2)])
def test_b1_flags_may_change_between_save_and_load(saved, loaded):
    """B1: step counters and state fit the flags of whoever loads, and training goes on."""
    url, _, marks = record_run(maker(OPTIMIZERS["adamw"], **IMPLEMENTATIONS[saved]), 4)
    make = maker(OPTIMIZERS["adamw"], **IMPLEMENTATIONS[loaded])
    with restored(make, url) as (model, opt, _, _):
        same(marks[4], bits(model, opt))
        for key, value in IMPLEMENTATIONS[loaded].items():
            assert opt.param_groups[0][key] == value
        train(model, opt)
        end = bits(model, opt)
    with restored(make, url) as (model, opt, _, report):
        assert report.step == 5
        same(end, bits(model, opt))


def test_b3_state_goes_by_name_not_by_order():
    """B3: two layers of one shape, the optimizer built in another order."""

    def make(seed=0, turn=lambda params: params):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 5))
        return model, torch.optim.AdamW(turn(list(model.parameters())), lr=1e-2, fused=True)

    url, _, marks = record_run(make, 5)
    with restored(lambda seed: make(seed, lambda p: p[::-1]), url) as (model, opt, _, _):
        same(marks[5], bits(model, opt))


def test_b2_dtypes_of_state_are_kept():
    """B2: moments in another dtype than the parameter keep dtype and bits."""

    def make(seed=0):
        torch.manual_seed(seed)
        model = torch.nn.Linear(5, 3)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)

    url = new_url()
    model, opt = make()
    for param in model.parameters():
        opt.state[param]["momentum_buffer"] = torch.randn(param.shape, dtype=torch.float64)
    with attach(model, opt, url) as ckpt:
        ckpt.restore()
        before = bits(model, opt)
    with restored(make, url) as (model, opt, _, _):
        same(before, bits(model, opt))
        states = [opt.state[p]["momentum_buffer"].dtype for p in model.parameters()]
        assert states == [torch.float64] * 2


def test_b4_hyper_parameters_change_over_time():
    """B4: each step is folded with its own lr, betas and weight decay; restore puts back all."""

    def make(seed=0):
        model = mlp(seed)
        return model, adamw(model)

    url = new_url()
    model, opt = make()
    with attach(model, opt, url, base_every=64) as ckpt:
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=30)
        ckpt.track(schedule=schedule)
        ckpt.restore()
        for number in range(1, 13):
            train(model, opt)
            schedule.step()
            if number == 5:
                opt.param_groups[0]["weight_decay"] = 0.3
            if number == 7:
                opt.param_groups[0]["betas"] = (0.8, 0.95)
            assert ckpt.end_step() == number
            if number == 9:
                opt.param_groups[0]["eps"] = 1e-6
        end, position = bits(model, opt), schedule.state_dict()
        end["group 0 eps"] = repr(1e-6)
    model, opt = make(3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=30)
    with attach(model, opt, url) as ckpt:
        ckpt.track(schedule=schedule)
        assert ckpt.restore().step == 12
        same(end, bits(model, opt))
        assert schedule.state_dict() == position
    check_records(url)


def test_a_tensor_lr_keeps_its_object():
    """A learning rate that is a tensor is filled in place."""

    def make(seed=0):
        model = mlp(seed)
        return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False)

    url = new_url()
    model, opt = make()
    with attach(model, opt, url) as ckpt:
        ckpt.restore()
        for _ in range(3):
            train(model, opt)
            opt.param_groups[0]["lr"].mul_(0.5)
        train(model, opt)
        end = bits(model, opt)
    model, opt = make(1)
    rate = opt.param_groups[0]["lr"]
    with attach(model, opt, url) as ckpt:
        ckpt.restore()
        assert opt.param_groups[0]["lr"] is rate
        same(end, bits(model, opt))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_other_dtypes(dtype):
    """Parameters that are no fp32 are kept in their own dtype."""

    def make(seed=0):
        generator = torch.Generator().manual_seed(seed)
        model = torch.nn.Module()
        for number, shape in enumerate([(3, 5), (), (0, 4), (67,)]):
            value = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            model.register_parameter(f"w{number}", torch.nn.Parameter(value))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    def step(model, opt):
        for param in model.parameters():
            param.grad = torch.randn(param.shape, dtype=torch.float64).to(dtype)
        opt.step()

    for policy in ("lossless", "bf16"):
        url, _, marks = record_run(make, 6, step=step, policy=policy, base_every=4)
        with restored(make, url) as (model, opt, _, _):
            same(marks[6], bits(model, opt))


def test_restoring_twice_aliases_nothing():
    """What is loaded is a copy: training on changes nothing that a later restore gives."""
    make = maker(OPTIMIZERS["adamw"], fused=True)
    url, _, marks = record_run(make, 5)
    for seed in (1, 2):
        with restored(make, url, seed=seed, step=5) as (model, opt, _, _):
            same(marks[5], bits(model, opt))
            train(model, opt)
