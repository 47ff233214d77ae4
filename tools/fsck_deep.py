"""The deep check: a sample of steps is folded, and held against what the trainer had.

Digests say that bytes are as they were written. Only a fold says that they give the state that the
trainer had: by the fingerprints in its deltas, and by every base that an earlier one leads to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from adacheck_store.catalog import Catalog
from adacheck_store.drift import Drift, measure, stretch
from adacheck_store.fetch import Fetcher
from adacheck_store.format.errors import AdaCheckError, ReplayMismatchError
from adacheck_store.reading import open_fold, open_layout
from adacheck_store.recovery import PartPlan, Prover, RestorePlan
from adacheck_store.tiers.base import Tier

from .findings import Finding, finding
from .fsck_again import settled
from .fsck_journal import Journal, name_of
from .ls import line_prover
from .rows import Progress
from .whole import Nowhere


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedRow:
    """A step that was folded, from ``base`` over ``deltas``, of all parts together.

    ``checked`` fingerprints were compared, of which ``differed`` were others (in class ``bounded``
    they may). ``compared`` bases were held against the fold from an earlier one; ``drift`` is the
    largest difference of any number there (None: nothing was compared).
    """

    run: str
    step: int
    base: int
    deltas: int
    exactness: str
    checked: int
    differed: int
    compared: int
    drift: float | None


def check_folds(
    tiers: Sequence[Tier], catalog: Catalog, sample: int, progress: Progress,
    again: Callable[[], Catalog], journal: Journal | None = None,
) -> Iterator[Finding | FoldedRow]:  # fmt: skip
    """Fold ``sample`` provable steps of the line, from the newest to the oldest, evenly apart.

    ``catalog`` is of what verifies, and ``again`` reads it anew. Memory is that of a window and of
    the heads of a chain. Rows of folds of the same records come from the ``journal``.
    """

    def folded(read: Callable[[], Catalog], step: int) -> list[Finding | FoldedRow]:
        now = read()
        try:
            return list(_check_step(tiers, now, step, progress, journal))
        except AdaCheckError as error:
            return [_not_folded(now, step, error.message)]

    prover = line_prover(catalog)
    for step in spread(prover.provable_steps(), sample) if prover is not None else ():
        yield from settled(folded(lambda: catalog, step), partial(folded, again, step))


def _not_folded(catalog: Catalog, step: int, why: str) -> Finding:
    what = f"step {step}: {why}"
    return finding("not-folded", what, run=catalog.run, span=(step, step))


def spread(steps: Sequence[int], count: int) -> list[int]:
    """At most so many of some ascending steps, the newest first, the oldest last, evenly apart."""
    if len(steps) <= count:
        return list(reversed(steps))
    last = len(steps) - 1
    places = {last - round(index * last / max(1, count - 1)) for index in range(count)}
    return [steps[place] for place in sorted(places, reverse=True)]


def _check_step(
    tiers: Sequence[Tier], catalog: Catalog, step: int, progress: Progress,
    journal: Journal | None,
) -> Iterator[Finding | FoldedRow]:  # fmt: skip
    prover = line_prover(catalog)
    plan = prover.prove(step) if prover is not None else "no term of the run has a manifest"
    if not isinstance(plan, RestorePlan):
        if not _passed(tiers, catalog, prover, step):
            yield _not_folded(catalog, step, plan)
        return
    if journal is None:
        yield from _fold(tiers, catalog, plan, progress)
        return
    name = _name(catalog, plan)
    if told := journal.told(name):
        yield FoldedRow(**told)
        return
    rows = list(_fold(tiers, catalog, plan, progress))
    yield from rows
    if len(rows) == 1 and isinstance(rows[0], FoldedRow):
        journal.add(name, asdict(rows[0]))


def _name(catalog: Catalog, plan: RestorePlan) -> bytes:
    """The journal's name of a fold: what it gives follows from the ids of what it reads."""
    leads = [stretch(catalog, part) for part in plan.parts]
    refs = [ref for lead in leads if lead is not None for ref in (lead[0], *lead[1])]
    ids = (ref.id for ref in (*plan.records, *refs))
    return name_of("fold", plan.run, plan.term, str(plan.step), *ids)


def _fold(
    tiers: Sequence[Tier], catalog: Catalog, plan: RestorePlan, progress: Progress
) -> Iterator[Finding | FoldedRow]:
    step = plan.step
    checked = differed = compared = 0
    classes: set[str] = set()
    drift: Drift | None = None
    fetcher = Fetcher(tiers)
    for part in plan.parts:
        layout = open_layout(tiers, plan.run, part.layout)
        try:
            what = f"folding step {step}, {part.part}"
            sink = Nowhere(lambda done, what=what: progress(what, done, 0))  # type: ignore[misc]
            report = open_fold(fetcher, layout, part).run(sink)
            checked, differed = checked + report.checked, differed + report.differed
            classes.add(report.exactness)
            if (lead := stretch(catalog, part)) is not None:
                progress(f"folding to base {part.base.step}, {part.part}", 0, 0)
                drift = measure(fetcher, layout, *lead, part.base).joined(drift)
                compared += 1
        except ReplayMismatchError as error:
            yield _wrong(catalog.run, step, part, error)
            return
    yield FoldedRow(
        run=plan.run, step=step, base=min(part.base.step for part in plan.parts),
        deltas=sum(len(part.deltas) for part in plan.parts), exactness="+".join(sorted(classes)),
        checked=checked, differed=differed, compared=compared,
        drift=None if drift is None else drift.absolute,
    )  # fmt: skip


def _passed(tiers: Sequence[Tier], catalog: Catalog, prover: Prover | None, step: int) -> bool:
    """Whether the last tier's floors say that a step may be gone."""
    segment = prover.segment_of(step) if prover is not None else None
    floors = catalog.floors.get(tiers[-1].traits.name, ())
    return segment is not None and any(f.covers(segment.term, "base", step) for f in floors)


def _wrong(run: str, step: int, part: PartPlan, error: ReplayMismatchError) -> Finding:
    what = f"step {step}, {part.part}, from base {part.base.step}: {error.message}"
    return finding("fold", what, key=part.base.key, run=run, tier=" ".join(part.base.tiers))
