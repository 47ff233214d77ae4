"""An exception in the middle of a step: the base that closes a gap is the boundary's."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.hooks.helpers import attach, bits, mlp, new_url, same

STEPS, STOP = 8, 5


def made(cls):
    """A model with dropout and a BatchNorm, its optimizer, and a loader that shuffles."""
    model = mlp(dropout=0.2)
    data = TensorDataset(torch.arange(60.0).reshape(12, 5).repeat(4, 1))
    return model, cls(model.parameters(), lr=1e-2), DataLoader(data, batch_size=4, shuffle=True)


def run(cls, url, leave=""):
    """Train from what is there, and leave within or after a step; what each step had."""
    model, optimizer, loader = made(cls)
    torch.manual_seed(7)
    ends = {}
    with attach(model, optimizer, url, strict=False) as ckpt:
        ckpt.track()
        start = ckpt.restore().step
        ends[start] = bits(model, optimizer)
        for step, (batch,) in enumerate(ckpt.batches(loader), start + 1):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            if step == STOP and leave == "within":
                ckpt._session._mistrust(ckpt._session._writer, "a test", step - 1)
                raise KeyError(leave)
            optimizer.step()
            assert ckpt.end_step() == step
            ends[step] = bits(model, optimizer)
            if step == STOP and leave == "after":
                ckpt._session._mistrust(ckpt._session._writer, "a test", step)
                raise KeyError(leave)
            if step == STEPS:
                break
    return start, ends


@pytest.mark.parametrize("leave", ["within", "after"])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adafactor])
def test_what_came_since_the_boundary_is_not_in_it(cls, leave):
    """Buffers, generators and the place in the data are those of the step's end."""
    _, wanted = run(cls, new_url())
    url = new_url()
    with pytest.raises(KeyError, match=leave):
        run(cls, url, leave)
    start, found = run(cls, url)
    assert start == (STOP - 1 if leave == "within" else STOP)
    for step, ends in found.items():
        same(ends, wanted[step])


def test_an_edit_since_the_boundary_keeps_the_step_from_being_kept(caplog):
    """There is no copy of what was edited; nothing is kept under the step's name."""
    model, optimizer, _ = made(torch.optim.Adafactor)
    url = new_url()
    with attach(model, optimizer, url) as ckpt:
        ckpt.track()
        ckpt.restore()
        for number in range(3):
            torch.manual_seed(number)
            model(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
            ckpt.end_step()
        with torch.no_grad():
            model[0].weight.zero_()
    assert "step 3 is not kept: tensors have been changed since" in caplog.text
    other, optimizer, _ = made(torch.optim.Adafactor)
    with attach(other, optimizer, url) as ckpt:
        ckpt.track()
        assert ckpt.restore().step == 1
