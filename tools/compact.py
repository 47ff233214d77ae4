"""Compact a chain by hand: fold it to a replayed base at a step, in a tier.

A base lies under a random token and is written once, so this is safe beside a live writer of the
object tier, can be killed anywhere, and done again changes nothing. An LMDB has one writer at a
time: one that a trainer or an agent holds is left to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from adacheck_store.ahead import Now, streamed
from adacheck_store.candidates import carry_out
from adacheck_store.catalog import RecordRef, read_catalog
from adacheck_store.compact import ReplayedBase
from adacheck_store.drain import TierSource
from adacheck_store.fetch import FetchedSource, Fetcher
from adacheck_store.format.errors import (
    AdaCheckError,
    RecordNotFoundError,
    TierBusyError,
    TierDamagedError,
    TierReadOnlyError,
    UsageError,
)
from adacheck_store.format.keys import layout_key, manifest_key
from adacheck_store.format.record import Block
from adacheck_store.reading import open_layout
from adacheck_store.recovery import PartPlan, RestorePlan, tolerant_line
from adacheck_store.retention import read_back
from adacheck_store.store import Store, writing
from adacheck_store.tiers.base import Source, Tier
from adacheck_store.tiers.lmdb import LmdbTier

from .rows import Progress, choose_run, silent


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactRow:
    """What became of a part: ``folded`` into a base, ``copied`` from another tier, ``present``.

    ``reasons`` say why newer steps were not taken.
    """

    run: str
    term: str
    part: str
    step: int
    tier: str
    done: str
    key: str
    base_step: int
    deltas: int
    exactness: str
    nbytes: int
    reasons: tuple[str, ...] = ()


def compact(
    store: Store, run: str = "", *, to: int | None = None, tier: str = "", inexact: bool = False,
    progress: Progress = silent,
) -> Iterator[CompactRow]:  # fmt: skip
    """Make a base of step ``to`` (default: the newest provable) in a tier, part by part.

    ``tier`` is the name of an LMDB that no other process writes, which gets bases of the parts that
    it keeps; without it all parts get theirs in the object tier.
    What is written is read back and verified. Raises `NotProvableError` for a step that cannot
    be produced, `UsageError` for one that retention has passed, for a tier that is not there or
    keeps no part, and, unless ``inexact``, where this machine folds by another arithmetic than the
    trainer's; `TierBusyError` naming who holds an LMDB, `TierFullError`, `TierReadOnlyError`.
    """
    name = choose_run(store, run)
    with _writable(store, name, tier) as target:
        rows = carry_out(
            store.tiers, name,
            lambda fetcher, plan: [
                _compact_part(store, target, fetcher, plan, part, inexact, progress)
                for part in _parts(store, target, plan)
            ],
            step=to,
        )  # fmt: skip
    for row in rows.result:
        yield replace(row, reasons=rows.reasons)


@contextmanager
def _writable(store: Store, run: str, name: str) -> Iterator[Tier]:
    """The tier of a name, to be written."""
    found = next((tier for tier in store.tiers if tier.traits.name == name), None)
    if not name:
        found = store.far
        if getattr(found, "readonly", False):
            raise TierReadOnlyError(
                "only this node's LMDB is there, and it is open for reading", run=run,
                hint="bring the object tier back, or name the LMDB's tier",
                tier=found.traits.name,
            )  # fmt: skip
    if found is None:
        raise _no_such_tier(store, run, name)
    if not isinstance(found, LmdbTier):
        yield found
        return
    try:
        writer = writing(found)
    except TierBusyError as error:
        error.hint = (
            "who holds it folds it by itself, at each multiple of base_every; without --tier a "
            "base comes to the object tier beside it"
        )
        raise
    try:
        yield writer
    finally:
        writer.close()


def _no_such_tier(store: Store, run: str, name: str) -> AdaCheckError:
    """Why a tier cannot be written."""
    for trouble in store.troubles:
        if trouble.tier == name:
            return trouble.error
    names = ", ".join(tier.traits.name for tier in store.tiers)
    what = f"the store has no tier {name[:100]!r}"
    if name.startswith("agent"):
        what = "what an agent has in memory it folds by itself, as far as all acknowledge"
    return UsageError(what, run=run, path=store.url, hint=f"one of: {names}")


def _parts(store: Store, tier: Tier, plan: RestorePlan) -> tuple[PartPlan, ...]:
    """Of a plan's parts those that a tier keeps: an LMDB has those of its own ranks."""
    if tier.traits.name == store.far.traits.name:
        return plan.parts
    catalog = read_catalog([tier], plan.run)
    line = {segment.term for segment in tolerant_line(catalog)} if catalog.manifests else set()
    tables = (catalog.bases, catalog.deltas)
    kept = {part for table in tables for (term, part), refs in table.items()
            if refs and term in line}  # fmt: skip
    found = tuple(part for part in plan.parts if part.part in kept)
    if not found:
        raise UsageError(
            f"tier {tier.traits.name} keeps no part of this step", run=plan.run, step=plan.step,
            hint="a base there would hang on nothing; ls tells what lies where",
        )  # fmt: skip
    return found


