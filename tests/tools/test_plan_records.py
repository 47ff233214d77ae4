"""What a plan counts of heads and extras is what records of a real training have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import adacheck_store as ada
from adacheck_store.catalog import read_catalog
from adacheck_store.fetch import Fetcher
from adacheck_store.format.head import SealedHead
from adacheck_store.store import open_store
from adacheck_store.tools.plan_records import base_head, delta_head, extra

STEPS = 5


def told(sealed: SealedHead) -> int:
    """Bytes of a head with what stands beside it."""
    return len(sealed.raw) + len(sealed.info)


def trained(model: nn.Module, where: str) -> dict[str, SealedHead]:
    """The heads of the newest delta, base and extra of a run with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with ada.attach(model, optimizer, run="run", store=where, base_every=STEPS) as run:
        run.restore()
        loader = torch.utils.data.DataLoader(torch.randn(2 * STEPS, 9), batch_size=2, shuffle=True)
        for batch in run.batches(loader):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            run.end_step()
        run.flush()
    found = {}
    with open_store(where) as opened:
        catalog = read_catalog([opened.far], "run")
        for kind in ("deltas", "bases", "extras"):
            refs = [ref for refs in getattr(catalog, kind).values() for ref in refs]
            newest = max(refs, key=lambda ref: ref.step)
            assert newest.step == STEPS
            found[kind] = Fetcher(opened.tiers).head(newest)
    return found


@pytest.mark.parametrize("width", [17, 700])
def test_heads_and_an_extra_of_a_real_training(width: int, tmp_path: Any) -> None:
    """Of many small tensors, and of few that have several blocks: within a twentieth."""
    layers = 40 if width < 100 else 2
    model = nn.Sequential(nn.Linear(9, width), *(nn.Linear(width, width) for _ in range(layers)))
    params = [param for param in model.parameters() if param.requires_grad]
    nbytes = 4 * sum(param.numel() for param in params)
    heads = trained(model, tmp_path.as_uri())
    for said, real in (
        (delta_head(len(params), nbytes, [nbytes] * 3), told(heads["deltas"])),
        (base_head(len(params), [nbytes] * 3), told(heads["bases"])),
        (extra(0), told(heads["extras"]) + sum(a.nbytes for a in heads["extras"].head.arrays)),
    ):
        assert said == pytest.approx(real, rel=0.05)
