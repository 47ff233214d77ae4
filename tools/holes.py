"""What a tier should have and has not: documents that records name, and holes of chains."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from adacheck_store.beginning import Place, stood_in
from adacheck_store.catalog import RecordRef, Table
from adacheck_store.format.errors import AdaCheckError
from adacheck_store.recovery import tolerant_line
from adacheck_store.tiers.base import Tier

if TYPE_CHECKING:
    from .repair import Survey


def missing(survey: Survey, tier: Tier) -> list[str]:
    """Keys that a tier should have and has not: documents, and holes of the far tier's chains.

    A hole lies above the tier's floor and before its newest step of that part: what comes after is
    the drain's to bring.
    """
    name = tier.traits.name
    try:
        have = set(tier.list(f"{survey.run}/"))
    except AdaCheckError:
        return []
    held = [text for text, refs in survey.refs.items() if any(name in r.tiers for r in refs)]
    found = survey.named(held) - have
    if tier is survey.store.far:
        for table in (survey.sound.deltas, survey.sound.extras):
            for (term, _), refs in table.items():
                found |= _holes(survey, name, term, refs)
        found |= _bases(survey, name, found, _stood_in(survey, tier, found))
    return sorted(found - have)


def _holes(survey: Survey, tier: str, term: str, refs: Iterable[RecordRef]) -> set[str]:
    newest = max((ref.step for ref in refs if tier in ref.tiers), default=-1)
    floor = _floor(survey, tier, term)
    return {ref.key for ref in refs if tier not in ref.tiers and floor <= ref.step < newest}


def _stood_in(survey: Survey, tier: Tier, filled: set[str]) -> set[Place]:
    """Where derived bases of a tier give their bytes, once all is there that can be rebuilt."""
    sound, name = survey.sound, tier.traits.name

    def rebuilt(table: Table) -> dict[tuple[str, str], tuple[RecordRef, ...]]:
        return {
            place: tuple(
                replace(ref, tiers=(name,)) for ref in refs
                if ref.key in filled or any(name in held.tiers for held in survey.refs[ref.key])
            )
            for place, refs in table.items()
        }  # fmt: skip

    if not sound.derived:
        return set()
    alone = replace(
        sound, bases=rebuilt(sound.bases), deltas=rebuilt(sound.deltas), extras={},
        derived=rebuilt(sound.derived),
    )  # fmt: skip
    terms = {term for term, _ in alone.derived}
    return {place for term in terms for place in stood_in(alone, tolerant_line(alone, term))}


def _bases(survey: Survey, tier: str, filled: set[str], stand_ins: set[Place]) -> set[str]:
    """Bases on which a delta of the tier hangs that can hang on nothing else there."""
    found: set[str] = set()
    for (term, part), bases in survey.sound.bases.items():
        deltas = survey.sound.deltas.get((term, part), ())
        here = {ref.step: ref for ref in deltas if tier in ref.tiers or ref.key in filled}
        floor = _floor(survey, tier, term)
        for base in bases:
            after = here.get(base.step + 1)
            chained = base.step in here and base.step != floor
            twins = [b for b in bases if (b.step, b.parent) == (base.step, base.parent)]
            hangs = after is not None and after.parent == base.parent
            given = (term, part, base.step) in stand_ins
            if hangs and not chained and base.step >= floor and not given:
                if not any(tier in twin.tiers or twin.key in found for twin in twins):
                    found.add(base.key)
    return found


def _floor(survey: Survey, tier: str, term: str) -> int:
    floors = survey.sound.floors.get(tier, ())
    return max((floor.step for floor in floors if term in floor.terms), default=0)
