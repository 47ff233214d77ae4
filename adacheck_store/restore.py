"""Executing a restore plan: verified bytes into staging, folded; a certificate of what was shown.

A block that no tier has right ends in a new plan without it: the newest older provable step is
taken, and said. Never guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from adacheck_store.format.errors import RestoreError
from adacheck_store.format.keys import part_name, rank_name
from adacheck_store.format.layout import Layout
from adacheck_store.tiers.base import Tier

from .candidates import carry_out
from .catalog import Catalog, read_catalog
from .deaths import Ceiling
from .derived import Began, began
from .drift import Drift, measure, stretch, too_much
from .fetch import BlocksLostError, Fetcher
from .fold import FoldReport
from .group import SOLO, Group
from .nearness import NOWHERE, Nearness
from .reading import fetch_parts, open_layouts, read_extra
from .recovery import PartPlan, RestorePlan
from .redundancy.shares import wanted_of
from .reshard import Wanted
from .state import PartState, gathered
from .topology import Need, adopt, is_another, only, put_together


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What a restore has shown about the state it gives.

    ``base_step`` and ``deltas`` are the largest over the parts; ``exactness`` the weakest.
    ``blocks_verified`` counts digests; ``verified_through`` is the step through which the
    trainer's own fingerprints were checked (the base's step if no delta was folded). In class
    ``bounded`` ``drift`` and ``drift_ulps`` are the largest differences found by folding up to
    the base the same way (None: nothing to measure it by), and ``differed`` counts fingerprints
    that were not the trainer's. ``gap`` says why the chain was started anew at the base, if it
    was, ``topology`` what this rank has of whom, where ranks or sharding are not the chain's,
    ``live`` whose memory it comes from, where that is a trainer's that lived on.
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
    topology: str = ""
    live: str = ""

    def __str__(self) -> str:
        drift = "" if self.drift is None else f", drift {self.drift:.3g}"
        gap = f", started anew there ({self.gap})" if self.gap else ""
        topology = "".join(f"; {text}" for text in (self.topology, self.live) if text)
        return (
            f"step {self.step} = {self.base_origin} base {self.base_step} + {self.deltas} deltas, "
            f"{self.exactness}, {self.blocks_verified} blocks verified, fingerprints through step "
            f"{self.verified_through}{drift}{gap}{topology}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """State of a run at a step, in staging memory, and how it was come by.

    ``extras`` maps a rank to its tree, with torch tensors. ``lost`` is how many steps newer than
    ``step`` were seen and not taken, with ``reasons``; ``tiers`` maps each tier to the
    bytes it gave. ``plan`` is what was executed. ``alike`` names what of the extra all ranks had
    alike where it is another rank's, for this one is new; else it is None. ``began`` is what was
    put together, if it was: a term may begin with just that.
    """

    step: int
    plan: RestorePlan
    parts: Mapping[str, PartState]
    extras: Mapping[str, Mapping[str, Any]]
    certificate: Certificate
    lost: int
    reasons: tuple[str, ...]
    tiers: Mapping[str, int]
    alike: frozenset[str] | None = None
    began: Began | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetched:
    """What one attempt gave; ``plan`` has the parts and extras that were read."""

    plan: RestorePlan
    parts: Mapping[str, PartState]
    reports: Sequence[FoldReport]
    extras: Mapping[str, Mapping[str, Any]]
    drift: Drift | None
    topology: str = ""
    alike: frozenset[str] | None = None
    live: str = ""
    began: Began | None = None


Living = Callable[[RestorePlan], tuple[PartState, str] | None]
"""The state of a planned step that this rank still holds, or is handed by one that does, and whose
it was; None on all ranks where that cannot be. All ranks call it.
"""


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
    need: Need | None = None, near: Nearness = NOWHERE, ceiling: Ceiling | None = None,
    living: Living | None = None,
) -> Restored:  # fmt: skip
    """The newest provable state of a run (or that of ``step``), fetched, verified and folded.

    Tiers are given nearest first. Where this machine's arithmetic is not the trainer's, the drift
    of such folds is measured; if it is above ``max_drift`` no delta is folded. What a rank
    ``need``s is put together as the state of its part (all parts as they are, if not given);
    ``near`` see `nearness.nearer`, ``ceiling`` see `deaths`. What trainers are ``living`` to give
    is not read. Raises `RestoreError`,
    `NotProvableError`, `ModelMismatchError` where a state cannot be put together, or what made
    every candidate fail.
    """

    def work(fetcher: Fetcher, whole: RestorePlan) -> _Fetched:
        given = living(whole) if living is not None and need is not None else None
        if given is not None and need is not None:
            return _handed(fetcher, whole, need, *given)
        return _fetch(
            fetcher, tiers, whole, need, lambda plan, layouts: drift(fetcher, plan, layouts)
        )

    def drift(fetcher: Fetcher, plan: RestorePlan, layouts: Mapping[str, Layout]) -> Drift | None:
        known = catalog if catalog is not None else read_catalog(tiers, run)
        return _drift(fetcher, layouts, plan, known, max_drift)

    done = carry_out(
        tiers, run, work, step=step, term=term, catalog=catalog, group=group, near=near,
        ceiling=ceiling,
    )  # fmt: skip
    found = done.result
    certificate = certify(found.plan, found.reports, done.fetcher, found.drift, found.topology)
    certificate = replace(certificate, live=found.live)
    return Restored(
        step=done.plan.step, plan=done.plan, parts=found.parts, extras=found.extras,
        certificate=certificate, lost=done.lost, reasons=done.reasons,
        tiers=dict(done.fetcher.used), alike=found.alike,
        began=found.began,
    )  # fmt: skip


def _handed(
    fetcher: Fetcher, whole: RestorePlan, need: Need, state: PartState, whose: str
) -> _Fetched:
    """A state that no tier was asked for, with the rank's own extra."""
    name = rank_name(need.rank)
    return _Fetched(
        plan=only(whole, {part_name(need.rank)}, {name}), parts={state.part: state}, reports=(),
        extras={name: read_extra(fetcher, whole.extras[name])}, drift=None, live=whose,
    )  # fmt: skip


