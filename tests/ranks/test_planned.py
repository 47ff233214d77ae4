"""What `adacheck-store plan` says of a step and a base is what real ranks keep, to the byte."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from adacheck_store.catalog import read_catalog
from adacheck_store.fetch import Fetcher
from adacheck_store.format.dtypes import item_bytes
from adacheck_store.reading import open_layout
from adacheck_store.store import open_store
from adacheck_store.tools.plan import CostRow, Settings, plan
from adacheck_store.tools.plan_models import from_dimensions, model
from adacheck_store.tools.plan_strategy import Strategy, items
from adacheck_store.tools.plan_topology import cluster
from tests.ranks.elastic import LLAMA, LLAMAS
from tests.ranks.test_shared import KEPT, kept
from tests.ranks.worker import STEPS, Launcher

pytestmark = pytest.mark.fault

CLUSTER: dict[str, Any] = {
    "ranks_per_node": 1, "step_s": 1, "network_gbit_s": 1, "disk_gb_s": 1, "object_gb_s": 1,
    "memory_gib": 1, "disk_gib": 1, "cores": 1, "node_failures_per_day": 1,
}  # fmt: skip

FROZEN = "4.bias"
"""Of the model that is no Llama."""


def small() -> torch.nn.Module:
    """What `tests.ranks.elastic` trains, and nobody has cut."""
    from tests.ranks.elastic import build_elastic

    return build_elastic("one", 1, 37)[0]


def planned(kind: str, strategy: Strategy, ranks: int, way: str) -> CostRow:
    """The row of a cluster of as many nodes."""
    llama = from_dimensions("llama", LLAMA | {"family": "llama"})
    asked = Settings(
        model=llama if kind in LLAMAS else model("planned_factory:small"),
        strategy=strategy, failures=1, trials=1,
        cluster=cluster(CLUSTER | {"nodes": ranks}), items=items("fp32", "lossless"),
    )  # fmt: skip
    return next(r for r in plan(asked) if isinstance(r, CostRow) and r.policy == way)


def bases(store: Any, step: int) -> dict[str, int]:
    """Of every part the bytes of a base of what is trained, padding apart."""
    found = {}
    with open_store(store.as_uri()) as opened:
        for (_, part), refs in read_catalog(opened.tiers, "e2e").bases.items():
            for ref in refs:
                layout = open_layout(opened.tiers, "e2e", ref.layout)
                if ref.step == step:
                    found[part] = sum(
                        piece.elements * item_bytes(dtype)
                        for section in layout.sections for _, dtype in section.roles
                        for piece in section.slices if not piece.name.endswith(FROZEN)
                    )  # fmt: skip
    return found


def beside(store: Any, step: int) -> tuple[int, int]:
    """Bytes of the heads of a step's deltas, and of its extras, of all ranks."""
    heads = extras = 0
    with open_store(store.as_uri()) as opened:
        catalog, fetcher = read_catalog(opened.tiers, "e2e"), Fetcher(opened.tiers)
        for kind in (catalog.deltas, catalog.extras):
            for ref in (ref for refs in kind.values() for ref in refs if ref.step == step):
                sealed = fetcher.head(ref)
                told = len(sealed.raw) + len(sealed.info)
                if kind is catalog.deltas:
                    heads += told
                else:
                    extras += told + sum(info.nbytes for info in sealed.head.arrays)
    return heads, extras


@pytest.mark.parametrize(
    ("kind", "ranks", "strategy", "way"),
    [
        ("zero1", 2, Strategy(kind="zero1"), "auto"),
        ("zero1", 2, Strategy(kind="zero1"), "off"),
        ("fsdp2", 3, Strategy(kind="zero3"), "auto"),
        ("hsdp2", 4, Strategy(kind="hsdp", shard=2), "auto"),
        ("hsdp2", 4, Strategy(kind="hsdp", shard=2), "off"),
        ("llama_zero1", 2, Strategy(kind="zero1"), "auto"),
        ("llama_fsdp2", 2, Strategy(kind="zero3"), "auto"),
        ("llama_hsdp2", 4, Strategy(kind="hsdp", shard=2), "auto"),
    ],
    ids=[
        "zero1",
        "zero1-off",
        "fsdp2",
        "mics",
        "mics-off",
        "LLaMA-7B, ZeRO-1",
        "LLaMA-7B, ZeRO-3",
        "LLaMA-7B, MiCS",
    ],
)
def test_real_ranks_keep_what_is_planned(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, kind: str, ranks: int, strategy: Strategy,
    way: str,
) -> None:  # fmt: skip
    """All parts of a step's deltas, and of its bases; each rank has a part. Heads nearly so."""
    monkeypatch.setitem(sys.modules, "planned_factory", sys.modules[__name__])
    said = planned(kind, strategy, ranks, way)
    given = {rank: {**KEPT[0], "redundancy": way} for rank in range(ranks)}
    store = tmp_path / "store"
    launcher = Launcher(tmp_path, kind, ranks)  # hosts the rendezvous as long as it lives
    attempt = launcher.start(store, given=given)
    assert attempt.wait() == [0] * ranks
    steps, whole = kept(store, STEPS), bases(store, STEPS)
    assert len(steps) == len(whole) == said.parts == ranks
    assert sum(sum(part.values()) for part in steps.values()) == said.step
    assert sum(whole.values()) == said.base
    heads, extras = beside(store, STEPS - 1)
    assert said.extras == pytest.approx(extras, rel=0.1)
    if kind == "llama_zero1":  # whole tensors are stepped here and there, not a shard of each
        assert heads < said.heads < ranks * heads
    else:
        assert said.heads == pytest.approx(heads, rel=0.1)
