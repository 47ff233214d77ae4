"""Planning a restore: a pure function from a catalog to the newest step it can prove.

The line is the newest term that has a manifest, with its ancestors up to their fork steps. A step
of it is provable if every part (see `proof`) and every extra is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from adacheck_store.format.errors import ChainBrokenError, NotProvableError, RestoreError
from adacheck_store.format.manifest import Manifest

from .catalog import Catalog, Gaps, RecordRef
from .deaths import Ceiling
from .proof import Origin, Proof, Segment, by_step, prove_line, sole


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """What to fold for a part; ``link`` is its link id at the step.

    ``origin`` is the plan of the fork step from which a derived base gets its bytes; it is one
    object for all parts that begin there. ``ways`` give the same to who is elsewhere (`nearness`).
    """

    part: str
    layout: str
    base: RecordRef
    deltas: tuple[RecordRef, ...]
    link: str
    origin: RestorePlan | None = None
    ways: Mapping[str, PartPlan] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The step that it gives."""
        return self.deltas[-1].step if self.deltas else self.base.step


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """A provable step and the records that produce it.

    ``extras`` maps each rank to its extra, and the earlier ones it refers to. ``newest`` is the
    newest step of which anything was seen on the line; ``reasons`` say why newer steps than
    ``step`` were not taken. ``passed_over`` is that of these which is a `deaths.Ceiling`, if any.
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
    passed_over: str = ""

    @property
    def levels(self) -> list[list[RestorePlan]]:
        """This plan, those of the forks whose bytes it needs, those that these need, and so on."""
        found: list[list[RestorePlan]] = [[self]]
        while found[-1]:
            below = {id(p.origin): p.origin for plan in found[-1] for p in plan.parts if p.origin}
            found.append(list(below.values()))
        return found[:-1]

    @property
    def records(self) -> list[RecordRef]:
        """All bases and deltas that are read, by any rank."""
        parts = [part for level in self.levels for plan in level for part in plan.parts]
        ways = (way for part in parts for way in (part, *part.ways.values()))
        return [ref for way in ways for ref in (way.base, *way.deltas)]


def line_of(catalog: Catalog, term: str = "") -> tuple[Segment, ...]:
    """The line, oldest term first; the branch that ends in ``term`` if given.

    Raises `RestoreError` for a run without manifest, `ChainBrokenError` if an ancestor's is gone.
    """
    if catalog.empty:
        raise RestoreError(
            "nothing of this run is in the store", run=catalog.run,
            hint="check the store's URL and the run's name",
        )  # fmt: skip
    segments, missing = _walk(catalog, term or max(m.term for m in catalog.manifests.values()))
    if missing and not segments:
        raise RestoreError("no such term", run=catalog.run, term=term, hint="list them with log")
    if missing:
        raise ChainBrokenError(
            "the manifest of an ancestor term is missing", run=catalog.run, term=missing,
            hint="restore a newer base by naming its term, or bring the missing tier back",
        )  # fmt: skip
    return segments


def tolerant_line(catalog: Catalog, term: str = "") -> tuple[Segment, ...]:
    """The line as far back as manifests reach: an ancestor that is gone ends it."""
    if not catalog.empty:
        segments = _walk(catalog, term or max(m.term for m in catalog.manifests.values()))[0]
        if segments:
            return segments
    return line_of(catalog, term)


def _walk(catalog: Catalog, term: str) -> tuple[tuple[Segment, ...], str]:
    """Segments from a term back to the root, oldest first; and the term that was not found."""
    by_term: dict[str, list[tuple[str, Manifest]]] = defaultdict(list)
    for identity, manifest in catalog.manifests.items():
        by_term[manifest.term].append((identity, manifest))
    segments: list[Segment] = []
    last: int | None = None
    while term:
        if term not in by_term or any(segment.term == term for segment in segments):
            return tuple(reversed(segments)), term
        revisions = tuple(sorted(by_term[term], key=lambda item: (item[1].step, item[0])))
        identity, manifest = revisions[-1]
        origin = revisions[0][1]
        segments.append(
            Segment(term=term, manifest_id=identity, manifest=manifest, first=origin.step,
                    last=last, revisions=revisions)
        )  # fmt: skip
        term, last = origin.parent_term, origin.fork_step
    return tuple(reversed(segments)), ""


def doubt(line: Sequence[Segment], step: int) -> str:
    """See `Prover.doubt`."""
    for segment in line:
        for _, manifest in segment.revisions if segment.covers(step) else ():
            found = manifest.redundancy
            if found is not None and found.agreed < step < manifest.step:
                return (
                    f"step {step}: copies on several ranks were equal at step {found.agreed}, "
                    f"and no longer at step {manifest.step}; one of them was kept"
                )
    return ""


class Prover:
    """Proofs of all parts along a line, computed once; answers for any step."""

    def __init__(self, catalog: Catalog, line: Sequence[Segment]) -> None:
        self.catalog = catalog
        self.line = tuple(line)
        parts = {
            entry.name
            for segment in self.line
            for _, manifest in segment.revisions
            for entry in manifest.parts
        }
        self.parts = prove_line(catalog, self.line, sorted(parts))
        self._extras = {place: by_step(refs) for place, refs in catalog.extras.items()}
        self._shared = any(
            manifest.redundancy is not None
            for segment in self.line for _, manifest in segment.revisions
        )  # fmt: skip
        self._held: dict[tuple[str, str], tuple[set[int], Gaps]] = {}
        self._origins: dict[str, tuple[Origin, RestorePlan | str]] = {}

    def segment_of(self, step: int) -> Segment | None:
        """The term a step belongs to; a fork step belongs to the parent."""
        return next((segment for segment in self.line if segment.covers(step)), None)

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
        """A plan for the step, or why there is none.

        A fork step is the parent's; where the parent's records do not give it, what the child
        put down when it opened may.
        """
        why = ""
        for segment in self.line:
            if segment.covers(step):
                chosen = self._choose(segment, step)
                if not isinstance(chosen, str):
                    return self._plan(segment, step, *chosen)
                why = why or f"step {step}: {chosen}"
        return why or f"step {step} lies before the line begins"

    def doubt(self, step: int) -> str:
        """Why a step is offered only where it is asked for; empty if it is no worse than others.

        From copies that have come apart one was kept until that was found.
        """
        return doubt(self.line, step)

    def provable_steps(self) -> list[int]:
        """All provable steps of the line, oldest first."""
        return [
            step for step in reversed(self.seen_steps())
            if any(
                not isinstance(self._choose(segment, step), str)
                for segment in self.line if segment.covers(step)
            )
        ]  # fmt: skip

    def _choose(
        self, segment: Segment, step: int
    ) -> tuple[dict[str, Proof], dict[str, tuple[RecordRef, ...]]] | str:
        """A proof for each part and the extras of each rank within a term, or why not."""
        manifest = segment.revision(step)[1]
        proofs: dict[str, Proof] = {}
        for entry in manifest.parts:
            layout = entry.layout if self._shared else ""
            found = self._proof(segment, entry.name, step, layout)
            if isinstance(found, str):
                return f"part {entry.name} {found}"
            proofs[entry.name] = found
        extras: dict[str, tuple[RecordRef, ...]] = {}
        for rank in manifest.ranks:
            refs = self._extra(segment, rank, step)
            if isinstance(refs, str):
                return f"the extra of rank {rank} {refs}"
            extras[rank] = refs
        return proofs, extras

    def _proof(self, segment: Segment, part: str, step: int, layout: str) -> Proof | str:
        """A proof of a part at a step, of records with that layout; empty: with any.

        Where parts make each other up, one that did not follow the others would leave out, or keep
        otherwise, what they rely on.
        """
        proofs = self.parts[part].get(segment.term, {}).get(step, {})
        if not proofs:
            return self._why(segment, part, step)
        if not sole(proofs, segment):
            return "has two records of different ids for this step"
        why = ""
        for proof in sorted(proofs.values(), key=lambda p: (p.length, p.link)):
            why = self.flaw(proof, layout)
            if not why:
                return proof
        return why

    def flaw(self, proof: Proof, layout: str = "") -> str:
        """Why what is proven cannot be read; empty if it can."""
        last = proof.base if proof.delta is None else proof.delta
        if last is None or last.manifest not in self.catalog.manifests:
            return "was written under a manifest revision that is missing"
        if layout not in ("", proof.layout):
            return "holds other tensors than the manifest says"
        if proof.layout not in self.catalog.layouts:
            return f"has layout {proof.layout[:16]}, which is missing"
        plan = None if proof.origin is None else self._plan_of(proof.origin)
        return plan if isinstance(plan, str) else ""

    def _plan_of(self, origin: Origin) -> RestorePlan | str:
        """The plan of the fork step that derived bases stand on, or why there is none."""
        parent = origin.parent
        known = self._origins.get(parent.term)
        if known is not None and known[0] is origin:
            return known[1]
        found: RestorePlan | str
        for part, proof in origin.proofs.items():
            if why := self.flaw(proof):
                found = f"begins with term {parent.term}'s step {origin.step}: part {part} {why}"
                break
        else:
            identity, manifest = parent.revision(origin.step)
            found = RestorePlan(
                run=self.catalog.run, term=parent.term, step=origin.step, manifest=manifest,
                manifest_id=identity, parts=self.part_plans(origin.proofs), extras={},
                newest=origin.step,
            )  # fmt: skip
        self._origins[parent.term] = (origin, found)
        return found

    def _extra(self, segment: Segment, rank: str, step: int) -> tuple[RecordRef, ...] | str:
        """A rank's extra at a step, and the earlier extras it refers to."""
        by_step = self._extras.get((segment.term, rank), {})
        found: list[RecordRef] = []
        wanted = [step]
        for at in wanted:
            here = by_step.get(at, [])
            where = "" if at == step else f"refers to that of step {at}, which "
            if not here:
                return f"{where}is missing"
            if len({ref.id for ref in here}) > 1:
                return f"{where}has two ids"
            found.append(here[0])
            if at == step:
                wanted.extend(earlier for earlier in here[0].refs if earlier != step)
        return tuple(found)

    def _plan(
        self, segment: Segment, step: int, proofs: Mapping[str, Proof],
        extras: Mapping[str, tuple[RecordRef, ...]],
    ) -> RestorePlan:  # fmt: skip
        identity, manifest = segment.revision(step)
        return RestorePlan(
            run=self.catalog.run, term=segment.term, step=step, manifest=manifest,
            manifest_id=identity, parts=self.part_plans(proofs), extras=extras, newest=step,
        )  # fmt: skip

    def part_plans(self, proofs: Mapping[str, Proof]) -> tuple[PartPlan, ...]:
        """What to fold for each part; of all that `flaw` has found nothing wrong with."""
        plans = []
        for part, proof in proofs.items():
            base, deltas = proof.records()
            origin = None if proof.origin is None else self._plan_of(proof.origin)
            assert not isinstance(origin, str)
            plans.append(
                PartPlan(part=part, layout=proof.layout, base=base, deltas=deltas, link=proof.link,
                         origin=origin)
            )  # fmt: skip
        return tuple(plans)

    def _why(self, segment: Segment, part: str, step: int) -> str:
        place = (segment.term, part)
        if place not in self._held:
            bases = self.catalog.bases.get(place, ())
            held = {ref.step for ref in (*bases, *self.catalog.deltas.get(place, ()))}
            self._held[place] = held, self.catalog.gaps(place, segment.last)
        held, blocked = self._held[place]
        if step in blocked:
            return "is unprovable here (a gap, re-based later)"
        if step not in held:
            return "has no delta and no base"
        if place in self.catalog.derived:
            return (
                f"begins with what all parts of term {segment.manifest.parent_term} had at step "
                f"{segment.first}, which cannot be proven"
            )
        return "has a delta, but no base that its chain reaches, or that still serves"


