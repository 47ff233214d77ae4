"""Candidates: carrying out the plan of the newest provable step, or where that fails the next.

A block that no tier has right ends in a new plan without it: the newest older provable step is
taken, and said. Never guess. What was deleted behind the reader, for a floor has risen, is not
damage: the tiers are read anew. In a group rank 0 plans, and all ranks go from candidate to
candidate together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from adacheck_store.format.errors import (
    AdaCheckError,
    ChainBrokenError,
    ReplayMismatchError,
    RestoreError,
)
from adacheck_store.tiers.base import Tier

from .catalog import Catalog, may_pass, read_catalog
from .deaths import Ceiling
from .fetch import BlocksLostError, Fetcher
from .group import SOLO, Group, lead, share
from .nearness import NOWHERE, Nearness, nearer, seen_from
from .parting import REASON_MAX, harm_of, parted
from .plan_json import decode_plan, encode_plan
from .recovery import RestorePlan, plan_restore

T = TypeVar("T")
Pair = tuple[str, str]

REASONS_MAX = 20
"""Damaged records named when steps were lost to them."""

ANEW_MAX = 16
"""How often the tiers are read anew for what was deleted behind a reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[T]):
    """A plan that was carried out: what the work gave, and why newer steps were not taken."""

    plan: RestorePlan
    result: T
    fetcher: Fetcher
    lost: int
    reasons: tuple[str, ...]


class _Planner:
    """Plans on rank 0, again and again: each time without what was found damaged meanwhile."""

    def __init__(
        self, catalog: Catalog, step: int | None, term: str, near: Nearness = NOWHERE,
        ceiling: Ceiling | None = None, read: Callable[[], Catalog] | None = None,
    ) -> None:  # fmt: skip
        self._catalog, self._ceiling = catalog, ceiling
        self._read, self._anew, self._left_out = read, 0, set[Pair]()
        self._step, self._term, self._near = step, term, near
        self._newest = -1
        self._reasons: list[str] = []
        self._damage: AdaCheckError | None = None
        self._refused: dict[int, str] = {}

    def plan(self) -> RestorePlan:
        """The newest step left (or the one asked for), with all reasons why it is not newer."""
        try:
            plan = plan_restore(self._catalog, self._step, self._term, self._ceiling, self._refused)
        except RestoreError as error:
            raise _with_damage(error, self._damage) from self._damage
        self._newest = max(self._newest, plan.newest)
        lost = self._step is None and plan.step < self._newest
        unread = _unread(self._catalog, lost)
        plan = nearer(plan, self._catalog, self._near)
        return dataclasses.replace(
            plan, newest=self._newest, reasons=(*plan.reasons, *self._reasons, *unread)
        )

    def learn(self, plan: RestorePlan, harms: Sequence[Mapping[str, Any]]) -> None:
        """Leave out what a rank could not use of a plan, unless it was deleted meanwhile."""
        gone = self._look_anew({pair for harm in harms for pair in _lost(harm)})
        for harm in harms:
            ended = _after(plan, harm["last_match"]) if "last_match" in harm else set[Pair]()
            damaged = ended | _lost(harm) - gone
            if damaged:
                self._reasons.append(harm["why"])
                self._left_out |= damaged
        self._catalog = self._catalog.without(self._left_out)

    def _look_anew(self, lost: Collection[Pair]) -> set[Pair]:
        """Which records that could not be used are no longer there: if any, the tiers, read again,
        are what is planned from. A tier of which less could be read than before tells nothing."""
        if not lost or self._read is None or self._anew >= ANEW_MAX:
            return set()
        fresh = self._read()
        unread = {
            trouble.tier for trouble in fresh.troubles if not trouble.key or may_pass(trouble.error)
        }
        held = _held(fresh) | {(trouble.tier, trouble.key) for trouble in fresh.troubles}
        gone = set(lost) - held
        if not gone or fresh.empty or unread & {tier for tier, _ in _held(self._catalog)}:
            return set()
        self._anew += 1
        key = min(key for _, key in gone)
        self._reasons.append(f"planned anew: {key} was deleted while this read it")
        self._catalog = fresh
        return gone

    def refuse(self, plan: RestorePlan, why: str) -> None:
        """Take another step than the plan's."""
        self._refused[plan.step] = f"step {plan.step}: {why}"

    def blame(self, damage: AdaCheckError | None) -> None:
        """Remember what this rank met, for the refusal that may follow from it."""
        self._damage = damage or self._damage


