"""What the tests of the seam train, and what they find in the store."""

from __future__ import annotations

import torch

from adacheck_store.arrays import from_bytes
from adacheck_store.format.bodies import decode_delta, grad_array
from adacheck_store.format.ids import block_count
from adacheck_store.format.keys import layout_key
from adacheck_store.format.layout import decode_layout
from adacheck_store.store import open_store
from tests.hooks.helpers import check_records

SHAPES = {"weight": (33, 17), "bias": (5,), "scalar": (), "turned": (12, 20)}


class Tensors(torch.nn.Module):
    """Parameters of odd sizes, one of them not in C order."""

    def __init__(self, device, seed=0):
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=made)
            if name == "turned":
                value = value.t().contiguous().t()
            setattr(self, name, torch.nn.Parameter(value.to(device)))


def give_grads(model, number):
    """Set gradients that depend on the step alone; returns copies of them by name."""
    made = torch.Generator().manual_seed(1000 + number)
    found = {}
    for name, param in model.named_parameters():
        grad = torch.randn(param.shape, generator=made).to(param.device)
        if param.grad is None:
            param.grad = torch.empty_like(param)
        param.grad.copy_(grad)
        found[name] = grad.cpu()
    return found


def net(device, seed=0, dropout=0.0):
    """A model with a BatchNorm and perhaps dropout."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(5, 33), torch.nn.BatchNorm1d(33), torch.nn.Dropout(dropout)]
    return torch.nn.Sequential(*layers, torch.nn.Tanh(), torch.nn.Linear(33, 3)).to(device)


def loss_of(model, device, number):
    """The loss on data that depends on the step alone."""
    made = torch.Generator().manual_seed(number)
    return model(torch.randn(4, 5, generator=made).to(device)).square().mean()


def kept_gradients(url):
    """step -> its updates, each the gradients by name, decoded from a memory store."""
    found = {}
    store = open_store(url)
    check_records(url)
    for key in store.near.list("r/"):
        head = store.near.head(key).head
        if head.kind != "delta":
            continue
        layout = decode_layout(store.near.head(str(layout_key("r", head.layout))).head)
        found[head.step] = [
            _decoded(store.near, key, head, number, update, layout)
            for number, update in enumerate(decode_delta(head).updates)
        ]
    return found


def _decoded(tier, key, head, number, update, layout):
    infos = {info.name: info for info in head.arrays}
    sections = {section.name: section for section in layout.sections}
    found = {}
    for grad in update.grads:
        info = infos[grad_array(number, grad.section, grad.encoding)]
        piece = sections[grad.section].slices[grad.slice]
        flat = torch.empty(0, dtype=torch.uint8)
        if info.elements:
            width = from_bytes(bytearray(16), info.dtype).element_size()
            count = block_count(info.elements * width)
            flat = from_bytes(bytearray(tier.read(key, info.name, 0, count)), info.dtype)
        values = flat[grad.offset : grad.offset + piece.elements].float()
        if grad.scale is not None:
            values = values * torch.tensor(grad.scale, dtype=torch.int32).view(torch.float32)
        found[piece.name] = values.view(piece.shape)
    return found


def assert_kept(url, wanted):
    """The deltas hold these gradients, step -> list of updates, bit for bit."""
    kept = kept_gradients(url)
    assert kept.keys() == wanted.keys()
    for step, updates in wanted.items():
        assert len(kept[step]) == len(updates), f"updates of step {step}"
        for mine, theirs in zip(kept[step], updates, strict=True):
            assert mine.keys() == theirs.keys()
            for name, grad in theirs.items():
                assert torch.equal(mine[name], grad), f"{name} at step {step}"
