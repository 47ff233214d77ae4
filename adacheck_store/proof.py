"""Proof: which steps of a part its records can produce, along the line. The chain rules as code.

Step by step from its bases: a base at s proves s, and a delta proves s+1 from a proven s whose
link (the id a base of s has as parent) is its parent. What a term of another topology begins with
is proven by the fork state of all parts of its parent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from adacheck_store.format.bodies import BOUNDED_STEPS
from adacheck_store.format.keys import MAX_STEP
from adacheck_store.format.manifest import Manifest

from .catalog import Catalog, Gaps, RecordRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A term's stretch of the line: steps ``first`` .. ``last`` (None: open end).

    ``manifest`` is the newest revision; ``revisions`` are all that were found, oldest first.
    """

    term: str
    manifest_id: str
    manifest: Manifest
    first: int
    last: int | None
    revisions: tuple[tuple[str, Manifest], ...] = ()

    def covers(self, step: int) -> bool:
        """True if the step belongs to this term (a fork step to both, the parent first)."""
        return self.first <= step and (self.last is None or step <= self.last)

    def revision(self, step: int) -> tuple[str, Manifest]:
        """The revision in force at a step: the newest that begins at or before it."""
        found = (self.manifest_id, self.manifest)
        for identity, manifest in reversed(self.revisions):
            found = (identity, manifest)
            if manifest.step <= step:
                break
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """What derived bases of a term stand on: proofs of all parts of ``parent`` at the fork step."""

    parent: Segment
    step: int
    proofs: Mapping[str, Proof]


@dataclass(frozen=True, slots=True)
class Proof:
    """How a part's state at a step is produced: a base, or a proof one step before and a delta.

    ``last`` is the last step that may be proven from it: drift accumulates from base to base.
    Where that base is a derived one ``origin`` gives its bytes.
    """

    link: str
    layout: str
    base: RecordRef | None = None
    delta: RecordRef | None = None
    prior: Proof | None = None
    length: int = 0
    last: int = MAX_STEP
    origin: Origin | None = None

    def root(self) -> RecordRef:
        """The base that it goes back to."""
        proof: Proof = self
        while proof.prior is not None:
            proof = proof.prior
        assert proof.base is not None
        return proof.base

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


Proofs = dict[int, dict[str, Proof]]
"""Step -> link -> proof: what is provable of a part within one term."""


def by_step(refs: Sequence[RecordRef]) -> dict[int, list[RecordRef]]:
    """References by their steps."""
    found: dict[int, list[RecordRef]] = defaultdict(list)
    for ref in refs:
        found[ref.step].append(ref)
    return found


def prove_part(catalog: Catalog, line: Sequence[Segment], part: str) -> dict[str, Proofs]:
    """Every provable step of a part along the line, by term, by what is known of it alone."""
    return prove_line(catalog, line, [part])[part]


def prove_line(
    catalog: Catalog, line: Sequence[Segment], parts: Iterable[str]
) -> dict[str, dict[str, Proofs]]:
    """Every provable step of some parts along the line: part -> term -> proofs."""
    proven: dict[str, dict[str, Proofs]] = {part: {} for part in parts}
    before: dict[str, Proofs] = {part: {} for part in proven}
    parent: Segment | None = None
    for segment in line:
        origin = _origin(segment, parent, before)
        for part, by_term in proven.items():
            begun = opening(segment, before[part], part)
            if origin is not None:
                begun.setdefault(segment.first, {}).update(_derived(catalog, segment, part, origin))
            by_term[segment.term] = _prove_segment(catalog, segment, part, begun)
        before = {part: by_term[segment.term] for part, by_term in proven.items()}
        parent = segment
    return proven


def _origin(
    segment: Segment, parent: Segment | None, before: Mapping[str, Proofs]
) -> Origin | None:  # fmt: skip
    """The fork state of a term's parent, as the tips name it; None where it is not proven whole."""
    manifest, found = segment.manifest, dict[str, Proof]()
    if parent is None or parent.term != manifest.parent_term:
        return None
    for part, tip in manifest.tips.items():
        proof = before.get(part, {}).get(segment.first, {}).get(tip)
        if proof is None:
            return None
        found[part] = proof
    forks_here = manifest.fork_step == segment.first
    return Origin(parent, segment.first, found) if found and forks_here else None


