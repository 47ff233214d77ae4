"""What all verbs of the command line share: arguments, progress, rows as JSON or tables, errors."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from adacheck_store.format.errors import AdaCheckError

if TYPE_CHECKING:
    from rich.console import Console

    from adacheck_store.store import Store
    from adacheck_store.tools.rows import Progress

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def complain(error: AdaCheckError) -> None:
    """One line on stderr: what, where, and what to do next; a document on stdout if ``--json``."""
    context = click.get_current_context(silent=True)
    line = " ".join(str(error).split())
    click.echo(f"adacheck-store: {line}", err=True)
    if context is not None and context.meta.get("json"):
        from adacheck_store.tools.rows import error_json

        click.echo(json.dumps(error_json(error), ensure_ascii=False))


def store_options(run: bool = True) -> Decorator:
    """The argument and options that every verb over a store has."""

    def decorate(verb: Callable[..., Any]) -> Callable[..., Any]:
        options = [
            click.argument("store_url"),
            click.option("--cache", metavar="FOLDER", help="Where the LMDB tiers lie."),
            click.option(
                "--json", "as_json", is_flag=True, callback=_note_json,
                help="Print one JSON document.",
            ),
        ]  # fmt: skip
        if run:
            options.append(
                click.option("--run", default="", help="The run; may be left out if there is one.")
            )
        for option in reversed(options):
            verb = option(verb)
        return verb

    return decorate


def _note_json(context: click.Context, _: click.Parameter, value: bool) -> bool:
    context.meta["json"] = value
    return value


def open_url(url: str, cache: str | None) -> Store:
    """The store, open for reading."""
    from adacheck_store.store import open_for_reading

    return open_for_reading(url, cache)


def console() -> Console:
    """Where tables go: wide enough for keys where nobody watches."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() else 200
    return Console(width=wide, highlight=False, soft_wrap=wide is not None)


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress bar on stderr if that is a terminal, else nothing."""
    from rich import progress as bars
    from rich.console import Console

    from adacheck_store.tools.rows import silent

    stderr = Console(stderr=True)
    if not stderr.is_terminal:
        yield silent
        return
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.DownloadColumn(),
               bars.TransferSpeedColumn(), bars.TimeRemainingColumn())  # fmt: skip
    with bars.Progress(*columns, console=stderr, transient=True) as shown:
        tasks: dict[str, bars.TaskID] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what, total=total or None)
            shown.update(tasks[what], completed=done)

        yield tell


def print_json(store_url: str, rows: list[Any], **more: Any) -> None:
    """One JSON document with all rows."""
    from adacheck_store.tools.rows import to_json

    document = {"store": store_url, **more, "rows": [to_json(row) for row in rows]}
    click.echo(json.dumps(document, ensure_ascii=False))


def show_rows(kind: str, url: str, rows: list[Any], as_json: bool, **more: Any) -> None:
    """Rows as one JSON document, or by the table of their kind."""
    if as_json:
        print_json(url, rows, **more)
        return
    from adacheck_store.tools import tables, tables_history

    out = console()
    if kind == "restored":
        tables.print_restored(out, rows[0])
    else:
        name = f"print_{kind}"
        getattr(tables_history if hasattr(tables_history, name) else tables, name)(out, rows)