def carry_out(
    tiers: Sequence[Tier], run: str, work: Callable[[Fetcher, RestorePlan], T], *,
    step: int | None = None, term: str = "", catalog: Catalog | None = None,
    group: Group = SOLO, near: Nearness = NOWHERE, ceiling: Ceiling | None = None,
) -> Outcome[T]:  # fmt: skip
    """Plan, and do ``work``; where it meets damage, again with the newest step left without it.

    Without a ``catalog``, which who gives it holds against deletion, the tiers are read here, and
    anew where a record was deleted behind the reader.
    ``work`` is done once for every plan tried: it must begin anew each time. In a group rank 0
    plans, all do their work, and all go on to the next plan or return. ``near`` see
    `nearness.nearer`; no step above ``ceiling`` is planned.
    Raises `RestoreError`, `NotProvableError`, or what made every candidate fail.
    """
    read: Callable[[], Catalog] | None = None
    if group.rank != 0:
        catalog = Catalog(run=run)
    elif catalog is None:
        read = partial(read_catalog, tiers, run)
        catalog = read()
    planner = _Planner(catalog, step, term, near, ceiling, read)

    while True:
        plan = lead(group, "plan", planner.plan, encode=encode_plan, decode=decode_plan)
        fetcher = Fetcher(tiers)
        parting = parted(fetcher, plan, group)
        if parting.harms:
            planner.blame(parting.damage)
            planner.learn(plan, parting.harms)
            continue
        if parting.why:
            planner.refuse(plan, parting.why)
            continue
        results: list[T] = []
        damages: list[AdaCheckError] = []

        def attempt() -> dict[str, Any]:
            try:
                mine = seen_from(plan, near.here)  # noqa: B023  # used in this round alone
                results.append(work(fetcher, mine))  # noqa: B023
            except (BlocksLostError, ReplayMismatchError) as error:
                damages.append(error)  # noqa: B023
                return _harm(error)
            return {}

        harms = share(group, "fetch", attempt)
        if not any(harms):
            lost = plan.newest - plan.step if step is None else 0
            return Outcome(
                plan=plan, result=results[0], fetcher=fetcher, lost=lost, reasons=plan.reasons
            )
        planner.blame(damages[0] if damages else None)
        if group.rank == 0:
            planner.learn(plan, harms)


def _harm(error: BlocksLostError | ReplayMismatchError) -> dict[str, Any]:
    """Damage that was met, as JSON."""
    if isinstance(error, ReplayMismatchError):
        why = str(error)[:REASON_MAX].encode("utf-8", "replace").decode()
        return {"why": why, "last_match": error.last_match}
    return harm_of(error)


def _unread(catalog: Catalog, lost: bool) -> list[str]:
    """Tiers that could not be read, and where steps were lost, records: unknown, not absent."""
    tiers = [f"unknown: {trouble.error}" for trouble in catalog.troubles if not trouble.key]
    records = [str(trouble.error) for trouble in catalog.troubles if trouble.key]
    return tiers + (records[:REASONS_MAX] if lost else [])


def _with_damage(error: RestoreError, damage: AdaCheckError | None) -> RestoreError:
    """A refusal that also says which damage led to it."""
    if damage is not None:
        error.message = f"{error.message}: {damage.message}"
        error.at(**damage.place)
    return error


def _lost(harm: Mapping[str, Any]) -> set[Pair]:
    """The (tier, key) pairs that could not be used."""
    return {(tier, key) for tier, key in harm.get("lost", ())}


def _held(catalog: Catalog) -> set[Pair]:
    """The (tier, key) pairs of all records of steps."""
    tables = (catalog.bases, catalog.deltas, catalog.extras, catalog.derived)
    return {(tier, ref.key) for table in tables for refs in table.values()
            for ref in refs for tier in ref.tiers}  # fmt: skip


def _after(plan: RestorePlan, last_match: int) -> set[Pair]:
    """The deltas that a plan reads after the last step that agreed: never empty."""
    deltas = [ref for ref in plan.records if ref.kind == "delta" and ref.step > last_match]
    if not deltas:
        raise ChainBrokenError("a fold differs, and no delta is left to leave out", run=plan.run)
    return {(tier, ref.key) for ref in deltas for tier in ref.tiers}
