"""Nearness: the same state from the tiers nearest to who reads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from .catalog import Catalog
from .proof import Segment, prove_part
from .recovery import PartPlan, RestorePlan, tolerant_line

Sets = Sequence[frozenset[str]]
"""Sets of tiers, by name, each farther away than the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearness:
    """Which tiers are near to whom: by place (a node's name) those that are there, and for all
    places the ``common`` ones that are looked at next. ``here`` is the place of this rank.
    """

    here: str = ""
    places: Mapping[str, Sets] = field(default_factory=dict)
    common: Sets = ()


NOWHERE = Nearness()
"""All tiers are alike."""


def nearer(plan: RestorePlan, catalog: Catalog, near: Nearness) -> RestorePlan:
    """The plan with each part from the nearest set of tiers that gives the same state exactly.

    Rather a longer fold than a base from afar: of a node's own memory than over the network, of
    the memories than from a disk. What is nearer to one place alone is a way of the part.
    """
    if not (near.places or near.common):
        return plan
    line = tolerant_line(catalog, plan.term)
    holders: dict[str, set[str]] = defaultdict(set)
    for table in (catalog.bases, catalog.deltas):
        for (_, part), refs in table.items():
            holders[part].update(tier for ref in refs for tier in ref.tiers)

    def with_ways(part: PartPlan) -> PartPlan:
        common = _nearest(part, plan, catalog, line, near.common) or part
        ways = {}
        for place, sets in near.places.items():
            if not holders[part.part].isdisjoint(*sets[-1:]):
                way = _nearest(part, plan, catalog, line, sets)
                if way is not None and way != common:
                    ways[place] = way
        return replace(common, ways=ways)

    return replace(plan, parts=tuple(with_ways(part) for part in plan.parts))


def seen_from(plan: RestorePlan, place: str) -> RestorePlan:
    """The plan as who is at a place reads it."""
    return replace(
        plan, parts=tuple(replace(part.ways.get(place, part), ways={}) for part in plan.parts)
    )


def _nearest(
    part: PartPlan, plan: RestorePlan, catalog: Catalog, line: Sequence[Segment], near: Sets
) -> PartPlan | None:
    """The part from the first of these sets that gives it exactly; None if none does."""
    for tiers in near if part.base.exactness != "bounded" else ():
        proofs = prove_part(catalog.held_by(tiers, part.part), line, part.part)
        proof = proofs[plan.term].get(plan.step, {}).get(part.link)
        if proof is None or proof.layout != part.layout:
            continue
        base, deltas = proof.records()
        if base.exactness != "bounded":
            return replace(part, base=base, deltas=deltas, origin=None)
    return None