def plan_restore(
    catalog: Catalog, step: int | None = None, term: str = "", ceiling: Ceiling | None = None,
    refused: Mapping[int, str] | None = None,
) -> RestorePlan:  # fmt: skip
    """The newest provable step of the line that is not above ``ceiling``, or the step asked for.

    Where all that is provable is above the ceiling it is the oldest of that. ``refused`` are steps
    that are not to be taken, with the reason. Raises `RestoreError`
    for a run without history, `NotProvableError` naming the reasons and, for a step asked for, the
    nearest steps that are provable.
    """
    line = tolerant_line(catalog, term)
    prover = Prover(catalog, line)
    seen = prover.seen_steps()
    newest = seen[0] if seen else line[-1].first
    if step is not None:
        plan = (refused or {}).get(step) or prover.prove(step)
        if isinstance(plan, str):
            raise _refusal(catalog, prover, step, plan)
        return replace(plan, newest=newest)
    over = str(ceiling) if ceiling is not None and newest > ceiling.step else ""
    reasons: list[str] = [over] if over else []
    for candidate in seen:
        if ceiling is not None and candidate > ceiling.step:
            continue
        doubt = (refused or {}).get(candidate) or prover.doubt(candidate)
        plan = doubt or prover.prove(candidate)
        if isinstance(plan, RestorePlan):
            return replace(plan, newest=newest, reasons=tuple(reasons), passed_over=over)
        reasons.append(plan)
    steps = [s for s in prover.provable_steps() if s not in (refused or {})] if ceiling else []
    if ceiling is not None and steps:
        return _oldest(prover, ceiling, steps, newest)
    summary = "; ".join(reasons[:5]) or "no base and no delta"
    if line[0].manifest.parent_term:
        summary += f"; the manifest of the term before, {line[0].manifest.parent_term}, is missing"
    raise NotProvableError(
        f"no step of the line can be proven: {summary}", run=catalog.run, term=line[-1].term,
        hint="fsck names the damage; older branches are reached by naming their term",
    )  # fmt: skip


def _oldest(prover: Prover, ceiling: Ceiling, steps: Sequence[int], newest: int) -> RestorePlan:
    """The oldest provable step where nothing provable is as old as the ceiling asks for."""
    plan = prover.prove(steps[0])
    assert isinstance(plan, RestorePlan)
    over = (
        f"{ceiling.why}, and none that is old enough to be tried now can be proven: this begins at "
        f"the oldest that can, {steps[0]} (newest: {steps[-1]}); find out why attempts die"
    )
    return replace(plan, newest=newest, reasons=(over,), passed_over=over)


def _refusal(catalog: Catalog, prover: Prover, step: int, why: str) -> NotProvableError:
    steps = prover.provable_steps()
    below, above = [s for s in steps if s < step], [s for s in steps if s > step]
    found = below[-1:] + above[:1] if below and above else below[-2:] + above[:2]
    near = " and ".join(map(str, found)) or "none"
    return NotProvableError(why, run=catalog.run, step=step, hint=f"nearest provable steps: {near}")
