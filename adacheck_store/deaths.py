"""Deaths: attempts that ended without getting any further, and where the next one begins.

If whatever follows a step kills every attempt, the newest step is no good place to begin at. How
a process ended is written nowhere, so each term counts as a death that did not get past the step
reached before it, and whose end nobody has excused (`excuse`). Pure: from what a catalog holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from adacheck_store.format.keys import Term
from adacheck_store.format.manifest import Manifest

from .catalog import Catalog


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """The newest ``step`` to begin at, after ``deaths`` in a row that did not pass ``reached``."""

    step: int
    reached: int
    deaths: int

    @property
    def why(self) -> str:
        """The deaths, in words."""
        who = f"{self.deaths} attempts in a row have" if self.deaths > 1 else "one attempt has"
        return f"{who} died without getting past step {self.reached}"

    def __str__(self) -> str:
        return f"steps after {self.step} are passed over: {self.why}"


def ceiling_of(catalog: Catalog, term: str, max_deaths: int) -> Ceiling | None:
    """Where the attempt ``term`` may begin at most; None: at any step.

    From ``max_deaths`` deaths on (0: never) one step before the one reached, and with each further
    death about twice as far back: replay is exact, so an attempt that begins one step earlier
    comes to the same place again. Such an attempt has got further only when it is past that step.
    A run that has never got past its first step has no ceiling: that is a bug, no poisoned step.
    """
    begun = _begun(catalog)
    excused = {claim.term for claim in catalog.claims if claim.excuse}
    terms = {*begun, *(claim.term for claim in catalog.claims)} - {term}
    first = reached = deaths = 0
    for name in sorted(terms, key=Term.parse):
        manifest = begun.get(name)
        if manifest is None:
            deaths += name not in excused
            continue
        free = not max_deaths or deaths < max_deaths  # else it may have begun below a ceiling
        if not manifest.parent_term:
            first = manifest.step
        if not manifest.parent_term or name in excused or manifest.step > reached or (
            free and manifest.step < reached
        ):  # fmt: skip
            reached, deaths = manifest.step, 0
        got = _got(catalog, manifest)
        if got > reached:
            reached, deaths = got, 0
        else:
            deaths += name not in excused
    if not max_deaths or deaths < max_deaths or reached <= first:
        return None
    back = (2 << (deaths - max_deaths)) - 1
    return Ceiling(step=reached - back, reached=reached, deaths=deaths)


def _begun(catalog: Catalog) -> Mapping[str, Manifest]:
    """The first manifest of each term that has one."""
    found: dict[str, Manifest] = {}
    for manifest in catalog.manifests.values():
        if manifest.term not in found or manifest.step < found[manifest.term].step:
            found[manifest.term] = manifest
    return found


def _got(catalog: Catalog, manifest: Manifest) -> int:
    """The step up to which every part and every rank of a term has written something."""
    newest = []
    for name in (*(entry.name for entry in manifest.parts), *manifest.ranks):
        tables = (catalog.bases, catalog.deltas, catalog.extras)
        refs = [ref for table in tables for ref in table.get((manifest.term, name), ())[-1:]]
        newest.append(max((ref.step for ref in refs), default=manifest.step))
    return min(newest, default=manifest.step)
