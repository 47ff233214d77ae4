"""Rows of what stays, what was and what changed, as tables and text that people can read."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from .cat import CatRow
from .diff import TensorDiff, ValueDiff
from .gc import GcRow
from .graph import GraphRow
from .importing import Imported
from .rows import size
from .tables import print_table, table
from .tag import TagRow


def print_gc(console: Console, rows: list[GcRow]) -> None:
    """What went, or would go."""
    print_table(
        console, table("Floors", "run", "tier", "step", "kept below", ""),
        (
            (r.run, r.tier, r.step, "\n".join(f"{s} {', '.join(w)}" for s, w in r.kept.items()),
             _done(r))
            for r in rows if r.what == "floor"
        ),
    )  # fmt: skip
    found = [row for row in rows if row.what != "floor"]
    print_table(
        console, table("Garbage", "run", "tier", "what", "count", "bytes", ""),
        (
            (r.run or None, r.tier, r.what, r.count, size(r.nbytes) if r.nbytes else None, _done(r))
            for r in found
        ),
    )  # fmt: skip
    if not found:
        console.print("nothing to delete")
    elif not any(row.applied for row in found):
        console.print("nothing was changed: --apply does it")


def _done(row: GcRow) -> str:
    if row.done in ("left", "stands") or row.applied:
        return f"{row.done}: {row.why}" if row.why else row.done
    return f"would be {row.done}"


def print_tags(console: Console, rows: list[TagRow]) -> None:
    """Tags of a run."""
    print_table(
        console, table("Tags", "name", "step", "term", "line", "base", ""),
        ((r.name, r.step, r.term, r.on_line, r.base, r.done) for r in rows),
    )  # fmt: skip
    if not rows:
        console.print("no tags")


def print_graph(console: Console, rows: list[GraphRow]) -> None:
    """The history as a graph."""
    for row in rows:
        style = "bold" if row.what == "term" else ""
        console.print(f"[yellow]{escape(row.graph)}[/yellow] {escape(row.text)}", style=style)


def print_diff(console: Console, rows: list[TensorDiff | ValueDiff]) -> None:
    """What two steps have otherwise."""
    tensors = [row for row in rows if isinstance(row, TensorDiff)]
    print_table(
        console,
        table("Tensors", "tensor", "dtype", "shape", "other", "bytes", "max abs", "max rel", ""),
        (
            (r.tensor, r.dtype, "x".join(map(str, r.shape)), f"{r.differ} of {r.elements}",
             f"{size(r.changed)} of {size(r.nbytes)}", f"{r.max_abs:.3g}", f"{r.max_rel:.3g}",
             f"only in the {r.only}" if r.only else f"{r.odd} not finite" if r.odd else "")
            for r in tensors
        ),
    )  # fmt: skip
    print_table(
        console, table("Values", "what", "first", "second"),
        ((r.what, r.first, r.second) for r in rows if isinstance(r, ValueDiff)),
    )  # fmt: skip
    changed, total = sum(r.changed for r in tensors), sum(r.nbytes for r in tensors)
    console.print(
        f"{size(changed)} of {size(total)} differ, in {sum(r.differ > 0 for r in tensors)} tensors"
        if rows else "no difference"
    )  # fmt: skip


def print_cat(console: Console, rows: list[CatRow]) -> None:
    """What was written of a tensor."""
    for row in rows:
        stored = "" if row.stored_as in ("", row.dtype.lower()) else f" as {row.stored_as}"
        console.print(f"{escape(row.tensor)} of step {row.step}: {row.dtype}{stored} "
                      f"{list(row.shape)}, {size(row.nbytes)}", markup=False)  # fmt: skip


def print_imported(console: Console, rows: list[Imported]) -> None:
    """What was imported."""
    for row in rows:
        of = row.optimizer or "no optimizer: to load, not to train on"
        console.print(f"step {row.step} of run {escape(row.run)} <- {escape(row.source)}")
        console.print(f"  {row.form}: {row.tensors} tensors, {size(row.nbytes)}, {of}")
        if row.left_out:
            console.print(f"  left out: {escape(', '.join(row.left_out[:20]))}")
