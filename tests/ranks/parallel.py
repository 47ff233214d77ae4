"""Models under further kinds of parallelism, for `tests.ranks.worker`; imports torch when asked."""

from __future__ import annotations

PARALLEL = ("zero", "zero_whole")
"""Kinds that are built here."""

SAME_DATA = ("tp", "tp_fsdp")
"""Kinds of which all ranks see the same batches."""


def build_parallel(kind: str, rank: int, ranks: int, width: int):
    """A model and its optimizer.

    ``zero``: DDP with ``ZeroRedundancyOptimizer`` and two groups; each parameter is stepped on one
    rank, from where all others get it. ``zero_whole``: its model alone, and a plain optimizer.
    """
    from torch import nn
    from torch.optim import AdamW

    model = _mlp(width)
    if kind == "zero_whole":
        return model, AdamW(model.parameters())
    if ranks > 2:  # DDP would add up in another order after a restart
        average(model.parameters())
        return model, _zero(model)
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, _zero(model)


def average(params) -> None:
    """Average the gradients of these parameters over all ranks, each as soon as it is there."""
    import torch.distributed as dist

    def averaged(param) -> None:
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()

    for param in params:
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(averaged)


def _mlp(width: int):
    from torch import nn

    model = nn.Sequential(
        nn.Linear(9, width), nn.Dropout(0.2), nn.GELU(), nn.LayerNorm(width),
        nn.Linear(width, 5), nn.Linear(5, 1),
    )  # fmt: skip
    model[-1].bias.requires_grad_(False)
    return model


def _zero(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.optim import AdamW

    groups = [
        {"params": [p for layer in model[:-1] for p in layer.parameters()]},
        {"params": [model[-1].weight], "lr": 3e-2},
    ]
    return ZeroRedundancyOptimizer(
        groups, AdamW, parameters_as_bucket_view=True, lr=1e-2, weight_decay=0.1, fused=True
    )
