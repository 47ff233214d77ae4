"""Every optimizer and implementation that a device has: captured, folded, put back."""

import pytest
import torch

from adacheck_store.format.bodies import decode_delta
from adacheck_store.optimizers import arithmetic_digest, group_values
from adacheck_store.trainer_hooks import encode
from tests.gpu.bodies import loss_of, net
from tests.hooks.helpers import attach, bits, check_records, new_url, restored, same

FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
CAPTURABLE = (
    torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.ASGD, torch.optim.Rprop,
)  # fmt: skip
BOTH = tuple(dict.fromkeys([*FUSED, *CAPTURABLE]))
CASES = [
    *((cls, {"foreach": flag}) for cls in BOTH for flag in (False, True)),
    *((cls, {"fused": True}) for cls in FUSED),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "fused": True}),
]
ON_DEVICE = [
    *((cls, {"capturable": True, "foreach": flag}) for cls in CAPTURABLE for flag in (False, True)),
    (torch.optim.AdamW, {"fused": True, "capturable": True, "amsgrad": True}),
]
"""What a CPU does not have."""

pytestmark = pytest.mark.filterwarnings("ignore:This instance was constructed with capturable")


def named(case):
    """A name for a case."""
    return "-".join([case[0].__name__, *(k for k, v in case[1].items() if v)])


@pytest.mark.parametrize("case", CASES, ids=named)
def test_captured_and_put_back(place, case):
    """Nothing waits; what is restored is the live state, to the bit where class ``exact``."""
    captured_and_put_back(place, *case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_DEVICE, ids=named)
def test_captured_and_put_back_on_a_device(cuda, case):
    """The same, with counters on the device."""
    captured_and_put_back(cuda, *case)


def captured_and_put_back(place, cls, flags):
    """Trains some steps, restores, and takes another."""

    def build(seed=0):
        model = net(place.device, seed)
        return model, cls(model.parameters(), **{"lr": 1e-2, **flags})

    model, opt = build()
    url = new_url()
    with attach(model, opt, url, base_every=100) as ckpt:
        ckpt.restore()
        for number in range(1, 7):
            opt.zero_grad()
            loss_of(model, place.device, number).backward()
            with place.watched():
                opt.step()
        end = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        live = None if place.cuda else bits(model, opt)
    assert all(decode_delta(head).updates for head in check_records(url).values())
    with restored(build, url, seed=9) as (again, mine, _, report):
        assert report.step == 6
        if report.certificate.exactness == "exact":
            for name, value in again.state_dict().items():
                assert torch.equal(value.cpu(), end[name]), name
        for name, value in again.state_dict().items():
            assert torch.allclose(value.cpu(), end[name], atol=1e-4, rtol=0), name
        if live is not None:
            assert report.certificate.exactness == "exact"
            same(bits(again, mine), live)
        for state in mine.state.values():  # a counter lies where the next step wants it
            away = flags.get("fused") or flags.get("capturable") or cls is torch.optim.ASGD
            if "step" in state:
                assert state["step"].device == (place.device if away else torch.device("cpu"))
        loss_of(again, place.device, 7).backward()
        mine.step()


@pytest.mark.parametrize("case", CASES, ids=named)
def test_the_vector_runs_on_the_device(place, case):
    """Twice the same; with a tensor as learning rate too, where the optimizer takes one."""
    run_the_vector(place, *case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_DEVICE, ids=named)
def test_the_vector_of_what_only_a_device_has(cuda, case):
    """The same, and torch's warning about capturable optimizers stays out of it."""
    run_the_vector(cuda, *case)


def run_the_vector(place, cls, flags):
    """Under every kind of learning rate."""
    rates = [1e-2]
    if cls in FUSED and not (flags.get("foreach") and not flags.get("capturable")):
        rates.append(torch.tensor(1e-2, device=place.device))
    for rate in rates:
        param = torch.nn.Parameter(torch.zeros(3, device=place.device))
        opt = cls([param], **{**flags, "lr": rate})
        name = f"torch.optim.{cls.__name__}"
        groups = [group_values(group) for group in opt.param_groups]
        found = arithmetic_digest(name, groups, ["F32"], str(place.device))
        assert len(found) == 32
        arithmetic_digest.__globals__["_vector_digest"].cache_clear()
        assert arithmetic_digest(name, groups, ["F32"], str(place.device)) == found


def test_the_trainers_arithmetic_is_that_of_its_parameters_device(place, monkeypatch):
    """The class of a fold elsewhere hangs on it: never the digest of another device's."""
    asked = []

    def told(name, groups, dtypes, device="cpu"):
        asked.append(device)
        return arithmetic_digest(name, groups, dtypes, device)

    monkeypatch.setattr(encode, "arithmetic_digest", told)

    def build(seed=0):
        model = net(place.device, seed)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    model, opt = build()
    url = new_url()
    with attach(model, opt, url, base_every=100) as ckpt:
        ckpt.restore()
        for number in range(1, 4):
            loss_of(model, place.device, number).backward()
            opt.step()
    assert set(asked) == {str(place.device)}
    groups = [group_values(group) for group in opt.param_groups]
    here = arithmetic_digest("torch.optim.AdamW", groups, ["F32"])
    theirs = {decode_delta(head).arithmetic for head in check_records(url).values()}
    with restored(build, url) as (_, _, _, report):
        equal = theirs == {(here,)}
        assert report.certificate.exactness == ("exact" if equal else "bounded")
    assert equal or place.cuda


def test_generators_of_the_device_go_back(place):
    """The restored run draws what the run it goes on from would have drawn."""

    def build(seed=0):
        model = net(place.device, seed, dropout=0.5)
        return model, torch.optim.SGD(model.parameters(), lr=1e-2)

    model, opt = build()
    url = new_url()
    with attach(model, opt, url) as ckpt:
        ckpt.restore()
        for number in range(1, 4):
            loss_of(model, place.device, number).backward()
            with place.watched():
                opt.step()
        drawn = torch.rand(5, device=place.device), torch.rand(5)
    with restored(build, url):
        assert torch.equal(torch.rand(5, device=place.device), drawn[0])
        assert torch.equal(torch.rand(5), drawn[1])


class Mine(torch.optim.AdamW):
    """Nothing is known of a subclass: its whole state is kept."""


def test_an_optimizer_kept_whole_is_not_waited_for(place):
    """Its state goes into the extra, from the device, and comes back bit for bit."""

    def build(seed=0):
        model = net(place.device, seed)
        return model, Mine(model.parameters(), lr=1e-2, fused=True)

    model, opt = build()
    url = new_url()
    with attach(model, opt, url, full_every=2) as ckpt:
        ckpt.restore()
        for number in range(1, 5):
            loss_of(model, place.device, number).backward()
            with place.watched():
                opt.step()
        live = [v.cpu() for s in opt.state.values() for v in s.values()]
        live += [value.cpu() for value in model.state_dict().values()]
    with restored(build, url, seed=9) as (again, mine, _, report):
        assert report.step == 4
        found = [v.cpu() for s in mine.state.values() for v in s.values()]
        found += [value.cpu() for value in again.state_dict().values()]
        assert all(map(torch.equal, found, live))
        assert len(found) == len(live)
