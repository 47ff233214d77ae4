"""CUDA graphs: a recorded step is captured at `end_step`, whatever the hooks did not see."""

from contextlib import closing

import pytest
import torch

from adacheck_store.format.errors import OrderError, TierError, UnsupportedError
from tests.gpu.bodies import Tensors, assert_kept, give_grads, kept_gradients
from tests.hooks.helpers import attach, new_url, restored

pytestmark = [
    pytest.mark.filterwarnings("ignore:This instance was constructed with capturable"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # one that was refused
]


def optimizer(place, model, **options):
    """AdamW as a graph wants it; on a CPU that is the fused one."""
    return torch.optim.AdamW(
        model.parameters(), **{"lr": 1e-2, "fused": True, "capturable": place.cuda, **options}
    )


def warmed(model, opt):
    """One step outside of the graph, which makes the optimizer's state."""
    return [give_grads(model, 1)], opt.step()


def recorded(place, model, opt):
    """A step in a graph, after which the graph itself spoils the gradients."""

    def work():
        opt.step()
        for param in model.parameters():
            param.grad.zero_()

    return place.record(work)


def run(place, url, steps, skip=(), twice=(), **options):
    """Train a step eagerly and the others by replay; what the deltas should hold, and the ends."""
    model = Tensors(place.device)
    opt = optimizer(place, model, **options.pop("flags", {}))
    wanted = {}
    with attach(model, opt, url, base_every=100, **options) as ckpt:
        ckpt.track()
        ckpt.restore()
        wanted[1] = warmed(model, opt)[0]
        ckpt.end_step()
        ckpt.flush(far=False)  # no thread may use the device while a graph is recorded
        replay = recorded(place, model, opt)
        for number in range(2, steps + 1):
            grads = give_grads(model, number)
            wanted[number] = [] if number in skip else [grads]
            for _ in range(number not in skip):
                replay()
            if number in twice:
                replay()
            with place.watched():
                assert ckpt.end_step() == number
        ends = [p.detach().cpu().clone() for p in model.parameters()]
    return wanted, ends


def assert_restored(place, url, step, ends, **flags):
    """The newest step is this one, and its parameters are these."""

    def fresh(seed):
        other = Tensors(place.device, seed)
        return other, optimizer(place, other, **flags)

    with restored(fresh, url) as (other, _, _, report):
        assert report.step == step
        for mine, end in zip(other.parameters(), ends, strict=True):
            close = torch.allclose(mine.cpu(), end, atol=1e-4, rtol=0)
            assert close if place.cuda else torch.equal(mine, end)


def test_replays_are_updates(place):
    """The gradients as the recorded step used them, though the graph zeroes them afterwards."""
    url = new_url()
    wanted, ends = run(place, url, 6)
    assert_kept(url, wanted)
    assert_restored(place, url, 6, ends)


def test_a_boundary_without_a_replay_has_no_update(place):
    """The graph counts its replays; nothing is taken for granted."""
    url = new_url()
    wanted, ends = run(place, url, 7, skip=(3, 6))
    assert_kept(url, wanted)
    assert_restored(place, url, 7, ends)


def test_the_learning_rate_may_be_a_tensor_that_changes(place):
    """A number is fixed in the graph, a tensor is read at each replay, and not after it."""
    url = new_url()
    rate = torch.tensor(1e-2, device=place.device)
    model = Tensors(place.device)
    opt = optimizer(place, model, lr=rate)
    with attach(model, opt, url, base_every=100) as ckpt:
        ckpt.track()
        ckpt.restore()
        warmed(model, opt)
        ckpt.end_step()
        ckpt.flush(far=False)
        replay = recorded(place, model, opt)
        for number in range(2, 6):
            give_grads(model, number)
            rate.fill_(0.1 / number)
            replay()
            rate.fill_(0.5)  # as a schedule does
            with place.watched():
                ckpt.end_step()
        ends = [p.detach().cpu().clone() for p in model.parameters()]
    assert_restored(place, url, 5, ends, lr=torch.tensor(1e-2, device=place.device))


def test_gradients_are_rounded_within_the_graph(place):
    """Policy ``bf16``: the recorded step consumes what is stored."""
    url = new_url()
    wanted, ends = run(place, url, 5, policy="bf16")
    for updates in wanted.values():
        for grads in updates:
            grads |= {name: grad.bfloat16().float() for name, grad in grads.items()}
    assert_kept(url, wanted)
    assert_restored(place, url, 5, ends)


def test_two_replays_in_one_boundary_are_said(place, caplog):
    """The first one's gradients are gone: the step is not kept, and a captured base follows."""
    url = new_url()
    _, ends = run(place, url, 6, twice=(4,), strict=False)
    assert "2 replays of a recorded step without end_step()" in caplog.text
    assert 3 in (kept := kept_gradients(url))
    assert 4 not in kept
    assert_restored(place, url, 6, ends)


def test_what_cannot_be_recorded_is_refused(place):
    """Without end_step() as the boundary, and where the step writes into its gradients."""
    model = Tensors(place.device)
    give_grads(model, 1)
    with attach(model, opt := optimizer(place, model), new_url()) as ckpt:
        ckpt.restore()
        opt.step()
        ckpt.flush(far=False)
        with pytest.raises(OrderError, match="recorded into a graph before restore"):
            recorded(place, model, opt)
    nesterov = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    with attach(model, nesterov, new_url()) as ckpt:
        ckpt.track()
        ckpt.restore()
        nesterov.step()
        ckpt.end_step()
        ckpt.flush(far=False)
        with pytest.raises(UnsupportedError, match="nesterov"):
            recorded(place, model, nesterov)


def test_graphs_that_differ_are_refused(place):
    """They share the memory that the gradients are copied to, and one set of numbers."""
    model = Tensors(place.device)
    with attach(model, opt := optimizer(place, model), new_url()) as ckpt:
        ckpt.track()
        ckpt.restore()
        warmed(model, opt)
        ckpt.end_step()
        ckpt.flush(far=False)
        recorded(place, model, opt)
        recorded(place, model, opt)
        opt.param_groups[0]["lr"] = 0.5
        with pytest.raises(UnsupportedError, match="other gradients or other numbers"):
            recorded(place, model, opt)


class Counting(Tensors):
    """With a large buffer that the step itself writes to."""

    def __init__(self, device, seed=0):
        super().__init__(device, seed)
        self.register_buffer("table", torch.zeros(300, 301, device=device))


def test_buffers_that_a_graph_writes_to_are_kept(place):
    """A replay leaves version counters alone, by which large buffers are watched else."""
    url = new_url()
    model = Counting(place.device)
    opt = optimizer(place, model)
    with attach(model, opt, url, base_every=100) as ckpt:
        ckpt.track()
        ckpt.restore()
        warmed(model, opt)
        ckpt.end_step()
        ckpt.flush(far=False)

        def work():
            opt.step()
            model.table.add_(1)

        replay = place.record(work)
        for number in range(2, 5):
            give_grads(model, number)
            replay()
            ckpt.end_step()

    def fresh(seed):
        other = Counting(place.device, seed)
        return other, optimizer(place, other)

    with restored(fresh, url) as (other, _, _, report):
        assert report.step == 4
        assert bool((other.table == 3).all())


@pytest.mark.parametrize("policy", ["lossless", "bf16"])
def test_a_recorded_step_may_skip_itself(place, policy):
    """A scaler within the graph: the graph counts what it skipped, and unscales at the step.

    Under ``bf16`` such gradients cannot be rounded before the step, and are kept as they are.
    """
    url, infinite, wanted = new_url(), (3, 5), {}
    model = Tensors(place.device)
    opt = optimizer(place, model)
    scaler = torch.amp.GradScaler(place.device.type, init_scale=1024.0, growth_interval=100)

    def scaled(number):
        grads = give_grads(model, number)
        wanted[number] = [] if number in infinite else [grads]
        with torch.no_grad():
            for param in model.parameters():
                param.grad *= float("inf") if number in infinite else scaler._scale

    def work():
        scaler.step(opt)
        scaler.update()

    with attach(model, opt, url, base_every=100, policy=policy) as ckpt:
        ckpt.track()
        ckpt.restore()
        scaler.scale(torch.zeros((), device=place.device))  # makes its tensors
        scaled(1)
        work()
        ckpt.end_step()
        ckpt.flush(far=False)
        replay = place.record(work)
        for number in range(2, 7):
            scaled(number)
            replay()
            with place.watched():
                assert ckpt.end_step() == number
        ends = [p.detach().cpu().clone() for p in model.parameters()]
    assert_kept(url, wanted)
    assert_restored(place, url, 6, ends)


def test_a_replay_beside_a_step_is_said(place, caplog):
    """Which of both came first is not known at the boundary, so they are not folded."""
    url = new_url()
    model = Tensors(place.device)
    opt = optimizer(place, model)
    with attach(model, opt, url, base_every=100, strict=False) as ckpt:
        ckpt.track()
        ckpt.restore()
        warmed(model, opt)
        ckpt.end_step()
        ckpt.flush(far=False)
        replay = recorded(place, model, opt)
        give_grads(model, 2)
        replay()
        warmed(model, opt)
        ckpt.end_step()
        ends = [p.detach().cpu().clone() for p in model.parameters()]
    assert (
        "1 replays of a recorded step beside a step that is not recorded, without end_step()"
        in caplog.text
    )
    assert 2 not in kept_gradients(url)
    assert_restored(place, url, 2, ends)


class Unknown(torch.optim.AdamW):
    """Nothing is known of it."""


@pytest.mark.parametrize("cls", [torch.optim.AdamW, Unknown])
def test_a_flush_between_a_replay_and_its_boundary_keeps_no_base(place, cls):
    """The step before is not given the state after it."""
    url = new_url()
    model = Tensors(place.device)
    opt = cls(model.parameters(), lr=1e-2, fused=True, capturable=place.cuda)
    ckpt = attach(model, opt, url, full_every=100, strict=False)
    with closing(ckpt):
        ckpt.track()
        ckpt.restore()
        warmed(model, opt)
        ckpt.end_step()
        ckpt.flush(far=False)
        replay = recorded(place, model, opt)
        give_grads(model, 2)
        replay()
        ckpt.end_step()
        ckpt._session._mistrust(ckpt._session._writer, "a test", 2)
        give_grads(model, 3)
        replay()
        with pytest.raises(TierError, match="a test"):
            ckpt.flush(far=False)

    def fresh(seed):
        other = Tensors(place.device, seed)
        return other, cls(other.parameters(), lr=1e-2, fused=True, capturable=place.cuda)

    with restored(fresh, url) as (_, _, _, report):
        assert report.step == 1
