"""The command line, adacheck-store VERB STORE_URL."""

from __future__ import annotations

import importlib
import logging
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from adacheck_store import __version__
from adacheck_store.agent.command import agent_verb
from adacheck_store.format.errors import AdaCheckError
from adacheck_store.tools.plan_command import plan_verb

from .cli_inside import cat_verb, diff_verb
from .cli_keep import gc_verb, tag_verb
from .cli_kit import complain, open_url, progress_bar, show_rows, store_options

DEMO = "adacheck_store.demo.command"
"""The module whose ``command`` is the verb ``demo``; loaded when asked for."""


class Verbs(click.Group):
    """The verbs; ``demo`` is loaded only when it is called. Our errors become one line each."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All verbs, sorted."""
        return sorted([*super().list_commands(ctx), "demo"])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A verb by its name."""
        if cmd_name != "demo":
            return super().get_command(ctx, cmd_name)
        return _Demo(name="demo", help="Train, lose ranks and nodes, compare bit for bit.")

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb; an `AdaCheckError` ends it with its exit code."""
        try:
            return super().invoke(ctx)
        except AdaCheckError as error:
            complain(error)
            ctx.exit(error.exit_code)


class _Demo(click.Command):
    """Hands everything to the demo's own command, loaded now."""

    def main_command(self) -> click.Command:
        """The demo's command; raises `click.UsageError` where it is not installed."""
        try:
            module = importlib.import_module(DEMO)
            command = module.command
        except (ModuleNotFoundError, AttributeError) as error:
            if isinstance(error, ModuleNotFoundError) and not DEMO.startswith(str(error.name)):
                raise
            raise click.UsageError("the demo is not part of this installation") from error
        if not isinstance(command, click.Command):
            raise click.ClickException(f"{DEMO}.command is no command")
        return command

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:  # fmt: skip
        """The context of the demo's own command."""
        return self.main_command().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command the context was made for."""
        return ctx.command.invoke(ctx)


@click.group(cls=Verbs)
@click.version_option(__version__, prog_name="adacheck-store")
def main() -> None:
    """Keep a checkpoint of a training run at every step, and restore it bit for bit.

    STORE_URL is file:///folder or a folder's path. Exit codes: 0 clean, 1 damage found, 2 misuse,
    3 could not check, 4 repaired.
    """
    logging.basicConfig(format="%(name)s: %(message)s", stream=sys.stderr)


@main.command("ls")
@store_options()
@click.option("--tier", default="", help="With --run: of this tier alone.")
@click.option("--term", default="", help="With --run: of this term alone (or its beginning).")
def ls_verb(
    store_url: str, cache: str | None, as_json: bool, run: str, tier: str, term: str
) -> None:
    """Runs of a store; with --run what every tier holds of every term."""
    from adacheck_store.tools.ls import ls

    if (tier or term) and not run:
        raise click.UsageError("--tier and --term belong to --run")
    with open_url(store_url, cache) as store:
        show_rows("ls", store_url, list(ls(store, run, tier=tier, term=term)), as_json)


@main.command("log")
@store_options()
@click.option("--graph", "drawn", is_flag=True, help="Drawn: forks, bases, gaps, tags, floors.")
def log_verb(store_url: str, cache: str | None, as_json: bool, run: str, drawn: bool) -> None:
    """Terms of a run, their forks, and the floors of its tiers."""
    from adacheck_store.tools.graph import graph
    from adacheck_store.tools.log import log

    with open_url(store_url, cache) as store:
        if drawn:
            show_rows("graph", store_url, list(graph(store, run)), as_json)
        else:
            show_rows("log", store_url, list(log(store, run)), as_json)


@main.command("show")
@store_options()
@click.argument("what", metavar="STEP|KEY")
def show_verb(store_url: str, cache: str | None, as_json: bool, run: str, what: str) -> None:
    """A record by its key, or the records of a step."""
    from adacheck_store.tools.show import show

    with open_url(store_url, cache) as store:
        show_rows("show", store_url, list(show(store, what, run)), as_json)


@main.command("status")
@store_options()
def status_verb(store_url: str, cache: str | None, as_json: bool, run: str) -> None:
    """How far each tier is, what it can prove alone, who holds it; and the living agents."""
    from adacheck_store.tools.status import status

    with open_url(store_url, cache) as store:
        show_rows("status", store_url, list(status(store, run)), as_json)


@main.command("fsck")
@store_options()
@click.option("--deep", is_flag=True, help="Fold a sample of steps too, and compare.")
@click.option("--sample", type=click.IntRange(min=1), default=8, show_default=True,
              help="With --deep: steps of each run.")  # fmt: skip
@click.option("--repair", is_flag=True, help="Rebuild from other tiers, set aside the rest.")
@click.option("--dry-run", is_flag=True, help="With --repair: only say what would be done.")
@click.option(
    "--resume",
    metavar="FILE",
    help="Note there what is verified; go on with what a check that was cut off noted.",
)
@click.pass_context
def fsck_verb(
    ctx: click.Context, store_url: str, cache: str | None, as_json: bool, run: str, deep: bool,
    sample: int, repair: bool, dry_run: bool, resume: str | None,
) -> None:  # fmt: skip
    """Check every record of a store, read-only, and say which steps are provable.

    With --deep a sample of steps is folded, and held against the trainer's fingerprints and against
    bases that an earlier one leads to. With --repair what does not verify is first rebuilt from any
    tier that has it right; what none has is moved to _aside. Ends with 4 if all could be rebuilt
    and the store is clean. With --resume a check that was cut off goes on where it was: FILE has
    what it had verified, and is removed when everything has been looked at.
    """
    from adacheck_store.tools.findings import CLEAN, DAMAGED, REPAIRED, Finding, exit_code
    from adacheck_store.tools.fsck import fsck
    from adacheck_store.tools.fsck_journal import open_journal
    from adacheck_store.tools.repair import REBUILT
    from adacheck_store.tools.repair import repair as mend

    if dry_run and not repair:
        raise click.UsageError("--dry-run belongs to --repair")
    rows: list[Any] = []
    with ExitStack() as stack:
        store = stack.enter_context(open_url(store_url, cache))
        tell = stack.enter_context(progress_bar())
        journal = stack.enter_context(open_journal(resume, store)) if resume else None
        if repair:
            rows += mend(store, run, dry_run=dry_run, progress=tell, journal=journal)
            if journal is not None:
                journal.forget_places()
        repaired = [row.done for row in rows]
        rows += fsck(store, run, tell, deep=sample if deep else 0, journal=journal)
    code = exit_code(row for row in rows if isinstance(row, Finding))
    if repaired and code == CLEAN:
        code = REPAIRED if set(repaired) == {REBUILT} else DAMAGED
    show_rows("findings", store_url, rows, as_json, exit_code=code)
    ctx.exit(code)


@main.command("drill")
@store_options()
@click.option("--seed", default=0, show_default=True, help="Chooses which objects are harmed.")
@click.pass_context
def drill_verb(
    ctx: click.Context, store_url: str, cache: str | None, as_json: bool, run: str, seed: int
) -> None:
    """Rehearse losses: what would be restored, how much is lost, how long it takes. Read-only.

    Ends with 1 if the loss of all processes, or of the disks with them, would leave nothing.
    """
    from adacheck_store.tools.drill import drill, exit_code

    with open_url(store_url, cache) as store, progress_bar() as tell:
        rows = list(drill(store, run, seed=seed, progress=tell))
    code = exit_code(rows)
    show_rows("drill", store_url, rows, as_json, exit_code=code)
    ctx.exit(code)


@main.command("doctor")
@store_options(run=False)
@click.option("--read-only", is_flag=True, help="Write no scratch object.")
@click.pass_context
def doctor_verb(
    ctx: click.Context, store_url: str, cache: str | None, as_json: bool, read_only: bool
) -> None:
    """Look at a store's place, or one to be, and this host: what is there, and what to mend.

    Ends with 1 if something is bad, with 3 if something could not be seen.
    """
    from adacheck_store.tools.doctor import doctor, exit_code

    rows = list(doctor(store_url, cache, write=not read_only))
    code = exit_code(rows)
    show_rows("doctor", store_url, rows, as_json, exit_code=code)
    ctx.exit(code)


@main.command("compact")
@store_options()
@click.option("--to", "step", type=click.IntRange(min=0), help="Default: the newest provable.")
@click.option("--tier", metavar="NAME", default="", help="An LMDB; default: the object tier.")
@click.option("--inexact", is_flag=True, help="Even if folds here are close to exact, not exact.")
def compact_verb(
    store_url: str, cache: str | None, as_json: bool, run: str, step: int | None, tier: str,
    inexact: bool,
) -> None:  # fmt: skip
    """Fold a run's chain to a base at a step, in the object tier, or an LMDB that nobody holds.

    Safe beside a run that trains. An LMDB that its trainer or agent holds is folded by that one
    alone; while this command writes to another, no trainer can begin there.
    """
    from adacheck_store.tools.compact import compact

    with open_url(store_url, cache) as store, progress_bar() as tell:
        rows = list(compact(store, run, to=step, tier=tier, inexact=inexact, progress=tell))
    show_rows("compact", store_url, rows, as_json)


@main.command("restore")
@store_options()
@click.argument("file", type=click.Path())
@click.option("--step", default="", help="A step or a tag. Default: the newest provable.")
@click.option("--term", default="", help="A branch off the line, by its term.")
@click.option("--rank", type=click.IntRange(min=0), default=0, help="Whose own tensors; 0.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def restore_verb(
    store_url: str, cache: str | None, as_json: bool, run: str, file: str, step: str,
    term: str, rank: int, force: bool,
) -> None:  # fmt: skip
    """Write a step's model and optimizer into a safetensors FILE."""
    from adacheck_store.tools.restore import restore
    from adacheck_store.tools.tag import step_named

    with open_url(store_url, cache) as store, progress_bar() as tell:
        number = step_named(store, step, run) if step else None
        row = restore(
            store, file, run, step=number, term=term, rank=rank, force=force, progress=tell
        )
    show_rows("restored", store_url, [row], as_json)


