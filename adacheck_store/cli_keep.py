"""The verbs that say what stays in a store: gc and tag."""

from __future__ import annotations

import re
from typing import Any

import click

from .cli_kit import open_url, progress_bar, show_rows, store_options

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Duration(click.ParamType[float]):
    """A time such as ``90``, ``90s``, ``12h`` or ``7d``, in seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Seconds; fails for anything else."""
        if isinstance(value, int | float):
            return float(value)
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw]?)", str(value))
        if not match:
            self.fail(f"{value!r} is no time: 90, 90s, 12h, 7d, 2w", param, ctx)
        return float(match[1]) * _UNITS[match[2] or "s"]


@click.command("gc")
@store_options()
@click.option("--last", type=click.IntRange(min=1),
              help="Bases to keep, with every step after the oldest of them. Without it 2, or, "
                   "without any other rule, as many as the run's trainer keeps.")  # fmt: skip
@click.option("--every", type=click.IntRange(min=1), help="Also one step in so many.")
@click.option("--every-time", type=Duration(), help="Also one step in so much time: 12h, 7d.")
@click.option("--best", metavar="PATH", default="",
              help="Also the step with the smallest number at PATH (metrics/loss).")  # fmt: skip
@click.option("--best-count", type=click.IntRange(min=1), default=1, show_default=True,
              help="With --best: how many.")  # fmt: skip
@click.option("--largest", is_flag=True, help="With --best: the largest numbers.")
@click.option("--drop-kept", is_flag=True, help="Also drop what the last floor kept, but tags.")
@click.option("--apply", is_flag=True, help="Do it. Else only say what would go.")
@click.option("--grace", type=Duration(), default="60s", show_default=True,
              help="Age of a floor, by the store's clock, before anything goes.")  # fmt: skip
@click.option("--older", type=Duration(), default="1d", show_default=True,
              help="Age at which what a put has left is taken for abandoned.")  # fmt: skip
@click.option("--aside", is_flag=True, help="Also what repairs have set aside, if it is older.")
def gc_verb(
    store_url: str, cache: str | None, as_json: bool, run: str, last: int | None, every: int | None,
    every_time: float | None, best: str, best_count: int, largest: bool, drop_kept: bool,
    apply: bool, grace: float, older: float, aside: bool,
) -> None:  # fmt: skip
    """Delete what no rule keeps and what nobody finished; says what would go unless --apply.

    Tagged steps always stay. Of the steps below the last bases those stay that have a base and that
    any rule asks for; without a rule those that the run's trainer keeps, as it has said in the
    store, or if it has no rules either what the last floor kept. Safe beside a run that trains.
    """
    from adacheck_store.policy import Retention
    from adacheck_store.tools.gc import Ages, gc

    rules = None
    if every or every_time or best or drop_kept:
        rules = Retention(
            last=last or 2, every=every or 0, every_s=every_time or 0.0, best=best,
            best_count=best_count, best_largest=largest,
        )  # fmt: skip
    ages = Ages(grace_s=grace, older_s=older, aside=aside)
    with open_url(store_url, cache) as store, progress_bar() as tell:
        rows = list(gc(store, run, last=last, rules=rules, apply=apply, ages=ages, progress=tell))
    show_rows("gc", store_url, rows, as_json)


@click.command("tag")
@store_options()
@click.argument("name", required=False)
@click.argument("step", required=False, type=click.IntRange(min=0))
@click.option("--remove", is_flag=True, help="Take the tag NAME back.")
@click.option("--inexact", is_flag=True, help="Even if folds here are close to exact, not exact.")
def tag_verb(
    store_url: str, cache: str | None, as_json: bool, run: str, name: str | None,
    step: int | None, remove: bool, inexact: bool,
) -> None:  # fmt: skip
    """List the tags of a run; or give STEP (the newest provable) the NAME.

    A tagged step has a base of its own in the object tier, and no floor passes it.
    """
    from adacheck_store.tools import tag

    if name is None and remove:
        raise click.UsageError("--remove takes the NAME of a tag")
    if remove and step is not None:
        raise click.UsageError("--remove takes a NAME and no STEP")
    with open_url(store_url, cache) as store, progress_bar() as tell:
        if name is None:
            rows = list(tag.tags(store, run))
        elif remove:
            rows = [tag.remove(store, name, run)]
        else:
            rows = [tag.add(store, name, run, step=step, inexact=inexact, progress=tell)]
    show_rows("tags", store_url, rows, as_json)