def _compact_part(
    store: Store, tier: Tier, fetcher: Fetcher, plan: RestorePlan, part: PartPlan,
    inexact: bool, progress: Progress,
) -> CompactRow:  # fmt: skip
    _refuse_below_floor(tier, plan)
    held = _held(tier, plan, part)
    if held is not None:
        return _row(tier, plan, part, "present", held.key, held.nbytes, held.exactness)
    with streamed(fetcher.parallel) as reader:
        source: Source = FetchedSource(fetcher, part.base)
        done = "copied"
        if part.deltas or part.origin is not None:
            base = _replayed(store, fetcher, plan, part, inexact, reader)
            what = f"base {plan.step} of part {part.part}"
            source, done = _Watched(base, progress, what, part.base.nbytes), "folded"
        tier.put([*_documents(store, tier, plan, part), source])
    tier.sync()
    ref = _held(tier, plan, part)
    if ref is None:
        raise TierDamagedError(
            "the base does not verify right after it was written", run=plan.run, step=plan.step,
            tier=tier.traits.name, key=source.key, hint="check the medium; the chain is untouched",
        )  # fmt: skip
    return _row(tier, plan, part, done, source.key, ref.nbytes, ref.exactness)


def _replayed(
    store: Store, fetcher: Fetcher, plan: RestorePlan, part: PartPlan, inexact: bool, reader: Now
) -> ReplayedBase:
    layout = open_layout(store.tiers, plan.run, part.layout)
    base = ReplayedBase(
        fetcher, layout, part, run=plan.run, term=plan.term, step=plan.step,
        manifest=plan.manifest_id, reader=reader,
    )  # fmt: skip
    if base.exactness != part.base.exactness and not inexact:
        _refuse_inexact(plan, part)
    return base


def _refuse_below_floor(tier: Tier, plan: RestorePlan) -> None:
    """A base below the tier's floor would be ignored, and soon deleted."""
    for floor in read_catalog([tier], plan.run).floors.get(tier.traits.name, ()):
        if floor.covers(plan.term, "base", plan.step):
            raise UsageError(
                f"the step lies below the floor of tier {tier.traits.name}, step {floor.step}",
                run=plan.run, step=plan.step, hint="restore writes it to a file of its own",
            )  # fmt: skip


def _refuse_inexact(plan: RestorePlan, part: PartPlan) -> None:
    """A restore prefers a base to the chain before it, and would be exact no longer."""
    raise UsageError(
        "this machine folds by another arithmetic than the trainer's: the base would be close to "
        "the state, not equal to it, and restores would begin with it", run=plan.run,
        part=part.part, step=plan.step,
        hint="run it on a machine of the trainer's kind, or with --inexact if there is none",
    )  # fmt: skip


class _Watched:
    """A replayed base as a source whose progress is told."""

    def __init__(self, base: ReplayedBase, progress: Progress, what: str, total: int) -> None:
        self._base, self._progress, self._what, self._total = base, progress, what, total
        self.key = base.key
        self.expected_id = base.expected_id
        self.seal = base.seal

    def blocks(self) -> Iterator[Block]:
        """The base's blocks."""
        done = 0
        for block in self._base.blocks():
            yield block
            done += block.data.nbytes
            self._progress(self._what, min(done, self._total), self._total)


def _held(tier: Tier, plan: RestorePlan, part: PartPlan) -> RecordRef | None:
    """A base of the step in the tier that follows the same chain and verifies."""
    found = read_catalog([tier], plan.run).bases.get((plan.term, part.part), ())
    for ref in found:
        if ref.step == plan.step and ref.parent == part.link and ref.layout == part.layout:
            try:
                read_back(tier, [ref])
            except AdaCheckError:
                continue
            return ref
    return None


def _documents(store: Store, tier: Tier, plan: RestorePlan, part: PartPlan) -> list[Source]:
    """The layout and the manifest revision, where the tier has not got them."""
    missing: list[Source] = []
    for key in (
        str(layout_key(plan.run, part.layout)),
        str(manifest_key(plan.run, plan.term, plan.manifest.step)),
    ):
        try:
            tier.head(key)
        except RecordNotFoundError:
            holder = _holder(store, key)
            if holder is not None:
                missing.append(TierSource(holder, key))
    return missing


def _holder(store: Store, key: str) -> Tier | None:
    for tier in store.tiers:
        try:
            tier.head(key)
        except AdaCheckError:
            continue
        return tier
    return None


def _row(
    tier: Tier, plan: RestorePlan, part: PartPlan, done: str, key: str, nbytes: int,
    exactness: str,
) -> CompactRow:  # fmt: skip
    return CompactRow(
        run=plan.run, term=plan.term, part=part.part, step=plan.step, tier=tier.traits.name,
        done=done, key=key, base_step=part.base.step, deltas=len(part.deltas),
        exactness=exactness, nbytes=nbytes,
    )  # fmt: skip
