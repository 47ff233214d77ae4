"""``python -m tests.benchmarks [PART ...]``: one table."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from . import (
    apart,
    fold,
    fsck,
    peers,
    profile,
    ranks,
    recovery,
    resident,
    s3,
    sharing,
    steps,
    storage,
    table,
    transport,
)

PARTS = {
    "fold": fold.rows, "storage": storage.rows, "transport": transport.rows, "steps": steps.rows,
    "profile": profile.rows, "resident": resident.rows, "apart": apart.rows,
    "recovery": recovery.rows, "peers": peers.rows, "ranks": ranks.rows,
    "sharing": sharing.rows,
    "s3": s3.rows, "fsck": fsck.rows, "table": table.rows,
}  # fmt: skip


def main() -> None:
    """Run the parts named (all by default) and print the table."""
    chosen = sys.argv[1:] or ["fold", "storage", "transport", "steps"]
    unknown = set(chosen) - set(PARTS)
    if unknown:
        sys.exit(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    table = Table(title="Ratios within one run; medians")
    for column in ("what", "figure", "bar", "", "detail"):
        table.add_column(column)
    for name in chosen:
        for row in PARTS[name]():
            mark = {True: "met", False: "MISSED", None: ""}[row.met]
            table.add_row(row.what, row.figure, row.bar, mark, row.detail)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
