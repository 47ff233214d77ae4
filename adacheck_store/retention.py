"""Retention: what a tier may delete. One pure rule, and the deleter that follows it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice

from adacheck_store.format.bodies import decode_extra
from adacheck_store.format.canonical import Scalar
from adacheck_store.format.errors import (
    ForkError,
    FormatError,
    RecordNotFoundError,
)
from adacheck_store.format.keys import parse_key
from adacheck_store.format.manifest import Entry, Floor, Tag
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.zarr import ZarrTier

from .arrays import tensor_of
from .catalog import Catalog, RecordRef, read_catalog
from .config import made_at
from .drain import TierSource
from .fetch import ArrayReader, Fetcher
from .parting import parted
from .policy import Facts, Retention, chosen
from .recovery import Prover, RestorePlan, doubt, tolerant_line
from .tagged import Hold, Tagged, flaw
from .terms import last_index, read_log

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorChoice:
    """A floor a tier can bear: the step, and the terms of the line it speaks for.

    ``bases`` are the bases of that step, one per part, to be read back before it is written.
    ``kept`` are the steps that stay below it, with the rules that keep them. ``logged`` is the last
    entry of the log that it was chosen by: one that knows of a later floor is chosen anew.
    """

    step: int
    terms: tuple[str, ...]
    bases: tuple[RecordRef, ...]
    kept: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    logged: int = 0

    def floor(self, tier: str, run: str) -> Floor:
        """The floor as it would be written, of no place in the log."""
        return Floor(
            run=run, term=self.terms[-1], index=0, tier=tier, terms=self.terms, step=self.step,
            kept=tuple(self.kept),
        )  # fmt: skip


def standing(catalog: Catalog) -> tuple[tuple[str, ...], list[RestorePlan]]:
    """The terms of the line, and the steps that stand by themselves in a tier, newest first.

    ``catalog`` is of that tier alone. At such a step every part has a base there, with bytes of its
    own, and every extra is provable and refers to none before.
    """
    if catalog.empty:
        return (), []
    line = tolerant_line(catalog)
    prover = Prover(catalog, line)
    found: list[RestorePlan] = []
    for step in _base_steps(catalog, {segment.term for segment in line}):
        plan = prover.prove(step)
        if isinstance(plan, RestorePlan) and len(plan.levels) == 1:
            if all(not part.deltas for part in plan.parts):
                found.append(plan)
    return tuple(segment.term for segment in line), found


def choose_floor(
    catalog: Catalog, keep_bases: int, not_above: int | None = None
) -> FloorChoice | None:
    """The highest step below which a tier needs nothing, or None.

    ``catalog`` is of that tier alone. It is the newest step at which every part has a base in
    the tier, every part and extra is provable there, at least ``keep_bases`` such steps (this one
    included) exist, and no later extra refers below it. ``not_above`` caps it (for instance at
    what a lower tier has received). It is not below a floor that the tier has.
    """
    return _choose(catalog, *standing(catalog), keep_bases, not_above)


def _choose(
    catalog: Catalog, terms: tuple[str, ...], plans: Iterable[RestorePlan], keep_bases: int,
    not_above: int | None,
) -> FloorChoice | None:  # fmt: skip
    if not terms:
        return None
    lowest = _lowest(catalog, terms)
    above = (plan for plan in plans if plan.step >= lowest)
    for plan in islice(above, keep_bases - 1, None):
        if not_above is None or plan.step <= not_above:
            if not _refers_below(catalog, plan.step):
                bases = tuple(part.base for part in plan.parts)
                return FloorChoice(step=plan.step, terms=terms, bases=bases)
    return None


def _lowest(catalog: Catalog, terms: Sequence[str]) -> int:
    """The step of the line below which floors have left nothing but what they keep.

    A floor of another branch goes no further than where the line leaves the terms of both.
    """
    line = tolerant_line(catalog, terms[-1])
    found = []
    for floor in _floors(catalog, terms):
        last = [segment for segment in line if segment.term in floor.terms][-1].last
        found.append(floor.step if last is None else min(floor.step, last))
    return max(found, default=0)


def _held(catalog: Catalog, terms: Sequence[str]) -> set[int]:
    """Steps of the line that a floor keeps and none lets go: another branch may have let go what
    this one keeps, and keep what was never of this one."""
    line, floors = tolerant_line(catalog, terms[-1]), _floors(catalog, terms)
    found = set()
    for step in {step for floor in floors for step in floor.kept}:
        term = next((segment.term for segment in line if segment.covers(step)), None)
        of_it = [floor for floor in floors if term is None or term in floor.terms]
        if any(step in floor.kept for floor in of_it):
            if term is None or not any(floor.covers(term, "base", step) for floor in of_it):
                found.add(step)
    return found


def _floors(catalog: Catalog, terms: Collection[str]) -> list[Floor]:
    found = [floor for floors in catalog.floors.values() for floor in floors]
    return [floor for floor in found if not set(terms).isdisjoint(floor.terms)]


def plan_floor(
    tier: Tier, run: str, keep_bases: int, *, cap: int | None, current: int = -1,
    own: tuple[Collection[str], Collection[str]] | None = None, retention: Retention | None = None,
    tagged: Tagged | None = None,
) -> FloorChoice | None:  # fmt: skip
    """A floor that a tier can bear above ``current``, its bases and those kept below it read back.

    ``own`` are the parts and the ranks that the tier is to prove, where they are not all. Below the
    floor stay tagged steps and what ``retention`` says; without one, what the last floor kept.
    Steps that a restore would pass over, for copies had come apart, count for nothing. ``tagged``
    is what earlier attempts at this tier have found, and is told why the floor is not higher.
    """
    logged = last_index(tier, run)
    catalog = tier_catalog(tier, run)
    catalog = catalog if own is None else catalog.only(*own)
    terms, plans = standing(catalog)
    asked: dict[int, bool] = {}

    def offered(plan: RestorePlan) -> bool:
        # A tier of some parts alone cannot ask all ranks' witnesses; its cap has.
        if plan.step not in asked:
            asked[plan.step] = own is not None or _is_offered(tier, catalog, plan)
        return asked[plan.step]

    def bearable(not_above: int | None) -> FloorChoice | None:
        choice = _choose(catalog, terms, filter(offered, plans), keep_bases, not_above)
        return None if choice is None or choice.step <= current else choice

    choice = _spare_tags(tier, catalog, bearable, cap, tagged or Tagged())
    if choice is None:
        return None
    read_back(tier, choice.bases)
    before = _held(catalog, terms)
    plans = [plan for plan in plans if plan.step < choice.step]
    bad: set[int] = set()
    while True:
        left = [plan for plan in plans if plan.step not in bad]
        kept = _kept(tier, catalog, choice, left, retention)
        fresh = [plan for plan in left if plan.step in kept and plan.step not in before]
        worse = {plan.step for plan in fresh if not (_verifies(tier, plan) and offered(plan))}
        if not worse:
            return replace(choice, kept=kept, logged=logged)
        bad |= worse  # what does not verify keeps nothing: another step of its stretch may


def _spare_tags(
    tier: Tier, catalog: Catalog, bearable: Callable[[int | None], FloorChoice | None],
    cap: int | None, tagged: Tagged,
) -> FloorChoice | None:  # fmt: skip
    """The highest bearable floor, at most ``cap``, that takes no tagged step; None: there is none.

    Why it is not as high as it could be, and how high that were, is left in ``tagged``.
    """
    tagged.begin(catalog)
    first = choice = bearable(cap)
    hold: Hold | None = None
    while choice is not None:
        lowest = _lowest(catalog, choice.terms)
        held = tagged.need(tier, catalog, choice.terms, range(lowest, choice.step))
        if held is not None:
            hold, choice = held, bearable(held.step)
        elif tagged.recalled:
            tagged.forget()  # no floor is raised by what was read long ago
        else:
            break
    if hold is not None and first is not None:
        if all(tagged.whole(tier, ref) for ref in first.bases):
            tagged.bears = max(tagged.bears, first.step)
    tagged.hold(hold.why if hold else None)
    return choice


def _kept(
    tier: Tier, catalog: Catalog, choice: FloorChoice, plans: Sequence[RestorePlan],
    retention: Retention | None,
) -> dict[int, tuple[str, ...]]:  # fmt: skip
    """Steps below a floor that stay, and why."""
    found: dict[int, tuple[str, ...]] = {}
    if retention is None:
        # Also what cannot be proven now: what is damaged may be mended yet.
        held = _held(catalog, choice.terms)
        found = {step: ("kept",) for step in held if step < choice.step}
    elif plans:
        found = chosen(retention, facts_of(tier, plans, retention))
    for tag in catalog.tags:
        if tag.term in choice.terms and tag.step < choice.step:
            found[tag.step] = (*found.get(tag.step, ()), f"tag {tag.name}")
    return dict(sorted(found.items()))


def facts_of(tier: Tier, plans: Sequence[RestorePlan], retention: Retention) -> list[Facts]:
    """What a policy asks of steps. Raises what a tier says that does not answer for a base."""
    found = []
    for plan in plans:
        times = _times(tier, plan) if retention.every_s else []
        value = _number(tier, plan, retention.best) if retention.best else None
        found.append(Facts(step=plan.step, time_s=max(times, default=None), value=value))
    return found


def _times(tier: Tier, plan: RestorePlan) -> list[float]:
    """When the bases of a step were made, as they say, so that no copy of the store changes it.

    Those of old writers do not say it: then when the store got them.
    """
    found = []
    for key in (part.base.key for part in plan.parts):
        with suppress(FormatError, RecordNotFoundError):
            made = made_at(tier.head(key))
            if made is None and isinstance(tier, ZarrTier):
                made = tier.times(f"{key}/").get(key)
            found += [] if made is None else [made]
    return found


def _number(tier: Tier, plan: RestorePlan, path: str) -> float | None:
    """The number at a path into what rank 0 tracks at a step; None if there is none."""
    refs = plan.extras.get(min(plan.extras, default=""))
    if not refs:
        return None
    try:
        value: object = decode_extra(tier.head(refs[0].key).head).tree.get("tracked")
    except (FormatError, RecordNotFoundError):
        return None
    for word in path.split("/"):
        value = value.get(word) if isinstance(value, Mapping) else None
    if isinstance(value, Scalar):
        value = tensor_of(value).item()
    return float(value) if type(value) in (int, float) else None  # type: ignore[arg-type]


def _verifies(tier: Tier, plan: RestorePlan) -> bool:
    """Whether all of a step that stands by itself verifies."""
    extras = [ref for refs in plan.extras.values() for ref in refs]
    return all(flaw(tier, ref) is None for ref in (*(part.base for part in plan.parts), *extras))


def _is_offered(tier: Tier, catalog: Catalog, plan: RestorePlan) -> bool:
    """Whether a restore takes a step without being asked for it; raises what may pass."""
    if plan.manifest.redundancy is None:
        return True
    if doubt(tolerant_line(catalog), plan.step):
        return False
    fetcher = Fetcher([tier])
    parting = parted(fetcher, plan)
    if parting.harms:
        fetcher.raise_unread()
    return not (parting.harms or parting.why)


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
    """Read every block of some records from the tier and verify it; raises what is wrong."""
    fetcher = Fetcher([tier])
    for ref in bases:
        reader = ArrayReader(fetcher, ref)
        for info in reader.head.arrays:
            for index in range(len(info.digests)):
                fetcher.read(ref, info, index, 1)


def below(keys: Iterable[str], entries: Sequence[Entry]) -> list[str]:
    """Of a tier's record keys, those that the entries of its log allow to delete."""
    floors = [entry for entry in entries if isinstance(entry, Floor)]
    tags = [entry for entry in entries if isinstance(entry, Tag)]
    doomed: list[str] = []
    for text in keys:
        key = parse_key(text)
        if key.kind not in ("base", "delta", "extra"):
            continue
        if any(floor.covers(key.term, key.kind, key.step, tags) for floor in floors):
            doomed.append(text)
    return doomed


