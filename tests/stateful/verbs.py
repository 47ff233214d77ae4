"""Verbs over a world's store: compact, tag, gc, repair; each with what it must leave behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from adacheck_store.catalog import Catalog
from adacheck_store.format.errors import AdaCheckError, TierReadOnlyError, UsageError
from adacheck_store.format.keys import parse_key
from adacheck_store.policy import Retention
from adacheck_store.recovery import tolerant_line
from adacheck_store.restore import restore_state
from adacheck_store.retention import standing, tier_catalog
from adacheck_store.store import Store
from adacheck_store.tiers.zarr_packs import expand
from adacheck_store.tools import tag as tags
from adacheck_store.tools.compact import compact as compact_verb
from adacheck_store.tools.findings import Finding
from adacheck_store.tools.fsck import fsck
from adacheck_store.tools.gc import Ages, gc
from adacheck_store.tools.repair import LEFT, REBUILT, SET_ASIDE, repair
from tests.stateful.trainers import DONE, RUN
from tests.stateful.world import World

Choose = Callable[[list[Any]], Any]


def _no_objects(world: World, store: Store) -> bool:
    """True if the far tier was lost and nobody has begun another."""
    return store.far.traits.name != "zarr" and not world.place.one


def _passed(world: World, store: Store, step: int) -> bool:
    """True if the far tier's floor is above a step that another tier still has."""
    floors = world.catalog(store).floors[store.far.traits.name]
    return step < max(floor.step for floor in floors)


def compact(world: World, choose: Choose) -> None:
    """A base by hand, at some provable step."""
    with world.read() as store:
        steps = world.provable(world.catalog(store))
        if not steps:
            return
        if _no_objects(world, store):
            with pytest.raises(TierReadOnlyError):
                list(compact_verb(store, RUN))
            return
        step = choose(steps)
        try:
            rows = list(compact_verb(store, RUN, to=step))
        except UsageError:
            assert _passed(world, store, step)
            return
        again = list(compact_verb(store, RUN, to=rows[0].step))
    DONE[f"compact {rows[0].done}"] += 1
    assert {row.done for row in again} == {"present"}


def tag(world: World, choose: Choose) -> None:
    """Name some provable step: from now on it stays."""
    with world.read() as store:
        steps = world.provable(world.catalog(store))
        if not steps or _no_objects(world, store):
            return
        step, name = choose(steps), f"tag{world.next_seed()}"
        try:
            row = tags.add(store, name, RUN, step=step)
        except UsageError:
            assert _passed(world, store, step)
            return
        except AdaCheckError:
            assert world.planted, "nothing was damaged, and a provable step cannot be tagged"
            return
        assert restore_state([store.far], RUN, step=step).step == step
    world.tagged[name] = (row.term, step)
    DONE["tagged"] += 1


def untag(world: World, choose: Choose) -> None:
    """Take a tag back; the step need not stay any more."""
    with world.read() as store:
        if world.tagged and not _no_objects(world, store):
            name = choose(sorted(world.tagged))
            tags.remove(store, name, RUN)
            del world.tagged[name]
            DONE["untagged"] += 1


def collect(world: World, last: int, every: int) -> None:
    """Collect garbage by a policy. Its promise is worked out here once more, by plain counting."""
    rules = Retention(last=last, every=every) if every else None
    for writer in world.writers.values():
        world.settle(writer)
    with world.read() as store:
        if _no_objects(world, store):
            return
        far = store.far
        before = tier_catalog(far, RUN)
        world.collected = True
        try:
            rows = list(gc(store, RUN, last=last, rules=rules, apply=True, ages=Ages(grace_s=0.0)))
        except AdaCheckError:
            assert world.planted, "nothing was damaged, and garbage cannot be collected"
            return
        DONE["collected"] += 1
        floors = [row for row in rows if row.what == "floor" and row.tier == far.traits.name]
        if world.planted or not floors or floors[0].done not in ("raised", "stands"):
            return
        (row,) = floors
        assert row.step is not None
        DONE[f"floor {row.done}"] += 1
        for step in sorted(_wanted(world, before, row.step, last, every)):
            world.check_restored(restore_state([far], RUN, step=step))


