"""A replica: one chain at one holder. What is held, what it proves, what the watermark frees."""

from __future__ import annotations

import abc
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from adacheck_store.catalog import Gaps, RecordRef, gaps_of
from adacheck_store.format.keys import MAX_STEP
from adacheck_store.format.manifest import Manifest
from adacheck_store.proof import Proof, Proofs, Segment, opening, prove_steps, sole
from adacheck_store.recovery import PartPlan

from .marks import NOTHING, Mark

RAM, LMDB, FAR = 1, 2, 4
"""Places of a record, as bits: this agent's memory, this node's LMDB, the far tier."""

HERE = RAM | LMDB


class Replica(abc.ABC):
    """A chain at one holder: its records by key, and the places each is in."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.refs: dict[str, RecordRef] = {}
        self.places: dict[str, int] = {}
        self._line: tuple[Segment, ...] = ()
        self._manifests: Mapping[str, Manifest] = {}
        self._mark: Mark | None = None
        self._reach: dict[str, tuple[int, int]] = {}
        self._strayed = False

    def add(self, ref: RecordRef, place: int) -> None:
        """A record is now in a place."""
        known = self.places.get(ref.key, 0)
        self.places[ref.key] = known | place
        if not known:
            self.refs[ref.key] = ref
            self._mark = None
            self._strayed = self._strayed or not self.on_line(ref)
            self._added(ref)

    def lose(self, keys: Iterable[str], place: int) -> None:
        """Records are no longer in a place; what is in none here is forgotten."""
        gone = []
        for key in keys:
            self.places[key] &= ~place
            if not self.places[key] & HERE:
                del self.places[key]
                gone.append(self.refs.pop(key))
        if gone:
            self._mark = None
            self._removed(gone)

    def follow(self, line: tuple[Segment, ...], manifests: Mapping[str, Manifest]) -> None:
        """The line is another one, unless it is the same."""
        if line == self._line and manifests.keys() == self._manifests.keys():
            return
        self._line, self._manifests, self._mark = line, manifests, None
        self._reach = {
            seg.term: (seg.first, MAX_STEP if seg.last is None else seg.last) for seg in line
        }
        self._strayed = True
        self._recompute()

    def on_line(self, ref: RecordRef) -> bool:
        """True if a record belongs to the line."""
        first, last = self._reach.get(ref.term, (0, -1))
        return first <= ref.step <= last

    def _lined(self) -> Iterable[RecordRef]:
        """Records that belong to the line: as a rule all."""
        return filter(self.on_line, self.refs.values()) if self._strayed else self.refs.values()

    def stray(self) -> list[RecordRef]:
        """Records that no restore of the line can use: a term that has begun left them behind."""
        if not self._line or not self._strayed:
            return []
        newest = self._line[-1].term
        off = [ref for ref in self.refs.values() if not self.on_line(ref)]
        self._strayed = bool(off)
        return [ref for ref in off if ref.term <= newest]

    def mark(self) -> Mark:
        """What can be produced here alone."""
        if self._mark is None:
            self._mark = self._make_mark() if self._line else NOTHING
        return self._mark

    def lacking(self, mark: Mark, watermark: int) -> list[RecordRef]:
        """What a holder with that mark needs to produce what this one can.

        That is all from the watermark on, where it cannot produce that; else what is new.
        """
        mine = self.mark()
        goes_on = bool(mark.spans) and (mark.covers(watermark) or not mine.covers(watermark))
        if goes_on and mark.newest >= mine.newest:
            return []
        doomed = {ref.key for ref in self.doomed(watermark)}
        kept = [ref for ref in self._lined() if ref.key not in doomed]
        return self._needed(kept, mark, goes_on)

    @abc.abstractmethod
    def doomed(self, watermark: int) -> list[RecordRef]:
        """Records of the line that nothing at or after the watermark needs."""

    @abc.abstractmethod
    def _needed(self, kept: list[RecordRef], mark: Mark, follows: bool) -> list[RecordRef]:
        """Of what is kept, what to send; ``follows``: the other's chain only needs to go on."""

    @abc.abstractmethod
    def _make_mark(self) -> Mark:
        """The mark, computed."""

    @abc.abstractmethod
    def _added(self, ref: RecordRef) -> None: ...

    @abc.abstractmethod
    def _removed(self, refs: Sequence[RecordRef]) -> None: ...

    @abc.abstractmethod
    def _recompute(self, terms: Collection[str] | None = None) -> None: ...


