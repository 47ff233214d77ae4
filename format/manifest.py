"""Manifests, claims and floors: what a term consists of, who may write, what may be gone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import strict
from .errors import MalformedError
from .head import Head, SealedHead
from .ids import check_id
from .keys import MAX_STEP, is_part, is_rank, is_run, is_term
from .redundancy import Redundancy, decode_redundancy


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEntry:
    """A part in a manifest: its layout's id, the ranks that may write it, and its owner rank."""

    name: str
    layout: str
    sources: tuple[int, ...] = (0,)
    owner: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One revision of a term's manifest; it holds from ``step`` on.

    ``parent_term`` and ``fork_step`` say where the term leaves its parent (empty on a fresh
    run), ``tips`` maps each part of the parent to its link id at the fork step (the id that a
    base of that step has as parent). ``previous`` is the id of the revision before this one.
    ``ranks`` name the extras without which a step does not exist. ``redundancy`` says who holds
    what, and is None where nobody has looked.
    """

    run: str
    term: str
    step: int
    parts: tuple[PartEntry, ...]
    ranks: tuple[str, ...]
    parent_term: str = ""
    fork_step: int = 0
    tips: Mapping[str, str] = field(default_factory=dict)
    previous: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    redundancy: Redundancy | None = None

    def part(self, name: str) -> PartEntry:
        """The part of that name; raises `MalformedError` (rule ``manifest``)."""
        for entry in self.parts:
            if entry.name == name:
                return entry
        raise MalformedError(f"no part {name!r} in the manifest", rule="manifest")

    def seal(self, info: Mapping[str, Any] | None = None) -> SealedHead:
        """The manifest's record (it has no arrays)."""
        body: dict[str, Any] = {
            "parent_term": self.parent_term,
            "fork_step": self.fork_step,
            "tips": dict(self.tips),
            "parts": [
                {"name": p.name, "layout": p.layout, "sources": list(p.sources), "owner": p.owner}
                for p in self.parts
            ],
            "ranks": list(self.ranks),
            "settings": dict(self.settings),
        }
        if self.redundancy is not None:
            body["redundancy"] = self.redundancy.to_json()
        head = Head(
            kind="manifest", run=self.run, term=self.term, step=self.step,
            parent=self.previous, body=body,
        )  # fmt: skip
        decode_manifest(head)
        return SealedHead.seal(head, info)


def decode_manifest(head: Head) -> Manifest:
    """A manifest from its head; raises `MalformedError` (rule ``manifest``)."""
    if head.kind != "manifest":
        raise MalformedError(f"a {head.kind}, not a manifest", rule="kind")
    try:
        body = strict.fields(
            head.body, "parts", "ranks", "parent_term", "fork_step", "tips", "settings"
        )
        parts = tuple(_decode_part(item) for item in strict.items(body["parts"]))
        manifest = Manifest(
            run=head.run,
            term=head.term,
            step=head.step or 0,
            parts=parts,
            ranks=tuple(strict.text(name) for name in strict.items(body["ranks"])),
            parent_term=strict.text(body["parent_term"], empty=True),
            fork_step=strict.count(body["fork_step"]),
            tips=dict(strict.fields(body["tips"])),
            previous=head.parent,
            settings=dict(strict.fields(body["settings"])),
            redundancy=_decode_redundancy(body, parts),
        )
        _check_manifest(manifest)
    except (TypeError, ValueError) as exc:
        raise MalformedError(f"not a manifest: {exc}"[:300], rule="manifest") from exc
    return manifest


def _decode_part(item: Any) -> PartEntry:
    found = strict.fields(item, "name", "layout", "sources", "owner")
    entry = PartEntry(
        name=strict.text(found["name"]),
        layout=check_id(found["layout"], "layout"),
        sources=tuple(strict.count(rank) for rank in strict.items(found["sources"])),
        owner=strict.count(found["owner"]),
    )
    if not is_part(entry.name) or entry.owner not in entry.sources:
        raise ValueError(f"part {entry.name[:40]!r}: its name, or an owner that is no source")
    strict.ascending(entry.sources, "sources")
    return entry


def _decode_redundancy(body: Mapping[str, Any], parts: tuple[PartEntry, ...]) -> Redundancy | None:
    """The optional field: writers that knew nothing of it left it out."""
    if "redundancy" not in body:
        return None
    return decode_redundancy(body["redundancy"], [part.sources for part in parts])


