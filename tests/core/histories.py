"""Random histories of a run as plain references, and an oracle that reads the chain rules aloud.

The writer here knows what every record truly holds: a state is a value, a delta leads from one
value to the next. So a plan can be carried out symbolically and its result compared.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, field, replace

from adacheck_store.catalog import Catalog, RecordRef
from adacheck_store.format.keys import base_key, delta_key, extra_key
from adacheck_store.format.manifest import Manifest, PartEntry

RUN = "r"
PARTS = ("p000000", "p000001")
RANKS = ("r000000", "r000001")
TIERS = ("near", "other", "far")


def digest(*words: object) -> str:
    """An id."""
    return hashlib.blake2b(repr(words).encode(), digest_size=32).hexdigest()


@dataclass
class TermState:
    """A term under way: its revisions, and per part the link the next record hangs on."""

    name: str
    revisions: list[tuple[str, Manifest]]
    step: int
    links: dict[str, str]
    values: dict[str, str]
    gap: int | None = None
    anew: bool = False


@dataclass
class History:
    """Everything ever written, before damage."""

    refs: list[RecordRef] = field(default_factory=list)
    manifests: dict[str, Manifest] = field(default_factory=dict)
    layouts: set[str] = field(default_factory=set)
    terms: dict[str, TermState] = field(default_factory=dict)
    edges: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Delta's key and id -> (value before, value after)."""
    holds: dict[str, str] = field(default_factory=dict)
    """Base's key -> value."""
    truth: dict[tuple[str, str, int], str] = field(default_factory=dict)
    """What the trainer had, by term, part and step."""
    disowned: dict[str, list[int]] = field(default_factory=dict)
    """Keys of records that a later gap calls wrong: the steps of the bases that do."""


