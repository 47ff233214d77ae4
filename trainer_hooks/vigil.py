"""The vigil: between two looks a thread sees that witnesses differ, and has all ranks look at once.

Ranks post short digests of their witnesses on the board, rank 0 reads them. The training thread
takes no part in that. Where something is wrong the ranks agree, as for a stop (`grace`), at which
boundary they look: each says up to where it goes by itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import xxhash

from adacheck_store.format import canonical, strict
from adacheck_store.format.errors import AdaCheckError, UsageError
from adacheck_store.group import Group
from adacheck_store.redundancy.witness import DIGEST_BYTES, Place, Witness

from . import background
from .ranks import Board, find_board
from .witness import Witnessing

log = logging.getLogger(__name__)

POLL_S = 0.25
"""How often ranks post and look, with up to 64 ranks; with more as much less often."""

AHEAD = 2
"""Boundaries that a rank may close before it has to know where all look."""

Sets = Mapping[Place, str]
"""Of each state that a rank shares a name for the ranks it shares it with."""


class Vigil:
    """A rank's part; `begin`, `reached` and `due` are the training thread's."""

    def __init__(self, group: Group, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s
        self._every_s = POLL_S * max(1.0, group.size / 64)
        self._board: Board | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._ended = False
        self._step = -1
        self._free: int | None = None
        self._look: int | None = None
        self._calls = 0
        self._quiet = -1
        self._sets: Sets = {}
        self._witnessing: Witnessing | None = None

    def rest(self) -> None:
        """Nothing is shared for the time being."""
        with self._changed:
            self._sets, self._witnessing = {}, None

    def begin(self, step: int, sets: Sets, witnessing: Witnessing) -> None:
        """From this step on these states of this rank are shared, and witnessed there.

        Every rank calls it, once any shares something.
        """
        with self._changed:
            self._sets, self._witnessing = sets, witnessing
            self._quiet = max(self._quiet, step)
        if self._thread is None:
            try:
                self._board = find_board(self._group)
            except UsageError as error:
                log.info("copies are compared at looks alone: %s", error)
                return
            self._thread = background.start("adacheck-vigil", self._run)

    def reached(self, step: int) -> None:
        """A boundary is about to be closed: wait here if it is not known yet where all look."""
        with self._changed:
            self._step = step
            if self._free is not None and step >= self._free and self._look is None:
                self._changed.wait_for(
                    lambda: self._look is not None or self._free is None, timeout=self._timeout_s
                )
            if self._look is not None and step > self._look:
                self._quiet = step + (8 << min(self._calls, 6))
                self._free = self._look = None
                self._calls += 1

    def due(self, step: int) -> bool:
        """Whether all ranks compare at a boundary because the vigil asks for it."""
        return self._look == step

    def end(self) -> None:
        """The run is over for this rank; others need not wait for its word."""
        with self._changed:
            self._ended = True

    # The thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._board is not None
        try:
            while not self._ended and not background.pause(self._every_s):
                self._round(self._board)
            if self._free is None:
                self._board.post(f"free/{self._calls}/{self._group.rank}", str(self._step))
        except (AdaCheckError, RuntimeError, OSError, ValueError) as error:
            log.info("copies are compared at looks alone from here on: %s", error)
            with self._changed:
                self._free = None
                self._changed.notify_all()

    def _round(self, board: Board) -> None:
        if self._look is not None:
            return
        board.post(f"witness/{self._group.rank}", self._told())
        if self._group.rank == 0 and (found := self._differing(board)) >= 0:
            log.warning("redundancy: copies differ at step %d: all ranks look", found)
            board.post(f"look/{self._calls}", str(found))
        if board.look(f"look/{self._calls}") is not None:
            self._agree(board)

    def _agree(self, board: Board) -> None:
        with self._changed:
            self._free = free = self._step + AHEAD
        found = board.exchange(f"free/{self._calls}", str(free), self._timeout_s)
        with self._changed:
            self._look = max(int(text) for text in found) + 2  # looks are in pairs
            self._changed.notify_all()

    def _told(self) -> str:
        """What this rank tells of the last steps: of each set of ranks 64 bits, of each step."""
        with self._changed:
            sets, witnessing = self._sets, self._witnessing
        lately = witnessing.lately() if witnessing is not None else {}
        steps = {str(step): _short(each, sets) for step, each in lately.items()}
        return canonical.dumps(steps).decode()

    def _differing(self, board: Board) -> int:
        """The newest step of which all ranks have told, if they differ; -1 if nothing is wrong."""
        told: list[Mapping[str, Any]] = []
        for rank in range(self._group.size):
            text = board.look(f"witness/{rank}")
            if text is None:
                return -1
            told.append(strict.fields(canonical.loads(text.encode())))
        common = set.intersection(*(set(map(int, each)) for each in told))
        step = max(common, default=-1)
        if step <= self._quiet:
            return -1
        known: dict[str, Any] = {}
        for each in told:
            for name, value in each[str(step)].items():
                if known.setdefault(name, value) != value or value == "":
                    return step
        return -1


def _short(witness: Witness, sets: Sets) -> dict[str, str]:
    """Of each set of ranks the digest of what is shared with them; empty where it is not known."""
    parts: dict[str, bytes] = {}
    if witness.since < 0 or len(witness.digests) != DIGEST_BYTES * len(sets):
        return dict.fromkeys(sets.values(), "")
    for number, name in enumerate(sets.values()):
        at = DIGEST_BYTES * number
        parts[name] = parts.get(name, b"") + witness.digests[at : at + DIGEST_BYTES]
    begun = witness.since.to_bytes(8, "little")
    return {name: xxhash.xxh3_64_hexdigest(begun + data) for name, data in parts.items()}