ByStep = dict[int, list[RecordRef]]


class PartReplica(Replica):
    """A part: bases, deltas, and the proofs they make."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._bases: dict[str, ByStep] = defaultdict(lambda: defaultdict(list))
        self._deltas: dict[str, ByStep] = defaultdict(lambda: defaultdict(list))
        self._proofs: dict[str, Proofs] = {}
        self._gaps: dict[str, Gaps] = {}
        self._told: list[RecordRef] = []

    def disown(self, ref: RecordRef) -> None:
        """Heed the gap that a base tells of, though the base is not here."""
        oldest = min((base.step for base in self.refs.values() if base.kind == "base"), default=0)
        self._told = [told for told in self._told if told.step >= oldest] + [ref]
        self._mark = None
        self._recompute({ref.term})

    def _added(self, ref: RecordRef) -> None:
        table = self._bases if ref.kind == "base" else self._deltas
        table[ref.term][ref.step].append(ref)
        last = self._line[-1] if self._line else None
        if last is None or ref.term != last.term or ref.step <= last.first or ref.gap is not None:
            self._recompute({ref.term})
        else:
            self._prove(last, ref.step)

    def _removed(self, refs: Sequence[RecordRef]) -> None:
        for ref in refs:
            table = self._bases if ref.kind == "base" else self._deltas
            rest = [other for other in table[ref.term][ref.step] if other is not ref]
            if rest:
                table[ref.term][ref.step] = rest
            else:
                del table[ref.term][ref.step]
        self._recompute({ref.term for ref in refs})

    def _recompute(self, terms: Collection[str] | None = None) -> None:
        """Prove anew what hangs on the records of some terms; None: of all."""
        parent: Proofs = {}
        stale = terms is None
        for segment in self._line:
            term = segment.term
            stale = stale or (terms is not None and term in terms)
            if stale:
                bases = [ref for refs in self._bases[term].values() for ref in refs]
                bases += [ref for ref in self._told if ref.term == term]
                self._gaps[term] = gaps_of(bases, segment.last)
                self._proofs[term] = opening(segment, parent, self.name)
                self._prove(segment, 0)
            parent = self._proofs[term]

    def _prove(self, segment: Segment, since: int) -> None:
        """Prove a term's steps from ``since`` on anew."""
        term, proven = segment.term, self._proofs[segment.term]
        for step in [step for step in proven if step >= since > segment.first]:
            del proven[step]
        prove_steps(
            proven, segment, self._bases[term], self._deltas[term], self._gaps[term],
            self._manifests, since,
        )  # fmt: skip

    def _proof(self, step: int) -> Proof | None:
        """A proof of a step of the line, if it has one state."""
        for segment in self._line:
            proofs = self._proofs[segment.term].get(step) if segment.covers(step) else None
            if proofs and len(proofs) == 1:
                return next(iter(proofs.values()))
            if proofs and sole(proofs, segment):
                return min(proofs.values(), key=lambda proof: (proof.length, proof.link))
        return None

    def _make_mark(self) -> Mark:
        spans: list[tuple[int, int]] = []
        tip = ""
        for segment in self._line:
            starts = {identity for identity, _ in segment.revisions}
            proven = self._proofs[segment.term]
            first, last = self._reach[segment.term]
            for step in sorted(proven):
                if not first <= step <= last or len(links := proven[step].keys() - starts) > 1:
                    continue
                if spans and step <= spans[-1][1] + 1:
                    if step <= spans[-1][1]:
                        continue  # a fork step, the parent's too
                    spans[-1] = (spans[-1][0], step)
                else:
                    spans.append((step, step))
                tip = next(iter(links), "")
        end = self._line[-1]
        newest = spans[-1][1] if spans else -1
        settled = newest if newest <= end.first else newest - 1
        return Mark(end.term, tuple(spans), tip, settled)

    def first_missing(self, step: int) -> int:
        """The first step of the term's deltas that lead to ``step`` without a hole."""
        deltas = self._deltas[self._line[-1].term] if self._line else {}
        while step in deltas:
            step -= 1
        return step + 1

    def fold_plan(self, step: int, every: int = 0, most: int = 0) -> PartPlan | None:
        """The fold that gives a base of a step, if deltas lead to it from one.

        Given ``every``, it stops at the first multiple of that on the way; given ``most``, after
        so many deltas.
        """
        proof = self._proof(step)
        if proof is None or not proof.length:
            return None
        base, deltas = proof.records()
        if every and (stop := base.step - base.step % every + every) < step:
            deltas = tuple(ref for ref in deltas if ref.step <= stop)
        deltas = deltas[: most or None]
        return PartPlan(
            part=self.name, layout=proof.layout, base=base, deltas=deltas, link=deltas[-1].id
        )

    def doomed(self, watermark: int) -> list[RecordRef]:
        """What lies below the base that the watermark's step is folded from."""
        proof = self._proof(watermark) if watermark >= 0 else None
        if proof is None:
            return []
        first = proof.root().step
        return [
            ref for ref in self._lined()
            if ref.step < first or (ref.step == first and ref.kind == "delta")
        ]  # fmt: skip

    def _needed(self, kept: list[RecordRef], mark: Mark, follows: bool) -> list[RecordRef]:
        oldest = min((ref.step for ref in kept if ref.kind == "base"), default=0)
        if not follows or mark.newest < oldest:
            return kept
        return [
            ref for ref in kept
            if (ref.step > mark.newest and (ref.kind == "delta" or ref.origin == "captured"))
            or (ref.step == mark.newest and self._begins(ref))
        ]  # fmt: skip

    def _begins(self, ref: RecordRef) -> bool:
        """True for the base of another layout than its parent's that the newest term begins with.

        Who has the parent's records alone can produce its step, and nothing that follows.
        """
        last = self._line[-1]
        first = (ref.term, ref.step) == (last.term, last.first)
        if ref.kind != "base" or not first or len(self._line) < 2:
            return False
        before = self._line[-2]
        parts = before.revision(ref.step)[1].parts  # what is held here may be of this term alone
        told = {entry.layout for entry in parts if entry.name == self.name}
        held = self._proofs[before.term].get(ref.step, {}).values()
        return {*told, *(proof.layout for proof in held)} != {ref.layout}


