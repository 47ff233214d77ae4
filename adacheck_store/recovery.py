"""Planning a restore: a pure function from a catalog to the newest step it can prove.

The line is the newest term that has a manifest, with its ancestors up to their fork steps.
Along the line every part is proven step by step from its bases: a base at s proves s, and a
delta proves s+1 from a proven s whose link (the id a base of s has as parent) is its parent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from adacheck_store.format.errors import ChainBrokenError, NotProvableError, RestoreError
from adacheck_store.format.manifest import Manifest

from .catalog import Catalog, RecordRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A term's stretch of the line: steps ``first`` .. ``last`` (None: open end)."""

    term: str
    manifest_id: str
    manifest: Manifest
    first: int
    last: int | None

    def covers(self, step: int) -> bool:
        """True if the step belongs to this term."""
        return self.first <= step and (self.last is None or step <= self.last)


@dataclass(frozen=True, slots=True)
class Proof:
    """How a part's state at a step is produced: a base, or a proof one step before and a delta."""

    link: str
    base: RecordRef | None = None
    delta: RecordRef | None = None
    prior: Proof | None = None
    length: int = 0

    def records(self) -> tuple[RecordRef, tuple[RecordRef, ...]]:
        """The base, and the deltas to fold into it in order."""
        deltas: list[RecordRef] = []
        proof: Proof = self
        while proof.prior is not None:
            assert proof.delta is not None
            deltas.append(proof.delta)
            proof = proof.prior
        assert proof.base is not None
        return proof.base, tuple(reversed(deltas))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """What to fold for a part; ``link`` is its link id at the step."""

    part: str
    layout: str
    base: RecordRef
    deltas: tuple[RecordRef, ...]
    link: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """A provable step and the records that produce it.

    ``extras`` maps each rank to its extra, and the earlier ones it refers to. ``newest`` is the
    newest step of which anything was seen on the line; ``reasons`` say why newer steps than
    ``step`` cannot be proven.
    """

    run: str
    term: str
    step: int
    manifest: Manifest
    manifest_id: str
    parts: tuple[PartPlan, ...]
    extras: Mapping[str, tuple[RecordRef, ...]]
    newest: int
    reasons: tuple[str, ...] = ()


def line_of(catalog: Catalog, term: str = "") -> tuple[Segment, ...]:
    """The line, oldest term first; the branch that ends in ``term`` if given.

    Raises `RestoreError` for a run without manifest, `ChainBrokenError` if an ancestor's
    manifest is nowhere to be found.
    """
    if catalog.empty:
        raise RestoreError(
            "nothing of this run is in the store", run=catalog.run,
            hint="check the store's URL and the run's name",
        )  # fmt: skip
    by_term: dict[str, list[tuple[str, Manifest]]] = defaultdict(list)
    for identity, manifest in catalog.manifests.items():
        by_term[manifest.term].append((identity, manifest))
    at = term or max(by_term)
    if at not in by_term:
        raise RestoreError("no such term", run=catalog.run, term=at, hint="list them with log")
    segments: list[Segment] = []
    last: int | None = None
    while at:
        if at not in by_term or any(segment.term == at for segment in segments):
            raise ChainBrokenError(
                "the manifest of an ancestor term is missing", run=catalog.run, term=at,
                hint="restore a newer base by naming its term, or bring the missing tier back",
            )  # fmt: skip
        identity, manifest = max(by_term[at], key=lambda item: item[1].step)
        first = min(m.step for _, m in by_term[at])
        segments.append(
            Segment(term=at, manifest_id=identity, manifest=manifest, first=first, last=last)
        )
        origin = min((m for _, m in by_term[at]), key=lambda m: m.step)
        at, last = origin.parent_term, origin.fork_step
    return tuple(reversed(segments))


def tolerant_line(catalog: Catalog) -> tuple[Segment, ...]:
    """The line as far back as manifests reach: an ancestor that is gone ends it."""
    try:
        return line_of(catalog)
    except ChainBrokenError as error:
        lost = str(error.place.get("term", ""))
    segments: list[Segment] = []
    at, last = max(m.term for m in catalog.manifests.values()), None
    while at and at != lost:
        found = [(i, m) for i, m in catalog.manifests.items() if m.term == at]
        identity, manifest = max(found, key=lambda item: item[1].step)
        origin = min((m for _, m in found), key=lambda m: m.step)
        segments.append(
            Segment(term=at, manifest_id=identity, manifest=manifest, first=origin.step, last=last)
        )
        at, last = origin.parent_term, origin.fork_step
    return tuple(reversed(segments))


