"""How far a CPU's fold of a device's training is from it: measured, and said."""

import pytest
import torch

from adacheck_store.catalog import read_catalog
from adacheck_store.config import Settings
from adacheck_store.drift import _ordered
from adacheck_store.fetch import ArrayReader, Fetcher
from adacheck_store.fold import Fold
from adacheck_store.reading import StateSink, open_layout
from adacheck_store.store import open_store
from tests.gpu.bodies import loss_of, net
from tests.hooks.helpers import attach, new_url, restored

IMPLEMENTATIONS = {
    "plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True},
}  # fmt: skip


@pytest.mark.parametrize("flags", list(IMPLEMENTATIONS))
def test_drift_of_a_thousand_steps(place, flags, record_property, capsys):
    """1 000 steps on a device, folded on the CPU in one go from the first base.

    On a CPU it is none, in 100 steps. The largest differences are printed, and kept in the report.
    """
    steps = 1000 if place.cuda else 100

    model = net(place.device)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, **IMPLEMENTATIONS[flags])
    url = new_url()
    with attach(model, opt, url, base_every=2 * steps, keep=steps) as ckpt:
        ckpt.restore()
        for number in range(1, steps + 1):
            opt.zero_grad()
            loss_of(model, place.device, number).backward()
            opt.step()
        live = _state(model, opt)
    exactness, folded = _folded(url, steps)
    absolute = max(float((a - b).abs().max()) for a, b in zip(live, folded, strict=True))
    apart = max(
        int((_ordered(a) - _ordered(b)).abs().max()) for a, b in zip(live, folded, strict=True)
    )
    kind = torch.cuda.get_device_name() if place.cuda else "CPU"
    said = f"{kind}, AdamW {flags}, {steps} steps: {exactness}, {absolute:.3g} or {apart} places"
    record_property("drift", said)
    with capsys.disabled():
        print(f"\ndrift on {said}")
    assert exactness in ("exact", "bounded")
    assert exactness == "bounded" or absolute == 0
    assert place.cuda or exactness == "exact"
    assert absolute <= Settings().max_drift


def _state(model, opt):
    """All parameters and moments, flat, on the CPU."""
    found = []
    for param in model.parameters():
        state = opt.state[param]
        tensors = (param.detach(), state["exp_avg"], state["exp_avg_sq"])
        found += [tensor.cpu().clone().reshape(-1) for tensor in tensors]
    return found


def _folded(url, steps):
    """The class, and the same tensors, of all deltas folded on the first base."""
    store = open_store(url)
    catalog = read_catalog(store.tiers, "r")
    ((place, deltas),) = catalog.deltas.items()
    base = min(catalog.bases[place], key=lambda ref: ref.step)
    deltas = sorted(deltas, key=lambda ref: ref.step)
    assert [ref.step for ref in deltas] == list(range(1, steps + 1))
    assert base.step == 0
    fetcher, sink = Fetcher(store.tiers), StateSink()
    layout = open_layout(store.tiers, "r", base.layout)
    readers = [ArrayReader(fetcher, ref) for ref in deltas]
    report = Fold(layout, ArrayReader(fetcher, base), readers).run(sink)
    (trained,) = (section for section in layout.sections if section.optimizer == 0)
    return report.exactness, [
        sink.arrays[f"{trained.name}/{role}"][piece.offset : piece.offset + piece.elements]
        for piece in trained.slices
        for role in ("param", "exp_avg", "exp_avg_sq")
    ]


def test_captured_bases_are_the_devices_bits(place):
    """In class ``bounded`` one comes every ``bounded_every`` steps, and is restored as it was."""

    def build(seed=0):
        model = net(place.device, seed)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    model, opt = build()
    url = new_url()
    with attach(model, opt, url, base_every=100, bounded_every=4, keep=100) as ckpt:
        ckpt.restore()
        for number in range(1, 11):
            opt.zero_grad()
            loss_of(model, place.device, number).backward()
            with place.watched():
                opt.step()
            if number == 8:
                live = _state(model, opt)
    with restored(build, url, seed=9, step=8) as (again, mine, _, report):
        assert report.certificate.exactness == "exact"
        assert all(map(torch.equal, _state(again, mine), live))
