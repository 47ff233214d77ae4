"""Excuses: what a session says in the run's log of an end that is no death (see `deaths`)."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator

from adacheck_store.format.errors import AdaCheckError, GroupError
from adacheck_store.format.keys import Term
from adacheck_store.tiers.base import Tier

from .terms import excuse_term

log = logging.getLogger(__name__)

TEXT_MAX = 300
"""Characters of an excuse."""


class Excuse:
    """The excuse of one term, given at most once, in the tier with the run's log.

    ``term`` is None until it is claimed, and on ranks but 0, which say nothing.
    """

    def __init__(self, tier: Tier, run: str) -> None:
        self._tier, self._run = tier, run
        self.term: Term | None = None

    def give(self, why: str) -> None:
        """Put it into the log; where that fails the term may count as a death, which is logged."""
        term, self.term = self.term, None
        if term is None:
            return
        try:
            excuse_term(self._tier, self._run, term, why[:TEXT_MAX] or "?")
        except AdaCheckError as error:
            log.warning("the end of this attempt may be taken for a death: %s", error)

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """What our own errors refuse is no death; what has happened to another rank may be one."""
        try:
            yield
        except AdaCheckError as error:
            if not isinstance(error, GroupError):
                self.give(f"{type(error).__name__}: {error.message}")
            raise

    def at_end(self, timeout_s: float) -> bool:
        """The session ends. False if the tier did not answer in time.

        It dies where an exception is on its way: but for ours, a person's Ctrl-C, and an exit that
        says that all is well.
        """
        if self.term is None or _dies(sys.exception()):
            return True
        thread = threading.Thread(
            target=self.give, args=("ended",), name="adacheck-excuse", daemon=True
        )
        thread.start()
        thread.join(timeout_s)
        return not thread.is_alive()


def _dies(error: BaseException | None) -> bool:
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    well = isinstance(error, AdaCheckError | KeyboardInterrupt) and not isinstance(
        error, GroupError
    )
    return error is not None and not well
