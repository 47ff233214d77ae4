"""Gradients as they really come about."""

import pytest
import torch

from adacheck_store.format.bodies import decode_delta
from adacheck_store.format.errors import UnsupportedError
from tests.hooks.helpers import attach, check_records, new_url
from tests.matrix import cases_gradients as cases
from tests.matrix.kit import compare, prove, run


@pytest.mark.parametrize(
    "case",
    [
        cases.Plain, cases.ZeroedInPlace, cases.ZeroedAtTheEnd, cases.Accumulated,
        cases.MidAccumulation, cases.MidAccumulationInPlace, cases.Experts, cases.Closures,
        cases.ClosuresNesterov, cases.ClosuresRounded,
        cases.Thawed, cases.Proven,
    ],
)  # fmt: skip
def test_restored_bit_for_bit(tmp_path, case):
    """Killed and restored, the run goes on as if nothing had happened."""
    prove(tmp_path, case)


@pytest.mark.parametrize("case", [cases.Subclass, cases.Curvature, cases.Lookup])
def test_what_cannot_be_folded_is_kept_by_bases(tmp_path, case):
    """The class is ``unsupported``, and the bits are the same."""
    prove(tmp_path, case)


def test_an_optimizer_that_nobody_knows_loses_what_came_after_its_last_base(tmp_path):
    """Killed in step 9, perhaps after it: a base in every third step, and nothing in between."""
    name = f"{cases.__name__}:{cases.Unknown.__name__}"
    reference = {row["step"]: row for row in run(tmp_path, name, "reference")}
    store = (tmp_path / "store").as_uri()
    compare(run(tmp_path, name, "captured", store), reference)
    for at in (None, 3):
        rows = run(tmp_path, name, "resumed", store, at)
        compare(rows, reference)
        assert rows[0]["restored"] in ((at,) if at else (6, 9))
        assert "unsupported" in rows[0]["certificate"]
        assert len(rows) == 2 + cases.Unknown.steps - rows[0]["restored"]


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
