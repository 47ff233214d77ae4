"""Bad input: every refusal says what, where and why, and what to do instead."""

from __future__ import annotations

import logging
import re
import warnings

import pytest
import torch

from adacheck_store.format.errors import AdaCheckError
from tests.hooks.helpers import adamw, attach, bits, mlp, new_url, record_run, same, train
from tests.matrix.cases_several import net
from tests.optimizers.mine import Lion, Noisy, Normed

O = torch.optim  # noqa: E741


class Wrapper(torch.optim.Optimizer):
    """Around another optimizer."""

    def __init__(self, inner) -> None:
        self.optim = inner
        super().__init__(inner.param_groups[0]["params"], {})


class FullyShardedDataParallel(torch.nn.Module):
    """By this name it is known."""


class Distributed:
    """By its module it is known: Megatron's is none of torch's optimizers either."""


Distributed.__module__ = "megatron.core.optimizer.distrib_optimizer"
Distributed.__qualname__ = "DistributedOptimizer"


class Strange(torch.Tensor):
    """A subclass with a dispatch of its own."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """None at all."""
        raise NotImplementedError


def pair(model=None, optimizer=None):
    """A model and its optimizer."""
    model = mlp() if model is None else model
    return model, optimizer or adamw(model)


def with_state(**state):
    """An AdamW whose first parameter has this state too."""
    model, optimizer = pair()
    optimizer.state[model[0].weight].update(state)
    return model, optimizer


def foreign():
    """A parameter that no module has."""
    model = mlp()
    return model, O.SGD([*model.parameters(), torch.nn.Parameter(torch.zeros(7))], lr=0.1)


def buffered():
    """A buffer that is trained."""
    model = mlp()
    return model, O.SGD([*model.parameters(), model[3].running_mean], lr=0.1)


def built(layer):
    """A layer and an SGD over it."""
    return layer, O.SGD(layer.parameters(), lr=0.1)


def quantized():
    """A quantized buffer."""
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to drop them
        model.register_buffer("table", torch.quantize_per_tensor(torch.ones(3), 1, 0, torch.qint8))
    return pair(model)


def subclassed():
    """A buffer of another kind."""
    model = mlp()
    model.register_buffer("odd", torch.Tensor._make_wrapper_subclass(Strange, (3,)))
    return pair(model)


AT_ATTACH = {
    "sparse": (lambda: built(torch.nn.Embedding(4, 4, sparse=True)), "sparse", "sparse=False"),
    "meta": (lambda: built(torch.nn.Linear(3, 3, device="meta")), "'weight'.*meta", "materialise"),
    "lazy": (lambda: built(torch.nn.LazyLinear(3)), "'weight'.*initialised", "forward pass"),
    "quantized": (quantized, "'table' is quantized", "dense"),
    "subclass": (subclassed, "'odd' is a Strange", "plain tensors"),
    "fsdp": (lambda: pair(FullyShardedDataParallel(), adamw(mlp())), "FSDP1", "use FSDP2"),
    "wrapper": (lambda: (lambda m, o: (m, Wrapper(o)))(*pair()), "Wrapper is not", "AdamW inside"),
    "differentiable": (
        lambda: (lambda m: (m, O.Adam(m.parameters(), differentiable=True)))(mlp()),
        "group 0.*differentiable", "differentiable=False",
    ),
    "rate": (
        lambda: (lambda m: (m, O.Adam(m.parameters(), lr=torch.tensor([1e-3]))))(mlp()),
        r"\['lr'\] of group 0.*Adam.*with dimensions", "without dimensions",
    ),
    "no optimizer": (lambda: (mlp(), torch.nn.Linear(1, 1)), "Linear", "torch.optim optimizer"),
    "megatron": (lambda: (mlp(), Distributed()), "Megatron's DistributedOptimizer", "use FSDP2"),
    "none at all": (lambda: (mlp(), []), "no optimizer", "give the optimizer"),
    "no model": (lambda: (3, adamw(mlp())), "type int", "module"),
    "foreign": (foreign, r"parameter 6 of group 0 .shape .7,...*not in the model", "names="),
    "buffer": (buffered, "'3.running_mean'", "Parameter"),
    "two owners": (
        lambda: (lambda m: (m, [adamw(m), O.SGD(m.parameters(), lr=1.0)]))(mlp()),
        "'0.weight' is trained by optimizers 0 and 1", "one optimizer",
    ),
    "given twice": (
        lambda: (lambda m, o: (m, [o, o]))(*pair()), "given twice", "each one once",
    ),
    "unknown state": (lambda: with_state(odd=3), "'odd'.*'0.weight'", "exp_avg"),
    "state's shape": (
        lambda: with_state(exp_avg=torch.zeros(2)), "exp_avg of '0.weight' has shape", "parameter",
    ),
    "two models": (
        lambda: (lambda a, b: ([a, b], [adamw(a), adamw(b)]))(mlp(), mlp()),
        "two tensors are called '0.weight'", "rename",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_ATTACH)
def test_what_cannot_be_captured_is_refused_at_attach(name, tmp_path):
    """By name, with what to do, and before the store is made."""
    make, words, remedy = AT_ATTACH[name]
    model, optimizer = make()
    with pytest.raises(AdaCheckError) as caught:
        attach(model, optimizer, (tmp_path / "store").as_uri())
    assert re.search(words, caught.value.message), caught.value.message
    assert remedy in caught.value.hint
    assert caught.value.hint in str(caught.value)
    assert not (tmp_path / "store").exists()


def scheduled(ckpt, model, optimizer):
    """A scheduler is made and not tracked."""
    O.lr_scheduler.StepLR(optimizer, 2)
    ckpt.restore()


def updates(ckpt, model, optimizer):
    """A second update without end_step()."""
    ckpt.track()
    for _ in range(2):
        train(model, optimizer)


def sparse_gradient(ckpt, model, optimizer):
    """A gradient that is sparse after all."""
    model[0].bias.grad = torch.ones(33).to_sparse()
    optimizer.step()


def grown(ckpt, model, optimizer):
    """A parameter that the model does not have, in the first step; later such are not kept."""
    ckpt.restore()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    train(model, optimizer)


def reshaped(ckpt, model, optimizer):
    """A buffer of another shape, in the first step; later such steps are not kept."""
    ckpt.restore()
    model[3].running_mean = torch.zeros(7)
    optimizer.step()


def tracked_late(ckpt, model, optimizer):
    """track() in mid-run."""
    train(model, optimizer)
    ckpt.track()


def untold(ckpt, model, optimizer):
    """An object whose state nobody can spell."""

    class Odd:
        def state_dict(self):
            return {"rows": [object()]}

        def load_state_dict(self, state):
            raise NotImplementedError

    ckpt.track(odd=Odd())


def twice(ckpt, model, optimizer):
    """Attached a second time."""
    attach(model, optimizer, new_url())


IN_TRAINING = {
    "scheduler": (scheduled, "the optimizer has a learning rate scheduler", "track(scheduler="),
    "no end_step": (updates, "a second update without end_step", "call it after every update"),
    "sparse": (sparse_gradient, "the gradient of '0.bias' is sparse", "sparse=False"),
    "grown": (grown, r"parameter 0 of group 1 .shape .2,.*not in the model", "names="),
    "reshaped": (reshaped, r"'3.running_mean' has shape .7,. now, it had .33,", "another run"),
    "tracked late": (tracked_late, "after training has begun", "before restore"),
    "number": (lambda c, m, o: c.track(n=3), "'n' is a int without state_dict", "give it"),
    "object": (untold, r"odd.rows.0. is a builtins.object", "return dicts"),
    "twice": (twice, "attached already", "close the other"),
    "status": (lambda c, m, o: c.status(), "not begun", "restore"),
    "carry": (lambda c, m, o: c.carry(len), "carry is a builtins", "dicts"),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_TRAINING)
def test_misuse_in_training_is_an_error_that_says_what_to_do(name):
    """Where an update is refused, the weights stay as they were."""
    do, words, remedy = IN_TRAINING[name]
    model, optimizer = pair()
    with attach(model, optimizer, new_url()) as ckpt:
        with pytest.raises(AdaCheckError) as caught:
            do(ckpt, model, optimizer)
        assert re.search(words, caught.value.message), caught.value.message
        assert remedy in caught.value.hint
        assert caught.value.hint in str(caught.value)


def test_another_models_chain_changes_nothing():
    """Both sides are named, and the remedy."""
    url, _, _ = record_run(pair, 2)
    model = net(5, 33, 3)
    optimizer = O.SGD(model.parameters(), lr=0.1)
    before = bits(model, optimizer)
    with attach(model, optimizer, url) as ckpt, pytest.raises(AdaCheckError) as caught:
        ckpt.restore()
    for word in ("the chain has torch.optim.AdamW", "this run torch.optim.SGD", "'4.weight'",
                 "nothing was changed"):  # fmt: skip
        assert word in str(caught.value)
    same(before, bits(model, optimizer))


@pytest.mark.parametrize(
    ("make", "why"),
    [(lambda p: O.LBFGS(p), "calls the closure again"), (Lion, "nothing is known"),
     (lambda p: O.Adafactor(p), "depends on the whole tensor")],
)  # fmt: skip
def test_what_cannot_be_folded_is_said_at_attach(make, why, caplog):
    """The class, the reason, and what is kept instead."""
    model = mlp()
    with caplog.at_level(logging.WARNING), attach(model, make(model.parameters()), new_url()):
        text = caplog.text
    for word in (why, "unsupported", "every 64 steps", "nothing in between"):
        assert word in text


@pytest.mark.parametrize(("cls", "why"), [(Normed, "other bits"), (Noisy, "random numbers")])
def test_a_proof_that_fails_says_where(cls, why):
    """And that the optimizer may be used all the same."""
    from adacheck_store.optimizer_kit import register_optimizer

    with pytest.raises(AdaCheckError) as caught:
        register_optimizer(cls, roles=["exp_avg"])
    assert why in caught.value.message
    assert cls.__name__ in caught.value.message
    assert "captured bases are kept" in caught.value.hint
