"""Executing a restore plan: verified bytes into staging, folded; a certificate of what was shown.

A block that no tier has right ends in a new plan without it: the newest older provable step is
taken, and said. Never guess.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from adacheck_store.format.bodies import decode_extra
from adacheck_store.format.canonical import ArrayRef, Scalar
from adacheck_store.format.errors import (
    AdaCheckError,
    ChainBrokenError,
    FormatError,
    RestoreError,
)
from adacheck_store.format.keys import layout_key
from adacheck_store.format.layout import Layout, Section, decode_layout
from adacheck_store.tiers.base import Tier

from .ahead import Ahead
from .arrays import tensor_of, torch_dtype
from .candidates import carry_out
from .catalog import Catalog, RecordRef, read_catalog
from .deaths import Ceiling
from .drift import Drift, measure, stretch, too_much
from .fetch import ArrayReader, BlocksLostError, Fetcher
from .fold import Fold, FoldReport
from .group import SOLO, Group
from .recovery import NOWHERE, Nearness, PartPlan, RestorePlan
from .redundancy.shares import wanted_of
from .state import PartState, gathered


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What a restore has shown about the state it gives.

    ``base_step`` and ``deltas`` are the largest over the parts; ``exactness`` the weakest.
    ``blocks_verified`` counts digests; ``verified_through`` is the step through which the
    trainer's own fingerprints were checked (the base's step if no delta was folded). In class
    ``bounded`` ``drift`` and ``drift_ulps`` are the largest differences found by folding up to
    the base the same way (None: nothing to measure it by), and ``differed`` counts fingerprints
    that were not the trainer's. ``gap`` says why the chain was started anew at the base, if it
    was.
    """

    step: int
    base_step: int
    base_origin: str
    deltas: int
    exactness: str
    blocks_verified: int
    fingerprints: int
    verified_through: int
    drift: float | None = None
    drift_ulps: int | None = None
    differed: int = 0
    gap: str = ""

    def __str__(self) -> str:
        drift = "" if self.drift is None else f", drift {self.drift:.3g}"
        gap = f", started anew there ({self.gap})" if self.gap else ""
        return (
            f"step {self.step} = {self.base_origin} base {self.base_step} + {self.deltas} deltas, "
            f"{self.exactness}, {self.blocks_verified} blocks verified, fingerprints through step "
            f"{self.verified_through}{drift}{gap}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """State of a run at a step, in staging memory, and how it was come by.

    ``extras`` maps a rank to its tree, with torch tensors. ``lost`` is how many steps newer than
    ``step`` were seen and not taken, with ``reasons``; ``tiers`` maps each tier to the
    bytes it gave. ``plan`` is what was executed.
    """

    step: int
    plan: RestorePlan
    parts: Mapping[str, PartState]
    extras: Mapping[str, Mapping[str, Any]]
    certificate: Certificate
    lost: int
    reasons: tuple[str, ...]
    tiers: Mapping[str, int]


_Fetched = tuple[
    dict[str, PartState], list[FoldReport], dict[str, dict[str, Any]], Drift | None
]  # fmt: skip


@dataclass(slots=True)
class StateSink:
    """A fold's sink that keeps the whole state in memory."""

    arrays: dict[str, torch.Tensor] = field(default_factory=dict)

    def window(self, section: Section, role: str, start: int, stop: int) -> torch.Tensor:
        """A view of the role's array, made when first asked for."""
        name = f"{section.name}/{role}"
        if name not in self.arrays:
            kind = torch_dtype(section.dtypes[role])
            self.arrays[name] = torch.empty(section.elements, dtype=kind)
        return self.arrays[name][start:stop]

    def done(self, section: Section, start: int, stop: int, views: Mapping[str, Any]) -> None:
        """Nothing: the windows are the result."""


def refuse_unknown(catalog: Catalog) -> None:
    """A run is not begun anew while a tier that may hold its history cannot be read.

    Raises `RestoreError` if the catalog is empty, and such a tier is among its troubles.
    """
    for trouble in catalog.troubles:
        if catalog.empty and not trouble.key:
            raise RestoreError(
                f"no history is found, and a tier that may hold it cannot be read: {trouble.error}",
                run=catalog.run, tier=trouble.tier,
                hint="make it readable and try again; resume='never' begins the run anew",
            ) from trouble.error  # fmt: skip


def restore_state(
    tiers: Sequence[Tier], run: str, *, step: int | None = None, term: str = "",
    catalog: Catalog | None = None, max_drift: float = float("inf"), group: Group = SOLO,
    own: tuple[str, str] | None = None, near: Nearness = NOWHERE,
    check: Callable[[RestorePlan], None] = lambda plan: None, ceiling: Ceiling | None = None,
) -> Restored:  # fmt: skip
    """The newest provable state of a run (or that of ``step``), fetched, verified and folded.

    Tiers are given nearest first. Where this machine's arithmetic is not the trainer's, the drift
    of such folds is measured; if it is above ``max_drift`` no delta is folded. ``own`` is the part
    and the rank that are fetched, with what other parts have of that rank's (all, if not given);
    ``near`` see `recovery.nearer`, ``ceiling``
    see `deaths`. Raises `RestoreError`, `NotProvableError`, or what made every candidate fail.
    """

    def work(fetcher: Fetcher, whole: RestorePlan) -> _Fetched:
        plan = whole if own is None else _only(whole, *own)
        parts, reports = fetch_parts(fetcher, tiers, plan)
        extras = {rank: read_extra(fetcher, refs) for rank, refs in plan.extras.items()}
        drift = None
        if any(report.exactness == "bounded" and report.deltas for report in reports):
            known = catalog if catalog is not None else read_catalog(tiers, run)
            drift = _drift(fetcher, parts, plan, known, max_drift)
        return parts, reports, extras, drift

    done = carry_out(
        tiers, run, work, step=step, term=term, catalog=catalog, group=group, check=check,
        near=near, ceiling=ceiling,
    )  # fmt: skip
    parts, reports, extras, drift = done.result
    mine = done.plan
    if own is not None:
        mine, wanted = _only(mine, *own), wanted_of(mine.manifest, int(own[1][1:]))
        parts = {own[0]: gathered(parts, own[0], wanted)} if wanted else parts
    return Restored(
        step=done.plan.step, plan=done.plan, parts=parts, extras=extras,
        certificate=certify(mine, reports, done.fetcher, drift), lost=done.lost,
        reasons=done.reasons, tiers=dict(done.fetcher.used),
    )  # fmt: skip


def _only(plan: RestorePlan, part: str, rank: str) -> RestorePlan:
    """A plan of one rank's extra, its part, and the parts of others that have what it holds."""
    wanted = wanted_of(plan.manifest, int(rank[1:])) or {part}
    return dataclasses.replace(
        plan, parts=tuple(item for item in plan.parts if item.part in wanted),
        extras={name: refs for name, refs in plan.extras.items() if name == rank},
    )  # fmt: skip


def _drift(
    fetcher: Fetcher, parts: Mapping[str, PartState], plan: RestorePlan, catalog: Catalog,
    max_drift: float,
) -> Drift | None:  # fmt: skip
    """The largest drift of folds that end at the plan's bases; raises if it is too large."""
    found: Drift | None = None
    for part in plan.parts:
        before = stretch(catalog, part)
        if before is None:
            continue
        try:
            drift = measure(fetcher, parts[part.part].layout, *before, part.base)
        except BlocksLostError:
            continue  # what lies before the base is not needed
        found = drift.joined(found)
        if drift.absolute > max_drift and part.deltas:
            place = {"run": plan.run, "part": part.part, "step": part.base.step}
            raise too_much(drift, max_drift, part.base.step, **place)
    return found


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
    base = ArrayReader(fetcher, part.base)
    return Fold(layout, base, [ArrayReader(fetcher, ref) for ref in part.deltas])


def fetch_parts(
    fetcher: Fetcher, tiers: Sequence[Tier], plan: RestorePlan
) -> tuple[dict[str, PartState], list[FoldReport]]:
    """Fold every part of a plan into memory."""
    parts: dict[str, PartState] = {}
    reports: list[FoldReport] = []
    for part in plan.parts:
        layout = open_layout(tiers, plan.run, part.layout)
        sink = StateSink()
        with Ahead() as reader:
            report = open_fold(fetcher, layout, part).run(sink, reader)
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


def certify(
    plan: RestorePlan, reports: Sequence[FoldReport], fetcher: Fetcher, drift: Drift | None = None
) -> Certificate:
    """What the folds of a plan have shown."""
    longest: PartPlan = max(plan.parts, key=lambda part: len(part.deltas))
    exactness = {report.exactness for report in reports} | {
        part.base.exactness for part in plan.parts
    }
    order = ("unsupported", "bounded", "exact")
    return Certificate(
        step=plan.step,
        base_step=longest.base.step,
        base_origin=longest.base.origin,
        deltas=len(longest.deltas),
        exactness=next(name for name in order if name in exactness),
        blocks_verified=fetcher.blocks_verified,
        fingerprints=sum(report.checked for report in reports),
        verified_through=min(report.verified_through for report in reports),
        drift=None if drift is None else drift.absolute,
        drift_ulps=None if drift is None else drift.ulps,
        differed=sum(report.differed for report in reports),
        gap=str((longest.base.gap or {}).get("reason", "")),
    )
