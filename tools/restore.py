"""Restore a step into one safetensors file, streamed; claims nothing, changes no store."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adacheck_store.candidates import Outcome, carry_out
from adacheck_store.fetch import Fetcher
from adacheck_store.fold import Fold, FoldReport
from adacheck_store.format.dtypes import SAFETENSORS_DTYPES
from adacheck_store.format.errors import UsageError
from adacheck_store.recovery import RestorePlan
from adacheck_store.restore import (
    Certificate,
    certify,
    open_fold,
    open_layout,
    read_extra,
)
from adacheck_store.store import Store
from adacheck_store.tiers import durable
from adacheck_store.tiers.medium import translate

from .export import ExportPlan, FileSink, PartNeeds, counters, finish
from .rows import Progress, choose_run, silent
from .show import readable

_METADATA_BYTES = 1 << 16
"""Room for what is small in the metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredFile:
    """A step restored into a file.

    ``lost`` is how many newer steps were seen and could not be proven, with ``reasons``, among
    them tiers that could not be read; ``tiers`` maps each tier to the bytes it gave.
    """

    run: str
    term: str
    step: int
    path: str
    nbytes: int
    tensors: int
    certificate: Certificate
    lost: int
    reasons: tuple[str, ...]
    tiers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Written:
    """What one attempt has written."""

    reports: list[FoldReport]
    tensors: int


def restore(
    store: Store, target: str | os.PathLike[str], run: str = "", *, step: int | None = None,
    term: str = "", force: bool = False, progress: Progress = silent,
) -> RestoredFile:  # fmt: skip
    """Write the newest provable step (or ``step``) as a safetensors file.

    The file appears whole or not at all: it is written beside its name, flushed, then named.
    Raises `UsageError` if the target exists (unless ``force``), `RestoreError`,
    `NotProvableError`, or a `TierError` for what the file's medium refuses.
    """
    name = choose_run(store, run)
    path = Path(target).absolute()
    _refuse_target(path, force)
    draft = path.with_name(f".{path.name[:200]}.{secrets.token_hex(6)}.part")
    try:
        file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise translate(error, "", str(path)) from error
    named = False
    try:
        done = carry_out(
            store.tiers, name, lambda fetcher, plan: _write(store, fetcher, plan, file, progress),
            step=step, term=term,
        )  # fmt: skip
        size = os.fstat(file).st_size
        _publish(file, draft, path, force)
        named = True
    except OSError as error:
        raise translate(error, "", str(path)) from error
    finally:
        os.close(file)
        if not named:
            with suppress(OSError):
                os.unlink(draft)
    unread = tuple(f"unknown: {trouble.error}" for trouble in store.troubles)
    return _row(done, str(path), size, unread)


def _row(done: Outcome[_Written], path: str, size: int, unread: tuple[str, ...]) -> RestoredFile:
    return RestoredFile(
        run=done.plan.run, term=done.plan.term, step=done.plan.step, path=path, nbytes=size,
        tensors=done.result.tensors, lost=done.lost, reasons=(*done.reasons, *unread),
        certificate=certify(done.plan, done.result.reports, done.fetcher),
        tiers=dict(done.fetcher.used),
    )  # fmt: skip


def _refuse_target(path: Path, force: bool) -> None:
    if path.is_dir():
        raise UsageError("the target is a folder", path=str(path), hint="name a file")
    if not path.parent.is_dir():
        raise UsageError("the target's folder does not exist", path=str(path), hint="make it first")
    if os.path.lexists(path) and not force:
        raise UsageError(
            "the target exists", path=str(path), hint="name another file, or give --force"
        )


def _publish(file: int, draft: Path, path: Path, force: bool) -> None:
    """Flush the file and name it; without ``force`` never over another's."""
    durable.fsync(file, "local.file.fsync")
    if force:
        durable.rename(str(draft), str(path), "local.rename")
    else:
        if not durable.link(str(draft), str(path), "local.link"):
            _refuse_target(path, force)
        os.unlink(draft)
    durable.fsync_path(str(path.parent), "local.folder.fsync")


def _write(
    store: Store, fetcher: Fetcher, plan: RestorePlan, file: int, progress: Progress
) -> _Written:
    """Fold the plan's parts into the file, one after the other, from its beginning."""
    for refs in plan.extras.values():
        read_extra(fetcher, refs)  # a step without its extras does not exist
    layouts = [open_layout(store.tiers, plan.run, part.layout) for part in plan.parts]
    folds = [
        open_fold(fetcher, layout, part)
        for layout, part in zip(layouts, plan.parts, strict=True)
    ]  # fmt: skip
    export = ExportPlan([_needs(fold) for fold in folds])
    head = _metadata(plan, folds)
    room = export.room(len(json.dumps(head)) * 2 + _METADATA_BYTES)
    os.ftruncate(file, 0)
    os.ftruncate(file, room + export.nbytes)
    before = 0
    for number, fold in enumerate(folds):
        sink = FileSink(file, room, export, number)
        for _ in fold.steps(sink):
            done = before + sink.written
            progress(f"step {plan.step} of run {plan.run}", done, export.nbytes)
        before += sink.written
    reports = [fold.report for fold in folds]
    scalars = counters([(fold.layout, fold.report.states) for fold in folds])
    head["certificate"] = _dump(dataclasses.asdict(certify(plan, reports, fetcher)))
    finish(file, room, export, scalars, head)
    return _Written(reports, len(export.entries) + len(scalars))


def _needs(fold: Fold) -> PartNeeds:
    return PartNeeds(
        fold.layout,
        {section.name: fold.roles(section) for section in fold.layout.sections},
        {section.name: fold.present(section) for section in fold.layout.sections},
    )


def _metadata(plan: RestorePlan, folds: list[Fold]) -> dict[str, str]:
    """What the file says beside its tensors; every value is text, most of them JSON."""
    aliases: dict[str, str] = {}
    dtypes: dict[str, str] = {}
    for section in [section for fold in folds for section in fold.layout.sections]:
        for piece in section.slices:
            aliases |= {f"model/{alias}": f"model/{piece.name}" for alias in piece.aliases}
            for role, dtype in section.roles:
                if dtype not in SAFETENSORS_DTYPES:
                    kept = "model" if role == section.main_role else "optimizer"
                    tail = "" if kept == "model" else f"/{role}"
                    dtypes[f"{kept}/{piece.name}{tail}"] = dtype
    return {
        "format": "adacheck-store restore",
        "run": plan.run,
        "step": str(plan.step),
        "term": plan.term,
        "manifest": plan.manifest_id,
        "optimizers": _dump(_optimizers(folds)),
        "aliases": _dump(aliases),
        "dtypes": _dump(dtypes),
    }


def _optimizers(folds: list[Fold]) -> list[Any]:
    """Per optimizer its class, and per group its hyper-parameters and the names of its tensors.

    Ranks have the same optimizers and groups; the names are those of all parts, each once.
    """
    first = max(folds, key=lambda fold: len(fold.layout.optimizers))
    sections = [section for fold in folds for section in fold.layout.sections]
    found = []
    for index, name in enumerate(first.layout.optimizers):
        boundary = first.report.boundary
        groups = [readable(dict(group)) for group in boundary[index]] if boundary else []
        for number, group in enumerate(groups):
            named = [
                piece.name
                for section in sections
                if section.optimizer == index
                for piece in section.slices
                if piece.group == number
            ]
            group["params"] = list(dict.fromkeys(named))
        found.append({"class": name, "groups": groups})
    return found


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
