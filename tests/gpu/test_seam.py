"""The stager's seam: what is captured is what the step used, and nobody waits for it."""

import pytest
import torch

from adacheck_store.trainer_hooks.copies import copy, host_copy
from adacheck_store.trainer_hooks.layouts import bind
from adacheck_store.trainer_hooks.stager import Stager
from tests.gpu.bodies import Tensors, assert_kept, give_grads, loss_of, net
from tests.hooks.helpers import attach, bits, new_url, restored, same

KINDS = {
    "plain": (torch.optim.AdamW, {"foreach": False}),
    "foreach": (torch.optim.AdamW, {"foreach": True}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
}


def made(kind, params, **options):
    """An optimizer of a kind."""
    cls, flags = KINDS[kind]
    return cls(params, **{"lr": 1e-2, **flags, **options})


@pytest.mark.parametrize("after", ["freed", "reused"])
@pytest.mark.parametrize("policy", ["lossless", "bf16"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_gradients_are_those_that_the_step_used(place, kind, policy, after):
    """Freed and their memory taken, or overwritten, while the copies wait behind other work."""
    model = Tensors(place.device)
    opt = made(kind, model.parameters())
    url, wanted = new_url(), {}
    with attach(model, opt, url, policy=policy, base_every=100) as ckpt:
        ckpt.restore()
        for number in range(1, 6):
            grads = give_grads(model, number)
            wanted[number] = [
                {n: g.bfloat16().float() if policy == "bf16" else g for n, g in grads.items()}
            ]
            if number == 4:
                place.busy()
            with place.watched():
                opt.step()
            for param in model.parameters():
                if after == "reused":
                    param.grad.fill_(float("nan"))
                else:
                    param.grad = None  # and what comes next may take its memory:
                    torch.full_like(param, float("nan"))
            if number == 4 and place.cuda:
                assert not place.idle(), "the device was waited for"
    assert_kept(url, wanted)


class Loop:
    """A training loop with everything in it that lies on the device."""

    def __init__(self, place, seed=0):
        self.place = place
        self.model = net(place.device, seed)
        rate = torch.tensor(1e-2, device=place.device)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=rate, fused=True)
        self.kept = torch.zeros(7, device=place.device)

    def state_dict(self):
        """A tracked tensor on the device."""
        return {"kept": self.kept}

    def load_state_dict(self, state):
        """The same."""
        self.kept.copy_(state["kept"])

    def step(self, number, ckpt=None):
        """One step; every third only accumulates, every other zeroes in place."""
        loss_of(self.model, self.place.device, number).backward()
        self.kept += 1
        if number % 3 == 0:
            return
        clip = ckpt.clip_grad_norm_ if ckpt else torch.nn.utils.clip_grad_norm_
        clip(self.model.parameters(), 0.05)
        self.opt.step()
        self.opt.zero_grad(set_to_none=number % 2 == 0)

    def state(self):
        """All of it."""
        return bits(self.model, self.opt) | {"kept": repr(self.kept.tolist())}


def test_nothing_waits_on_the_training_thread(place):
    """Clipping, accumulation, zeroing in place, tensors as numbers, tracked ones, statistics."""
    url, loop = new_url(), Loop(place)
    with attach(loop.model, loop.opt, url, base_every=4) as ckpt:
        ckpt.track(loop=loop)
        ckpt.restore()
        for number in range(1, 12):
            with place.watched():
                loop.step(number, ckpt)
                assert ckpt.end_step() == number
        ckpt.flush()
        grads = {n: p.grad.clone() for n, p in loop.model.named_parameters() if p.grad is not None}
    again = Loop(place, seed=9)
    with attach(again.model, again.opt, url, resume="must") as ckpt:
        ckpt.track(loop=again)
        report = ckpt.restore()
        assert report.step == 11
        for name, param in again.model.named_parameters():
            assert (param.grad is None) == (name not in grads)
            assert param.grad is None or torch.equal(param.grad, grads[name])
        if not place.cuda:
            assert report.certificate.exactness == "exact"
            same(again.state(), loop.state())


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("unscaled", [True, False])
def test_a_fused_step_that_skips_itself(place, unscaled, explicit):
    """With `end_step` only the device knows, and is not asked; without it must be."""
    infinite = (2, 4, 5)
    model = Tensors(place.device)
    opt = made("fused", model.parameters())
    scaler = torch.amp.GradScaler(place.device.type, init_scale=1024.0, growth_interval=2)
    url, wanted, applied = new_url(), {}, 0
    with attach(model, opt, url, base_every=100) as ckpt:
        if explicit:
            ckpt.track()
        ckpt.restore()
        scaler.scale(torch.zeros((), device=place.device))  # makes its tensors
        for number in range(1, 8):
            grads = give_grads(model, number)
            with torch.no_grad():
                for param in model.parameters():
                    param.grad *= float("inf") if number in infinite else scaler._scale
            if unscaled:
                scaler.unscale_(opt)
            applied += number not in infinite
            if explicit or number not in infinite:
                kept = number if explicit else applied
                wanted[kept] = [] if number in infinite else [grads]
            if explicit:
                with place.watched():
                    scaler.step(opt)
                    ckpt.end_step()
            else:
                scaler.step(opt)
            scaler.update()
        assert ckpt.step == (7 if explicit else applied)
        ends = [p.detach().cpu().clone() for p in model.parameters()]
    assert_kept(url, wanted)

    def fresh(seed):
        other = Tensors(place.device, seed)
        return other, made("fused", other.parameters())

    with restored(fresh, url) as (other, _, _, report):
        assert report.step == (7 if explicit else applied)
        for mine, end in zip(other.parameters(), ends, strict=True):
            close = torch.allclose(mine.cpu(), end, atol=1e-4, rtol=0)
            assert close if place.cuda else torch.equal(mine, end)


def test_a_tracked_scaler_is_not_waited_for(place):
    """Its own ``state_dict`` waits for two numbers; they are copied, and kept as it says them."""
    model = Tensors(place.device)
    opt = made("fused", model.parameters())
    scaler = torch.amp.GradScaler(place.device.type, init_scale=1024.0, growth_interval=2)
    url = new_url()
    with attach(model, opt, url) as ckpt:
        ckpt.track(scaler=scaler)
        ckpt.restore()
        scaler.scale(torch.zeros((), device=place.device))  # makes its tensors
        with place.strict(), pytest.raises((AssertionError, RuntimeError), match=r"item|synchron"):
            scaler.state_dict()
        for number in range(1, 4):
            give_grads(model, number)
            with place.watched():
                scaler.step(opt)
                scaler.update()
                assert ckpt.end_step() == number
        kept = scaler.state_dict()
    assert (kept["scale"], kept["_growth_tracker"]) == (2048.0, 1)
    again, mine = Tensors(place.device, 9), torch.amp.GradScaler(place.device.type)
    with attach(again, made("fused", again.parameters()), url, resume="must") as ckpt:
        ckpt.track(scaler=mine)
        ckpt.restore()
        found = mine.state_dict()
    assert found == kept
    assert [type(value) for value in found.values()] == [type(value) for value in kept.values()]


def test_copies_from_another_stream_are_waited_for(place):
    """The step on one stream, and the boundary on another, which here does not wait for it.

    It should, for the sake of the parameters; what was copied at the step is right without.
    """
    model = Tensors(place.device)
    opt = made("fused", model.parameters())
    url, wanted = new_url(), {}
    with attach(model, opt, url, base_every=100) as ckpt:
        ckpt.track()
        ckpt.restore()
        for number in range(1, 5):
            side = place.stream()
            with side:
                wanted[number] = [give_grads(model, number)]
                place.busy()
                with place.watched():
                    opt.step()
            with place.watched():
                ckpt.end_step()
            place.join(side)
    assert_kept(url, wanted)


def test_memory_given_up_unread_is_waited_for(place):
    """A boundary that nobody reads: its buffer is not filled while copies are on their way."""
    model = Tensors(place.device)
    binding = bind(model, made("fused", model.parameters()))
    stager = Stager(binding, policy="lossless", window=0, block_bytes=64, timeout_s=1.0)
    late = torch.arange(64, dtype=torch.uint8, device=place.device)

    buffer = stager.acquire()
    place.busy()
    copy([buffer.blocks], [late])
    buffer.landed()
    stager.release(buffer)
    assert stager.acquire() is buffer
    buffer.blocks.fill_(7)
    if place.cuda:
        torch.cuda.synchronize()
    else:
        place.late.land(place.late.sent)
    assert bool((buffer.blocks == 7).all())


def test_host_memory_is_pinned_where_a_device_copies_to_it(place):
    """Else the copy would wait."""
    model = Tensors(place.device)
    binding = bind(model, made("fused", model.parameters()))
    stager = Stager(binding, policy="lossless", window=1, block_bytes=64, timeout_s=1.0)
    buffer, area = stager.acquire(), stager.area()

    memory = [buffer.blocks, *buffer.area(0, 0).grads.values(), *buffer.area(0, 1).grads.values()]
    memory += [*area.arrays.values(), host_copy(model.weight), host_copy(model.scalar)]
    assert [tensor.is_pinned() for tensor in memory] == [place.cuda] * len(memory)
