"""A plan for people: tables, and a picture where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from adacheck_store.format.errors import UsageError
from adacheck_store.redundancy.costs import MOST_RANKS

from .plan import CostRow, PlanRow, ReachRow, Row, SurvivalRow
from .plan_diff import UnsafeRow
from .plan_looks import LookRow
from .rows import size

_COSTS: tuple[tuple[str, str], ...] = (
    ("step", "a step, in all"), ("step_rank", "a step, handed out by a rank"),
    ("network", "a step, over the network"), ("network_node", "a step, sent by a node"),
    ("base", "a base, held by agents"), ("base_rank", "a base, drained by a rank"),
    ("heads", "heads of a step, in all"), ("head_rank", "heads of a step, of a rank"),
    ("extras", "extras of a step, in all"), ("extra_rank", "extra of a step, of a rank"),
    ("ram_node", "RAM of a node"), ("nvme_node", "NVMe of a node"), ("object", "object store"),
)  # fmt: skip


def print_plan(console: Console, rows: Sequence[Row]) -> None:
    """What is planned, and a table each of costs, reach and survival, by policy."""
    head = next(row for row in rows if isinstance(row, PlanRow))
    console.print(
        f"{head.model}: {head.parameters:,} parameters, state {size(head.state_bytes)}; "
        f"{head.strategy} on {head.ranks} ranks, {head.nodes} nodes, k={head.k}"
    )
    console.print(f"counted: {head.counted}; a rank or node is the busiest")
    look = next((row for row in rows if isinstance(row, LookRow)), None)
    console.print(_looked(look) if look else f"more than {MOST_RANKS} ranks are not compared")
    costs = [row for row in rows if isinstance(row, CostRow)]
    reach = [row for row in rows if isinstance(row, ReachRow)]
    lines = [[words, *(size(getattr(r, name)) for r in costs)] for name, words in _COSTS]
    lines.append(["cores of a node that fold", *(f"{r.cores_node:.2f}" for r in costs)])
    _print(console, ["needs", *(r.policy for r in costs)], lines)
    shares = ("network", "disk", "object", "cpu", "ram", "nvme")
    lines = [[name, *(f"{getattr(r, name):.1%}" for r in reach)] for name in shares]
    lines.append(["every step (1S1C)", *("yes" if r.every_step else "no" for r in reach)])
    lines.append(["reachable interval, steps", *(str(r.interval) for r in reach)])
    lines.append(["until holders have it (t_ckpt)", *(f"{r.t_ckpt_s:.3f} s" for r in reach)])
    lines.append(["lost by a failure", *(f"{r.lost_s:.2f} s" for r in reach)])
    lines.append(["lost a day", *(f"{r.lost_s_per_day:.2f} s" for r in reach)])
    _print(console, ["share of what there is", *(r.policy for r in reach)], lines)
    lines = [
        [r.policy, str(r.failures), "not counted" if r.exact is None else f"{r.exact:.4%}",
         f"{r.racks:.2%} ± {r.error:.2%}"]
        for r in rows if isinstance(r, SurvivalRow)
    ]  # fmt: skip
    _print(console, ["survival", "at once", "nodes, exact", "nodes and racks, simulated"], lines)
    lines = [
        [r.policy, str(r.before), str(r.after), str(r.states), size(r.bytes), r.tensors]
        for r in rows if isinstance(r, UnsafeRow)
    ]  # fmt: skip
    titles = ["less safe", "survived before", "after", "states", "bytes", "of"]
    if lines:
        _print(console, titles, lines)


def _looked(look: LookRow) -> str:
    return (
        f"to find copies a rank sends {size(look.exchange)} for {look.tensors} tensors, and "
        f"{size(look.counts)} of lengths; around a ring {size(look.ring)}"
    )


def _print(console: Console, titles: Iterable[str], lines: Iterable[Iterable[str]]) -> None:
    table = Table(header_style="bold", expand=False)
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left")
    for line in lines:
        table.add_row(*line)
    console.print(table)


def plot(rows: Sequence[Row], path: str) -> None:
    """Draw shares and survival into an image file.

    Raises `UsageError` if matplotlib is not installed or cannot write such a file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "--plot needs matplotlib", hint="pip install 'adacheck-store[plot]'"
        ) from error
    figure: Any = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    shares = ("network", "disk", "object", "cpu", "ram", "nvme")
    reach = [row for row in rows if isinstance(row, ReachRow)]
    width = 0.8 / max(len(reach), 1)
    for number, row in enumerate(reach):
        at = [place + width * number for place in range(len(shares))]
        left.bar(at, [100 * getattr(row, name) for name in shares], width=width, label=row.policy)
    left.set_xticks([place + 0.4 - width / 2 for place in range(len(shares))], shares)
    left.axhline(100, color="black", linewidth=0.8)
    left.set_ylabel("percent of what there is")
    left.legend()
    found = [row for row in rows if isinstance(row, SurvivalRow)]
    for policy in dict.fromkeys(row.policy for row in found):
        own = [row for row in found if row.policy == policy]
        at_once = [row.failures for row in own]
        right.errorbar(
            at_once, [row.racks for row in own], [row.error for row in own], fmt="o--",
            label=f"{policy}, nodes and racks",
        )  # fmt: skip
        if all(row.exact is not None for row in own):
            right.plot(at_once, [row.exact for row in own], label=f"{policy}, nodes")
    right.set_xlabel("failures at once")
    right.set_ylabel("probability of survival")
    right.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"no picture: {error}",
            path=path,
            hint="a writable name that ends in .png, .svg or .pdf",
        ) from error
