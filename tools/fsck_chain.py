"""Checks across the records of a run: links, forks, terms, floors, holes, provable steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from adacheck_store.catalog import Catalog, Gaps, RecordRef
from adacheck_store.format.errors import AdaCheckError
from adacheck_store.format.keys import Term, rank_name
from adacheck_store.format.manifest import Floor, Manifest
from adacheck_store.parting import offered
from adacheck_store.proof import Segment
from adacheck_store.recovery import Prover, RestorePlan, line_of
from adacheck_store.tiers.base import Tier

from .findings import Finding, Provable, finding
from .ls import line_prover
from .rows import ranges, spans

_BOUNDED_STEPS_MAX = 256

Place = tuple[str, str]
"""Term, and part or rank."""


@dataclass(slots=True)
class Spine:
    """Bases and deltas of one part in one term, by step."""

    catalog: Catalog
    place: Place
    deltas: dict[int, list[RecordRef]]
    bases: dict[int, list[RecordRef]]

    @property
    def first(self) -> int:
        """The step at which the term begins."""
        steps = (m.step for m in self.catalog.manifests.values() if m.term == self.place[0])
        return min(steps, default=0)

    @property
    def starts(self) -> set[str]:
        """Ids that a new start may have as parent: the term's manifest revisions."""
        found = self.catalog.manifests.items()
        return {identity for identity, m in found if m.term == self.place[0]}


def spines(catalog: Catalog) -> Iterator[Spine]:
    """One for each part of each term."""
    for place in sorted({*catalog.deltas, *catalog.bases}):
        yield Spine(
            catalog, place, _by_step(catalog.deltas.get(place, ())),
            _by_step(catalog.bases.get(place, ())),
        )  # fmt: skip


def _by_step(refs: Iterable[RecordRef]) -> dict[int, list[RecordRef]]:
    table: dict[int, list[RecordRef]] = defaultdict(list)
    for ref in refs:
        table[ref.step].append(ref)
    return dict(table)


def check_links(catalog: Catalog) -> Iterator[Finding]:
    """Forks, parents of deltas and bases, new starts (INV-22 to INV-27)."""
    for refs in (*catalog.deltas.values(), *catalog.extras.values()):
        for step, several in _by_step(refs).items():
            if len({ref.id for ref in several}) > 1:
                where = ", ".join(f"{ref.id[:12]} in {'+'.join(ref.tiers)}" for ref in several)
                yield _of(several[0], "fork", f"step {step} has several ids: {where}")
    for spine in spines(catalog):
        base_ids = {ref.id for refs in spine.bases.values() for ref in refs}
        starts = spine.starts
        for step in sorted(spine.deltas):
            for ref in spine.deltas[step]:
                yield from _check_delta(spine, ref, base_ids, starts)
        for step in sorted(spine.bases):
            for ref in spine.bases[step]:
                yield from _check_base(spine, ref, base_ids, starts)


def _check_delta(
    spine: Spine, ref: RecordRef, base_ids: set[str], starts: set[str]
) -> Iterator[Finding]:
    if ref.parent in base_ids:
        yield _of(ref, "base-parent", f"its parent {ref.parent[:16]} is a base")
        return
    before = spine.deltas.get(ref.step - 1, [])
    if ref.parent not in starts and before and ref.parent not in {r.id for r in before}:
        yield _of(ref, "link", f"its parent {ref.parent[:16]} is not delta {ref.step - 1}")
        return
    bases = spine.bases.get(ref.step - 1, [])
    if bases and ref.parent not in {base.parent for base in bases}:
        yield _of(ref, "base-link", f"no base of step {ref.step - 1} has its parent")


def _check_base(
    spine: Spine, ref: RecordRef, base_ids: set[str], starts: set[str]
) -> Iterator[Finding]:
    if ref.parent in base_ids:
        yield _of(ref, "base-parent", f"its parent {ref.parent[:16]} is a base")
        return
    deltas = {delta.id for delta in spine.deltas.get(ref.step, [])}
    after = {delta.parent for delta in spine.deltas.get(ref.step + 1, [])}
    if ref.parent in starts:
        stood_in = ref.step == spine.first and spine.place in spine.catalog.derived
        if ref.origin != "captured" and not stood_in:
            yield _of(ref, "unbased-start", "a new start, and its base is not captured")
        if ref.step != spine.first and ref.gap is None:
            yield _of(ref, "unexplained-start", "a new start within a term without a gap")
    elif deltas and ref.parent not in deltas:
        yield _of(ref, "base-link", f"its parent {ref.parent[:16]} is not delta {ref.step}")
    elif after and ref.parent not in after:
        yield _of(ref, "base-link", f"delta {ref.step + 1} has another parent")


