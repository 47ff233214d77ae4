"""The command `adacheck-store plan`."""

from __future__ import annotations

import json
from typing import Any

import click


def _note_json(context: click.Context, _: click.Parameter, value: bool) -> bool:
    context.meta["json"] = value
    return value


@click.command("plan")
@click.argument("model")
@click.argument("topology", metavar="TOPOLOGY.toml")
@click.option(
    "--strategy",
    default="zero1",
    show_default=True,
    help="ddp, zero1, zero3 (FSDP), hsdp, tp-fsdp or ep-zero1.",
)
@click.option("--shard", type=int, default=0, help="hsdp: ranks that hold one replica.")
@click.option("--tp", type=int, default=0, help="Ranks that cut a layer: tp-fsdp, zero1, ep-zero1.")
@click.option("--ep", type=int, default=0, help="ep-zero1: groups that experts are dealt to.")
@click.option("--pp", type=int, default=0, help="Stages of a pipeline; each is parallel as named.")
@click.option(
    "--optimizer",
    default="mixed",
    show_default=True,
    help="AdamW: mixed (half parameters, masters), fp32, amsgrad; momentum; sgd.",
)
@click.option("--gradients", default="lossless", show_default=True, help="lossless or bf16.")
@click.option("--k", type=int, default=1, show_default=True, help="Failure domains to lose.")
@click.option("--window", type=int, default=2, show_default=True)
@click.option("--base-every", type=int, default=64, show_default=True)
@click.option("--keep-bases", type=int, default=2, show_default=True)
@click.option("--failures", type=int, default=4, show_default=True, help="Survival of up to these.")
@click.option("--trials", type=int, default=20_000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--diff", "other", metavar="OTHER.toml", help="What another topology makes unsafe.")
@click.option("--plot", "picture", metavar="FILE", help="Draw it; needs matplotlib.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    callback=_note_json,
    is_eager=True,
    help="Print one JSON document.",
)
def plan_verb(
    model: str, topology: str, strategy: str, shard: int, tp: int, ep: int, pp: int,
    optimizer: str,
    gradients: str, other: str | None, picture: str | None, as_json: bool, **more: Any,
) -> None:  # fmt: skip
    """What a run would cost and survive, without GPU or cluster.

    MODEL is a name (gpt2-124m, llama-3-8b, ...), a JSON file of dimensions, or module:function.
    """
    from rich.console import Console

    from . import plan_models, plan_show
    from .plan import Settings, plan
    from .plan_strategy import Strategy, items
    from .plan_topology import read_cluster
    from .rows import to_json

    asked = Settings(
        model=plan_models.model(model), cluster=read_cluster(topology),
        strategy=Strategy(kind=strategy, shard=shard, tp=tp, ep=ep, pp=pp),
        items=items(optimizer, gradients), other=read_cluster(other) if other else None, **more,
    )  # fmt: skip
    rows = list(plan(asked))
    if picture:
        plan_show.plot(rows, picture)
    if as_json:
        click.echo(json.dumps({"rows": [to_json(row) for row in rows]}, ensure_ascii=False))
    else:
        plan_show.print_plan(Console(width=100, highlight=False), rows)
