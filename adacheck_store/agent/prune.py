"""Pruning at an agent: floors for the LMDB, and for the far tier where rank 0 is at home."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from adacheck_store.format.errors import AdaCheckError
from adacheck_store.format.keys import Term, part_name
from adacheck_store.terms import Rivals, check_fence, put_floor
from adacheck_store.tiers.base import Tier

from . import events as ev
from .replica import FAR, LMDB
from .work import Work

if TYPE_CHECKING:
    from adacheck_store.retention import FloorChoice
    from adacheck_store.tagged import Tagged

    from .shell import Shell

TRIES_A_LAG = 4
"""Times at most to look whether a floor may rise, in `Settings.object_lag_s`: it reads lists."""

Own = tuple[tuple[str, ...], tuple[str, ...]]
"""Parts and ranks."""


class Prunes:
    """Raises floors, never above the watermark, and deletes what lies below them."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._watermark = -1
        self._queued = False
        self._wanted = False
        self._next = 0.0
        self._floors: dict[tuple[str, int], int] = {}
        self._rivals: tuple[str, Rivals] | None = None
        self.tagged: Tagged | None = None
        """What is known of tags by the one who prunes the far tier, in this term."""
        self._graves: list[tuple[float, int, list[str]]] = []
        self.work: Work[None] = Work("prune", lambda _: self._act(), self._failed, backoff=True)

    def want(self, watermark: int = -1) -> None:
        """The watermark is that step now, or something was drained (under the shell's lock)."""
        self._watermark = max(watermark, self._watermark)
        self._wanted = True

    def tick(self) -> None:
        """Called a few times a second, under the shell's lock: try, where it is time to."""
        now = time.monotonic()
        if self._queued or now < self._next:
            return
        if self._wanted or self._graves or self._behind():
            self._queued, self._wanted = True, False
            self._next = now + self._shell.settings.object_lag_s / TRIES_A_LAG
            self.work.give(None)

    def _behind(self) -> bool:
        """True while a floor is lower than the bases that are due would allow.

        Other nodes drain theirs later, and nobody tells of it.
        """
        shell, every = self._shell, self._shell.settings.base_every
        last = min(self._watermark, shell.core.view.watermark) // every
        due = (last - (shell.settings.keep_bases - 1)) * every
        places = [place for place in shell.drainers if place != FAR or self._prunes_far()]
        return due > 0 and any(self.floor(place) < due for place in places)

    def _prunes_far(self) -> bool:
        return self._shell.core.view.owns(part_name(0))

    def floor(self, place: int) -> int:
        """The floor of a place in the term there is, -1 if none was raised by this process."""
        return self._floors.get((self._shell.core.view.term, place), -1)

    @property
    def held(self) -> tuple[float, AdaCheckError] | None:
        """Since when (s) a tag keeps the far tier's floor down, and what is to be done about it."""
        tagged = self.tagged
        held = None if tagged is None else tagged.held
        return None if tagged is None or held is None else (tagged.since, held)

    def _failed(self, command: None, error: Exception) -> None:
        with self._shell.lock:
            self._queued = False

    def _act(self) -> None:
        with self._shell.lock:
            self._queued = False
            view = self._shell.core.view
            cap = min(self._watermark, view.watermark)  # that of a newer term begins anew
            term = view.term
            parts = tuple(sorted(part.name for part in view.parts() if view.owns(part.name)))
            ranks = tuple("r" + name[1:] for name in parts)
        if not term or not parts:
            return
        if self._rivals is None or self._rivals[0] != term:
            far = self._shell.places[FAR]
            self._rivals = (term, Rivals(far, self._shell.run, Term.parse(term)))
            self.tagged = None
        if self._prunes_far():
            self._raise(FAR, term, cap, None)
        else:
            self.tagged = None
        self._raise(LMDB, term, cap, (parts, ranks))
        self._bury()

    def _raise(self, place: int, term: str, cap: int, own: Own | None) -> None:
        from adacheck_store.retention import (  # brings torch; see `Shell.replay`
            floor_of,
            raise_floor,
        )
        from adacheck_store.tagged import Tagged

        tier = self._shell.places.get(place)
        if tier is None:
            return
        current = self._floors.get((term, place), -1)
        if place == LMDB:
            # No step that the far tier proves for all parts is below the floor of any LMDB.
            # What a tag alone keeps from being its floor is there like one; so is all before.
            with self._shell.lock:
                waiting = self._shell.core.drains.backlog(FAR, time.monotonic())
            borne = -1 if self.tagged is None else self.tagged.bears
            if waiting.records:
                borne = min(borne, waiting.oldest_step - 1)
            highest = floor_of(self._shell.places[FAR], self._shell.run, term)
            cap = min(cap, max(highest, borne))
        else:
            self.tagged = self.tagged or Tagged()
        floor, doomed = raise_floor(
            tier, self._shell.run, self._shell.settings.keep_bases, cap=cap, current=current,
            put=lambda choice: self._put(tier, term, choice), own=own,
            retention=self._shell.settings.retention if place == FAR else None,
            tagged=self.tagged if place == FAR else None,
        )  # fmt: skip
        self._floors[term, place] = floor
        if doomed:
            grace_s = self._shell.settings.grace_s if place == FAR else 0.0
            self._graves.append((time.monotonic() + grace_s, place, doomed))

    def _put(self, tier: Tier, term: str, choice: FloorChoice) -> bool:
        run, far = self._shell.run, self._shell.places[FAR]
        check_fence(far, run, Term.parse(term))
        assert self._rivals is not None
        live, dead = self._rivals[1].look()
        return not live and not self._shell.core.lease.frozen(time.monotonic()) and bool(
            put_floor(tier, run, term=term, terms=choice.terms, step=choice.step,
                      kept=tuple(choice.kept), ignore=dead, logged=choice.logged)
        )  # fmt: skip

    def _bury(self) -> None:
        from adacheck_store.retention import bury  # brings torch; see `Shell.replay`

        now = time.monotonic()
        for grave in [grave for grave in self._graves if grave[0] <= now]:
            _, place, keys = grave
            gone = bury(self._shell.places[place], self._shell.run, keys)
            self._graves.remove(grave)
            if place == LMDB:
                self._shell.tell(ev.Lost(LMDB, tuple(gone)))