def _of(ref: RecordRef, kind: str, what: str) -> Finding:
    return finding(kind, what, tier="+".join(ref.tiers), key=ref.key)


def check_terms(catalog: Catalog, *, log_read: bool) -> Iterator[Finding]:
    """Claims, parents, revisions and tips (INV-28 to INV-30)."""
    by_term: dict[str, list[tuple[str, Manifest]]] = defaultdict(list)
    for identity, manifest in catalog.manifests.items():
        by_term[manifest.term].append((identity, manifest))
    claimed = {claim.term for claim in catalog.claims}
    for term, revisions in sorted(by_term.items()):
        revisions.sort(key=lambda item: item[1].step)
        origin = revisions[0][1]
        key = f"{catalog.run}/{term}/manifest/{origin.step:012d}"
        if log_read and term not in claimed:
            yield finding("claim", "the log has no claim of this term", key=key)
        before = ""
        for identity, manifest in revisions:
            if manifest.previous != before:
                place = f"{catalog.run}/{term}/manifest/{manifest.step:012d}"
                yield finding("revision", "its parent is not the revision before it", key=place)
            before = identity
        if origin.parent_term:
            yield from _check_parent(catalog, origin, key, set(by_term))
    for term in sorted(claimed - by_term.keys()):
        yield finding("unused-claim", f"term {term} was claimed and has no manifest",
                      run=catalog.run)  # fmt: skip
    for term, part in sorted({*catalog.bases, *catalog.deltas, *catalog.extras}):
        if term not in by_term:
            yield finding("manifestless", f"records of {part}, and no manifest of term {term} "
                          "anywhere", run=catalog.run)  # fmt: skip


def _check_parent(
    catalog: Catalog, origin: Manifest, key: str, known: set[str]
) -> Iterator[Finding]:
    parent = origin.parent_term
    if Term.parse(parent).number >= Term.parse(origin.term).number:
        yield finding("term-number", f"its parent {parent} has no lower number", key=key)
    if parent not in known:
        floors = [floor for found in catalog.floors.values() for floor in found]
        if not any(origin.term in f.terms and f.step > origin.fork_step for f in floors):
            yield finding("parent-term", f"the manifest of its parent {parent} is missing", key=key)
        return
    for part, tip in origin.tips.items():
        links = {ref.id for ref in catalog.deltas.get((parent, part), ())
                 if ref.step == origin.fork_step}  # fmt: skip
        links |= {ref.parent for ref in catalog.bases.get((parent, part), ())
                  if ref.step == origin.fork_step}  # fmt: skip
        if links and tip not in links:
            yield finding("tips", f"the tip of {part} is not the parent's link at step "
                          f"{origin.fork_step}", key=key)  # fmt: skip


def check_floors(
    tier: str, alone: Catalog, floors: Iterable[Floor], *, partial: bool
) -> Iterator[Finding]:
    """A floor's step, and the steps it keeps, are provable in its tier alone (INV-32, INV-33).

    A ``partial`` tier may keep some ranks' parts: it is to prove those whose base it kept.
    """
    newest = max(floors, key=lambda floor: (floor.step, floor.index), default=None)
    if newest is not None and partial:
        parts = {part for (_, part), refs in alone.bases.items()
                 if any(ref.step == newest.step for ref in refs)}  # fmt: skip
        if parts:
            alone = alone.only(parts, {rank_name(int(part[1:])) for part in parts})
    prover = line_prover(alone)
    if newest is None or prover is None:
        return
    key = f"{alone.run}/log/{newest.index:012d}"
    for kind, step in (("floor", newest.step), *(("floor-kept", s) for s in newest.kept)):
        segment = prover.segment_of(step)
        if segment is None or segment.term not in newest.terms:
            continue
        plan = prover.prove(step)
        if isinstance(plan, str) and not _of_another(alone, segment, step):
            yield finding(kind, plan, tier=tier, key=key, span=(step, step))


