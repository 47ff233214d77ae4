"""Export a step for other programs, streamed: without a GPU, without a trainer.

``safetensors`` is what `restore` writes. ``hf`` is a folder of safetensors files with an index, the
model alone under its own names. ``torch`` and ``dcp`` are made by torch itself from a safetensors
file that lies beside them meanwhile, mapped, not loaded: they need twice the room on the disk.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from adacheck_store.ahead import streamed
from adacheck_store.candidates import carry_out
from adacheck_store.fetch import Fetcher
from adacheck_store.format.errors import UsageError
from adacheck_store.recovery import RestorePlan
from adacheck_store.restore import certify
from adacheck_store.store import Store
from adacheck_store.tiers import durable
from adacheck_store.tiers.medium import translate

from .restore import RestoredFile, open_parts, publish, refuse_target, restore
from .rows import Progress, choose_run, silent
from .safetensors_file import FilePlan, FileWriter, finish, mapped
from .whole import PieceSink, Whole

FORMATS = ("safetensors", "hf", "torch", "dcp")

HF_INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 << 30
"""Most bytes of a file of ``hf``, unless a single tensor has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which step of a store is meant, and seen from which rank; ``step`` None: the newest."""

    run: str = ""
    step: int | None = None
    term: str = ""
    rank: int = 0


def export(
    store: Store, target: str | os.PathLike[str], form: str, choice: Choice, *,
    shard_bytes: int = SHARD_BYTES, progress: Progress = silent,
) -> RestoredFile:  # fmt: skip
    """Write a step in one of `FORMATS`; the target appears whole or not at all.

    Raises `UsageError` if the target exists or the format is none, and what `restore` raises:
    `NotProvableError` names the nearest steps that there are.
    """
    path = Path(target).absolute()
    if form == "safetensors":
        return _restore(store, path, choice, progress)
    if form not in FORMATS:
        raise UsageError(f"no format {form[:40]!r}", hint=f"one of {', '.join(FORMATS)}")
    refuse_target(path, force=False)
    with _draft(path) as draft:
        if form == "hf":
            draft.mkdir()
            row = _hf(store, draft, choice, shard_bytes, progress)
        else:
            scratch = draft.with_suffix(".safetensors")
            row = _restore(store, scratch, choice, progress)
            state = state_of(scratch)
            if form == "torch":
                torch.save(state, draft)
            else:
                _save_dcp(state, draft)
        return replace(row, path=str(path), nbytes=_settled(draft, path))


def _restore(store: Store, path: Path, choice: Choice, progress: Progress) -> RestoredFile:
    return restore(
        store, path, choice.run, step=choice.step, term=choice.term, rank=choice.rank,
        progress=progress,
    )  # fmt: skip


@contextmanager
def _draft(path: Path) -> Iterator[Path]:
    """A name beside the target, and what lies under it and its like is gone afterwards."""
    draft = path.with_name(f".{path.name[:180]}.{secrets.token_hex(6)}.part")
    try:
        yield draft
    except OSError as error:
        raise translate(error, "", str(path)) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        for left in (draft, draft.with_suffix(".safetensors")):
            with suppress(OSError):
                left.unlink()


def _settled(draft: Path, path: Path) -> int:
    """Flush what lies at the draft and give it its name; its bytes."""
    files = [draft] if draft.is_file() else sorted(draft.iterdir())
    for file in files:
        with file.open("rb") as opened:
            durable.fsync(opened.fileno(), "local.file.fsync")
    size = sum(file.stat().st_size for file in files)
    if draft.is_file():
        publish(draft, path, force=False)
        return size
    durable.fsync_path(str(draft), "local.folder.fsync")
    refuse_target(path, force=False)
    durable.rename(str(draft), str(path), "local.rename")
    durable.fsync_path(str(path.parent), "local.folder.fsync")
    return size


def sorted_out(
    said: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """The tensors of a file that `restore` has written: the model's by name, tied ones under each
    of their names, and those of optimizer state by name and role."""
    model: dict[str, torch.Tensor] = {}
    states: dict[str, dict[str, torch.Tensor]] = {}
    for label, tensor in tensors.items():
        where, _, name = label.partition("/")
        if where == "model":
            model[name] = tensor
        else:
            name, _, role = name.rpartition("/")
            states.setdefault(name, {})[role] = tensor
    for alias, name in json.loads(said["aliases"]).items():
        model[alias.partition("/")[2]] = model[name.partition("/")[2]]
    return model, states


def state_of(path: Path) -> dict[str, Any]:
    """What `restore` has written as nested dicts, its tensors mapped from the file.

    ``model`` maps names to tensors; ``optimizer`` has ``state``, by name, and ``param_groups``,
    whose ``params`` are names, as `torch.distributed.checkpoint.state_dict` has them; ``step``.
    Tied tensors stand under each of their names.
    """
    said, tensors = mapped(path)
    model, states = sorted_out(said, tensors)
    groups = [group for each in json.loads(said["optimizers"]) for group in each["groups"]]
    optimizer = {"state": states, "param_groups": groups}
    return {"model": model, "optimizer": optimizer, "step": int(said["step"])}


def _save_dcp(state: dict[str, Any], folder: Path) -> None:
    """A folder that ``torch.distributed.checkpoint.load`` reads."""
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about there being one process
        save(state, checkpoint_id=str(folder), no_dist=True)


def _hf(
    store: Store, folder: Path, choice: Choice, shard_bytes: int, progress: Progress
) -> RestoredFile:
    """The model in files of at most ``shard_bytes``, and their index."""

    def work(fetcher: Fetcher, plan: RestorePlan) -> tuple[int, Any]:
        for left in folder.iterdir():
            left.unlink()
        opened = open_parts(store, fetcher, plan, choice.rank)
        model = {k: w for k, w in opened.tensors.all.items() if k.startswith("model/")}
        shards = _shards(list(model.values()), shard_bytes)
        names = [
            f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
        ]
        file_of = {w.name: name for name, shard in zip(names, shards, strict=True) for w in shard}
        total = sum(whole.nbytes for whole in model.values())
        with ExitStack() as stack:
            writers = {
                name: _HfFile(folder / name, shard, stack)
                for name, shard in zip(names, shards, strict=True)
            }

            def write(label: str, at: int, elements: torch.Tensor) -> None:
                if label in model:
                    name = model[label].name
                    writers[file_of[name]].writer.write(name, at, elements)

            for part, fold in opened.folds.items():
                with streamed(fetcher.parallel) as reader:
                    for _ in fold.steps(PieceSink(part, opened.tensors, write), reader):
                        done = sum(each.writer.written for each in writers.values())
                        progress(f"step {plan.step} of run {plan.run}", done, total)
            for each in writers.values():
                each.finish({"format": "pt", "step": str(plan.step), "run": plan.run})
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / HF_INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        return len(model), [fold.report for fold in opened.folds.values()]

    done = carry_out(
        store.tiers, choose_run(store, choice.run), work, step=choice.step, term=choice.term
    )
    tensors, reports = done.result
    unread = tuple(f"unknown: {trouble.error}" for trouble in store.troubles)
    return RestoredFile(
        run=done.plan.run, term=done.plan.term, step=done.plan.step, path="", nbytes=0,
        tensors=tensors, lost=done.lost, reasons=(*done.reasons, *unread),
        certificate=certify(done.plan, reports, done.fetcher), tiers=dict(done.fetcher.used),
    )  # fmt: skip


class _HfFile:
    """A file of ``hf`` while it is written."""

    def __init__(self, path: Path, shard: list[Whole], stack: ExitStack) -> None:
        self._file = stack.enter_context(path.open("xb+")).fileno()
        self._plan = FilePlan({whole.name: (whole.dtype, whole.shape) for whole in shard})
        self._room = self._plan.room(1 << 12)
        os.ftruncate(self._file, self._room + self._plan.nbytes)
        self.writer = FileWriter(self._file, self._room, self._plan)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write the header."""
        finish(self._file, self._room, self._plan, {}, metadata)


def _shards(wholes: list[Whole], shard_bytes: int) -> list[list[Whole]]:
    """Tensors by name, in files; a file has at least one."""
    shards: list[list[Whole]] = [[]]
    room = shard_bytes
    for whole in sorted(wholes, key=lambda each: each.name):
        if shards[-1] and whole.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(whole)
        room -= whole.nbytes
    return shards
