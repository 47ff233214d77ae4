"""Manifests, claims and floors: what a term consists of, who may write, what may be gone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import MalformedError
from .head import Head, SealedHead
from .ids import check_id
from .keys import is_part, is_rank, is_term


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
    ``ranks`` name the extras without which a step does not exist.
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

    def part(self, name: str) -> PartEntry:
        """The part of that name; raises `MalformedError` (rule ``manifest``)."""
        for entry in self.parts:
            if entry.name == name:
                return entry
        raise MalformedError(f"no part {name!r} in the manifest", rule="manifest")

    def seal(self, info: Mapping[str, Any] | None = None) -> SealedHead:
        """The manifest's record (it has no arrays)."""
        body = {
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
    body = head.body
    try:
        manifest = Manifest(
            run=head.run,
            term=head.term,
            step=head.step or 0,
            parts=tuple(
                PartEntry(
                    name=item["name"], layout=item["layout"], sources=tuple(item["sources"]),
                    owner=item["owner"],
                )
                for item in body["parts"]
            ),
            ranks=tuple(body["ranks"]),
            parent_term=body["parent_term"],
            fork_step=body["fork_step"],
            tips=dict(body["tips"]),
            previous=head.parent,
            settings=dict(body["settings"]),
        )  # fmt: skip
        _check_manifest(manifest)
    except (KeyError, TypeError, ValueError) as exc:
        raise MalformedError(f"not a manifest: {exc!r}"[:300], rule="manifest") from exc
    return manifest


def _check_manifest(manifest: Manifest) -> None:
    for entry in manifest.parts:
        check_id(entry.layout, "layout")
        if not is_part(entry.name) or not all(type(r) is int and r >= 0 for r in entry.sources):
            raise ValueError(f"part {entry.name!r}")
        if type(entry.owner) is not int or entry.owner < 0:
            raise ValueError(f"owner of {entry.name!r}")
    names = [entry.name for entry in manifest.parts]
    if len(set(names)) != len(names) or len(set(manifest.ranks)) != len(manifest.ranks):
        raise ValueError("a part or rank stands twice")
    if not all(isinstance(name, str) and is_rank(name) for name in manifest.ranks):
        raise ValueError("ranks")
    if manifest.parent_term and not is_term(manifest.parent_term):
        raise ValueError("parent_term")
    if type(manifest.fork_step) is not int or manifest.fork_step < 0:
        raise ValueError("fork_step")
    for part, tip in manifest.tips.items():
        if not is_part(part):
            raise ValueError("tips")
        check_id(tip, "tip")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The claim of a term: log entry ``index``, made by conditional create."""

    run: str
    term: str
    index: int

    def seal(self, info: Mapping[str, Any] | None = None) -> SealedHead:
        """The claim's record."""
        head = Head(kind="claim", run=self.run, term=self.term, step=self.index)
        return SealedHead.seal(head, info)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What tier ``tier`` may have deleted of ``terms``: everything below ``step`` but ``kept``."""

    run: str
    term: str
    index: int
    tier: str
    terms: tuple[str, ...]
    step: int
    kept: tuple[int, ...] = ()

    def seal(self, info: Mapping[str, Any] | None = None) -> SealedHead:
        """The floor's record."""
        body = {
            "tier": self.tier, "terms": list(self.terms), "step": self.step,
            "kept": list(self.kept),
        }  # fmt: skip
        head = Head(kind="floor", run=self.run, term=self.term, step=self.index, body=body)
        decode_log(head)
        return SealedHead.seal(head, info)


def decode_log(head: Head) -> Claim | Floor:
    """A claim or floor from its head; raises `MalformedError` (rule ``log``)."""
    if head.kind == "claim":
        return Claim(run=head.run, term=head.term, index=head.step or 0)
    if head.kind != "floor":
        raise MalformedError(f"a {head.kind} in the log", rule="kind")
    try:
        floor = Floor(
            run=head.run, term=head.term, index=head.step or 0, tier=head.body["tier"],
            terms=tuple(head.body["terms"]), step=head.body["step"],
            kept=tuple(head.body["kept"]),
        )  # fmt: skip
        if not isinstance(floor.tier, str) or not all(is_term(term) for term in floor.terms):
            raise ValueError("tier or terms")
        if not all(type(step) is int and step >= 0 for step in (floor.step, *floor.kept)):
            raise ValueError("steps")
    except (KeyError, TypeError, ValueError) as exc:
        raise MalformedError(f"not a floor: {exc!r}"[:300], rule="log") from exc
    return floor