def _wanted(world: World, before: Catalog, floor: int, last: int, every: int) -> set[int]:
    """Steps that the far tier must give after a floor was set, of those it gave before."""
    terms, plans = standing(before)
    stood = sorted(plan.step for plan in plans)
    earlier = [found for found in before.floors.get("zarr", before.floors.get("memory", ()))
               if set(terms) & set(found.terms)]  # fmt: skip
    line = tolerant_line(before)

    def of(step: int) -> str:  # a fork step is of both terms, and the parent's
        return next((segment.term for segment in line if segment.covers(step)), "")

    # A floor of another branch says nothing of this one beyond the fork.
    lowest = max((step for found in earlier for step in range(found.step + 1)
                  if of(step) in found.terms), default=0)  # fmt: skip
    above = [step for step in stood if step >= lowest]
    assert floor <= max(lowest, above[-last]), f"{last} of {above} stay, and the floor is {floor}"
    wanted = {step for step in stood if step >= floor}
    wanted |= {step for _, step in world.tagged_on_line() if step in stood}
    if every:
        firsts: dict[int, int] = {}
        for step in stood:
            if step < floor:
                firsts.setdefault(step // every, step)
        return wanted | set(firsts.values())
    kept = {step for found in earlier for step in found.kept if of(step) in found.terms}
    gone = {step for step in kept for found in earlier if found.covers(of(step), "base", step)}
    return wanted | ((kept - gone) & set(stood))


def _holders(catalog: Catalog) -> dict[str, set[str]]:
    """Key -> tiers that hold the record."""
    found: dict[str, set[str]] = {}
    for table in (catalog.bases, catalog.deltas, catalog.extras):
        for refs in table.values():
            for ref in refs:
                found.setdefault(ref.key, set()).update(ref.tiers)
    return found


def mend(world: World) -> None:
    """Repair the store: what any tier proves stays, and a second repair finds nothing to do."""
    world.close_all()
    with world.read() as store:
        catalog = world.catalog(store)
        before = set(world.places(catalog))
        sound = _holders(catalog.without(world.damaged))
        try:
            rows = list(repair(store, RUN))
            again = list(repair(store, RUN))
        except AdaCheckError:
            assert world.planted, "nothing was damaged, and nothing can be repaired"
            return
        for row in rows:
            DONE[f"repair {row.done}"] += 1
            if row.done in (REBUILT, SET_ASIDE):
                key = parse_key(row.key)
                held = list(expand([key])) if key.kind == "pack" else [row.key]
                world.damaged -= {(row.tier, text) for text in held}
                elsewhere = all(sound.get(text, set()) - {row.tier} for text in held)
                assert row.done == REBUILT or not elsewhere, f"{row} is whole in another tier"
        assert {row.done for row in again} <= {LEFT}, again
        assert before <= set(world.places(world.catalog(store))), "a repair has lost a step"
        if not _no_objects(world, store):
            _mend_tags(world, store)
            _mend_floor(store)
        bare = any(row.kind == "floor" for row in fsck(store, RUN) if isinstance(row, Finding))
    if not again and not world.damaged and not world.lost and not bare:
        DONE["whole again"] += world.planted
        world.planted = False  # from here on it is as good as any


def _mend_floor(store: Store) -> None:
    """A floor whose base was set aside gets a new one, as its finding says."""
    floors = tier_catalog(store.far, RUN).floors.get(store.far.traits.name, ())
    for step in [max(floor.step for floor in floors)] if floors else []:
        with suppress(AdaCheckError):
            list(compact_verb(store, RUN, to=step))


def _mend_tags(world: World, store: Store) -> None:
    """Tagged steps whose bases were set aside get new ones, as the warning of retention says."""
    for row in tags.tags(store, RUN):
        if row.on_line and not row.base and row.name in world.tagged:
            with suppress(AdaCheckError):
                list(compact_verb(store, RUN, to=row.step))
                DONE["tag mended"] += 1
