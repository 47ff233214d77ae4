"""Import a state that others wrote as a step of a run: a base that a training can go on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adacheck_store.boundary import Link
from adacheck_store.config import writer_info
from adacheck_store.foreign import (
    Foreign,
    LaidOut,
    lay_out,
    names_of,
    refuse_strays,
    spec_for,
)
from adacheck_store.foreign_keys import with_counters
from adacheck_store.format.bodies import ExtraBody
from adacheck_store.format.errors import UsageError
from adacheck_store.format.head import Head, SealedHead
from adacheck_store.format.record import Record
from adacheck_store.group import SOLO
from adacheck_store.optimizers import make_optimizer
from adacheck_store.saving import save
from adacheck_store.store import open_for_saving

from .rows import Progress, silent
from .sources import Contents, open_source


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A step that was imported from a source of a ``form``.

    ``optimizer`` is its class, empty for a model alone; ``left_out`` are keys of the source that
    are neither the model's nor the optimizer's.
    """

    run: str
    term: str
    step: int
    source: str
    form: str
    optimizer: str
    tensors: int
    nbytes: int
    left_out: tuple[str, ...]


def take_in(
    store_url: str, source: Path, run: str, *, step: int | None = None, cache: str | None = None,
    model: str | None = None, optimizer: str | None = None, optimizer_class: str = "",
    tied: Mapping[str, str] | None = None, progress: Progress = silent,
) -> Imported:  # fmt: skip
    """Write what a file or folder has as the step of a run; see `sources.open_source`.

    ``model`` and ``optimizer`` are keys in it, ``tied`` maps further names to those of their
    tensors where the source does not say which are. Raises `UsageError` where nobody says which
    step it is, what `saving.save` and `open_source` raise; then nothing of it counts.
    """
    contents = open_source(source, model, optimizer)
    number = contents.step if step is None else step
    if number is None:
        raise UsageError(
            "the source does not say which step it is", path=str(source), hint="give --step"
        )
    foreign = with_counters(_foreign(contents, optimizer_class, tied or {}))
    refuse_strays(
        [names_of(foreign)], "say by --model and --optimizer under which keys the two stand",
        path=str(source),
    )  # fmt: skip
    laid = lay_out(foreign)
    total = sum(found.nbytes for found in laid.sources.values())
    told = _watched(laid, f"step {number} of run {run}", total, progress)
    with open_for_saving(store_url, cache) as store:
        saved = save(store, run, number, SOLO, told, lambda link: _extra(link, number),
                     f"import of {contents.form}")  # fmt: skip
    others = sorted(
        key for key in (*contents.pieces, *contents.values)
        if not contents.keys.owner(key, value=key in contents.values) and key != "step"
    )  # fmt: skip
    return Imported(
        run=run, term=saved.term, step=number, source=str(source), form=contents.form,
        optimizer=next(iter(laid.layout.optimizers), ""), tensors=len(laid.sources),
        nbytes=saved.nbytes, left_out=tuple(others),
    )  # fmt: skip


def _foreign(contents: Contents, optimizer_class: str, tied: Mapping[str, str]) -> Foreign:
    """The state of a source."""
    foreign = contents.keys.foreign(
        contents.pieces, contents.values, optimizer_class or contents.optimizer,
        {**contents.aliases, **tied},
    )  # fmt: skip
    missing = sorted({*tied.values()} - foreign.model.keys())
    if missing:
        raise UsageError(f"there is no {missing[0]!r} to tie to", hint="NAME=OTHER, both as saved")
    spec = spec_for(foreign)
    defaults = {} if spec is None else make_optimizer(spec).defaults
    return replace(foreign, groups=[  # JSON has no tuples
        {key: tuple(value) if isinstance(defaults.get(key), tuple) else value
         for key, value in group.items()}
        for group in foreign.groups
    ])  # fmt: skip


def _watched(laid: LaidOut, what: str, total: int, progress: Progress) -> LaidOut:
    """The state, whose tensors tell when they are read."""
    done = 0

    def watched(found: Any) -> Any:
        def read() -> Any:
            nonlocal done
            done += found.nbytes
            progress(what, done, total)
            return found.read()

        return replace(found, read=read)

    return replace(laid, sources={key: watched(found) for key, found in laid.sources.items()})


def _extra(link: Link, step: int) -> Record:
    """An extra that knows of nothing."""
    head = Head(
        kind="extra", run=link.run, term=link.term, part=link.rank, step=step, parent="",
        manifest=link.manifest, layout="", arrays=(), body=ExtraBody(tree={}).to_json(),
    )  # fmt: skip
    return Record(SealedHead.seal(head, writer_info()), {})