def bury(tier: Tier, run: str, doomed: Iterable[str]) -> list[str]:
    """Delete what a floor allowed before the grace period, as far as the log allows it still.

    Returns what that was: the floor may have been taken back, or not be readable any more.
    """
    going = below(doomed, read_log(tier, run))
    tier.delete(going)
    return going


def tier_catalog(tier: Tier, run: str) -> Catalog:
    """The catalog of one tier alone; raises the tier's own trouble, or that of a record that could
    not be read: what may go is not decided without it."""
    catalog = read_catalog([tier], run)
    catalog.raise_unread()
    return catalog


def floor_of(tier: Tier, run: str, term: str) -> int:
    """The highest floor in a tier's log that speaks of a term; -1 if there is none."""
    entries = read_log(tier, run)
    floors = [entry.step for entry in entries if isinstance(entry, Floor) and term in entry.terms]
    return max(floors, default=-1)


def raise_floor(
    tier: Tier, run: str, keep_bases: int, *, cap: int | None, current: int,
    put: Callable[[FloorChoice], bool], own: tuple[Collection[str], Collection[str]] | None = None,
    retention: Retention | None = None, tagged: Tagged | None = None,
) -> tuple[int, list[str]]:  # fmt: skip
    """A higher floor for a tier if it can bear one: its step, and the keys that may now go.

    `plan_floor` chooses it and reads its bases back before ``put`` writes it; ``put`` may refuse.
    """
    choice = plan_floor(
        tier, run, keep_bases, cap=cap, current=current, own=own, retention=retention,
        tagged=tagged,
    )  # fmt: skip
    if choice is None:
        return current, []
    detach(tier, run, choice)
    if not put(choice):
        return current, []
    return choice.step, below(tier.list(f"{run}/"), read_log(tier, run))


def detach(tier: Tier, run: str, choice: FloorChoice) -> None:
    """Give the extras of steps that are kept packs of their own: a pack goes only as a whole.

    One that is damaged stays in its pack, and so does all that is in there.
    """
    if not tier.traits.packs or not choice.kept:
        return
    for text in list(tier.list(f"{run}/")):
        key = parse_key(text)
        if key.kind == "extra" and key.step in choice.kept and key.term in choice.terms:
            try:
                tier.put([TierSource(tier, text)])
            except (FormatError, ForkError, RecordNotFoundError) as error:
                log.warning("kept as it is: %s", error.at(tier=tier.traits.name, key=text))
    tier.sync()
