"""One model in many topologies, for `tests.ranks.worker`; imports torch when asked."""

from __future__ import annotations

from tests.ranks.llama import build_llama

LLAMAS = ("llama_zero1", "llama_fsdp2", "llama_hsdp2")

ELASTIC = ("one", "copies", "fsdp2", "hsdp2", "shards", "tp2", "tp_fsdp2", "zero1", *LLAMAS)
"""Kinds that are built here."""

LLAMA = {"layers": 2, "hidden": 16, "inner": 43, "heads": 4, "kv_heads": 4, "vocab": 125}
"""LLaMA-7B at a 256th of its width, and with two of its 32 layers."""


def build_elastic(kind: str, ranks: int, width: int):
    """The model and its optimizer: always the same tensors and groups.

    ``one``: a process alone. ``copies``: DDP. ``fsdp2``; ``hsdp2``: each shard on two ranks.
    ``shards``: so, by columns where they divide. ``tp2``: two layers cut by tensor
    parallelism; ``tp_fsdp2``: on pairs, and all sharded over them. ``zero1``: DDP with
    ``ZeroRedundancyOptimizer``. Rows do not divide by most numbers of ranks, and there is one that
    only the first has. A bias is frozen. ``llama_...``: such a way with a `LLAMA` instead.
    """
    import torch
    from torch import nn

    if kind in LLAMAS:
        kind = kind.removeprefix("llama_")
        model = build_llama(**LLAMA)
    else:
        model = nn.Sequential(
            nn.Linear(9, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 5),
            nn.Linear(5, 1),
        )  # fmt: skip
        model[-1].bias.requires_grad_(False)
    if kind in ("copies", "zero1"):
        model = nn.parallel.DistributedDataParallel(model)
    elif kind != "one":
        model = _cut(model, kind, ranks)
    options = {"lr": 1e-2, "weight_decay": 0.1, "foreach": False}
    params = [p for p in model.parameters() if p.requires_grad]
    if kind != "zero1":
        return model, torch.optim.AdamW(params, **options)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return model, ZeroRedundancyOptimizer(params, torch.optim.AdamW, **options)


def _cut(model, kind: str, ranks: int):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    pairs = kind in ("hsdp2", "tp_fsdp2")
    shape, names = ((2, ranks // 2), ("a", "b")) if pairs else ((ranks,), ("b",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if kind.startswith("tp"):
        plan = {
            "0": ColwiseParallel(output_layouts=Replicate()),
            "3": RowwiseParallel(input_layouts=Replicate()),
        }
        model = parallelize_module(model, mesh["b"], plan)
        if kind == "tp2":
            return model
        mesh = mesh["a"]

    def columns(param):
        even = param.dim() > 1 and param.shape[1] % ranks == 0  # FSDP2 takes no others
        return Shard(1) if even else None

    other = columns if kind == "shards" else None
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, shard_placement_fn=other)
    model.clipped = kind != "tp_fsdp2"  # torch clips no gradients on several meshes
    return fully_shard(model, mesh=mesh)


def feed_alike(kind: str, batch, number: int) -> None:
    """Tensor parallelism trains one batch on several ranks: they are told it."""
    import random

    import torch.distributed as dist

    if kind in ("tp2", "tp_fsdp2"):
        random.seed(number)
        for tensor in batch:
            dist.broadcast(tensor, 0)


def whole(model, optimizer) -> dict:
    """Digests of all that all ranks have together: parameters, moments, counters, groups."""
    import torch.distributed as dist

    from adacheck_store.arrays import byte_view
    from adacheck_store.format.ids import record_id

    def digest(tensor) -> str:
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return record_id(bytes(byte_view(full.detach().contiguous())))[:12]

    if hasattr(model, "reshard"):
        model.reshard()
    inner = getattr(optimizer, "optim", optimizer)  # of ZeRO-1: it has some of them alone
    found = {}
    for name, param in model.named_parameters():
        name = name.removeprefix("module.")
        found[f"{name}/param"] = digest(param)
        for role, value in sorted(inner.state.get(param, {}).items()):
            found[f"{name}/{role}"] = digest(value)
    for number, group in enumerate(optimizer.param_groups):
        found[f"group {number}"] = repr(sorted((k, v) for k, v in group.items() if k != "params"))
    told = [found] * dist.get_world_size()
    dist.all_gather_object(told, found)
    merged = {key: value for each in told for key, value in each.items()}
    assert all(merged[key] == value for each in told for key, value in each.items())
    return merged
