"""Leases: while somebody plans a restore from what is here, nothing of it may go."""

from __future__ import annotations

LEASE_S = 60.0
"""How long a request for a catalog keeps everything; the planner renews it."""


class Lease:
    """The freeze that the newest claimed term holds, if any."""

    def __init__(self) -> None:
        self._term = ""
        self._until = 0.0

    def ask(self, term: str, now: float) -> None:
        """A planner that has claimed ``term`` reads the catalog, or renews.

        An older claim than the one that holds the lease changes nothing.
        """
        if term >= self._term:
            self._term, self._until = term, now + LEASE_S

    def opened(self, term: str) -> None:
        """A term has begun: claims up to it are past."""
        if term >= self._term:
            self._until = 0.0

    def frozen(self, now: float) -> bool:
        """True while nothing may be folded over or dropped."""
        return now < self._until
