"""Reading what a plan names: layouts, folds, whole parts, extras. Verified, into memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from adacheck_store.format.bodies import decode_extra
from adacheck_store.format.canonical import ArrayRef, Scalar
from adacheck_store.format.errors import AdaCheckError, ChainBrokenError, FormatError
from adacheck_store.format.keys import layout_key
from adacheck_store.format.layout import Layout, Section, decode_layout
from adacheck_store.tiers.base import Tier

from .ahead import Ahead
from .arrays import tensor_of, torch_dtype, untouched
from .catalog import RecordRef
from .derived import DerivedReader
from .fetch import ArrayReader, BlocksLostError, Fetcher
from .fold import Fold, FoldReport
from .recovery import PartPlan, RestorePlan
from .regions import Span, merged
from .reshard import Wanted, unit_of
from .state import PartState


@dataclass(slots=True)
class StateSink:
    """A fold's sink that keeps what is folded in memory; of the sections in ``bare`` no optimizer's
    state. What is not folded takes none."""

    arrays: dict[str, torch.Tensor] = field(default_factory=dict)
    bare: Collection[str] = ()

    def window(self, section: Section, role: str, start: int, stop: int) -> torch.Tensor:
        """A view of the role's array, made when first asked for."""
        if section.name in self.bare and role != section.main_role:
            return torch.empty(stop - start, dtype=torch_dtype(section.dtypes[role]))
        name = f"{section.name}/{role}"
        if name not in self.arrays:
            self.arrays[name] = untouched(section.elements, section.dtypes[role])
        return self.arrays[name][start:stop]

    def done(self, section: Section, start: int, stop: int, views: Mapping[str, Any]) -> None:
        """Nothing: the windows are the result."""


def open_layout(tiers: Sequence[Tier], run: str, layout_id: str) -> Layout:
    """A layout by id, from the first tier that has it right."""
    errors: list[str] = []
    for tier in tiers:
        try:
            sealed = tier.head(str(layout_key(run, layout_id)))
            if sealed.id == layout_id:
                return decode_layout(sealed.head)
            errors.append(f"{tier.traits.name}: another record under its key")
        except AdaCheckError as error:
            errors.append(str(error))
    raise ChainBrokenError(
        f"no tier has layout {layout_id[:16]}: {'; '.join(errors)}", run=run,
        hint="bring back a tier that has it; fsck tells what this one lacks",
    )  # fmt: skip


def open_fold(fetcher: Fetcher, layout: Layout, part: PartPlan) -> Fold:
    """The fold of a part's plan; reads heads, no blocks yet."""
    if part.origin is None:
        base = ArrayReader(fetcher, part.base)
    else:
        base = DerivedReader(fetcher, part, layout, partial(_open_folds, fetcher))
    return Fold(layout, base, [ArrayReader(fetcher, ref) for ref in part.deltas])


def _open_folds(fetcher: Fetcher, plan: RestorePlan) -> dict[str, Fold]:
    layouts = open_layouts(fetcher.tiers, plan)
    return {item.part: open_fold(fetcher, layouts[item.part], item) for item in plan.parts}


def open_layouts(tiers: Sequence[Tier], plan: RestorePlan) -> dict[str, Layout]:
    """The layouts of a plan's parts, by part; each is read once."""
    found = {ident: open_layout(tiers, plan.run, ident) for ident in {p.layout for p in plan.parts}}
    return {part.part: found[part.layout] for part in plan.parts}


def _blocks_of(layout: Layout, wanted: Mapping[tuple[str, str], bool]) -> dict[str, Sequence[Span]]:
    """Elements of whole blocks, by section, that have something of what is wanted of a part."""
    found: dict[str, Sequence[Span]] = {}
    for section in layout.sections:
        pieces = [each for each in section.slices if (each.scope, each.name) in wanted]
        unit = unit_of(section)
        if pieces:
            found[section.name] = merged(
                (each.offset // unit * unit, -(-(each.offset + each.elements) // unit) * unit)
                for each in pieces if each.elements
            )  # fmt: skip
    return found


def fetch_parts(
    fetcher: Fetcher, plan: RestorePlan, layouts: Mapping[str, Layout], wanted: Wanted
) -> tuple[dict[str, PartState], list[FoldReport]]:
    """Fold every part of a plan into memory; ``layouts`` are theirs by part.

    Of each part what is ``wanted``, in whole blocks; all of it where nothing is. Reports are of the
    parts that gave something.
    """
    parts: dict[str, PartState] = {}
    reports: list[FoldReport] = []
    for part in plan.parts:
        layout, sink, only = layouts[part.part], StateSink(), None
        fold = open_fold(fetcher, layout, part)
        if wanted:
            of_part = wanted[part.part]
            only = _blocks_of(layout, of_part)
            sink.bare = {
                section.name for section in layout.sections
                if not any(of_part.get((each.scope, each.name)) for each in section.slices)
            }  # fmt: skip
            for name in only:  # also where all that is wanted is empty
                for role in fold.roles(layout.section(name)):
                    sink.window(layout.section(name), role, 0, 0)
        with Ahead(fetcher.parallel) as reader:
            report = fold.run(sink, reader, only)
        if only is None or any(only.values()):
            reports.append(report)
        parts[part.part] = PartState(
            part=part.part, step=plan.step, layout=layout, layout_id=part.layout,
            arrays=sink.arrays, states=report.states, boundary=report.boundary,
        )  # fmt: skip
    return parts, reports


def read_extra(fetcher: Fetcher, refs: Sequence[RecordRef]) -> dict[str, Any]:
    """A rank's extra as a tree with torch tensors; ``refs`` as in `RestorePlan.extras`."""
    readers = {ref.step: ArrayReader(fetcher, ref) for ref in refs}
    newest = readers[refs[0].step]
    ref = newest.ref
    try:
        body = decode_extra(newest.head)
        tree = {name: _with_tensors(value, newest) for name, value in body.tree.items()}
        for name, step in body.refs.items():
            earlier = readers[step]
            ref = earlier.ref
            tree[name] = _with_tensors(decode_extra(earlier.head).tree[name], earlier)
    except (FormatError, KeyError, RuntimeError, ValueError) as error:
        pairs = [(tier, ref.key) for tier in ref.tiers]
        raise BlocksLostError(ref, pairs, f"{type(error).__name__}: {error}"[:400]) from error
    return tree


def _with_tensors(value: Any, reader: ArrayReader) -> Any:
    """A typed value with its arrays and scalars as tensors."""
    if isinstance(value, ArrayRef):
        info = reader.head.array(value.array)
        return reader.elements(value.array, 0, info.elements).reshape(value.shape)
    if isinstance(value, Scalar):
        return tensor_of(value)
    if isinstance(value, tuple | list):
        return type(value)(_with_tensors(item, reader) for item in value)
    if isinstance(value, dict):
        return {key: _with_tensors(item, reader) for key, item in value.items()}
    return value