def check_tags(tier: str, catalog: Catalog) -> Iterator[Finding]:
    """A tagged step can be produced, from all tiers, on the line or on its branch (INV-40)."""
    for tag in catalog.tags:
        try:
            plan = Prover(catalog, line_of(catalog, tag.term)).prove(tag.step)
        except AdaCheckError as error:
            plan = error.message
        if isinstance(plan, str):
            yield finding("tag", f"tag {tag.name}: {plan}", tier=tier,
                          key=f"{catalog.run}/log/{tag.index:012d}")  # fmt: skip


def check_holes(tier: str, alone: Catalog, bad: set[str]) -> Iterator[Finding]:
    """Steps missing between those a tier holds, above its floors, and a term's first base."""
    for kind, table in (("delta", alone.deltas), ("extra", alone.extras)):
        for place, refs in sorted(table.items()):
            floor = _floor_of(alone.floors.get(tier, ()), place[0])
            steps = {ref.step for ref in refs if ref.step >= floor}
            alone_there = _by_themselves(alone, place[0], steps) if kind == "extra" else set()
            end = max(steps - alone_there, default=-1)
            first = max(floor, _first(alone, place[0]) + 1)
            declared = _gaps(alone, place[0])
            prefix = f"{alone.run}/{place[0]}/{place[1]}/{kind}/"
            named = {int(key[len(prefix) :][:12]) for key in bad if key.startswith(prefix)}
            for low, high in _missing(first, end, steps, declared):
                if sum(low <= step <= high for step in named) < high - low + 1:
                    which = f"{low}..{high}" if high > low else str(low)
                    yield finding("hole", f"no {kind} of steps {which} of {place[1]}", tier=tier,
                                  key=f"{prefix}{low:012d}", span=(low, high))  # fmt: skip
    yield from _first_bases(tier, alone)


def _by_themselves(alone: Catalog, term: str, steps: set[int]) -> set[int]:
    """Steps with a base, and nothing right before: tags may have put them there, ahead of what is
    yet to be drained."""
    based = {ref.step for (of, _), refs in alone.bases.items() if of == term for ref in refs}
    return {step for step in steps & based if step - 1 not in steps}


def _missing(first: int, end: int, steps: set[int], declared: Gaps) -> Iterator[tuple[int, int]]:
    """Ranges from ``first`` to ``end`` that are neither among ``steps`` nor in a gap."""
    held = [*((step, step) for step in steps), *declared.spans]
    for low, high in Gaps(held).spans:
        if first < low <= end:
            yield first, low - 1
        first = max(first, high + 1)


def _first_bases(tier: str, alone: Catalog) -> Iterator[Finding]:
    """A term without parent begins with a base, and a floor's step has one of each part."""
    origins = {m.term: m for m in sorted(alone.manifests.values(), key=lambda m: -m.step)}
    for (term, part), refs in sorted(alone.deltas.items()):
        origin = origins.get(term) if refs else None
        floor = _floor_of(alone.floors.get(tier, ()), term)
        if origin is None or origin.parent_term or floor > origin.step:
            continue
        if not any(ref.step == origin.step for ref in alone.bases.get((term, part), ())):
            yield finding(
                "base-missing", f"the base of step {origin.step}, with which the term begins, "
                f"is missing", tier=tier, key=f"{alone.run}/{term}/{part}/base/{origin.step:012d}",
                run=alone.run,
            )  # fmt: skip


def _floor_of(floors: Iterable[Floor], term: str) -> int:
    return max((floor.step for floor in floors if term in floor.terms), default=0)


def _first(catalog: Catalog, term: str) -> int:
    return min((m.step for m in catalog.manifests.values() if m.term == term), default=0)


def _gaps(catalog: Catalog, term: str) -> Gaps:
    """Steps that any part of a term declares unprovable."""
    places = {place for place in (*catalog.bases, *catalog.gap_spans) if place[0] == term}
    return Gaps(span for place in places for span in catalog.gaps(place).spans)


