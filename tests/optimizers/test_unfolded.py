"""Optimizers nobody knows are safe: bases every so often, restored bit for bit, said aloud."""

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from adacheck_store.catalog import read_catalog
from adacheck_store.format.errors import ModelMismatchError, UnsupportedError, UsageError
from adacheck_store.store import open_store
from adacheck_store.writer import Writer
from tests.hooks.helpers import attach, bits, mlp, new_url, raw, record_run, restored, same
from tests.optimizers.mine import InGroup, Lion, Normed, Secretive, Slowed

EVERY, STEPS = 3, 11

Pair = tuple[torch.nn.Module, torch.optim.Optimizer]


class Speaking(Lion):
    """Has a state dict of its own, with what it keeps beside its state."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        """Ever smaller updates."""
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.01 / self.count
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        """With the counter."""
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """With the counter."""
        self.count = state_dict.pop("count")
        super().load_state_dict(state_dict)


class Strange(Lion):
    """Keeps all kinds of state: a shared entry, tuples, rows, half precision, flags, a list."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update that depends on all of it."""
        shared = self.state["shared"]
        shared["n"] = shared.get("n", 0) + 1
        for group in self.param_groups:
            group["trace"] = torch.cat([group.get("trace", torch.zeros(0)), torch.ones(1)])
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                rows = p.grad.reshape(p.shape[0], -1).mean(1)
                pair = state.get("pair", (torch.zeros_like(rows), 0))
                state["pair"] = (pair[0].lerp(rows, 0.1), pair[1] + 1)
                state["half"] = (p.grad * 0.5).bfloat16()
                state["seen"] = [*state.get("seen", []), float(p.grad.sum())][-3:]
                state["flag"] = shared["n"] % 2 == 0
                scale = group["lr"] * (1 + len(state["seen"]) + state["flag"])
                p.sub_(p.grad + state["half"].float(), alpha=scale)
                p.mul_(1 - 1e-3 * float(state["pair"][0].sum()) / group["trace"].numel())


