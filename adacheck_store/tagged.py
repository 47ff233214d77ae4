"""Tagged steps of a tier: which floors they can bear, and what was read to know it."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import NamedTuple

from adacheck_store.format.errors import FormatError, RecordNotFoundError, TierDamagedError
from adacheck_store.tiers.base import Tier

from .catalog import Catalog, RecordRef
from .fetch import ArrayReader, BlocksLostError, Fetcher
from .recovery import Prover, RestorePlan, tolerant_line

log = logging.getLogger(__name__)

Spot = tuple[str, int]
"""An array's name and the index of a block; no name: the record's head."""


class Hold(NamedTuple):
    """The highest floor that a tagged step can bear, and why it is that one."""

    step: int
    why: TierDamagedError


class Tagged:
    """The tagged steps of a tier, from one attempt to raise its floor to the next.

    ``held`` says which tag keeps the floor down, since ``since`` (monotonic, s), if one does.
    ``bears`` is the highest step whose floor the tier could bear but for tags: all bases of it were
    read back. Records that were found whole are not read again, of others only the block that was
    wrong, which may be mended in its place; ``recalled`` tells that not all was read anew. What the
    tier holds no more is forgotten.
    """

    def __init__(self) -> None:
        self.held: TierDamagedError | None = None
        self.since = 0.0
        self.bears = -1
        self.recalled = False
        self._found: dict[tuple[str, str], Spot | None] = {}
        self._fresh: set[tuple[str, str]] = set()

    def begin(self, catalog: Catalog) -> None:
        """Another attempt, with this catalog of the tier."""
        tables = (catalog.bases, catalog.deltas, catalog.extras, catalog.derived)
        keys = {(r.key, r.id) for table in tables for refs in table.values() for r in refs}
        self._found = {place: spot for place, spot in self._found.items() if place in keys}
        self._fresh.clear()
        self.recalled = False

    def forget(self) -> None:
        """Read everything anew."""
        self._found.clear()
        self.recalled = False

    def hold(self, why: TierDamagedError | None) -> None:
        """What keeps the floor down now; it is logged where it has changed."""
        if why is not None and str(why) != str(self.held):
            self.since = time.monotonic()
            log.warning("%s", why)
        self.held = why

    def whole(self, tier: Tier, ref: RecordRef) -> bool:
        """Whether a record verifies, or has; raises what may pass: unread is not damaged."""
        place = ref.key, ref.id
        if place in self._found:
            spot = self._found[place]
            if spot is None:
                self.recalled |= place not in self._fresh
                return True
            if flaw(tier, ref, spot) is not None:
                return False
        self._found[place] = found = flaw(tier, ref)
        self._fresh.add(place)
        return found is None

    def need(
        self, tier: Tier, catalog: Catalog, terms: Collection[str], steps: range
    ) -> Hold | None:
        """The highest floor below which no tagged one of ``steps`` is lost; None: any.

        A tag is kept by its step's own base. Where that is gone or damaged, and the chain gives the
        step, the chain stays. What an earlier floor has passed has no chain any more.
        """
        name = tier.traits.name
        found: list[Hold] = []
        for tag in catalog.tags:
            lost: set[tuple[str, str]] = set()
            while tag.term in terms and tag.step in steps:
                sound = catalog.without(lost) if lost else catalog
                plan = Prover(sound, tolerant_line(sound, tag.term)).prove(tag.step)
                if not isinstance(plan, RestorePlan):
                    break
                broken = {(name, ref.key) for ref in plan.records if not self.whole(tier, ref)}
                if not broken:
                    if any(part.deltas or part.origin for part in plan.parts):
                        step = min(ref.step for ref in plan.records if ref.kind == "base")
                        found.append(Hold(step, _why(catalog.run, name, tag.name, tag.step, step)))
                    break
                lost |= broken
        return min(found, key=lambda hold: hold.step, default=None)


def _why(run: str, tier: str, tag: str, step: int, floor: int) -> TierDamagedError:
    return TierDamagedError(
        f"the step of tag {tag} has no sound base there, only a chain: for that nothing is deleted "
        f"from step {floor} on", run=run, step=step, tier=tier,
        hint=f"adacheck-store compact --to {step} writes a base (or remove the tag)",
    )  # fmt: skip


def flaw(tier: Tier, ref: RecordRef, only: Spot | None = None) -> Spot | None:
    """Where a record does not verify, None if it does; ``only`` that place is read, if given.

    Raises what may pass: unread is not damaged.
    """
    fetcher = Fetcher([tier])
    at: Spot = ("", 0)
    try:
        for info in (reader := ArrayReader(fetcher, ref)).head.arrays:
            for index in range(len(info.digests)):
                at = info.name, index
                if only in (None, at):
                    fetcher.read(reader.ref, info, index, 1)
    except (FormatError, RecordNotFoundError, BlocksLostError):
        fetcher.raise_unread()
        return at
    return None