def _manifest_ids(catalog: Catalog, term: str) -> set[str]:
    return {identity for identity, m in catalog.manifests.items() if m.term == term}


def _unprovable(bases: Sequence[RecordRef]) -> set[int]:
    """Steps through which nothing may be folded: from a gap's first to its base's."""
    steps: set[int] = set()
    for base in bases:
        if base.gap is not None and type(base.gap.get("from")) is int:
            steps.update(range(base.gap["from"], base.step + 1))
    return steps


def prove_part(catalog: Catalog, line: Sequence[Segment], part: str) -> dict[int, dict[str, Proof]]:
    """Every provable step of a part along the line: step -> link -> proof."""
    proven: dict[int, dict[str, Proof]] = {}
    for segment in line:
        place = (segment.term, part)
        bases: dict[int, list[RecordRef]] = defaultdict(list)
        deltas: dict[int, list[RecordRef]] = defaultdict(list)
        for ref in catalog.bases.get(place, ()):
            bases[ref.step].append(ref)
        for ref in catalog.deltas.get(place, ()):
            deltas[ref.step].append(ref)
        blocked = _unprovable(catalog.bases.get(place, ()))
        steps = sorted(s for s in {*bases, *deltas} if segment.covers(s))
        inherited = _inherited(catalog, segment, proven, part)
        for step in steps:
            before = proven.get(step - 1, {})
            if step - 1 == segment.first:
                before = {**before, **inherited}
            here: dict[str, Proof] = {}
            for ref in deltas[step]:
                prior = before.get(ref.parent)
                if prior is not None and step not in blocked:
                    here[ref.id] = Proof(ref.id, delta=ref, prior=prior, length=prior.length + 1)
            for ref in sorted(bases[step], key=_base_preference):
                here[ref.parent] = Proof(ref.parent, base=ref)
            if here and step == segment.first and segment.manifest.parent_term:
                proven.setdefault(step, {}).update(here)
            elif here:
                proven[step] = here
    return proven


def _base_preference(ref: RecordRef) -> tuple[bool, int, str]:
    """Later is better: captured over replayed, then more holders, then any fixed order."""
    return (ref.origin == "captured", len(ref.tiers), ref.key)


def _inherited(
    catalog: Catalog, segment: Segment, proven: Mapping[int, Mapping[str, Proof]], part: str
) -> dict[str, Proof]:
    """The parent's state at the fork step, under the links that this term's first delta names."""
    tip = segment.manifest.tips.get(part, "")
    proof = proven.get(segment.first, {}).get(tip)
    if proof is None or not segment.manifest.parent_term:
        return {}
    return dict.fromkeys(_manifest_ids(catalog, segment.term), proof)


def _prove_extra(
    catalog: Catalog, segment: Segment, rank: str, step: int
) -> tuple[RecordRef, ...] | None:
    """A rank's extra at a step with the earlier extras it refers to."""
    refs = catalog.extras.get((segment.term, rank), ())
    here = [ref for ref in refs if ref.step == step]
    if len({ref.id for ref in here}) != 1:
        return None
    found = [here[0]]
    for earlier in here[0].refs:
        match = [ref for ref in refs if ref.step == earlier]
        if len({ref.id for ref in match}) != 1:
            return None
        found.append(match[0])
    return tuple(found)