def _check_manifest(manifest: Manifest) -> None:
    strict.ascending([entry.name for entry in manifest.parts], "parts")
    strict.ascending(manifest.ranks, "ranks")
    if not all(is_rank(name) for name in manifest.ranks):
        raise ValueError("a rank's name")
    if manifest.parent_term:
        if not is_term(manifest.parent_term) or manifest.parent_term == manifest.term:
            raise ValueError("parent_term")
        if manifest.fork_step > manifest.step:
            raise ValueError(f"fork_step {manifest.fork_step} after step {manifest.step}")
    elif manifest.fork_step or manifest.tips:
        raise ValueError("a fork without parent term")
    for part, tip in manifest.tips.items():
        if not is_part(part):
            raise ValueError(f"a tip of {part[:40]!r}")
        check_id(tip, "tip")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The claim of a term: log entry ``index``, made by conditional create.

    With an ``excuse`` it is a second one of a term that is claimed, and says why the term's end,
    though it may have got no further, is no death.
    """

    run: str
    term: str
    index: int
    excuse: str = ""

    def seal(self, info: Mapping[str, Any] | None = None) -> SealedHead:
        """The claim's record."""
        body = {"excuse": self.excuse} if self.excuse else {}
        head = Head(kind="claim", run=self.run, term=self.term, step=self.index, body=body)
        decode_log(head)
        return SealedHead.seal(head, info)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What tier ``tier`` may have deleted of ``terms``: everything below ``step`` but ``kept``.

    Of the steps kept it keeps bases and extras.
    """

    run: str
    term: str
    index: int
    tier: str
    terms: tuple[str, ...]
    step: int
    kept: tuple[int, ...] = ()

    def covers(self, term: str, kind: str, step: int, tags: Iterable[Tag] = ()) -> bool:
        """Whether a record may be gone; of the steps kept, or tagged, bases and extras may not.

        A floor is written so that it covers no tag. Whoever deletes asks for the tags once more.
        """
        if term not in self.terms or step >= self.step:
            return False
        if kind == "delta":
            return True
        return step not in self.kept and not any(
            tag.step == step and tag.term in self.terms for tag in tags
        )

    def seal(self, info: Mapping[str, Any] | None = None) -> SealedHead:
        """The floor's record."""
        body = {
            "tier": self.tier, "terms": list(self.terms), "step": self.step,
            "kept": list(self.kept),
        }  # fmt: skip
        head = Head(kind="floor", run=self.run, term=self.term, step=self.index, body=body)
        decode_log(head)
        return SealedHead.seal(head, info)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """A name for a step of ``term`` and its ancestors: no floor of the tier covers the step."""

    run: str
    term: str
    index: int
    name: str
    step: int

    def seal(self, info: Mapping[str, Any] | None = None) -> SealedHead:
        """The tag's record."""
        body = {"name": self.name, "step": self.step}
        head = Head(kind="tag", run=self.run, term=self.term, step=self.index, body=body)
        decode_log(head)
        return SealedHead.seal(head, info)


Entry = Claim | Floor | Tag
"""What may lie in a run's log."""


def decode_log(head: Head) -> Entry:
    """An entry of the log from its head; raises `MalformedError` (rule ``log``)."""
    if head.kind == "tag":
        return _decode_tag(head)
    if head.kind == "claim":
        try:
            excuse = strict.text(head.body["excuse"]) if "excuse" in head.body else ""
        except (TypeError, ValueError) as exc:
            raise MalformedError(f"not a claim: {exc}"[:300], rule="log") from exc
        return Claim(run=head.run, term=head.term, index=head.step or 0, excuse=excuse)
    if head.kind != "floor":
        raise MalformedError(f"a {head.kind} in the log", rule="kind")
    try:
        body = strict.fields(head.body, "tier", "terms", "step", "kept")
        floor = Floor(
            run=head.run, term=head.term, index=head.step or 0,
            tier=strict.text(body["tier"]),
            terms=tuple(strict.text(term) for term in strict.items(body["terms"])),
            step=strict.count(body["step"]),
            kept=tuple(strict.count(step) for step in strict.items(body["kept"])),
        )  # fmt: skip
        _check_floor(floor)
    except (TypeError, ValueError) as exc:
        raise MalformedError(f"not a floor: {exc}"[:300], rule="log") from exc
    return floor


def _decode_tag(head: Head) -> Tag:
    try:
        body = strict.fields(head.body, "name", "step")
        tag = Tag(
            run=head.run, term=head.term, index=head.step or 0, name=strict.text(body["name"]),
            step=strict.count(body["step"]),
        )  # fmt: skip
        if not is_run(tag.name) or tag.step > MAX_STEP:
            raise ValueError(f"name {tag.name[:40]!r} or step {tag.step}")
    except (TypeError, ValueError) as exc:
        raise MalformedError(f"not a tag: {exc}"[:300], rule="log") from exc
    return tag


def _check_floor(floor: Floor) -> None:
    if not floor.terms or not all(is_term(term) for term in floor.terms):
        raise ValueError("terms")
    if len(set(floor.terms)) != len(floor.terms):
        raise ValueError("a term stands twice")
    strict.ascending(floor.kept, "kept steps")
    if floor.step > MAX_STEP or (floor.kept and floor.kept[-1] >= floor.step):
        raise ValueError(f"kept steps are below the floor {floor.step}")
