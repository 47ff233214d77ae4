"""What a manifest says of redundancy, for people to read and to compare."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from adacheck_store.format.manifest import Manifest
from adacheck_store.format.rank_sets import runs_of
from adacheck_store.format.redundancy import HeldPart, Redundancy

NAMES_MAX = 20
"""Names listed of each reason; further ones are counted."""


def summary(manifest: Manifest) -> dict[str, Any]:
    """A manifest's redundancy as JSON for people; empty where it says nothing."""
    found = manifest.redundancy
    if found is None:
        return {}
    unproven: dict[str, dict[str, None]] = defaultdict(dict)
    for part in found.parts:
        for name, ground in part.pairs():
            if found.grounds[ground].why:
                unproven[found.grounds[ground].why][found.names[name]] = None
    return {
        "k": found.k,
        "policy": found.policy,
        "agreed": found.agreed,
        "nodes": dict(found.nodes),
        "parts": [
            {
                "part": entry.name, "class": part.degree, "sources": spelled(entry.sources),
                "owner": entry.owner,
                "holders": [_holder(found, node, source) for node, source in part.holders],
                "states": len(part.states) // 2,
                "keep": dict(Counter(found.grounds[ground].keep for _, ground in part.pairs())),
            }
            for entry, part in zip(manifest.parts, found.parts, strict=True)
        ],
        "unproven": {why: _cut(list(names)) for why, names in sorted(unproven.items())},
    }  # fmt: skip


def spelled(ranks: Sequence[int]) -> str:
    """A set of ranks in short: ``0-7``, ``0-56 by 8``, ``3``."""
    runs = runs_of(ranks)
    words = []
    for start, stride, count in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
        by = f" by {stride}" if stride > 1 else ""
        words.append(f"{start}-{start + stride * (count - 1)}{by}" if count > 1 else f"{start}")
    return ", ".join(words)


def _holder(found: Redundancy, node: int, source: int) -> str:
    way = "" if found.ranks[source] == node else ", by network"
    return f"{found.nodes[node][0]} (rank {source}{way})"


def _cut(names: list[str]) -> list[str]:
    rest = len(names) - NAMES_MAX
    return names if rest <= 0 else [*names[:NAMES_MAX], f"... and {rest} more"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How many domains may be lost without losing a tensor, before and after; -1: it is gone.

    None where there is no such tensor. ``scope`` is empty or that of a state that is a rank's own.
    """

    scope: str
    name: str
    before: int | None
    after: int | None
    unsafe: bool


def diff(before: Manifest, after: Manifest) -> Iterator[Change]:
    """What differs between two revisions, tensor by tensor; ``unsafe`` is below the k of ``after``.

    A revision that says nothing of redundancy promises nothing of any tensor.
    """
    wanted = after.redundancy.k if after.redundancy else 0
    old, new = tolerances(before), tolerances(after)
    for scope, name in sorted({*old, *new}, key=lambda each: each[::-1]):
        was, now = old.get((scope, name)), new.get((scope, name))
        if was != now:
            yield Change(
                scope=scope, name=name, before=was, after=now,
                unsafe=now is not None and now < wanted,
            )  # fmt: skip


def tolerances(manifest: Manifest) -> dict[tuple[str, str], int]:
    """Of each scope and name the domains that may be lost: the least over its pieces."""
    found = manifest.redundancy
    if found is None:
        return {}
    least: dict[tuple[str, str], int] = {}
    for entry, part in zip(manifest.parts, found.parts, strict=True):
        survives = _tolerance(found, part, entry.sources)
        for name, ground in part.pairs():
            place = found.grounds[ground].scope, found.names[name]
            least[place] = min(survives, least.get(place, survives))
    return least


def _tolerance(found: Redundancy, part: HeldPart, sources: Sequence[int]) -> int:
    """One less than the domains that a part can be had from: agents', and live also trainers'."""
    nodes = {node for node, _ in part.holders}
    if found.policy == "live":
        nodes |= {found.ranks[rank] for rank in sources}
    return len({found.nodes[node][1] for node in nodes} - {""}) - 1


def under(manifest: Manifest, domain: Mapping[str, str]) -> Manifest:
    """The revision if nodes lay in these failure domains; those not named are gone.

    With `diff` it says what a change of topology makes unsafe. Not to be written: a topology that
    has changed is a new term's.
    """
    found = manifest.redundancy
    if found is None:
        return manifest
    nodes = tuple((name, domain.get(name, "")) for name, _ in found.nodes)
    return replace(manifest, redundancy=replace(found, nodes=nodes))