class Prover:
    """Proofs of all parts along a line, computed once; answers for any step."""

    def __init__(self, catalog: Catalog, line: Sequence[Segment]) -> None:
        self.catalog = catalog
        self.line = tuple(line)
        parts = {entry.name for segment in self.line for entry in segment.manifest.parts}
        self.parts = {part: prove_part(catalog, self.line, part) for part in sorted(parts)}

    def segment_of(self, step: int) -> Segment | None:
        """The term a step belongs to; a fork step belongs to the parent."""
        for segment in self.line:
            if segment.covers(step):
                return segment
        return None

    def seen_steps(self) -> list[int]:
        """Every step of which the line has any record, newest first."""
        steps: set[int] = set()
        for segment in self.line:
            for table in (self.catalog.bases, self.catalog.deltas, self.catalog.extras):
                for (term, _), refs in table.items():
                    if term == segment.term:
                        steps.update(ref.step for ref in refs if segment.covers(ref.step))
        return sorted(steps, reverse=True)

    def prove(self, step: int) -> RestorePlan | str:
        """A plan for the step, or why there is none."""
        segment = self.segment_of(step)
        if segment is None:
            return f"step {step} lies before the line begins"
        plans: list[PartPlan] = []
        for entry in segment.manifest.parts:
            proofs = self.parts[entry.name].get(step, {})
            if not proofs:
                return f"step {step}: {self._why(segment, entry.name, step)}"
            if len(proofs) > 1 and len({p.link for p in proofs.values() if p.delta}) > 1:
                return f"step {step}: part {entry.name} has two deltas of different ids"
            proof = min(proofs.values(), key=lambda p: (p.length, p.link))
            base, deltas = proof.records()
            if base.layout not in self.catalog.layouts:
                return f"step {step}: the layout of part {entry.name} is missing"
            plans.append(
                PartPlan(part=entry.name, layout=base.layout, base=base, deltas=deltas,
                         link=proof.link)
            )  # fmt: skip
        extras: dict[str, tuple[RecordRef, ...]] = {}
        for rank in segment.manifest.ranks:
            found = _prove_extra(self.catalog, segment, rank, step)
            if found is None:
                return f"step {step}: the extra of rank {rank} is missing"
            extras[rank] = found
        return RestorePlan(
            run=self.catalog.run, term=segment.term, step=step, manifest=segment.manifest,
            manifest_id=segment.manifest_id, parts=tuple(plans), extras=extras, newest=step,
        )  # fmt: skip

    def _why(self, segment: Segment, part: str, step: int) -> str:
        deltas = self.catalog.deltas.get((segment.term, part), ())
        bases = self.catalog.bases.get((segment.term, part), ())
        if step in _unprovable(bases):
            return f"part {part} is unprovable here (a gap, re-based later)"
        if not any(ref.step == step for ref in (*deltas, *bases)):
            return f"part {part} has no delta and no base"
        return f"part {part} has a delta, but no base that its chain reaches"

    def provable_steps(self) -> list[int]:
        """All provable steps of the line, oldest first."""
        return [s for s in reversed(self.seen_steps()) if isinstance(self.prove(s), RestorePlan)]


def plan_restore(catalog: Catalog, step: int | None = None, term: str = "") -> RestorePlan:
    """The newest provable step of the line, or the step asked for.

    Raises `RestoreError` for a run without history, `NotProvableError` naming the reasons and,
    for a step asked for, the nearest steps that are provable.
    """
    line = line_of(catalog, term) if term else tolerant_line(_nonempty(catalog))
    prover = Prover(catalog, line)
    seen = prover.seen_steps()
    newest = seen[0] if seen else line[-1].first
    if step is not None:
        plan = prover.prove(step)
        if isinstance(plan, str):
            raise _refusal(catalog, prover, step, plan)
        return _with_newest(plan, newest, ())
    reasons: list[str] = []
    for candidate in seen:
        plan = prover.prove(candidate)
        if isinstance(plan, RestorePlan):
            return _with_newest(plan, newest, tuple(reasons))
        reasons.append(plan)
    summary = "; ".join(reasons[:5]) or "no base and no delta"
    raise NotProvableError(
        f"no step of the line can be proven: {summary}", run=catalog.run, term=line[-1].term,
        hint="fsck names the damage; older branches are reached by naming their term",
    )  # fmt: skip


def _nonempty(catalog: Catalog) -> Catalog:
    if catalog.empty:
        line_of(catalog)
    return catalog


def _with_newest(plan: RestorePlan, newest: int, reasons: tuple[str, ...]) -> RestorePlan:
    return replace(plan, newest=newest, reasons=reasons)


def _refusal(catalog: Catalog, prover: Prover, step: int, why: str) -> NotProvableError:
    steps = prover.provable_steps()
    below = [s for s in steps if s < step][-1:]
    above = [s for s in steps if s > step][:1]
    near = " and ".join(str(s) for s in (*below, *above)) or "none"
    return NotProvableError(why, run=catalog.run, step=step, hint=f"nearest provable steps: {near}")