def check_steps(catalog: Catalog, tiers: Sequence[Tier]) -> Iterator[Finding | Provable]:
    """Which steps of the line are provable from all tiers, and why others are not."""
    prover = line_prover(catalog)
    if prover is None:
        return
    reasons: dict[int, str] = {}
    good: list[int] = []
    apart: set[int] = set()
    for step in reversed(prover.seen_steps()):
        plan = offered(tiers, prover, step)
        if isinstance(plan, RestorePlan):
            good.append(step)
            continue
        reasons[step] = plan
        if isinstance(prover.prove(step), RestorePlan):
            apart.add(step)
    newest = max(good, default=None)
    gaps = {segment.term: _gaps(catalog, segment.term) for segment in prover.line}
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)  # by term: each has its reasons
    for step in reasons:
        segment = prover.segment_of(step)
        term = segment.term if segment is not None else ""
        if segment is not None and (
            _superseded(catalog, segment, step) or _of_another(catalog, segment, step)
        ):
            continue
        if step in apart:
            groups["parted", term].append(step)
        elif segment is not None and step in gaps[segment.term]:
            groups["declared-gap", term].append(step)
        else:
            after = newest is not None and step > newest
            groups["tail" if after else "gap", term].append(step)
    for (kind, _), steps in groups.items():
        for low, high in spans(steps):
            what = f"steps {low}..{high}" if high > low else f"step {low}"
            verb = "is passed over" if kind == "parted" else "cannot be proven"
            yield finding(kind, f"{what} of the line {verb}: {reasons[low]}",
                          run=catalog.run, span=(low, high))  # fmt: skip
    yield provable(catalog.run, "all", good)
    yield from _branches(catalog, {segment.term for segment in prover.line})


def _of_another(catalog: Catalog, segment: Segment, step: int) -> bool:
    """Whether a floor keeps a step of another branch, of which this one has at most extras.

    What is kept is told by number, so they stay too. Were this one's own step lost altogether, it
    could not be told from that.
    """
    keeping = [
        floor for found in catalog.floors.values() for floor in found
        if step in floor.kept and segment.term in floor.terms
    ]  # fmt: skip
    if not keeping:  # nearly always, and what follows looks through all records
        return False
    own = (*catalog.bases.items(), *catalog.deltas.items())
    if any(ref.step == step for (term, _), refs in own if term == segment.term for ref in refs):
        return False
    others = {
        term for (term, _), refs in catalog.bases.items()
        if term != segment.term and any(ref.step == step for ref in refs)
    }  # fmt: skip
    return any(not others.isdisjoint(floor.terms) for floor in keeping)


def _superseded(catalog: Catalog, segment: Segment, step: int) -> bool:
    """Whether a step of several ranks is one that some of them may have deleted already.

    They prune their near tiers one by one, each up to the object tier's floor.
    """
    floors = [floor for found in catalog.floors.values() for floor in found]
    return len(segment.manifest.parts) > 1 and step < _floor_of(floors, segment.term)


def _branches(catalog: Catalog, line: set[str]) -> Iterator[Finding]:
    """Terms off the line: which of their steps cannot be proven along their branch."""
    for term in sorted({m.term for m in catalog.manifests.values()} - line):
        try:
            prover = Prover(catalog, line_of(catalog, term))
        except AdaCheckError:
            continue
        segment = prover.line[-1]
        steps = [step for step in prover.seen_steps() if segment.covers(step)]
        lost = [s for s in steps if s > segment.first and isinstance(prover.prove(s), str)]
        if lost:
            yield finding("unreachable", f"steps {ranges(lost)} of branch {term} cannot be proven",
                          run=catalog.run)  # fmt: skip


def provable(run: str, tier: str, steps: Iterable[int]) -> Provable:
    """The row of provable steps."""
    known = sorted(steps)
    return Provable(
        run=run, tier=tier, steps=ranges(known), newest=known[-1] if known else None,
        count=len(known),
    )  # fmt: skip


def provable_alone(
    run: str, alone: Mapping[str, Catalog], tiers: Sequence[Tier]
) -> Iterator[Provable]:
    """Which steps each tier proves by itself."""
    for name, catalog in alone.items():
        prover = line_prover(catalog)
        own = [tier for tier in tiers if tier.traits.name == name]
        steps = prover.provable_steps() if prover else []
        good = [s for s in steps if prover and isinstance(offered(own, prover, s), RestorePlan)]
        yield provable(run, name, good)


def check_drift(catalog: Catalog) -> Iterator[Finding]:
    """In class ``bounded`` a captured base comes at least every 256 steps (INV-39)."""
    for spine in spines(catalog):
        refs = [ref for found in spine.bases.values() for ref in found]
        if not any(ref.exactness == "bounded" for ref in refs):
            continue
        marks = sorted(ref.step for ref in refs if ref.origin == "captured")
        ends = [*marks[1:], max(spine.deltas, default=0)]
        for start, stop in zip(marks, ends, strict=False):
            if stop - start > _BOUNDED_STEPS_MAX:
                yield finding("drift", f"{stop - start} steps after the captured base of step "
                              f"{start}", run=catalog.run)  # fmt: skip