@main.command("export")
@store_options()
@click.argument("target", type=click.Path())
@click.option(
    "--format", "form", required=True,
    type=click.Choice(["safetensors", "hf", "torch", "dcp"]), help="What TARGET becomes.",
)  # fmt: skip
@click.option("--step", default="", help="A step or a tag. Default: the newest provable.")
@click.option("--term", default="", help="A branch off the line, by its term.")
@click.option("--rank", type=click.IntRange(min=0), default=0, help="Whose own tensors; 0.")
def export_verb(
    store_url: str, cache: str | None, as_json: bool, run: str, target: str, form: str,
    step: str, term: str, rank: int,
) -> None:  # fmt: skip
    """Write a step for other programs into TARGET, a file or (hf, dcp) a folder."""
    from adacheck_store.tools.export import Choice, export
    from adacheck_store.tools.tag import step_named

    with open_url(store_url, cache) as store, progress_bar() as tell:
        number = step_named(store, step, run) if step else None
        choice = Choice(run=run, step=number, term=term, rank=rank)
        row = export(store, target, form, choice, progress=tell)
    show_rows("restored", store_url, [row], as_json)


@main.command("import")
@store_options(run=False)
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--run", required=True, help="The run; a new one, or one to go on from.")
@click.option("--step", type=click.IntRange(min=0), help="Default: what the source says.")
@click.option("--model", help="Key of the model in it; default: model, or what is usual.")
@click.option("--optimizer", help="Key of the optimizer in it.")
@click.option("--optimizer-class", default="", help="torch.optim.AdamW; default: as options say.")
@click.option("--tied", multiple=True, metavar="NAME=OTHER", help="NAME is OTHER's tensor.")
def import_verb(
    store_url: str, cache: str | None, as_json: bool, source: Path, run: str, step: int | None,
    model: str | None, optimizer: str | None, optimizer_class: str, tied: tuple[str, ...],
) -> None:  # fmt: skip
    """Make a step of what others wrote in SOURCE, that a training can go on from.

    A file of torch.save or of safetensors, a folder of torch.distributed.checkpoint or of Hugging
    Face. Nothing in them is executed.
    """
    from adacheck_store.tools.importing import take_in

    if any("=" not in each for each in tied):
        raise click.UsageError("--tied takes NAME=OTHER")
    pairs = dict(each.split("=", 1) for each in tied)
    with progress_bar() as tell:
        row = take_in(
            store_url, source, run, step=step, cache=cache, model=model, optimizer=optimizer,
            optimizer_class=optimizer_class, tied=pairs, progress=tell,
        )  # fmt: skip
    show_rows("imported", store_url, [row], as_json)


main.add_command(agent_verb)
main.add_command(cat_verb)
main.add_command(diff_verb)
main.add_command(gc_verb)
main.add_command(plan_verb)
main.add_command(tag_verb)