_Drifts = Callable[[RestorePlan, Mapping[str, Layout]], Drift | None]


def _fetch(
    fetcher: Fetcher, tiers: Sequence[Tier], whole: RestorePlan, need: Need | None,
    measured: _Drifts,
) -> _Fetched:  # fmt: skip
    """All parts and extras of a plan, or what one rank needs of them."""
    plan = whole
    wanted: Wanted = {}
    if need is not None:
        wanted = wanted_of(whole.manifest, need.rank)
        plan = only(whole, wanted or {part_name(need.rank)}, {rank_name(need.rank)})
    layouts = open_layouts(tiers, plan)
    topology, alike, start = "", None, None
    if need is not None and is_another(whole, layouts, need, wanted):
        layouts = open_layouts(tiers, whole)
        made = put_together(fetcher, whole, layouts, need, wanted)
        assert need.layout is not None
        start = began(need.layout, made.state.layout, made.state.arrays)
        parts, reports, plan = {made.state.part: made.state}, made.reports, made.plan
        tree, alike, topology = adopt(fetcher, whole, need, made.taken)
        extras: dict[str, Mapping[str, Any]] = {rank_name(need.rank): tree}
    else:
        parts, reports = fetch_parts(fetcher, plan, layouts, wanted)
        extras = {name: read_extra(fetcher, refs) for name, refs in plan.extras.items()}
        if need is not None and wanted:
            part = part_name(need.rank)
            parts = {part: gathered(parts, part, wanted)}
    bounded = any(report.exactness == "bounded" and report.deltas for report in reports)
    return _Fetched(
        plan=plan, parts=parts, reports=reports, extras=extras, topology=topology, alike=alike,
        drift=measured(plan, layouts) if bounded else None, began=start,
    )  # fmt: skip


def _drift(
    fetcher: Fetcher, layouts: Mapping[str, Layout], plan: RestorePlan, catalog: Catalog,
    max_drift: float,
) -> Drift | None:  # fmt: skip
    """The largest drift of folds that end at the plan's bases; raises if it is too large."""
    found: Drift | None = None
    for part in plan.parts:
        before = stretch(catalog, part)
        if before is None:
            continue
        try:
            drift = measure(fetcher, layouts[part.part], *before, part.base)
        except BlocksLostError:
            continue  # what lies before the base is not needed
        found = drift.joined(found)
        if drift.absolute > max_drift and part.deltas:
            place = {"run": plan.run, "part": part.part, "step": part.base.step}
            raise too_much(drift, max_drift, part.base.step, **place)
    return found


def certify(
    plan: RestorePlan, reports: Sequence[FoldReport], fetcher: Fetcher,
    drift: Drift | None = None, topology: str = "",
) -> Certificate:  # fmt: skip
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
        verified_through=min((r.verified_through for r in reports), default=plan.step),
        drift=None if drift is None else drift.absolute,
        drift_ulps=None if drift is None else drift.ulps,
        differed=sum(report.differed for report in reports),
        gap=str((longest.base.gap or {}).get("reason", "")),
        topology=topology,
    )
