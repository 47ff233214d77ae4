"""Restore a step into one safetensors file, streamed; claims nothing, changes no store.

Tensors are ``model/<name>`` and ``optimizer/<name>/<role>``, whole: pieces of several ranks are
put together.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adacheck_store.ahead import streamed
from adacheck_store.candidates import Outcome, carry_out
from adacheck_store.fetch import Fetcher
from adacheck_store.fold import Fold, FoldReport
from adacheck_store.format.dtypes import SAFETENSORS_DTYPES
from adacheck_store.format.errors import UsageError
from adacheck_store.reading import open_fold, open_layout, read_extra
from adacheck_store.recovery import RestorePlan
from adacheck_store.restore import Certificate, certify
from adacheck_store.store import Store
from adacheck_store.tiers import durable
from adacheck_store.tiers.medium import translate

from .rows import Progress, choose_run, silent
from .safetensors_file import FilePlan, FileWriter, finish
from .show import readable
from .whole import PieceSink, Tensors, Wanted, add_fold, counters, joined, view_of

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
    term: str = "", rank: int = 0, force: bool = False, progress: Progress = silent,
) -> RestoredFile:  # fmt: skip
    """Write the newest provable step (or ``step``) as a safetensors file.

    What each rank has for itself (buffers, or all, where nothing says that it is shared) is that
    of ``rank``. The file appears whole or not at all: it is written beside its name, flushed, then
    named.
    Raises `UsageError` if the target exists (unless ``force``), `RestoreError`,
    `NotProvableError`, or a `TierError` for what the file's medium refuses.
    """
    name = choose_run(store, run)
    path = Path(target).absolute()
    refuse_target(path, force)
    draft = path.with_name(f".{path.name[:200]}.{secrets.token_hex(6)}.part")
    try:
        file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise translate(error, "", str(path)) from error
    named = False
    try:
        done = carry_out(
            store.tiers, name,
            lambda fetcher, plan: _write(store, fetcher, plan, rank, file, progress),
            step=step, term=term,
        )  # fmt: skip
        size = os.fstat(file).st_size
        durable.fsync(file, "local.file.fsync")
        publish(draft, path, force)
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


def refuse_target(path: Path, force: bool) -> None:
    """Raise `UsageError` for a target that exists, unless ``force``, or has no folder."""
    if path.is_dir():
        raise UsageError("the target is a folder", path=str(path), hint="name a file")
    if not path.parent.is_dir():
        raise UsageError("the target's folder does not exist", path=str(path), hint="make it first")
    if os.path.lexists(path) and not force:
        raise UsageError(
            "the target exists", path=str(path), hint="name another file, or give --force"
        )


def publish(draft: Path, path: Path, force: bool) -> None:
    """Give a flushed file its name; without ``force`` never over another's."""
    if force:
        durable.rename(str(draft), str(path), "local.rename")
    else:
        if not durable.link(str(draft), str(path), "local.link"):
            refuse_target(path, force)
        os.unlink(draft)
    durable.fsync_path(str(path.parent), "local.folder.fsync")


@dataclass(frozen=True, slots=True)
class Opened:
    """The folds of a plan's parts, by part, and the whole tensors that they will give."""

    folds: Mapping[str, Fold]
    tensors: Tensors
    wanted: Wanted


def open_parts(store: Store, fetcher: Fetcher, plan: RestorePlan, rank: int = 0) -> Opened:
    """All parts of a plan, seen from a rank; reads heads and extras, no other blocks.

    Raises `UsageError` for a rank that is none, `UnsupportedError` for parts that do not fit.
    """
    for refs in plan.extras.values():
        read_extra(fetcher, refs)  # a step without its extras does not exist
    wanted = view_of(plan.manifest, rank)
    tensors = Tensors(wanted)
    folds: dict[str, Fold] = {}
    for part in plan.parts:
        layout = open_layout(store.tiers, plan.run, part.layout)
        folds[part.part] = open_fold(fetcher, layout, part)
        add_fold(tensors, part.part, folds[part.part])
    tensors.refuse_holes()
    return Opened(folds, tensors, wanted)


def _write(
    store: Store, fetcher: Fetcher, plan: RestorePlan, rank: int, file: int, progress: Progress
) -> _Written:
    """Fold the plan's parts into the file, from its beginning."""
    opened = open_parts(store, fetcher, plan, rank)
    wholes = opened.tensors.all
    export = FilePlan({label: (whole.dtype, whole.shape) for label, whole in wholes.items()})
    head = _metadata(plan, opened)
    room = export.room(len(json.dumps(head)) * 2 + _METADATA_BYTES)
    os.ftruncate(file, 0)
    os.ftruncate(file, room + export.nbytes)
    writer = FileWriter(file, room, export)
    for part, fold in opened.folds.items():
        with streamed(fetcher.parallel) as reader:
            for _ in fold.steps(PieceSink(part, opened.tensors, writer.write), reader):
                progress(f"step {plan.step} of run {plan.run}", writer.written, export.nbytes)
    scalars = counters_of(opened)
    reports = [fold.report for fold in opened.folds.values()]
    head["certificate"] = _dump(dataclasses.asdict(certify(plan, reports, fetcher)))
    finish(file, room, export, scalars, head)
    return _Written(reports, len(export.entries) + len(scalars))


def _metadata(plan: RestorePlan, opened: Opened) -> dict[str, str]:
    """What the file says beside its tensors; every value is text, most of them JSON."""
    dtypes = {
        label: whole.dtype for label, whole in opened.tensors.all.items()
        if whole.dtype not in SAFETENSORS_DTYPES
    }  # fmt: skip
    return {
        "format": "adacheck-store restore",
        "run": plan.run,
        "step": str(plan.step),
        "term": plan.term,
        "manifest": plan.manifest_id,
        "optimizers": _dump(optimizers_of(opened)),
        "aliases": _dump(opened.tensors.aliases),
        "dtypes": _dump(dtypes),
    }


def counters_of(opened: Opened) -> dict[str, torch.Tensor]:
    """Counters of all parts after their folds, as 0-dim tensors; see `whole.joined`."""
    return joined([
        counters(fold.layout, fold.report.states, functools.partial(opened.wanted, part))
        for part, fold in opened.folds.items()
    ])  # fmt: skip


def optimizers_of(opened: Opened) -> list[Any]:
    """Per optimizer its class, and per group its hyper-parameters and the names of its tensors.

    Hyper-parameters are those of the first part that has any.
    """
    found: list[Any] = []
    for part, fold in opened.folds.items():
        for index, name in enumerate(fold.layout.optimizers):
            boundary = fold.report.boundary
            groups = [readable(dict(group)) for group in boundary[index]] if boundary else []
            if index == len(found):
                found.append({"class": name, "groups": groups})
            for number, group in enumerate(found[index]["groups"]):
                names = group.setdefault("params", [])
                names += [
                    piece.name
                    for section in fold.layout.sections if section.optimizer == index
                    for piece in section.slices
                    if piece.group == number and opened.wanted(part, piece)
                    and piece.name not in names
                ]  # fmt: skip
    return found


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
