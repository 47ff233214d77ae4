"""Drainers: copy records of this node's own chains to a lower place, as the core commands."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from adacheck_store.catalog import RecordRef
from adacheck_store.drain import copy_records, in_batches
from adacheck_store.format.derived import ORIGIN
from adacheck_store.format.errors import FormatError, RecordNotFoundError, TierFullError
from adacheck_store.format.keys import parse_key

from . import events as ev
from .door import copy_documents
from .replica import FAR, LMDB, RAM
from .work import Work, log

if TYPE_CHECKING:
    from adacheck_store.tiers.base import Tier

    from .shell import Shell


class Drainer:
    """Drains to one place; a failure is tried again later and later, and holds up nothing else.

    ``bytes_per_s`` caps what is copied to the far tier (0: nothing does).
    """

    def __init__(self, shell: Shell, place: int) -> None:
        self._shell = shell
        self._place = place
        self.bytes_per_s = 0
        self.bytes_drained = 0
        self.drained = -1
        name = "drain-lmdb" if place == LMDB else "drain-far"
        self.work: Work[ev.Drain | ev.Survey] = Work(name, self._act, self._failed, backoff=True)

    def give(self, command: ev.Drain | ev.Survey) -> None:
        """Have records drained, or what lies there read."""
        self.work.give(command)

    def _act(self, command: ev.Drain | ev.Survey) -> None:
        shell, target = self._shell, self._shell.places[self._place]
        if isinstance(command, ev.Survey):
            shell.tell(ev.Surveyed(command.term, self._look(command.chains)))
            return
        uppers = [shell.places[place] for place in (RAM, LMDB)
                  if place in shell.places and place != self._place]  # fmt: skip
        copy_documents(shell.places[RAM], target, shell.run)
        passed: list[str] = []
        for batch in in_batches(command.keys, len(command.keys)):
            before = time.monotonic()
            size = self._copy(uppers, batch, passed)
            self.bytes_drained += size
            if self.bytes_per_s and self._place == FAR:
                rest_s = size / self.bytes_per_s - (time.monotonic() - before)
                self.work.ending.wait(max(0.0, rest_s))
        target.sync()
        done = tuple(key for key in command.keys if key not in passed)
        shell.tell(ev.Drained(self._place, done, passed=tuple(passed)))
        with shell.lock:
            shell.prunes.want()

    def _look(self, chains: tuple[str, ...]) -> tuple[RecordRef, ...]:
        """References of what is there of some chains; what cannot be read is not there."""
        target, run = self._shell.places[self._place], self._shell.run
        found = []
        for key in target.list(f"{run}/"):
            parsed = parse_key(key)
            if parsed.part in chains and parsed.kind in ("base", "delta", "extra"):
                with suppress(RecordNotFoundError, FormatError):
                    found.append(self._shell.ref_of(target, key))
        # A derived base has no bytes: what it needs of other parts is not looked at here.
        return tuple(ref for ref in found if ref.origin != ORIGIN)

    def _failed(self, command: ev.Drain | ev.Survey, error: Exception) -> None:
        if isinstance(command, ev.Survey):
            self._shell.tell(ev.Surveyed(command.term, None))
        else:
            self._shell.tell(ev.Drained(self._place, (), full=isinstance(error, TierFullError)))

    def _copy(self, uppers: list[Tier], batch: list[str], passed: list[str]) -> int:
        """Copy a batch; say which records cannot be copied, and pass them over."""
        target = self._shell.places[self._place]
        try:
            return copy_records(uppers, target, batch)
        except (RecordNotFoundError, FormatError) as error:
            if len(batch) == 1:
                log.warning("not drained: %s", error.at(key=batch[0]))
                passed.append(batch[0])
                return 0
        return sum(self._copy(uppers, [key], passed) for key in batch)
