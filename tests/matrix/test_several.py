"""Several optimizers under one run."""

import pytest
import torch

from adacheck_store.format.bodies import decode_delta
from adacheck_store.format.errors import OrderError, UnsupportedError
from tests.hooks.helpers import attach, check_records, new_url
from tests.matrix import cases_several as cases
from tests.matrix.kit import prove


@pytest.mark.parametrize(
    "case", [cases.Gan, cases.GanRounded, cases.GanRates, cases.Schedules, cases.InBackward]
)
def test_restored_bit_for_bit(tmp_path, case):
    """Killed and restored, every optimizer goes on as if nothing had happened."""
    prove(tmp_path, case, steps=(5,))


def test_a_boundary_lists_its_updates_in_order():
    """Five of the critic's, then the generator's; none where nothing was updated."""
    gan, url = cases.Gan(), new_url()
    with attach(gan.model, gan.optimizers, url) as ckpt:
        ckpt.restore()
        gan.step(1)
        assert ckpt.step == 0
        assert ckpt.end_step() == 1
        assert ckpt.end_step() == 2
    deltas = check_records(url)
    orders = [[update.optimizer for update in decode_delta(deltas[n]).updates] for n in (1, 2)]
    assert orders == [[1, 1, 1, 1, 1, 0], []]


def test_end_step_cannot_be_forgotten():
    """Updates without it end in an error that names the rule."""
    gan = cases.Gan()
    with attach(gan.model, gan.optimizers, new_url()) as ckpt:
        ckpt.restore()
        for _ in range(16):
            gan.critic_step()
        with pytest.raises(OrderError, match=r"16 updates.*end_step"):
            gan.critic_step()
        ckpt.end_step()


def test_one_scheduler_of_two_forgotten():
    """The error says which optimizer's it is."""
    case = cases.Schedules()
    with attach(case.model, case.optimizers, new_url()) as ckpt:
        ckpt.track(cosine=case.tracked["cosine"])
        with pytest.raises(OrderError, match="optimizer 1 has a learning rate scheduler"):
            ckpt.restore()


def test_optimizers_that_cannot_be_told_apart():
    """One given twice, a parameter in two, none at all."""
    model = cases.net(5, 3)
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match="given twice"):
        attach(model, [first, first], new_url())
    with pytest.raises(UnsupportedError, match=r"'0.weight' is trained by optimizers 0 and 1"):
        attach(model, [first, torch.optim.SGD(model.parameters(), lr=0.1)], new_url())
    with pytest.raises(UnsupportedError, match="no optimizer"):
        attach(model, [], new_url())
