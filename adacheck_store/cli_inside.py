"""The verbs that look into states: diff and cat."""

from __future__ import annotations

import sys

import click

from .cli_kit import open_url, progress_bar, show_rows, store_options


@click.command("diff")
@store_options()
@click.argument("first", metavar="STEP")
@click.argument("second", metavar="STEP")
@click.option("--term", default="", help="Of a branch off the line, by its term.")
@click.option("--rank", type=click.IntRange(min=0), default=0, help="Whose own tensors; 0.")
@click.option("--all", "everything", is_flag=True, help="What is alike too.")
def diff_verb(
    store_url: str, cache: str | None, as_json: bool, run: str, first: str, second: str,
    term: str, rank: int, everything: bool,
) -> None:  # fmt: skip
    """What is another between two steps, or tags: tensors, counters, hyper-parameters."""
    from adacheck_store.tools.diff import diff
    from adacheck_store.tools.export import Choice
    from adacheck_store.tools.tag import step_named

    with open_url(store_url, cache) as store, progress_bar() as tell:
        sides = [
            Choice(run=run, step=step_named(store, text, run), term=term, rank=rank)
            for text in (first, second)
        ]
        rows = list(diff(store, *sides, everything=everything, progress=tell))
    show_rows("diff", store_url, rows, as_json)


@click.command("cat")
@store_options()
@click.argument("what", metavar="TENSOR|KEY")
@click.option("--step", default="", help="A step or a tag. Default: the newest provable.")
@click.option("--term", default="", help="A branch off the line, by its term.")
@click.option("--rank", type=click.IntRange(min=0), default=0, help="Whose own tensors; 0.")
@click.option("--npy", type=click.Path(), help="Write the tensor to this .npy file.")
def cat_verb(
    store_url: str, cache: str | None, as_json: bool, run: str, what: str, step: str, term: str,
    rank: int, npy: str | None,
) -> None:  # fmt: skip
    """One tensor of a step (model/NAME, optimizer/NAME/exp_avg) or one record, to stdout.

    A tensor's bytes are little-endian and in C order; a record is a safetensors file.
    """
    from adacheck_store.format.keys import is_key
    from adacheck_store.tools.cat import cat_npy, cat_record, cat_tensor
    from adacheck_store.tools.export import Choice
    from adacheck_store.tools.tag import step_named

    if as_json and not npy:
        raise click.UsageError("--json belongs to --npy: else stdout takes the bytes")
    if not npy and sys.stdout.isatty():
        raise click.UsageError("bytes are not for a terminal: redirect stdout, or give --npy FILE")
    out = sys.stdout.buffer
    with open_url(store_url, cache) as store, progress_bar() as tell:
        if is_key(what):
            if npy or step or term:
                raise click.UsageError("a record is written as it is, to stdout")
            cat_record(store, what, out)
            return
        number = step_named(store, step, run) if step else None
        choice = Choice(run=run, step=number, term=term, rank=rank)
        if npy:
            row = cat_npy(store, what, npy, choice, tell)
        else:
            cat_tensor(store, what, out, choice, tell)
            return
    show_rows("cat", store_url, [row], as_json)
