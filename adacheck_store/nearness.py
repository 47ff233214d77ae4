"""Nearness: the same state from the nearest tiers that give it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .catalog import Catalog
from .proof import Segment, prove_part
from .recovery import PartPlan, RestorePlan, tolerant_line

Nearness = Mapping[str, Sequence[frozenset[str]]]
"""Of a part sets of tiers, by name, each farther from who loads it than the one before."""

NOWHERE: Nearness = {}
"""All tiers are alike."""


def nearer(plan: RestorePlan, catalog: Catalog, near: Nearness) -> RestorePlan:
    """The plan with each part from the nearest set of tiers that gives the same state exactly.

    Rather a longer fold than a base from afar: of a node's own memory than over the network, of
    the memories than from a disk.
    """
    if not near:
        return plan
    line = tolerant_line(catalog, plan.term)
    parts = [_nearer(part, plan, catalog, line, near.get(part.part, ())) for part in plan.parts]
    return replace(plan, parts=tuple(parts))


def _nearer(
    part: PartPlan, plan: RestorePlan, catalog: Catalog, line: Sequence[Segment],
    near: Sequence[frozenset[str]],
) -> PartPlan:  # fmt: skip
    for tiers in near if part.base.exactness != "bounded" else ():
        proofs = prove_part(catalog.held_by(tiers, part.part), line, part.part)
        proof = proofs[plan.term].get(plan.step, {}).get(part.link)
        if proof is None or proof.layout != part.layout:
            continue
        base, deltas = proof.records()
        if base.exactness != "bounded":
            return replace(part, base=base, deltas=deltas, origin=None)
    return part
