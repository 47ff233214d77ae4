"""Tags: names for steps that stay. A tagged step has a base of its own, and no floor passes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from adacheck_store.catalog import read_catalog
from adacheck_store.drain import TierSource
from adacheck_store.format.errors import NameRefusedError, TierDamagedError, UsageError
from adacheck_store.format.keys import is_run
from adacheck_store.format.manifest import Tag
from adacheck_store.recovery import plan_restore
from adacheck_store.retention import standing, tier_catalog
from adacheck_store.store import Store
from adacheck_store.terms import put_tag, remove_tag

from .compact import compact
from .rows import Progress, choose_run, silent


@dataclass(frozen=True, slots=True, kw_only=True)
class TagRow:
    """A tag: ``done`` is ``stands``, ``added`` or ``removed``.

    ``base``: the step has a base of its own in the object tier, and its extras. ``on_line``: it is
    a step of the line.
    """

    run: str
    name: str
    step: int
    term: str
    on_line: bool
    base: bool
    done: str


def tags(store: Store, run: str = "") -> Iterator[TagRow]:
    """All tags of a run, by step."""
    name = choose_run(store, run)
    catalog = tier_catalog(store.far, name)
    terms, plans = standing(catalog)
    steps = {plan.step for plan in plans}
    for tag in sorted(catalog.tags, key=lambda tag: (tag.step, tag.name)):
        yield _row(tag, tag.term in terms, tag.step in steps, "stands")


def step_named(store: Store, text: str, run: str = "") -> int:
    """A step by its number or by its tag; raises `UsageError` for a name that is no tag."""
    if text.isascii() and text.isdigit():
        return int(text)
    chosen = choose_run(store, run)
    found = {tag.name: tag.step for tag in read_catalog(store.tiers, chosen).tags}
    if text not in found:
        listed = ", ".join(sorted(found))
        raise UsageError(
            f"no step and no tag: {text[:140]!r}", run=chosen, hint=f"of: {listed or 'none'}"
        )
    return found[text]


def add(
    store: Store, name: str, run: str = "", *, step: int | None = None, inexact: bool = False,
    progress: Progress = silent,
) -> TagRow:  # fmt: skip
    """Give a step of the line (the newest provable one) a name, and a base in the object tier.

    Base and extras are there before the tag is: killed between, it is as if the step had been
    compacted. One that stands for this very step stays. Raises `NameRefusedError`, `UsageError`
    for a name that is taken or a step that is about to be deleted, and what `compact` raises.
    """
    if not is_run(name):
        raise NameRefusedError(
            f"not the name of a tag: {name[:140]!r}",
            hint="use 1 to 128 of A-Z a-z 0-9 . _ - and begin with a letter or digit",
        )
    chosen = choose_run(store, run)
    stands = next((tag for tag in tier_catalog(store.far, chosen).tags if tag.name == name), None)
    if stands is not None and stands.step != step:
        raise _taken(stands)
    (row, *_) = compact(store, chosen, to=step, inexact=inexact, progress=progress)
    _bring_extras(store, chosen, row.step)
    if stands is not None and stands.term != row.term:
        raise _taken(stands)
    tag = stands or put_tag(store.far, chosen, term=row.term, name=name, step=row.step)
    plans = standing(tier_catalog(store.far, chosen))[1]
    if all(plan.step != tag.step for plan in plans):
        if stands is None:
            remove_tag(store.far, chosen, name)
        raise TierDamagedError(
            "the step cannot be produced there right after it was written", run=chosen,
            step=tag.step, tier=store.far.traits.name, hint="fsck says what is wrong with it",
        )  # fmt: skip
    return _row(tag, True, True, "added" if stands is None else "stands")


def _taken(tag: Tag) -> UsageError:
    return UsageError(
        f"the tag {tag.name!r} stands, for step {tag.step}", run=tag.run, step=tag.step,
        hint="choose another name, or remove it first",
    )  # fmt: skip


def _bring_extras(store: Store, run: str, step: int) -> None:
    """Copy the step's extras to the object tier, where it has not received them."""
    far = store.far
    tiers = {tier.traits.name: tier for tier in store.tiers}
    plan = plan_restore(read_catalog(store.tiers, run), step)
    for ref in (ref for refs in plan.extras.values() for ref in refs):
        if far.traits.name not in ref.tiers:
            far.put([TierSource(tiers[ref.tiers[0]], ref.key)])
    far.sync()


def remove(store: Store, name: str, run: str = "") -> TagRow:
    """Take a tag back: the next floor may pass its step. Raises `UsageError` if there is none."""
    chosen = choose_run(store, run)
    found = remove_tag(store.far, chosen, name)
    if not found:
        listed = ", ".join(sorted(tag.name for tag in tier_catalog(store.far, chosen).tags))
        raise UsageError(f"no tag {name[:140]!r}", run=chosen, hint=f"of: {listed or 'none'}")
    return _row(found[0], True, True, "removed")


def _row(tag: Tag, on_line: bool, base: bool, done: str) -> TagRow:
    return TagRow(
        run=tag.run, name=tag.name, step=tag.step, term=tag.term, on_line=on_line, base=base,
        done=done,
    )  # fmt: skip
