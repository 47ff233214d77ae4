"""``adacheck-store demo``: options, progress, and one table at the end."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import tempfile
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .harness import DemoResult, Round, run_demo, settings_line


@click.command()
@click.option("--store", default="", help="Store URL (default: a temporary folder).")
@click.option("--steps", default=50, show_default=True, type=click.IntRange(10))
@click.option("--rounds", default=1, show_default=True, type=click.IntRange(1), help="Kills.")
@click.option("--seed", default=None, type=int, help="Of the kill's moment and the training.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(store: str, steps: int, rounds: int, seed: int | None, as_json: bool) -> None:
    """Train, be killed, restore, go on, lose the machine, restore again: bit for bit.

    Trains a byte-level GPT on the Python standard library's source, with a checkpoint at every
    step. Exits with 1 if any bit differs from the uninterrupted run.
    """
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    console = Console(stderr=as_json)
    with tempfile.TemporaryDirectory(prefix="adacheck-demo-") as folder:
        work = Path(folder)
        where = store or (work / "store").as_uri()
        with _bars(console) as bars:
            task = bars.add_task("starting", total=steps)
            result = run_demo(
                work, where, steps=steps, rounds=rounds, seed=seed,
                progress=lambda what, at, total: bars.update(
                    task, description=what, completed=at, total=total
                ),
            )  # fmt: skip
    if as_json:
        click.echo(json.dumps({"seed": seed, **dataclasses.asdict(result)}))
    else:
        console.print(_table(result, seed))
    for number, outcome in enumerate(result.rounds, 1):
        for line in outcome.differences[:20]:
            console.print(f"round {number}: differs: {line}", style="red", markup=False)
    sys.exit(0 if all(outcome.equal for outcome in result.rounds) else 1)


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=False,
    )  # fmt: skip


def _table(result: DemoResult, seed: int) -> Table:
    table = Table(
        title=f"{result.parameters / 1e6:.1f} M parameters, {result.steps} steps, a checkpoint at "
        f"every step ({settings_line()}, seed {seed})",
        show_header=True,
    )
    table.add_column("")
    for number in range(1, len(result.rounds) + 1):
        table.add_column(f"round {number}" if len(result.rounds) > 1 else "")
    for name, cells in _lines(result):
        table.add_row(name, *cells)
    return table


def _lines(result: DemoResult) -> list[tuple[str, list[str]]]:
    def row(name: str, cell: object) -> tuple[str, list[str]]:
        assert callable(cell)
        return name, [str(cell(outcome)) for outcome in result.rounds]

    def size(outcome: Round) -> str:
        per = outcome.bytes_per_step / result.parameters
        ratio = result.state_bytes / outcome.bytes_per_step
        return (
            f"{outcome.bytes_per_step / 1e6:.2f} MB, {per:.3f} per parameter; full state "
            f"{result.state_bytes / 1e6:.1f} MB ({ratio:.1f} x)"
        )

    def speed(outcome: Round) -> str:
        without = result.reference_step_s
        return (
            f"{outcome.step_s * 1e3:.0f} ms with, {without * 1e3:.0f} ms without "
            f"({outcome.step_s / without:.3f} x)"
        )

    return [
        row("killed", lambda r: f"after step {r.killed_after}, in {r.killed_in}"),
        row("restored to", lambda r: f"step {r.restored} from {r.tier}, {r.restore_s:.2f} s"),
        row("certificate", lambda r: r.certificate),
        row(
            "machine lost, restored to",
            lambda r: (
                f"step {r.lost_to} ({r.lost_behind} behind) from {r.lost_tier}, "
                f"{r.lost_restore_s:.2f} s"
            ),
        ),
        row("certificate", lambda r: r.lost_certificate),
        row("bytes per step", size),
        row("step time", speed),
        row("background", lambda r: f"{r.background_s * 1e3:.0f} CPU-ms per step"),
        row("bit-equal", lambda r: "yes" if r.equal else "NO"),
    ]
