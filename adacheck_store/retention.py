"""Retention: what a tier may delete. One pure rule, and the deleter that follows it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from adacheck_store.format.errors import AdaCheckError
from adacheck_store.format.keys import parse_key
from adacheck_store.format.manifest import Floor
from adacheck_store.tiers.base import Tier

from .catalog import Catalog, RecordRef, read_catalog
from .fetch import ArrayReader, Fetcher
from .recovery import Prover, RestorePlan, tolerant_line
from .terms import read_log


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorChoice:
    """A floor a tier can bear: the step, and the terms of the line it speaks for.

    ``bases`` are the bases of that step, one per part, to be read back before it is written.
    """

    step: int
    terms: tuple[str, ...]
    bases: tuple[RecordRef, ...]


def choose_floor(
    catalog: Catalog, keep_bases: int, not_above: int | None = None
) -> FloorChoice | None:
    """The highest step below which a tier needs nothing, or None.

    ``catalog`` is of that tier alone. It is the newest step at which every part has a base in
    the tier, every part and extra is provable there, at least ``keep_bases`` such steps (this one
    included) exist, and no later extra refers below it. ``not_above`` caps it (for instance at
    what a lower tier has received).
    """
    if catalog.empty:
        return None
    line = tolerant_line(catalog)
    prover = Prover(catalog, line)
    found: list[tuple[int, RestorePlan]] = []
    for step in _base_steps(catalog, {segment.term for segment in line}):
        plan = prover.prove(step)
        if isinstance(plan, RestorePlan) and all(not part.deltas for part in plan.parts):
            found.append((step, plan))
    capped = [
        (step, plan)
        for step, plan in found[keep_bases - 1 :]
        if (not_above is None or step <= not_above) and not _refers_below(catalog, step)
    ]
    if not capped:
        return None
    step, plan = capped[0]
    return FloorChoice(
        step=step, terms=tuple(segment.term for segment in line),
        bases=tuple(part.base for part in plan.parts),
    )  # fmt: skip


def _base_steps(catalog: Catalog, terms: set[str]) -> list[int]:
    """Steps of the line with a base of some part, newest first."""
    steps = {ref.step for (term, _), refs in catalog.bases.items() if term in terms for ref in refs}
    return sorted(steps, reverse=True)


def _refers_below(catalog: Catalog, step: int) -> bool:
    return any(
        ref.step >= step and any(earlier < step for earlier in ref.refs)
        for refs in catalog.extras.values()
        for ref in refs
    )


def read_back(tier: Tier, bases: Iterable[RecordRef]) -> None:
    """Read every block of the bases from the tier and verify it; raises what is wrong."""
    fetcher = Fetcher([tier])
    for ref in bases:
        reader = ArrayReader(fetcher, ref)
        for info in reader.head.arrays:
            for index in range(len(info.digests)):
                fetcher.read(ref, info, index, 1)


def below(keys: Iterable[str], floors: Sequence[Floor]) -> list[str]:
    """Of a tier's record keys, those that its floors allow to delete."""
    doomed: list[str] = []
    for text in keys:
        key = parse_key(text)
        if key.kind not in ("base", "delta", "extra"):
            continue
        if any(
            key.term in floor.terms and key.step < floor.step and key.step not in floor.kept
            for floor in floors
        ):
            doomed.append(text)
    return doomed


def tier_catalog(tier: Tier, run: str) -> Catalog:
    """The catalog of one tier alone; raises the tier's own trouble, if it has one."""
    catalog = read_catalog([tier], run)
    for trouble in catalog.troubles:
        if not trouble.key:
            error: AdaCheckError = trouble.error
            raise error
    return catalog


def floor_of(tier: Tier, run: str, term: str) -> int:
    """The highest floor in a tier's log that speaks of a term; -1 if there is none."""
    entries = read_log(tier, run)
    floors = [entry.step for entry in entries if isinstance(entry, Floor) and term in entry.terms]
    return max(floors, default=-1)


def raise_floor(
    tier: Tier, run: str, keep_bases: int, *, cap: int | None, current: int,
    put: Callable[[FloorChoice], bool], own: tuple[Collection[str], Collection[str]] | None = None,
) -> tuple[int, list[str]]:  # fmt: skip
    """A higher floor for a tier if it can bear one: its step, and the keys that may now go.

    ``own`` are the parts and the ranks that the tier is to prove, where they are not all. The
    floor's bases are read back before ``put`` writes it; ``put`` may refuse.
    """
    catalog = tier_catalog(tier, run)
    choice = choose_floor(catalog if own is None else catalog.only(*own), keep_bases, cap)
    if choice is None or choice.step <= current:
        return current, []
    read_back(tier, choice.bases)
    if not put(choice):
        return current, []
    floors = [entry for entry in read_log(tier, run) if isinstance(entry, Floor)]
    return choice.step, below(tier.list(f"{run}/"), floors)
