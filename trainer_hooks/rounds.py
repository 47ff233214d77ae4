"""Rounds: which optimizers have made how many updates since the last boundary."""

from __future__ import annotations

from adacheck_store.format.errors import OrderError

UPDATES_MAX = 16
"""Updates of one of several optimizers between two boundaries; each takes a buffer of its own."""


class Rounds:
    """Counts updates of ``optimizers`` optimizers; one alone may make one between boundaries.

    ``total`` is how many there were in all.
    """

    def __init__(self, optimizers: int) -> None:
        self._made = [0] * optimizers
        self.total = 0
        self._begun = False
        self._most = UPDATES_MAX if optimizers > 1 else 1

    @property
    def open(self) -> bool:
        """True if there was an update since the last boundary."""
        return any(self._made)

    @property
    def begun(self) -> bool:
        """True if one was begun since: one that failed may have been made in part."""
        return self._begun or self.open

    def check(self, optimizer: int, step: int) -> None:
        """An update is to begin; raise `OrderError` where one more would be too many."""
        if self._made[optimizer] >= self._most:
            raise OrderError(
                "a second update without end_step()" if self._most == 1 else
                f"{UPDATES_MAX} updates of an optimizer without end_step()", step=step,
                hint="with several optimizers or after track() end_step() is the boundary: call it "
                "after every update, or every round of updates",
            )  # fmt: skip
        self._begun = True

    def note(self, optimizer: int) -> None:
        """An update was made."""
        self._made[optimizer] += 1
        self.total += 1

    def close(self) -> None:
        """A boundary."""
        self._made, self._begun = [0] * len(self._made), False
