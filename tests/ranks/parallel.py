"""Models under further kinds of parallelism, for `tests.ranks.worker`; imports torch when asked."""

from __future__ import annotations

DEEP = ("deep0", "deep1", "deep2", "deep3", "deep2turned", "deep2flip", "deep2micro")

PARALLEL = ("zero", "moe", "stages", "mixed", "many", *DEEP)
"""Kinds that are built here."""


def build_parallel(kind: str, rank: int, ranks: int, width: int):
    """A model and its optimizer or optimizers.

    ``zero``: DDP with ``ZeroRedundancyOptimizer`` and two groups; each parameter is stepped on one
    rank, from where all others get it.
    ``moe``: an expert on each rank, tokens sent to them and back; the attention is on all ranks,
    and stepped by ``ZeroRedundancyOptimizer``. ``stages``: two stages of a pipeline, each of
    layers that it numbers from 0, on four ranks each stage twice. ``mixed``: as an automatic
    planner might have it, each operator in its own way: copied, cut by columns or rows, copied in
    bf16, stepped on one rank and sent to the others, of each rank alone. ``many``: DDP with more
    than 128 parameters. ``deep1`` to ``deep3``:
    DeepSpeed's stages of ZeRO in bf16, with two groups, ``deep2turned`` with the weights in another
    order, ``deep2micro`` with two micro-batches a step.
    """
    if kind in DEEP:
        micro = 2 if kind == "deep2micro" else 1
        return _deep(int(kind[4]), width, turned=kind == "deep2turned", micro=micro)
    model = bare(kind, rank, ranks, width)
    made = {"zero": _zero, "moe": _sent, "stages": _piped, "mixed": _planned, "many": _copied}
    return made[kind](model, rank, ranks)


def bare(kind: str, rank: int, ranks: int, width: int = 37):
    """The model of a rank, without what needs the other ranks."""
    if kind == "many":
        return _many()
    if kind in ("moe", "mixed"):
        return (_mixture if kind == "moe" else _operators)(rank, ranks, width)
    return _stage(rank >= ranks // 2, width) if kind == "stages" else _mlp(width)


def data_of(kind: str, rank: int, ranks: int) -> int:
    """Which batches a rank sees; ranks of one number see the same."""
    if kind.startswith("tp") or kind == "mixed":
        return 0
    return rank % (ranks // 2) if kind == "stages" else rank


def average(params, group=None) -> None:
    """Average the gradients of these parameters over ranks, each as soon as it is there."""
    import torch.distributed as dist

    def averaged(param) -> None:
        dist.all_reduce(param.grad, group=group)
        param.grad /= dist.get_world_size(group)

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


def _many():
    import torch
    from torch import nn

    class Many(nn.Module):
        """A mean of many small parameters, added in the middle."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(9, 5), nn.Linear(5, 1)
            self.more = nn.ParameterList(nn.Parameter(torch.randn(5)) for _ in range(150))

        def forward(self, x):
            return self.last(torch.tanh(self.first(x) + torch.stack(list(self.more)).mean(0)))

    return Many()


def _copied(model, rank: int, ranks: int):
    from torch import nn
    from torch.optim import AdamW

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, AdamW(wrapped.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def _zero(model, rank: int, ranks: int):
    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.optim import AdamW

    wrapped = model
    if ranks > 2:  # DDP would add up in another order after a restart
        average(model.parameters())
    else:
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    groups = [
        {"params": [p for layer in model[:-1] for p in layer.parameters()]},
        {"params": [model[-1].weight], "lr": 3e-2},
    ]
    return wrapped, ZeroRedundancyOptimizer(
        groups, AdamW, parameters_as_bucket_view=True, lr=1e-2, weight_decay=0.1, fused=True
    )


def _mixture(rank: int, ranks: int, width: int):
    import torch
    from torch import nn

    class Mixture(nn.Module):
        """Attention over a batch, then of each token one expert, weighted by its router."""

        clipped = False
        """The norm of a rank's gradients is not that of all: experts differ."""

        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(9, 3)
            self.router = nn.Linear(9, ranks)
            torch.manual_seed(31 + rank)
            self.expert = nn.Sequential(nn.Linear(9, width), nn.GELU(), nn.Linear(width, 9))
            torch.manual_seed(5)
            self.head = nn.Linear(9, 1)

        def forward(self, batch):
            tokens = batch + self.attention(batch, batch, batch, need_weights=False)[0]
            share = self.router(tokens).softmax(-1)
            to = share.argmax(-1)
            to[: min(ranks, len(to))] = torch.arange(min(ranks, len(to)))  # no expert is idle
            weight = share.gather(1, to[:, None])
            order = to.argsort(stable=True)
            sent = torch.bincount(to, minlength=ranks)
            got = torch.empty_like(sent)
            torch.distributed.all_to_all_single(got, sent)
            there = exchange()(tokens[order], sent.tolist(), got.tolist())
            back = exchange()(self.expert(there), got.tolist(), sent.tolist())
            mixed = torch.zeros_like(tokens).index_copy(0, order, back)
            return self.head(tokens + weight * mixed)

    return Mixture()


def _sent(model, rank: int, ranks: int):
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    shared = [p for name, p in model.named_parameters() if not name.startswith("expert")]
    average(shared)
    return model, [
        ZeroRedundancyOptimizer(shared, torch.optim.AdamW, lr=1e-2, fused=True),
        torch.optim.AdamW(model.expert.parameters(), lr=2e-2, fused=True),
    ]


def exchange():
    """All-to-all of rows, through which gradients go back the same way."""
    import torch

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(context, rows, sent, got):
            context.way = got, sent
            found = rows.new_empty(sum(got), rows.shape[1])
            torch.distributed.all_to_all_single(found, rows.contiguous(), got, sent)
            return found

        @staticmethod
        def backward(context, grad):
            return Exchange.apply(grad, *context.way), None, None

    return Exchange.apply


def _stage(last: bool, width: int):
    import torch
    from torch import nn

    class Stage(nn.Module):
        """Layers numbered from 0 in each stage: of one shape, and of another, and one frozen."""

        def __init__(self) -> None:
            super().__init__()
            frozen = nn.LayerNorm(9).requires_grad_(False)
            sizes = (9, width), (width, 1 if last else 9)
            self.layers = nn.ModuleList([frozen, *(nn.Linear(*size) for size in sizes)])

        def forward(self, batch):
            normed, first, second = self.layers
            return second(torch.nn.functional.gelu(first(normed(batch))))

    torch.manual_seed(11 + last)
    return Stage()


def _piped(model, rank: int, ranks: int):
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    each = ranks // 2
    last = rank >= each
    along = [dist.new_group([at, at + each]) for at in range(each)][rank % each]
    across = [dist.new_group(range(at, at + each)) for at in (0, each)][last]
    average(model.parameters(), across)
    stage = PipelineStage(model, int(last), 2, torch.device("cpu"), group=along)
    schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)

    def run(batch, target):
        losses: list = []
        schedule.step(*() if last else (batch,), target=target if last else None, losses=losses)
        return torch.stack(losses).mean() if last else torch.zeros(())

    model.__dict__["run"] = run
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True
    )
    return model, optimizer