class ExtraReplica(Replica):
    """A rank's extras: each proves its own step, with those it refers to."""

    def _added(self, ref: RecordRef) -> None:
        pass

    def _removed(self, refs: Sequence[RecordRef]) -> None:
        pass

    def _recompute(self, terms: Collection[str] | None = None) -> None:
        pass

    def _make_mark(self) -> Mark:
        held = {(ref.term, ref.step) for ref in self.refs.values()}
        steps = {
            ref.step: ref.id for ref in self._lined()
            if not ref.refs or all((ref.term, step) in held for step in ref.refs)
        }  # fmt: skip
        spans: list[tuple[int, int]] = []
        for step in sorted(steps):
            if spans and step == spans[-1][1] + 1:
                spans[-1] = (spans[-1][0], step)
            else:
                spans.append((step, step))
        newest = spans[-1][1] if spans else -1
        return Mark(self._line[-1].term, tuple(spans), steps.get(newest, ""), newest)

    def doomed(self, watermark: int) -> list[RecordRef]:
        """Extras of steps before the watermark that no later one refers to."""
        if not self.mark().covers(watermark):
            return []
        before = [ref for ref in self._lined() if ref.step < watermark]
        if not before:
            return []
        needed = {step for ref in self.refs.values() if ref.step >= watermark for step in ref.refs}
        return [ref for ref in before if ref.step not in needed]

    def _needed(self, kept: list[RecordRef], mark: Mark, follows: bool) -> list[RecordRef]:
        return [ref for ref in kept if not mark.covers(ref.step)]


def make_replica(chain: str) -> Replica:
    """An empty replica of a part (``p...``) or of a rank's extras (``r...``)."""
    return PartReplica(chain) if chain.startswith("p") else ExtraReplica(chain)