def matrices(seed: int) -> torch.nn.Module:
    """A model of matrices alone."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 33, bias=False), torch.nn.Tanh(), torch.nn.Linear(33, 3, bias=False)
    )


def words(seed: int) -> torch.nn.Module:
    """A model with sparse gradients."""
    torch.manual_seed(seed)
    return torch.nn.EmbeddingBag(40, 6, sparse=True, mode="sum")


def maker(
    cls: Any, model: Callable[[int], torch.nn.Module] = mlp, **flags: Any
) -> Callable[..., Pair]:
    """A maker of a model and its optimizer."""

    def make(seed: int = 0) -> Pair:
        built = model(seed)
        return built, cls(built.parameters(), **flags)

    return make


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One step, by closure where the optimizer wants one."""
    sparse = isinstance(model, torch.nn.EmbeddingBag)
    data = torch.randint(40, (4, 5)) if sparse else torch.randn(4, 5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        return float(optimizer.step(closure).detach())
    loss = closure()
    optimizer.step()
    return float(loss.detach())


def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`bits`, and every structure of the optimizer's state."""
    found = bits(model, optimizer)
    params = [id(p) for group in optimizer.param_groups for p in group["params"]]
    for key, state in optimizer.state.items():
        name = str(params.index(id(key))) if isinstance(key, torch.Tensor) else f"shared {key}"
        for word, value in state.items():
            found[f"{name}.{word}"] = spelled(value)
    return found


def spelled(value: Any) -> Any:
    """A value whose tensors are bytes."""
    if isinstance(value, torch.Tensor):
        return raw(value)
    if isinstance(value, list | tuple):
        return type(value)(spelled(item) for item in value)
    return value


CASES: dict[str, Callable[..., Pair]] = {
    "Adafactor": maker(torch.optim.Adafactor, lr=1e-2),
    "LBFGS": maker(torch.optim.LBFGS, lr=0.1, max_iter=3, history_size=4),
    "LBFGS-wolfe": maker(
        torch.optim.LBFGS, lr=0.5, max_iter=2, line_search_fn="strong_wolfe"
    ),
    "SparseAdam": maker(torch.optim.SparseAdam, words, lr=1e-2),
    "Lion": maker(Lion, lr=1e-3, counted=True),
    "Normed": maker(Normed), "InGroup": maker(InGroup, lr=1e-2),
    "Slowed": maker(Slowed, lr=1e-2, amsgrad=True),
    "Speaking": maker(Speaking), "Strange": maker(Strange, matrices, lr=1e-3),
}  # fmt: skip
if hasattr(torch.optim, "Muon"):
    CASES["Muon"] = maker(torch.optim.Muon, matrices, lr=1e-2)


@pytest.mark.parametrize("name", CASES)
def test_the_newest_base_is_restored_and_training_goes_on_with_the_same_bits(name: str) -> None:
    make = CASES[name]
    torch.manual_seed(7)
    plain = make()
    truth = {}
    torch.manual_seed(11)
    losses = []
    for number in range(1, STEPS + 6):
        losses.append(step(*plain))
        truth[number] = everything(*plain)
    url = new_url()
    torch.manual_seed(7)
    model, optimizer = make()
    torch.manual_seed(11)
    with attach(model, optimizer, url, full_every=EVERY, keep=9) as ckpt:
        ckpt.restore()
        found = [step(model, optimizer) for _ in range(STEPS)]
        ckpt.flush(far=False)
        status = ckpt.status()
    assert found == losses[:STEPS], "capture has changed the training"
    assert status.exactness == "unsupported"
    for asked in (None, EVERY * 2):
        with restored(make, url, step=asked, full_every=EVERY, keep=9) as (
            again,
            mine,
            ckpt,
            report,
        ):
            assert report.step == asked or report.step == STEPS
            assert report.certificate.exactness == "unsupported"
            assert report.certificate.deltas == 0
            same(everything(again, mine), truth[report.step])
            for number in range(report.step + 1, report.step + 4):
                assert step(again, mine) == losses[number - 1]
                same(everything(again, mine), truth[number])


def test_it_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        record_run(CASES["Adafactor"], 2, step=lambda m, o: step(m, o), full_every=2)
    text = caplog.text
    for word in ("torch.optim.Adafactor", "depends on the whole tensor", "unsupported", "2 steps"):
        assert word in text


def test_a_kill_loses_no_more_than_full_every_steps() -> None:
    """Nothing is flushed: what was kept is a base every so many steps, and no delta."""
    url = new_url()
    model, optimizer = CASES["Adafactor"]()
    ckpt = attach(model, optimizer, url, full_every=4)
    marks = {}
    for number in range(1, 12):
        step(model, optimizer)
        marks[number] = everything(model, optimizer)
    ckpt.close()  # as a kill: no flush
    with restored(CASES["Adafactor"], url) as (again, mine, _, report):
        assert report.step == 8
        same(everything(again, mine), marks[8])


def test_a_slow_tier_makes_no_base_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps between bases are no gap that asks for another one."""
    quick = Writer._put

    def slow(self: Writer, *args: Any) -> Any:
        time.sleep(0.05)
        return quick(self, *args)

    monkeypatch.setattr(Writer, "_put", slow)
    url = new_url()
    model, optimizer = CASES["Adafactor"]()
    with attach(model, optimizer, url, full_every=4, keep=9) as ckpt:
        ckpt.restore()
        for _ in range(12):
            step(model, optimizer)
            time.sleep(0.01)
    with open_store(url) as store:
        bases = [ref.step for refs in read_catalog(store.tiers, "r").bases.values() for ref in refs]
    assert sorted(bases) == [0, 1, 4, 8, 12]


def test_one_of_several_optimizers_makes_the_run_unsupported() -> None:
    def make(seed: int = 0) -> Any:
        model = mlp(seed, norm=False)
        first, last = model[0].parameters(), model[3].parameters()
        return model, [torch.optim.AdamW(first, lr=1e-2), torch.optim.Adafactor(last)]

    def both(model: Any, pair: Any) -> None:
        model(torch.randn(4, 5)).square().mean().backward()
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()

    url = new_url()
    model, pair = make()
    with attach(model, pair, url, full_every=3) as ckpt:
        ckpt.restore()
        for _ in range(7):
            both(model, pair)
            ckpt.end_step()
        ckpt.flush()
    with restored(make, url) as (again, mine, _, report):
        assert report.step == 7
        assert report.certificate.exactness == "unsupported"
        for here, there in zip(pair, mine, strict=True):
            same(everything(model, here), everything(again, there))


def test_a_chain_of_one_is_not_loaded_into_the_other() -> None:
    url, _, _ = record_run(CASES["Lion"], 4, step=lambda m, o: step(m, o), full_every=2)
    model = mlp(1)
    before = bits(model, optimizer := Slowed(model.parameters(), lr=1e-2))
    with attach(model, optimizer, url, strict=False) as ckpt:
        with pytest.raises(ModelMismatchError, match=r"tests\.optimizers\.mine\.Lion"):
            ckpt.restore()
        same(bits(model, optimizer), before)


def test_a_wrong_setting_is_refused() -> None:
    model, optimizer = CASES["Adafactor"]()
    with pytest.raises(UsageError, match="full_every=0"):
        attach(model, optimizer, new_url(), full_every=0)


def test_state_that_cannot_be_kept_is_refused_with_the_first_step() -> None:
    class Opaque(Secretive):
        """Keeps an object."""

        def step(self, closure: Any = None) -> Any:
            """One update."""
            super().step(closure)
            self.state[self.param_groups[0]["params"][0]]["thing"] = object()

    model = mlp(0)
    optimizer = Opaque(model.parameters(), lr=1e-2)
    ckpt = attach(model, optimizer, new_url(), strict=False)
    ckpt.restore()
    with pytest.raises(UnsupportedError, match=r"0\.weight'\.thing is a builtins\.object"):
        step(model, optimizer)
    ckpt.close()