class Author:
    """Writes a random history with an ``random.Random``."""

    def __init__(self, rng) -> None:
        self.rng = rng
        self.history = History()
        self.parts = PARTS[: rng.randint(1, 2)]
        self.ranks = RANKS[: rng.randint(1, 2)]
        self.serial = 0

    def write(self, actions: int) -> History:
        """A history of so many actions."""
        term = self.open_term(None, self.rng.choice([0, 0, 3]))
        for _ in range(actions):
            word = self.rng.choices(
                ["step", "base", "check", "gap", "mismatch", "fork", "restart", "revision", "twin"],
                [24, 4, 1, 2, 1, 1, 2, 1, 1],
            )[0]
            if word == "step":
                self.take_step(term)
            elif word == "base":
                self.put_base(term, "replayed")
            elif word == "check":
                self.put_base(term, "captured")
            elif word == "gap":
                self.open_gap(term)
            elif word == "mismatch":
                self.distrust(term)
            elif word == "revision":
                self.revise(term)
            elif word == "twin":
                self.twin(term)
            elif word == "restart":
                term = self.open_term(term, term.step)
            else:
                old = self.rng.choice(list(self.history.terms.values()))
                first = old.revisions[0][1].step
                term = self.open_term(old, self.rng.randint(first, max(first, old.step)))
        return self.history

    def _number(self) -> int:
        self.serial += 1
        return self.serial

    def open_term(self, parent: TermState | None, step: int) -> TermState:
        """A term without parent, or one that leaves its parent at a step that can be proven."""
        name = f"t{len(self.history.terms) + 1:06d}-{self._number():016x}"
        changed = parent is None or self.rng.random() < 0.25
        tips: dict[str, str] = {}
        owner = ""
        if parent is not None:
            proof = Oracle(self.catalog(), self.history, parent.name).whole_at(step)
            if proof is None:
                return parent
            owner, tips = proof
        layout = digest("layout", self._number()) if changed else ""
        parts = tuple(
            PartEntry(name=p, layout=layout or parent.revisions[-1][1].part(p).layout)
            for p in self.parts
        )
        manifest = Manifest(
            run=RUN, term=name, step=step, parts=parts, ranks=self.ranks,
            parent_term=owner, fork_step=step if owner else 0, tips=tips,
        )  # fmt: skip
        identity = digest("manifest", name, step)
        self.history.manifests[identity] = manifest
        self.history.layouts |= {p.layout for p in parts}
        values = {
            p: self.history.truth[owner, p, step] if owner else f"start {name} {p}"
            for p in self.parts
        }
        term = TermState(name, [(identity, manifest)], step, dict.fromkeys(self.parts, identity),
                         values)  # fmt: skip
        self.history.terms[name] = term
        for p in self.parts:
            self.history.truth[name, p, step] = values[p]
        if changed:
            self.put_base(term, "captured")
            self._extras(term)
        return term

    def _layout(self, term: TermState, part: str) -> str:
        return term.revisions[-1][1].part(part).layout

    def _extras(self, term: TermState, skip: float = 0.0) -> None:
        for rank in term.revisions[-1][1].ranks:
            if self.rng.random() >= skip:
                earlier = [
                    r.step for r in self.history.refs
                    if r.kind == "extra" and r.term == term.name and r.part == rank
                    and r.step < term.step and not r.refs
                ]  # fmt: skip
                refs = (earlier[-1],) if earlier and self.rng.random() < 0.3 else ()
                self._add("extra", term, rank, str(extra_key(RUN, term.name, rank, term.step)),
                          digest("extra", term.name, rank, term.step), refs=refs)  # fmt: skip

    def _add(self, kind, term, part, key, identity, **more) -> RecordRef:
        rng = self.rng
        tiers = tuple(t for t in TIERS if rng.random() < 0.7) or (rng.choice(TIERS),)
        ref = RecordRef(
            key=key, kind=kind, term=term.name, part=part, step=term.step, id=identity,
            parent=more.pop("parent", ""), manifest=term.revisions[-1][0],
            layout="" if kind == "extra" else self._layout(term, part), tiers=tiers, nbytes=1,
            **more,
        )  # fmt: skip
        self.history.refs.append(ref)
        return ref

    def put_base(self, term: TermState, origin: str, gap=None) -> None:
        """A base of each part at the present step."""
        if term.gap is not None and gap is None:
            return
        if origin == "replayed" and term.step == term.revisions[0][1].step:
            return
        for part in self.parts:
            key = str(base_key(RUN, term.name, part, term.step))
            self._add("base", term, part, key, digest(key), parent=term.links[part],
                      origin=origin, exactness="exact", gap=gap)  # fmt: skip
            self.history.holds[key] = term.values[part]

    def take_step(self, term: TermState) -> None:
        """A boundary: deltas and extras, or nothing while a gap is open, or its end."""
        term.step += 1
        for part in self.parts:
            term.values[part] = digest("value", term.values[part], self._number())
            self.history.truth[term.name, part, term.step] = term.values[part]
        if term.gap is not None:
            if self.rng.random() < 0.5:
                self.close_gap(term)
            return
        for part in self.parts:
            key = str(delta_key(RUN, term.name, part, term.step))
            identity = digest("delta", key, self._number())
            self._add("delta", term, part, key, identity, parent=term.links[part])
            before = self.history.truth[term.name, part, term.step - 1]
            self.history.edges[key + identity] = (before, term.values[part])
            term.links[part] = identity
        self._extras(term, skip=0.02)

    def open_gap(self, term: TermState) -> None:
        """A put that failed: nothing is stored until a captured base."""
        if term.gap is None:
            term.gap = term.step + 1

    def close_gap(self, term: TermState) -> None:
        """A captured base that says from which step on the chain is wrong."""
        for part in self.parts:
            term.links[part] = term.revisions[-1][0]
        gap = {"reason": "x", "from": term.gap}
        self.put_base(term, "captured", gap)
        self._extras(term)
        for ref in self.history.refs:
            if ref.term == term.name and ref.step >= term.gap:
                if ref.kind == "delta" or (ref.kind == "base" and ref.origin == "replayed"):
                    self.history.disowned.setdefault(ref.key, []).append(term.step)
        term.gap = None

    def distrust(self, term: TermState) -> None:
        """What was stored from some step on proves wrong: the trainer had something else."""
        first = self.rng.randint(max(term.revisions[0][1].step + 1, term.step - 3), term.step + 1)
        if term.gap is not None or first > term.step:
            return
        term.gap = first

    def revise(self, term: TermState) -> None:
        """A new revision of the manifest, from the next step on: other ranks."""
        old = term.revisions[-1][1]
        if term.gap is not None or old.step >= term.step + 1:
            return
        ranks = RANKS[: self.rng.randint(1, 2)]
        manifest = replace(old, step=term.step + 1, ranks=ranks, previous=term.revisions[-1][0])
        identity = digest("manifest", term.name, manifest.step)
        term.revisions.append((identity, manifest))
        self.history.manifests[identity] = manifest
        self.take_step(term)

    def twin(self, term: TermState) -> None:
        """A second id under the key of the last delta."""
        last = [r for r in self.history.refs if r.kind == "delta" and r.term == term.name]
        if last:
            ref = last[-1]
            other = replace(ref, id=digest("twin", ref.id), tiers=(self.rng.choice(TIERS),))
            self.history.refs.append(other)
            self.history.edges[other.key + other.id] = self.history.edges[ref.key + ref.id]

    def catalog(self) -> Catalog:
        """All of it, undamaged."""
        return catalog_of(self.history, self.history.refs, self.history.manifests,
                          self.history.layouts)  # fmt: skip


