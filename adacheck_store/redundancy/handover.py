"""Handing over: which ranks that live on can give what those need that were replaced. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from adacheck_store.format.manifest import Manifest

from .shares import wanted_of


def givers(manifest: Manifest, living: Collection[int]) -> Mapping[int, int] | str:
    """For each rank that is not ``living`` one that is, and holds just what it held.

    Proven by the revision that was in force, state by state; else why there is none. Each giver
    has about as many to give to.
    """
    size = len(manifest.ranks)
    if manifest.redundancy is None:
        return "no copies had been found by then"
    held = {rank: _held(manifest, rank) for rank in range(size)}
    found: dict[int, int] = {}
    given = dict.fromkeys(sorted(living), 0)
    for rank in sorted(set(range(size)) - set(living)):
        alike = [each for each in given if held[each] == held[rank]]
        if not alike:
            return f"what rank {rank} held is not on any rank that lives on"
        found[rank] = min(alike, key=lambda each: given[each])
        given[found[rank]] += 1
    return found


_State = tuple[str, tuple[str, str], bool]


def _held(manifest: Manifest, rank: int) -> frozenset[_State]:
    """The states a rank held, each by the part that has it: the same tensors, and the same pieces.

    And whether all of it, or the parameter alone.
    """
    wanted = wanted_of(manifest, rank).items()
    return frozenset((part, place, all_) for part, held in wanted for place, all_ in held.items())
