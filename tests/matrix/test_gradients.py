"""Gradients as they really come about."""

import pytest
import torch

from adacheck_store.format.bodies import decode_delta
from adacheck_store.format.errors import UnsupportedError
from tests.hooks.helpers import attach, check_records, new_url
from tests.matrix import cases_gradients as cases
from tests.matrix.kit import prove


@pytest.mark.parametrize(
    "case",
    [
        cases.Plain, cases.ZeroedInPlace, cases.ZeroedAtTheEnd, cases.Accumulated,
        cases.MidAccumulation, cases.MidAccumulationInPlace, cases.Experts, cases.Closures,
    ],
)  # fmt: skip
def test_restored_bit_for_bit(tmp_path, case):
    """Killed and restored, the run goes on as if nothing had happened."""
    assert "exact" in prove(tmp_path, case)[0]["certificate"]


@pytest.mark.parametrize("case", [cases.Subclass, cases.Curvature, cases.Lookup])
def test_what_cannot_be_folded_is_kept_by_bases(tmp_path, case):
    """The class is ``unsupported``, and the bits are the same."""
    assert "unsupported" in prove(tmp_path, case)[0]["certificate"]


def test_gradients_are_kept_only_where_something_waits_for_them():
    """In the middle of an accumulation all, after an update none."""
    run, url = cases.MidAccumulation(), new_url()
    with attach(run.model, run.optimizers, url) as ckpt:
        ckpt.track(**run.tracked)
        ckpt.restore()
        for number in range(1, 4):
            run.step(number)
            zeroed, waiting = ckpt._capture.left_behind()
            assert (len(zeroed), len(waiting)) == (0, 0 if number == 3 else 8)
            ckpt.end_step()
    updates = [len(decode_delta(head).updates) for _, head in sorted(check_records(url).items())]
    assert updates == [0, 0, 1]


def test_a8_sparse_gradients_are_refused_by_name():
    """A8: at attach where the module says so, else before the update that would use them."""
    model = torch.nn.Embedding(10, 4, sparse=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"sparse gradients -> use sparse=False"):
        attach(model, opt, new_url())
    model = torch.nn.Linear(4, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, opt, new_url()) as ckpt:
        ckpt.restore()
        model.bias.grad = torch.ones(3).to_sparse()
        before = model.bias.detach().clone()
        with pytest.raises(UnsupportedError, match="the gradient of 'bias' is sparse"):
            opt.step()
        assert torch.equal(before, model.bias)
