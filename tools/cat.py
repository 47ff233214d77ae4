"""One tensor of a step, or one record, as bytes: to a stream, or a tensor to a file for numpy.

A tensor is folded alone: of its parts the ranges that it lies in. Its pieces come in any order, so
they are put in their places in a file first, by the memory of a window.
"""

from __future__ import annotations

import difflib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from adacheck_store.arrays import byte_view, torch_dtype
from adacheck_store.candidates import carry_out
from adacheck_store.catalog import make_ref
from adacheck_store.fetch import FetchedSource, Fetcher
from adacheck_store.fold import Only
from adacheck_store.format.errors import AdaCheckError, RecordNotFoundError, UsageError
from adacheck_store.format.head import check_key
from adacheck_store.format.keys import parse_key
from adacheck_store.format.layout import align
from adacheck_store.format.record import encode_header
from adacheck_store.recovery import RestorePlan
from adacheck_store.store import Store
from adacheck_store.tiers import durable
from adacheck_store.tiers.medium import translate

from .export import Choice
from .restore import Opened, open_parts, publish, refuse_target
from .rows import Progress, choose_run, silent
from .safetensors_file import write_at
from .whole import PieceSink, Whole

_PLAIN = ("F64", "F32", "F16", "I64", "I32", "I16", "I8", "U8", "BOOL", "C64", "U16", "U32", "U64")


@dataclass(frozen=True, slots=True, kw_only=True)
class CatRow:
    """What was written: ``dtype`` and ``shape`` of the tensor, and what numpy takes it for."""

    run: str
    term: str
    step: int
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    stored_as: str
    nbytes: int


def cat_record(store: Store, key: str, out: BinaryIO) -> int:
    """A record as one safetensors file into a stream, each block verified; its bytes.

    Blocks come from whatever tiers have them right. Raises `RecordNotFoundError`, or what is
    wrong with the record where no tier has it whole.
    """
    parsed = parse_key(key)
    error: AdaCheckError = RecordNotFoundError("no tier has this record", key=key)
    for tier in store.tiers:
        try:
            sealed = tier.head(key)
            check_key(parsed, sealed.head, sealed.id)
            break
        except AdaCheckError as exc:
            error = error if isinstance(exc, RecordNotFoundError) else exc
    else:
        raise error.at(key=key)
    ref = make_ref(parsed, sealed, [tier.traits.name for tier in store.tiers])
    source = FetchedSource(Fetcher(store.tiers), ref)
    count = out.write(encode_header(source.seal()))
    return count + sum(out.write(block.data) for block in source.blocks())


def cat_tensor(
    store: Store, name: str, out: BinaryIO, choice: Choice, progress: Progress = silent
) -> CatRow:
    """The bytes of a tensor of a step into a stream, little-endian and in C order.

    ``name`` is as `restore` writes it: ``model/...`` or ``optimizer/.../exp_avg``. Raises
    `UsageError` for a tensor that there is not, naming the likest, and what `restore` raises.
    """
    with tempfile.TemporaryFile() as file:
        row = _fold(store, name, file.fileno(), choice, progress, plain=False)
        file.seek(0)
        shutil.copyfileobj(file, out, 1 << 20)
    return row


def cat_npy(
    store: Store, name: str, target: str | os.PathLike[str], choice: Choice,
    progress: Progress = silent,
) -> CatRow:  # fmt: skip
    """A tensor of a step as a ``.npy`` file, which appears whole or not at all.

    Of what numpy lacks, bfloat16 and 8-bit floats, it has the same values as float32. Raises
    what `cat_tensor` raises, and `UsageError` if the target exists.
    """
    path = Path(target).absolute()
    refuse_target(path, force=False)
    draft = path.with_name(f".{path.name[:180]}.{os.urandom(6).hex()}.part")
    try:
        with draft.open("xb+") as file:
            row = _fold(store, name, file.fileno(), choice, progress, plain=True)
            durable.fsync(file.fileno(), "local.file.fsync")
        publish(draft, path, force=False)
    except OSError as error:
        raise translate(error, "", str(path)) from error
    finally:
        draft.unlink(missing_ok=True)
    return row


def _fold(
    store: Store, name: str, file: int, choice: Choice, progress: Progress, *, plain: bool
) -> CatRow:
    def work(fetcher: Fetcher, plan: RestorePlan) -> tuple[Whole, torch.dtype, int]:
        opened = open_parts(store, fetcher, plan, choice.rank)
        whole = _wanted(opened, name)
        dtype = torch_dtype(whole.dtype)
        kind = torch.float32 if plain and whole.dtype not in _PLAIN else dtype
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        start = _npy_header(file, kind, whole.shape) if plain else 0
        size = torch.empty(0, dtype=kind).itemsize
        os.ftruncate(file, start + whole.elements * size)
        done = 0

        def write(label: str, at: int, elements: torch.Tensor) -> None:
            nonlocal done
            if label == whole.label:
                data = byte_view(elements.to(kind))
                write_at(file, data, start + at * size)
                done += len(data)

        for part, fold in opened.folds.items():
            only = _ranges(opened, part, whole)
            if only:
                for _ in fold.steps(PieceSink(part, opened.tensors, write), only=only):
                    progress(whole.label, done, whole.elements * size)
        return whole, kind, os.fstat(file).st_size

    done = carry_out(
        store.tiers, choose_run(store, choice.run), work, step=choice.step, term=choice.term
    )
    whole, kind, nbytes = done.result
    return CatRow(
        run=done.plan.run, term=done.plan.term, step=done.plan.step, tensor=whole.label,
        dtype=whole.dtype, shape=whole.shape, stored_as=str(kind).removeprefix("torch."),
        nbytes=nbytes,
    )  # fmt: skip


def _wanted(opened: Opened, name: str) -> Whole:
    label = opened.tensors.aliases.get(name, name)
    found = opened.tensors.all.get(label)
    if found is None:
        like = difflib.get_close_matches(name, opened.tensors.all, n=5, cutoff=0.3)
        raise UsageError(
            f"no tensor {name[:200]!r}", hint=f"such as: {', '.join(like)}" if like else
            "names begin with model/ or optimizer/",
        )  # fmt: skip
    return found


def _ranges(opened: Opened, part: str, whole: Whole) -> Only:
    """The elements of a part's sections in which the tensor lies."""
    found: dict[str, list[tuple[int, int]]] = {}
    for section in opened.folds[part].layout.sections:
        for index, piece in enumerate(section.slices):
            label = opened.tensors.label_of.get((part, section.name, whole.role, index))
            if label == whole.label and piece.elements:
                end = align(piece.offset + piece.elements)
                found.setdefault(section.name, []).append((piece.offset, end))
    return found


def _npy_header(file: int, kind: torch.dtype, shape: tuple[int, ...]) -> int:
    """Write numpy's header; its bytes."""
    with os.fdopen(os.dup(file), "wb") as header:
        np.lib.format.write_array_header_1_0(
            header,
            {
                "descr": torch.empty(0, dtype=kind).numpy().dtype.str, "fortran_order": False,
                "shape": shape,
            },
        )  # fmt: skip
        return header.tell()
