"""The vigil: between two looks a thread sees that witnesses differ, and has all ranks look at once.

Ranks post short digests of their witnesses on the board, rank 0 reads them. The training thread
takes no part in that. Where something is wrong, or a look has failed, the ranks agree, as for a
stop (`grace`), at which boundary they look: each says up to where it goes by itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from adacheck_store.format import canonical, strict
from adacheck_store.format.errors import AdaCheckError, UsageError
from adacheck_store.group import Group

from . import background
from .ranks import Board, find_board
from .witness import Brief, Witnessing

log = logging.getLogger(__name__)

POLL_S = 0.25
"""How often ranks post and look, with up to 64 ranks; with more as much less often."""

RETRY_S = 10.0
"""Longest pause before the board is tried again that could not be reached."""

AHEAD = 2
"""Boundaries that a rank may close before it has to know where all look."""

AGREE_S = 10.0
"""Longest wait for the threads of all ranks to say up to where each goes by itself."""

REST = 8
"""Boundaries after a look that was asked for before the next may be; each time twice as many."""


class Vigil:
    """A rank's part; all but the thread's own methods are the training thread's.

    Every rank begins it at the same boundary, whatever it shares. It keeps to itself what goes
    wrong, and tries again. It asks for a look every ``longest`` boundaries where none helps: what
    is stored meanwhile may be such as no restore takes.
    """

    def __init__(self, group: Group, timeout_s: float, longest: int) -> None:
        self._group, self._timeout_s = group, min(timeout_s, AGREE_S)
        self._every_s = POLL_S * max(1.0, group.size / 64)
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._ended = False
        self._step = self._since = self._failed = -1
        self._free: int | None = None
        self._look: int | None = None
        self._call = 0
        self._longest = max(longest, REST)
        self._quiet, self._rest = -1 - self._longest, REST
        self._witnessing: Witnessing | None = None
        self._posted = ""
        self._heard: Sequence[str] | None = None

    def begin(self) -> None:
        """Start the thread, if it was not started before; if that cannot be, the next time."""
        if self._thread is None:
            try:
                self._thread = background.start("adacheck-vigil", self._run)
            except (RuntimeError, OSError) as error:
                log.warning("copies are compared at looks alone for now: %s", error)

    def watch(self, step: int, witnessing: Witnessing | None) -> None:
        """At this step all were found equal; what this rank shares is witnessed there (None: it
        shares nothing).
        """
        with self._changed:
            self._witnessing, self._since, self._failed = witnessing, step, -1

    def ask(self, step: int) -> None:
        """A look at this step has failed here: another one is wanted, until one succeeds."""
        with self._changed:
            self._failed = step

    def reached(self, step: int) -> None:
        """A boundary is about to be closed: wait here if it is not known yet where all look."""
        with self._changed:
            self._step = step
            if self._free is not None and step >= self._free and self._look is None:
                self._changed.wait_for(
                    lambda: self._look is not None or self._free is None, timeout=self._timeout_s
                )
            if self._look is not None and step > self._look:
                self._rested()
                self._free = self._look = None

    def _rested(self) -> None:
        """Ask for no look soon: each time for longer, unless the last one was long ago."""
        calm = self._step > self._quiet + self._longest
        self._rest = REST if calm else min(2 * self._rest, self._longest)
        self._quiet = self._step + self._rest

    def due(self, step: int) -> bool:
        """Whether all ranks compare at a boundary because the vigil asks for it."""
        return self._look == step

    def end(self) -> None:
        """The run is over for this rank; others need not wait for its word."""
        with self._changed:
            self._ended = True

    # The thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        board: Board | None = None
        pause_s = self._every_s
        while not self._ended and not background.pause(pause_s):
            try:
                board = board or find_board(self._group)
                self._round(board)
                pause_s = self._every_s
            except UsageError as error:
                log.info("copies are compared at looks alone: %s", error)
                return
            except (AdaCheckError, RuntimeError, OSError, ValueError, KeyError) as error:
                log.info("ranks do not hear of each other's copies for now: %s", error)
                board, self._posted, pause_s = None, "", min(2 * pause_s, RETRY_S)
                with self._changed:
                    if self._free is not None:
                        self._rested()
                    self._free = None
                    self._changed.notify_all()
        if board is not None and self._free is None:
            try:
                board.post(f"free/{self._call + 1}/{self._group.rank}", str(self._step))
            except (RuntimeError, OSError) as error:
                log.debug("the last word was not heard: %s", error)

    def _round(self, board: Board) -> None:
        if self._look is not None:
            return
        told = self._told()
        if told != self._posted:
            board.post(f"witness/{self._group.rank}", told)
            self._posted = told
        if self._group.rank == 0 and (why := self._wrong(board)):
            log.warning("redundancy: %s: all ranks look", why)
            board.post("look", str(self._call + 1))
        called = board.look("look")
        if called is not None and int(called) > self._call:
            self._call = int(called)  # whatever becomes of it: the next one has another number
            self._agree(board)

    def _agree(self, board: Board) -> None:
        with self._changed:
            self._free = free = self._step + AHEAD
        found = board.exchange(f"free/{self._call}", str(free), self._timeout_s)
        with self._changed:
            self._look = max(int(text) for text in found) + 2  # looks are in pairs
            self._changed.notify_all()

    def _told(self) -> str:
        """What this rank tells: of the last steps what it shares with whom, and of a failed look.

        Of the steps None where it shares nothing: it can miss nothing either.
        """
        with self._changed:
            witnessing, failed = self._witnessing, self._failed
        steps = None
        if witnessing is not None:
            steps = {str(step): dict(brief) for step, brief in witnessing.lately().items()}
        return canonical.dumps({"steps": steps, "failed": failed}).decode()

    def _wrong(self, board: Board) -> str:
        """Why all ranks are to look, from what they tell (rank 0); empty if nothing is wrong."""
        heard = board.all("witness")
        if heard is None or heard == self._heard or self._step <= self._quiet:
            return ""
        told = [strict.fields(canonical.loads(each.encode()), "steps", "failed") for each in heard]
        failed = max(strict.integer(each["failed"]) for each in told)
        if failed >= 0:
            return f"at step {failed} copies could not be compared"
        found = self._differing([strict.fields(t["steps"]) for t in told if t["steps"] is not None])
        if found >= 0:
            return f"copies differ at step {found}"
        self._heard = heard
        return ""

    def _differing(self, told: Sequence[Mapping[str, Any]]) -> int:
        """The newest step of which all have told, if they differ; -1 if nothing is wrong."""
        common = set.intersection(*(set(map(int, each)) for each in told)) if told else set()
        step = max(common, default=-1)
        if step <= self._since:
            return -1
        known: dict[str, Any] = {}
        for each in told:
            brief: Brief = each[str(step)]
            for name, value in brief.items():
                if known.setdefault(name, value) != value or value == "":
                    return step
        return -1
