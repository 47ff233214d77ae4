"""``adacheck-store demo``: options, progress, and one table at the end."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .harness import DemoResult, Recovery, run_demo, settings_line
from .model import WIDTH
from .trainer import Job


@click.command()
@click.option("--store", default="", help="Store URL (default: a temporary folder).")
@click.option("--nodes", default=2, show_default=True, type=click.IntRange(1))
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(1), help="A node.")
@click.option("--steps", default=40, show_default=True, type=click.IntRange(12))
@click.option("--width", default=WIDTH, show_default=True, type=click.IntRange(64),
              help="Of the model; a multiple of 64.")  # fmt: skip
@click.option("--seed", default=None, type=int, help="Of the moments and of the training.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    store: str, nodes: int, ranks: int, steps: int, width: int, seed: int | None, as_json: bool
) -> None:
    """Train, lose a rank, a node, then all but the zarr tier, and go on each time: bit for bit.

    Trains a byte-level GPT on the Python standard library's source by FSDP2, with a checkpoint at
    every step and an agent on each node; nodes are names on this host. Exits with 1 if any bit
    differs from the uninterrupted run.
    """
    if width % 64:
        raise click.UsageError(f"--width {width} is no multiple of 64")
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    console = Console(stderr=as_json)
    with tempfile.TemporaryDirectory(prefix="adacheck-demo-") as folder:
        work = Path(folder)
        job = Job(
            folder=work, nodes=nodes, ranks_per_node=ranks, steps=steps, seed=seed, width=width,
            run=work.name, store=store or (work / "store").as_uri(),
        )  # fmt: skip
        with _bars(console) as bars:
            task = bars.add_task("starting", total=steps)
            result = run_demo(
                work, job,
                lambda what, at, total: bars.update(
                    task, description=what, completed=at, total=total
                ),
            )  # fmt: skip
    if as_json:
        click.echo(json.dumps({"seed": seed, **dataclasses.asdict(result)}))
    else:
        console.print(_table(result, seed))
    for line in result.differences[:20]:
        console.print(f"differs: {line}", style="red", markup=False)
    sys.exit(1 if result.differences else 0)


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=False,
    )  # fmt: skip


def _table(result: DemoResult, seed: int) -> Table:
    per = result.bytes_per_step / result.parameters
    times = result.state_bytes / result.bytes_per_step
    table = Table(
        title=f"{result.parameters / 1e6:.1f} M parameters on {result.nodes} x "
        f"{result.ranks_per_node} ranks (FSDP2), {result.steps} steps, a checkpoint at every step\n"
        f"{settings_line()}, seed {seed}",
        caption=f"bytes per step: {result.bytes_per_step / 1e6:.2f} MB, {per:.3f} per parameter; "
        f"full state {result.state_bytes / 1e6:.1f} MB ({times:.1f} x)\n"
        f"step time: {result.step_s * 1e3:.0f} ms with, {result.reference_step_s * 1e3:.0f} ms "
        f"without ({result.step_s / result.reference_step_s:.2f} x), ranks and agents on "
        f"{len(os.sched_getaffinity(0))} cores\n"
        f"bit-equal to the uninterrupted run: {'NO' if result.differences else 'yes'}",
        caption_justify="left", caption_style="",
    )  # fmt: skip
    table.add_column("lost")
    for each in result.recoveries:
        table.add_column(each.loss.what)
    for name, cell in _CELLS.items():
        table.add_row(name, *(cell(each) for each in result.recoveries))
    return table


_CELLS: dict[str, Callable[[Recovery], str]] = {
    "when": lambda r: f"after step {r.loss.after}, in {r.loss.phase}",
    "restored to": lambda r: f"step {r.restored}, {r.steps_lost} lost",
    "from": lambda r: "\n".join(f"{name} {size / 1e6:.0f} MB" for name, size in r.tiers.items()),
    "restore": lambda r: f"{r.restore_s:.2f} s",
    "next step": lambda r: f"{r.back_s:.1f} s after the loss",
    "certificate": lambda r: r.certificate,
}
"""Rows of the table: what each says of a `Recovery`."""