def catalog_of(history: History, refs, manifests, layouts) -> Catalog:
    """A catalog of what is left."""
    tables = {kind: defaultdict(list) for kind in ("base", "delta", "extra")}
    for ref in sorted(refs, key=lambda r: (r.step, r.key, r.id)):
        tables[ref.kind][ref.term, ref.part].append(ref)
    base, delta, extra = (
        {place: tuple(found) for place, found in tables[kind].items()}
        for kind in ("base", "delta", "extra")
    )
    return Catalog(run=RUN, manifests=dict(manifests), bases=base, deltas=delta, extras=extra,
                   layouts=dict.fromkeys(layouts, TIERS))  # fmt: skip


def damaged(history: History, rng) -> Catalog:
    """The history after losses: records from random tiers, manifests, layouts, whole tiers."""
    gone = {t for t in TIERS if rng.random() < 0.15}
    rate = rng.choice([0.0, 0.02, 0.1, 0.3])
    refs = []
    for ref in history.refs:
        tiers = tuple(t for t in ref.tiers if t not in gone and rng.random() >= rate)
        if tiers:
            refs.append(replace(ref, tiers=tiers))
    keep = rng.choice([1.0, 1.0, 0.9])
    manifests = {i: m for i, m in history.manifests.items() if rng.random() < keep}
    layouts = {name for name in history.layouts if rng.random() < keep}
    return catalog_of(history, refs, manifests, layouts)


