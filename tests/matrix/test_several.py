"""Several optimizers under one run."""

import logging

import pytest
import torch

from adacheck_store.format.bodies import decode_delta
from adacheck_store.format.errors import OrderError, UnsupportedError
from adacheck_store.store import open_store
from tests.hooks.helpers import attach, check_records, new_url
from tests.matrix import cases_several as cases
from tests.matrix.kit import prove


def extra_of(url, step):
    """The head of a step's extra in a memory store."""
    near = open_store(url).near
    (key,) = [key for key in near.list("r/") if f"/extra/{step:012d}" in key]
    return near.head(key).head


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


class Tidy(cases.Gan):
    """Drops what the generator's backward leaves in the critic before the boundary."""

    def step(self, number):
        """A round, and the critic's gradients gone."""
        losses = super().step(number)
        self.optimizers[1].zero_grad()
        return losses


@pytest.mark.parametrize(
    ("case", "told"), [(cases.Gan, 1), (Tidy, 0), (cases.InBackward, 0), (cases.GanRates, 1)]
)
def test_gradients_kept_in_vain_are_said_once(case, told, caplog):
    """A critic's, after the generator's backward: kept, for nothing tells that nobody needs them.

    A loop that drops them before the boundary has smaller steps.
    """
    gan, url = case(), new_url()
    with attach(gan.model, gan.optimizers, url) as ckpt, caplog.at_level(logging.WARNING):
        ckpt.restore()
        for number in range(1, 12):
            gan.step(number)
            ckpt.end_step()
    said = [record for record in caplog.records if "were dropped unused" in record.getMessage()]
    assert len(said) == told
    if told:
        assert "call zero_grad() before end_step()" in said[0].getMessage()
        assert "4 parameters (the first of shape (19, 5), 0.0 MB" in said[0].getMessage()
    kept = [len(extra_of(url, step).arrays) for step in (5, 10)]
    plain = 3  # the generators' states
    assert kept == ([plain + 4] * 2 if told else [plain] * 2)


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