def _derived(
    catalog: Catalog, segment: Segment, part: str, origin: Origin
) -> dict[str, Proof]:  # fmt: skip
    """What a term's derived bases prove of a part, by link: that of its first manifest."""
    links = {identity for identity, _ in segment.revisions}
    return {
        ref.parent: Proof(ref.parent, ref.layout, base=ref, origin=origin)
        for ref in catalog.derived.get((segment.term, part), ())
        if ref.step == segment.first and ref.parent == ref.manifest and ref.parent in links
    }


def _prove_segment(catalog: Catalog, segment: Segment, part: str, begun: Proofs) -> Proofs:
    """Every step of a term that its own records prove, given what it begins with."""
    place = (segment.term, part)
    return prove_steps(
        begun, segment,
        by_step(catalog.bases.get(place, ())), by_step(catalog.deltas.get(place, ())),
        catalog.gaps(place, segment.last), catalog.manifests,
    )  # fmt: skip


def prove_steps(
    proven: Proofs, segment: Segment, bases: Mapping[int, Sequence[RecordRef]],
    deltas: Mapping[int, Sequence[RecordRef]], blocked: Gaps, manifests: Mapping[str, Manifest],
    since: int = 0,
) -> Proofs:  # fmt: skip
    """Add to ``proven`` every step of a term, from ``since`` on, that its records prove.

    ``proven`` holds what is known before: the `opening`, and steps below ``since``. A base
    replayed within a gap was folded through what the gap disowns.
    """
    first, last = max(since, segment.first), MAX_STEP if segment.last is None else segment.last
    for step in sorted(step for step in {*bases, *deltas} if first <= step <= last):
        before = proven.get(step - 1, {})
        here = dict(proven.get(step, {}))
        for ref in () if step in blocked else deltas.get(step, ()):
            prior = before.get(ref.parent)
            if prior is not None and prior.layout == ref.layout and step <= prior.last:
                here[ref.id] = Proof(
                    ref.id, ref.layout, delta=ref, prior=prior, length=prior.length + 1,
                    last=prior.last, origin=prior.origin,
                )  # fmt: skip
        for ref in _by_preference(bases.get(step, ()), manifests):
            if ref.origin == "captured" or step not in blocked:
                serves = ref.since + BOUNDED_STEPS if ref.exactness == "bounded" else MAX_STEP
                here[ref.parent] = Proof(ref.parent, ref.layout, base=ref, last=serves)
        if here:
            proven[step] = here
    return proven


def _by_preference(
    refs: Sequence[RecordRef], manifests: Mapping[str, Manifest]
) -> Sequence[RecordRef]:
    """Later is better: its revision known, captured, more holders, then any fixed order."""

    def rank(ref: RecordRef) -> tuple[bool, bool, int, str]:
        return (ref.manifest in manifests, ref.origin == "captured", len(ref.tiers), ref.key)

    return sorted(refs, key=rank) if len(refs) > 1 else refs


def opening(segment: Segment, parent: Proofs, part: str) -> Proofs:
    """What a term with a parent has at its first step: what the tips name of the parent's state.

    It stands under the links that the term's first delta may name.
    """
    tip = segment.manifest.tips.get(part, "")
    proof = parent.get(segment.first, {}).get(tip)
    if proof is None or not segment.manifest.parent_term:
        return {}
    links = {identity: replace(proof, link=identity) for identity, _ in segment.revisions}
    return {segment.first: links}


def sole(proofs: Mapping[str, Proof], segment: Segment) -> bool:
    """True if a step has one state: its proofs' links, but those that start anew, are one."""
    if len(proofs) <= 1:
        return True
    return len(proofs.keys() - {identity for identity, _ in segment.revisions}) <= 1