class Oracle:
    """What can be proven of a term's line, from the top down, straight from the rules.

    The line is that of the newest term unless one is named.
    """

    def __init__(self, catalog: Catalog, history: History, term: str = "") -> None:
        self.catalog = catalog
        self.history = history
        self.line = self._line(term)
        self.ends = {name: last for name, _, last in self.line}
        self.memo: dict[tuple[str, str, int, str], frozenset[str]] = {}

    def revisions(self, term: str) -> list[tuple[str, Manifest]]:
        """Found revisions of a term, oldest first."""
        found = [(i, m) for i, m in self.catalog.manifests.items() if m.term == term]
        return sorted(found, key=lambda item: (item[1].step, item[0]))

    def _line(self, term: str) -> list[tuple[str, int, float]]:
        """(term, first, last) of the line, newest first, as far as manifests reach."""
        at = term or max((m.term for m in self.catalog.manifests.values()), default="")
        last: float = float("inf")
        found = []
        while at and self.revisions(at):
            origin = self.revisions(at)[0][1]
            found.append((at, origin.step, last))
            at, last = origin.parent_term, origin.fork_step
        return found

    def refs(self, kind: str, term: str, part: str, step: int) -> list[RecordRef]:
        """Records at a place."""
        table = {"base": self.catalog.bases, "delta": self.catalog.deltas,
                 "extra": self.catalog.extras}[kind]  # fmt: skip
        return [ref for ref in table.get((term, part), ()) if ref.step == step]

    def blocked(self, term: str, part: str, step: int) -> bool:
        """True if a base says that the spine is unprovable at the step.

        What a writer says after the step at which a newer term left it is off the line.
        """
        last = self.ends.get(term, float("inf"))
        return any(
            base.gap is not None and base.gap["from"] <= step <= base.step <= last
            for base in self.catalog.bases.get((term, part), ())
        )

    def layouts(self, term: str, part: str, step: int, link: str) -> frozenset[str]:
        """Layouts in which the part's state under a link can be produced; empty if in none."""
        place = (term, part, step, link)
        if place not in self.memo:
            self.memo[place] = frozenset(self._layouts(*place))
        return self.memo[place]

    def _layouts(self, term: str, part: str, step: int, link: str):
        revisions = self.revisions(term)
        if not revisions or step < revisions[0][1].step:
            return
        own = False
        for base in self.refs("base", term, part, step):
            trusted = base.origin == "captured" or not self.blocked(term, part, step)
            if base.parent == link and trusted:
                own = True
                yield base.layout
        if own:
            return
        for delta in self.refs("delta", term, part, step):
            if delta.id == link and not self.blocked(term, part, step):
                if delta.layout in self.layouts(term, part, step - 1, delta.parent):
                    yield delta.layout
        newest = revisions[-1][1]
        if step == revisions[0][1].step and newest.parent_term:
            if link in {i for i, _ in revisions} and part in newest.tips:
                parent = newest.parent_term
                yield from self.layouts(parent, part, step, newest.tips[part])

    def links(self, term: str, part: str, step: int) -> set[str]:
        """Links under which the part is provable at the step."""
        maybe = {i for i, _ in self.revisions(term)}
        maybe |= {b.parent for b in self.refs("base", term, part, step)}
        maybe |= {d.id for d in self.refs("delta", term, part, step)}
        return {link for link in maybe if self.layouts(term, part, step, link)}

    def manifest(self, term: str, step: int) -> Manifest:
        """The revision in force."""
        found = self.revisions(term)
        return ([m for _, m in found if m.step <= step] or [found[0][1]])[-1]

    def whole(self, term: str, step: int) -> dict[str, set[str]] | None:
        """Links of each part if every part and extra is there under a term, else None."""
        manifest = self.manifest(term, step)
        parts = {}
        for entry in manifest.parts:
            links = self.links(term, entry.name, step)
            starts = {i for i, _ in self.revisions(term)}
            if not links or len(links - starts) > 1:
                return None
            good = {link for link in links if self._usable(term, entry.name, step, link)}
            if not good:
                return None
            parts[entry.name] = good
        for rank in manifest.ranks:
            here = self.refs("extra", term, rank, step)
            if len({ref.id for ref in here}) != 1:
                return None
            if any(len({r.id for r in self.refs("extra", term, rank, s)}) != 1
                   for s in here[0].refs):  # fmt: skip
                return None
        return parts

    def _usable(self, term: str, part: str, step: int, link: str) -> bool:
        """The layout is known, and so is the revision that the step's own record names."""
        if not self.layouts(term, part, step, link) & self.catalog.layouts.keys():
            return False
        bases = [b for b in self.refs("base", term, part, step)
                 if b.parent == link
                 and (b.origin == "captured" or not self.blocked(term, part, step))]  # fmt: skip
        deltas = [d for d in self.refs("delta", term, part, step) if d.id == link]
        if bases or deltas:
            return any(r.manifest in self.catalog.manifests for r in bases or deltas)
        newest = self.revisions(term)[-1][1]
        return self._usable(newest.parent_term, part, step, newest.tips[part])

    def provable(self, step: int) -> bool:
        """True if the step exists on the line."""
        return any(
            first <= step <= last and self.whole(at, step) is not None
            for at, first, last in self.line
        )

    def whole_at(self, step: int) -> tuple[str, dict[str, str]] | None:
        """For a writer: the term that owns a provable step of a line, and the parts' links."""
        for at, first, last in reversed(self.line):
            if first <= step <= last:
                parts = self.whole(at, step)
                if parts is not None:
                    return at, {part: min(links) for part, links in parts.items()}
        return None
