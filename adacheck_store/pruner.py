"""Pruning: floors for this rank's tiers, and the deletion of what lies below them."""

from __future__ import annotations

import threading
import time

from adacheck_store.format.errors import AdaCheckError
from adacheck_store.format.keys import Term, part_name, rank_name
from adacheck_store.tiers.base import Tier

from .config import Settings
from .drift import CapturedBases
from .group import Group
from .retention import FloorChoice, bury, floor_of, raise_floor
from .store import Store
from .tagged import Tagged
from .tail import Progress
from .terms import Rivals, check_fence, put_floor


class Pruner:
    """Prunes the near tier, and on rank 0 the far one, when a higher floor may be possible.

    The far tier holds all parts, and its floor is a step that each of them proves there. A near
    tier may hold one part of many: its floor is a step that it proves for that part, and at most
    the far tier's. So a step that all ranks can prove is never below the floor of any. Where but a
    tag holds the far floor down, the near one goes on to what that could be: `held` says it.

    ``changed`` is upkeep's condition, and guards what is wanted; it is held while `due` is called.
    """

    def __init__(
        self, store: Store, *, run: str, term: Term, group: Group, settings: Settings,
        changed: threading.Condition, progress: Progress, captured: CapturedBases,
    ) -> None:  # fmt: skip
        self._store, self._run, self._term = store, run, term
        self._own = ((part_name(group.rank),), (rank_name(group.rank),))
        self._settings = settings
        self._changed = changed
        self._progress = progress
        self._captured = captured
        self._rivals = Rivals(store.far, run, term)
        self._tagged = Tagged()
        self._graves: list[tuple[float, Tier, list[str]]] = []
        # The far tier first: its floor is the highest that a near tier may have.
        tiers = (store.far, store.near) if group.rank == 0 else (store.near,)
        self._tiers = tuple(dict.fromkeys(tiers))
        self._wanted = {tier.traits.name for tier in self._tiers}

    @property
    def held(self) -> AdaCheckError | None:
        """What keeps the far tier's floor down until somebody does something, if anything does."""
        return self._tagged.held

    def want_near(self) -> None:
        """The near tier may bear a higher floor now."""
        self._wanted.add(self._store.near.traits.name)

    def want_all(self) -> None:
        """Every tier that this rank prunes may bear a higher floor now."""
        self._wanted |= {tier.traits.name for tier in self._tiers}

    def due(self) -> bool:
        """Whether there is something to try or to delete."""
        now = time.monotonic()
        return bool(self._wanted) or any(at <= now for at, _, _ in self._graves)

    def prune(self) -> None:
        """Each tier is tried, whatever became of the other; what failed stays wanted."""
        first: AdaCheckError | None = None
        for tier in self._tiers:
            try:
                self._prune_tier(tier)
            except AdaCheckError as error:
                first = first or error
        if first is not None:
            raise first

    def _prune_tier(self, tier: Tier) -> None:
        name = tier.traits.name
        with self._changed:
            wanted = name in self._wanted
            self._wanted.discard(name)
        try:
            if wanted:
                self._raise_floor(tier)
            self._bury(tier)
        except BaseException:
            if wanted:
                with self._changed:
                    self._wanted.add(name)
            raise

    def _raise_floor(self, tier: Tier) -> None:
        """Write a higher floor for a tier if it can bear one, and mark what lies below it."""
        near = tier is self._store.near and tier is not self._store.far
        progress = self._progress
        current = progress.near_floor if near else progress.far_floor
        with self._changed:  # what is still to be compared stays
            cap = self._captured.floor()
        if near:
            # What a tag alone keeps from being the far floor is there like one; so is all before.
            borne = min(self._tagged.bears, progress.drained)
            highest = max(floor_of(self._store.far, self._run, str(self._term)), borne)
            cap = highest if cap is None else min(cap, highest)
        if cap is not None and cap <= current:
            return
        floor, doomed = raise_floor(
            tier, self._run, self._settings.keep_bases, cap=cap, current=current,
            put=lambda choice: self._put_floor(tier, choice), own=self._own if near else None,
            retention=None if near else self._settings.retention,
            tagged=None if near else self._tagged,
        )  # fmt: skip
        if near:
            progress.near_floor = floor
        else:
            progress.far_floor = floor
            higher = floor > current or self._tagged.bears > current
            if higher and tier is not self._store.near:
                with self._changed:  # it may have been tried under the lower one meanwhile
                    self.want_near()
        if doomed:
            grace_s = 0.0 if tier is self._store.near else self._settings.grace_s
            self._graves.append((time.monotonic() + grace_s, tier, doomed))

    def _put_floor(self, tier: Tier, choice: FloorChoice) -> bool:
        """False while a newer claim may still be restoring from below."""
        check_fence(self._store.far, self._run, self._term)
        live, dead = self._rivals.look()
        return not live and bool(
            put_floor(
                tier, self._run, term=str(self._term), terms=choice.terms, step=choice.step,
                kept=tuple(choice.kept), ignore=dead, logged=choice.logged,
            )
        )  # fmt: skip

    def _bury(self, tier: Tier) -> None:
        """Delete what has been below a floor for long enough."""
        now = time.monotonic()
        due = [grave for grave in self._graves if grave[1] is tier and grave[0] <= now]
        for grave in due:
            bury(tier, self._run, grave[2])
            self._graves.remove(grave)
