"""Rows as tables and text that people can read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .agents import AgentRow, ChainRow, DrainRow
from .compact import CompactRow
from .doctor import CheckRow
from .drill import DrillRow
from .findings import Finding, Provable, exit_code
from .fsck_deep import FoldedRow
from .fsck_journal import ResumedRow
from .log import FloorRow, TermRow
from .ls import HoldingRow, RunRow
from .repair import LEFT, RepairRow
from .restore import RestoredFile
from .rows import size
from .show import RecordRow, StepRow
from .status import Row, TierRow, TroubleRow

_STYLES = {"damage": "bold red", "warning": "yellow", "info": "dim"}
_FINDINGS_PER_KIND = 10


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return escape(str(value))


def table(title: str, *columns: str) -> Table:
    """A table without rows."""
    made = Table(title=title, title_justify="left", header_style="bold", expand=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def print_table(console: Console, table: Table, rows: Iterable[Iterable[Any]]) -> None:
    """Fill a table and print it, unless there are no rows."""
    for row in rows:
        table.add_row(*(_text(value) for value in row))
    if table.row_count:
        console.print(table)


def print_ls(console: Console, rows: list[RunRow | HoldingRow]) -> None:
    """Runs, and what lies where."""
    runs = [row for row in rows if isinstance(row, RunRow)]
    print_table(
        console,
        table("Runs", "run", "terms", "steps", "provable", "bases", "records", "bytes", "?"),
        (
            (r.run, r.terms, r.steps, r.provable, r.bases, r.records,
             "  ".join(f"{tier} {size(n)}" for tier, n in r.nbytes.items()), r.troubles or "")
            for r in runs
        ),
    )  # fmt: skip
    if not runs:
        console.print("no runs")
    print_table(
        console, table("Holdings", "term", "line", "tier", "bases", "deltas", "extras", "bytes"),
        (
            (r.term, r.on_line, r.tier, r.bases, r.deltas, r.extras, size(r.nbytes))
            for r in rows if isinstance(r, HoldingRow)
        ),
    )  # fmt: skip


def print_log(console: Console, rows: list[TermRow | FloorRow]) -> None:
    """Terms and floors."""
    print_table(
        console,
        table("Terms", "claim", "term", "line", "parent", "fork", "first", "steps", "on the line",
               "excuse"),
        (
            (r.claim, r.term, r.on_line, r.parent or None, r.fork_step, r.first, r.steps,
             r.line_steps, r.excuse or None)
            for r in rows if isinstance(r, TermRow)
        ),
    )  # fmt: skip
    print_table(
        console, table("Floors", "entry", "tier", "step", "kept", "of terms", "written by"),
        (
            (r.index, r.tier, r.step, r.kept, " ".join(r.terms), r.term)
            for r in rows if isinstance(r, FloorRow)
        ),
    )  # fmt: skip


def print_status(console: Console, rows: list[Row]) -> None:
    """Tiers, agents with their chains and drains, and troubles."""
    print_table(
        console,
        table("Tiers", "tier", "newest", "provable", "behind", "bases", "newest base", "bytes",
               "held by"),
        (
            (r.tier, r.newest, r.provable, r.behind, r.bases, r.newest_base, size(r.nbytes),
             r.holder)
            for r in rows if isinstance(r, TierRow)
        ),
    )  # fmt: skip
    _print_agents(console, rows)
    print_table(
        console, table("Troubles", "tier", "key", "what"),
        ((r.tier, r.key, r.what) for r in rows if isinstance(r, TroubleRow)),
    )  # fmt: skip


def _print_agents(console: Console, rows: list[Row]) -> None:
    print_table(
        console,
        table("Agents", "node", "pid", "term", "watermark", "trainers", "memory", "records", "at",
               "last error"),
        (
            (r.node, r.pid, r.term, _step(r.watermark), r.trainers,
             f"{size(r.resident)} of {size(r.memory)}", f"{size(r.used)} of {size(r.room)}",
             " ".join(filter(None, (*r.at, r.metrics))), r.last_error)
            for r in rows if isinstance(r, AgentRow)
        ),
    )  # fmt: skip
    print_table(
        console,
        table("Chains", "node", "chain", "replica", "newest", "exposed", "holders", "bytes"),
        (
            (r.node, r.chain, _step(r.replica_step), _step(r.newest_step), r.exposed,
             ", ".join(f"{name} {'silent' if name in r.silent else _step(step)}"
                       for name, step in r.holders.items()),
             "  ".join(f"{place} {size(n)}" for place, n in r.nbytes.items() if n))
            for r in rows if isinstance(r, ChainRow)
        ),
    )  # fmt: skip
    print_table(
        console,
        table("Drains", "node", "to", "waiting", "bytes", "lag", "drained", "requests", "busy",
               "error"),
        (
            (r.node, r.place, r.records, size(r.nbytes), f"{r.lag_steps} steps, {r.lag_s:g} s",
             size(r.drained), r.requests or "", f"{r.busy_s:g} s", r.error)
            for r in rows if isinstance(r, DrainRow)
        ),
    )  # fmt: skip


def _step(step: int) -> str:
    return "-" if step < 0 else str(step)


def print_show(console: Console, rows: list[StepRow | RecordRow]) -> None:
    """A step and its records."""
    for row in rows:
        if isinstance(row, StepRow):
            how = f"base {row.base} and {row.deltas} deltas" if row.provable else row.why
            word = "provable" if row.provable else "not provable"
            console.print(f"step {row.step} of term {row.term}: {word} ({escape(how)})")
            continue
        console.print(f"\n[bold]{escape(row.key)}[/bold]")
        facts = {
            "kind": row.kind, "id": row.id, "in": ", ".join(row.tiers), "step": row.step,
            "parent": row.parent, "manifest": row.manifest, "layout": row.layout,
            "bytes": size(row.nbytes), "info": row.info,
        }  # fmt: skip
        for name, value in facts.items():
            if value not in ("", None):
                console.print(f"  {name:9} {_text(value)}")
        print_table(
            console, table("arrays", "name", "dtype", "elements", "bytes", "blocks"),
            ((a.name, a.dtype, a.elements, size(a.nbytes), a.blocks) for a in row.arrays),
        )  # fmt: skip
        _print_tree(console, row.body, 1)


def _print_tree(console: Console, value: Mapping[str, Any], depth: int) -> None:
    for name, item in value.items():
        lead = "  " * depth + escape(str(name))
        if isinstance(item, Mapping) and item:
            console.print(lead)
            _print_tree(console, item, depth + 1)
        elif isinstance(item, list) and any(isinstance(entry, Mapping | list) for entry in item):
            for number, entry in enumerate(item):
                inner = entry if isinstance(entry, Mapping) else {str(number): entry}
                console.print(f"{lead} {number}")
                _print_tree(console, inner, depth + 1)
        else:
            console.print(f"{lead}: {_text(item)}")


def print_findings(
    console: Console, rows: list[RepairRow | Finding | Provable | FoldedRow | ResumedRow]
) -> None:
    """Repairs, findings by severity, provable steps, and the result in a line."""
    print_table(
        console, table("Repairs", "tier", "was", "done", "key", "why"),
        (
            (r.tier, r.was, r.done if r.applied or r.done == LEFT else f"to be {r.done}", r.key,
             r.why)
            for r in rows if isinstance(r, RepairRow)
        ),
    )  # fmt: skip
    findings = [row for row in rows if isinstance(row, Finding)]
    for severity, style in _STYLES.items():
        counts: dict[tuple[str, str], int] = {}
        for item in findings:
            if item.severity != severity:
                continue
            group = (item.kind, item.tier)
            counts[group] = counts.get(group, 0) + 1
            if counts[group] <= _FINDINGS_PER_KIND:
                _print_finding(console, item, style)
        for (kind, tier), count in counts.items():
            if count > _FINDINGS_PER_KIND:
                console.print(f"[{style}]{severity}[/{style}] {kind} in {_text(tier)}: "
                              f"{count} in all (--json lists them)")  # fmt: skip
    print_table(
        console, table("Provable steps", "run", "from", "steps", "newest", "count"),
        (
            (r.run, "all tiers" if r.tier == "all" else f"{r.tier} alone", r.steps, r.newest,
             r.count)
            for r in rows if isinstance(r, Provable)
        ),
    )  # fmt: skip
    print_table(
        console,
        table("Folded", "run", "step", "base", "deltas", "class", "sums", "bases", "drift"),
        (
            (r.run, r.step, r.base, r.deltas, r.exactness, r.checked, r.compared,
             None if r.drift is None else f"{r.drift:.3g}")
            for r in rows if isinstance(r, FoldedRow)
        ),
    )  # fmt: skip
    for resumed in (row for row in rows if isinstance(row, ResumedRow)):
        console.print(
            f"taken from the journal {escape(resumed.journal)}, begun {resumed.age_s / 3600:.1f} h "
            f"ago, and not read again: {resumed.records} records ({size(resumed.nbytes)}), "
            f"{resumed.folds} folded steps"
        )
    console.print(summary(findings))


def _print_finding(console: Console, item: Finding, style: str) -> None:
    where = " ".join(
        f"{name}={value}" for name, value in
        (("tier", item.tier), ("key", item.key or item.run), ("path", item.path)) if value
    )  # fmt: skip
    rule = f" {item.invariant}" if item.invariant else ""
    console.print(f"[{style}]{item.severity}[/{style}] {item.kind}{rule}: {escape(item.what)}")
    console.print(f"    {escape(where)}")
    if item.severity != "info":
        console.print(f"    so: {escape(item.consequence)}")
        console.print(f"    do: {escape(item.remedy)}")


def summary(findings: list[Finding]) -> str:
    """The result of a check in a line."""
    count = {name: sum(item.severity == name for item in findings) for name in _STYLES}
    word = {0: "clean", 1: "damaged", 3: "not everything could be checked"}[exit_code(findings)]
    return f"{word}: {count['damage']} damages, {count['warning']} warnings, {count['info']} notes"


_VERDICTS = {"ok": "green", "warning": "yellow", "bad": "bold red", "unknown": "magenta"}


def print_doctor(console: Console, rows: list[CheckRow]) -> None:
    """What was looked at, and what to mend."""
    made = table("Doctor", "area", "check", "", "found")
    for row in rows:
        style = _VERDICTS[row.verdict]
        verdict = f"[{style}]{row.verdict}[/{style}]"
        made.add_row(_text(row.area), _text(row.check), verdict, _text(row.found))
    console.print(made)
    for row in rows:
        if row.remedy:
            console.print(f"{row.area}, {row.check}: {escape(row.remedy)}")


def print_drill(console: Console, rows: list[DrillRow]) -> None:
    """Losses, and what a restore after each gives."""
    print_table(
        console,
        table("Drill", "lost", "restored", "RPO", "RTO", "read", "requests", "from"),
        (
            (r.loss, r.outcome if r.step is None else f"step {r.step}",
             f"{r.lost} of {r.newest + 1} steps", f"{r.seconds:.2f} s", size(r.nbytes),
             r.requests or "", ", ".join(r.tiers))
            for r in rows
        ),
    )  # fmt: skip
    for row in rows:
        for reason in row.reasons[:3]:
            console.print(f"{escape(row.loss)}: {escape(reason)}")


def print_restored(console: Console, row: RestoredFile) -> None:
    """A restored file."""
    console.print(f"step {row.step} of run {escape(row.run)} -> {escape(row.path)}")
    console.print(f"  {row.tensors} tensors, {size(row.nbytes)}")
    console.print(f"  certificate: {row.certificate}")
    console.print("  read from: " + ", ".join(f"{t} {size(n)}" for t, n in row.tiers.items()))
    if row.lost:
        console.print(f"  [yellow]{row.lost} newer steps cannot be proven:[/yellow]")
    for reason in row.reasons[:5]:
        console.print(f"    {escape(reason)}")


def print_compact(console: Console, rows: list[CompactRow]) -> None:
    """What was compacted."""
    words = {
        "folded": "folded", "copied": "copied from another tier",
        "present": "was there already: nothing done",
    }  # fmt: skip
    for row in rows:
        console.print(
            f"base {row.step} of {row.part} in {row.tier}: {words[row.done]} "
            f"(base {row.base_step} and {row.deltas} deltas, {row.exactness}, {size(row.nbytes)})"
        )
        console.print(f"  {escape(row.key)}")
        for reason in row.reasons[:5]:
            console.print(f"  {escape(reason)}")
