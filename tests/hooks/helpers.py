"""Small models and trainers, and digests of everything that makes up a training state."""

from __future__ import annotations

import contextlib
import uuid

import torch

import adacheck_store as ada
from adacheck_store.arrays import byte_view
from adacheck_store.format.bodies import decode_base, decode_delta, decode_extra
from adacheck_store.format.check import check_base, check_delta
from adacheck_store.format.keys import layout_key
from adacheck_store.format.layout import decode_layout
from adacheck_store.store import open_store


def new_url():
    """A memory store of its own."""
    return f"memory://{uuid.uuid4().hex}"


def mlp(seed=0, dropout=0.1, norm=True):
    """A model with odd sizes, dropout and a BatchNorm."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(5, 33), torch.nn.Dropout(dropout), torch.nn.Tanh()]
    if norm:
        layers.append(torch.nn.BatchNorm1d(33))
    return torch.nn.Sequential(*layers, torch.nn.Linear(33, 3))


def adamw(model, **options):
    """AdamW, fused unless another implementation is asked for."""
    if "foreach" not in options:
        options.setdefault("fused", True)
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})


def train(model, optimizer, ckpt=None, *, clip=0.0):
    """One step on random data from the global generator; returns the loss."""
    optimizer.zero_grad()
    loss = model(torch.randn(4, 5)).square().mean()
    loss.backward()
    if clip:
        if ckpt is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        else:
            ckpt.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.item()


def raw(tensor):
    """Dtype, shape and bytes."""
    return (str(tensor.dtype), tuple(tensor.shape), bytes(byte_view(tensor.detach().contiguous())))


def bits(model, optimizer):
    """Every parameter, buffer, optimizer state and hyper-parameter, as bytes."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = {
        name: raw(value) for name, value in [*model.named_parameters(), *model.named_buffers()]
    }
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in ("params", "foreach", "fused", "capturable"):
                found[f"group {number} {key}"] = repr(value)
        for param in group["params"]:
            for key, value in optimizer.state.get(param, {}).items():
                name = names.get(id(param), "?")
                if isinstance(value, torch.Tensor):
                    found[f"state {name} {key}"] = raw(value)
    return found


def same(left, right):
    """Assert two results of `bits` equal, naming what differs."""
    differing = [k for k in left.keys() | right.keys() if left.get(k) != right.get(k)]
    assert not differing, sorted(differing)


def attach(model, optimizer, url, **options):
    """Attach strictly, to a run called ``r``."""
    return ada.attach(model, optimizer, run="r", store=url, **{"strict": True, **options})


def check_records(url):
    """Check every record of a memory store against the format; heads of deltas by step."""
    store = open_store(url)
    deltas = {}
    for key in store.near.list("r/"):
        head = store.near.head(key).head
        if head.kind in ("base", "delta"):
            layout = decode_layout(store.near.head(str(layout_key("r", head.layout))).head)
        if head.kind == "delta":
            check_delta(head, decode_delta(head), layout)
            deltas[head.step] = head
        elif head.kind == "base":
            check_base(head, decode_base(head), layout)
        elif head.kind == "extra":
            decode_extra(head)
    return deltas


def encodings(head):
    """Encoding and scale of every gradient of a delta's only update."""
    (update,) = decode_delta(head).updates
    return {(g.section, g.slice): (g.encoding, g.scale) for g in update.grads}


def record_run(make, steps, *, step=train, at=(), **options):
    """Train ``steps`` steps under capture; returns url, losses, and `bits` at the steps ``at``."""
    url = new_url()
    model, optimizer = make()
    losses, marks = [], {}
    with attach(model, optimizer, url, **options) as ckpt:
        ckpt.restore()
        for number in range(1, steps + 1):
            losses.append(step(model, optimizer))
            if number in at or number == steps:
                marks[number] = bits(model, optimizer)
    check_records(url)
    return url, losses, marks


@contextlib.contextmanager
def restored(make, url, *, seed=99, step=None, **options):
    """A freshly built model (from another seed) with a run loaded into it."""
    model, optimizer = make(seed)
    with attach(model, optimizer, url, resume="must", **options) as ckpt:
        report = ckpt.restore(step)
        yield model, optimizer, ckpt, report