def _operators(rank: int, ranks: int, width: int):
    import torch
    from torch import nn

    class Operators(nn.Module):
        """One operator of each kind; ``own`` has a gradient and no influence on the others."""

        clipped = False

        def __init__(self) -> None:
            super().__init__()
            self.copied = nn.Linear(9, width)
            self.columns = nn.Linear(width, 13)
            self.rows = nn.Linear(13, width)
            self.narrow = nn.Linear(width, 5, dtype=torch.bfloat16)
            self.sent = nn.Linear(5, 1)
            torch.manual_seed(41 + rank)
            self.own = nn.Linear(9, 1)

        def forward(self, batch):
            found = torch.nn.functional.gelu(self.copied(batch))
            found = found + self.rows(torch.nn.functional.gelu(self.columns(found)))
            own = self.own(batch)
            return self.sent(self.narrow(found.bfloat16()).float()) + (own - own.detach())

    return Operators()


def _planned(model, rank: int, ranks: int):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("copies", "cut"))
    plan = {
        "columns": ColwiseParallel(output_layouts=Replicate()),
        "rows": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(model, mesh["cut"], plan)
    sent = list(model.sent.parameters())
    mine = [p for p in model.parameters() if rank == 0 or all(p is not each for each in sent)]
    optimizer = torch.optim.AdamW(mine, lr=1e-2, foreach=False)

    def send(*args) -> None:
        for param in sent:
            dist.broadcast(param.data, 0)

    optimizer.register_step_post_hook(send)
    return model, optimizer


def _deep(stage: int, width: int, *, turned: bool, micro: int):
    import os

    import torch
    import torch.distributed as dist
    from torch import nn

    rank = str(dist.get_rank())
    size = str(dist.get_world_size())
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
    import deepspeed

    # Else it compiles collectives for inference first, for a minute or more.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    class Halved(nn.Module):
        """In bf16, from and to fp32; in halves without a rest, for that would be stray memory."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(9, width + 1),
                nn.Dropout(0.2),
                nn.GELU(),
                nn.Linear(width + 1, 1, bias=False),
            )

        def forward(self, batch):
            return self.layers(batch.bfloat16()).float()

    model = Halved()
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups = [
        {"params": weights[::-1] if turned else weights, "weight_decay": 0.1},
        {"params": biases, "weight_decay": 0.0},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9,
        "gradient_accumulation_steps": micro,
    }  # fmt: skip
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config,
        dist_init_required=False,
    )  # fmt: skip
    if stage == 0:
        return engine, optimizer
    engine.masters = (
        optimizer.fp32_partitioned_groups_flat
        if stage == 3 else optimizer.single_partition_of_fp32_groups
    )  # fmt: skip

    def run(batch, target):
        loss = nn.functional.mse_loss(engine(batch), target)
        engine.backward(loss)
        engine.step()
        return loss

    engine.run = run
    return engine, optimizer
