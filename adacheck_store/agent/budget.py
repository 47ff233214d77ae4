"""The budget: memory that is never exceeded, and a reserve in it for every chain.

A part has room for its base and the deltas that the flow of training can need at once; one more
base may come in at a time. What no reserve claims is anybody's.
"""

from __future__ import annotations

from dataclasses import dataclass

BEYOND_WINDOW = 3
"""Deltas that a chain may need beyond the W in flight.

The one being received, the one that the slowest rank's last step is settled by, and that step.
"""


@dataclass(slots=True)
class _Account:
    """A chain's reserve and use, in bytes: bases and the rest; use has what was admitted."""

    base: int = 0
    rest: int = 0
    used_base: int = 0
    used_rest: int = 0


class Budget:
    """Bytes of memory for all chains of all runs of an agent."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._accounts: dict[str, _Account] = {}

    def reserve(self, chains: dict[str, tuple[int, int]], window: int) -> int:
        """Reserve for chains, by name: the bytes of a base and of a delta (or extra).

        Replaces what was reserved before. Returns the bytes needed; if that is more than the
        total, nothing has changed.
        """
        wanted = {
            name: (base, rest * (window + BEYOND_WINDOW)) for name, (base, rest) in chains.items()
        }
        needed = sum(base + rest for base, rest in wanted.values())
        needed += max((base for base, _ in wanted.values()), default=0)
        if needed <= self.total:
            for account in self._accounts.values():
                account.base = account.rest = 0
            for name, (base, rest) in wanted.items():
                account = self._accounts.setdefault(name, _Account())
                account.base, account.rest = base, rest
        return needed

    def admit(self, chain: str, base: int, rest: int) -> bool:
        """Take so many bytes for a chain, if what is reserved and unused leaves them."""
        account = self._accounts.setdefault(chain, _Account())
        self._take(account, base, rest)
        kept = incoming = over = 0
        for each in self._accounts.values():
            kept += max(0, each.base - each.used_base) + max(0, each.rest - each.used_rest)
            incoming = max(incoming, each.base)
            over += max(0, each.used_base - each.base)
        if self.used + kept + max(0, incoming - over) <= self.total:
            return True
        self._take(account, -base, -rest)
        return False

    def charge(self, chain: str, base: int, rest: int) -> None:
        """Count bytes that are in use (negative: no longer), whatever is reserved."""
        self._take(self._accounts.setdefault(chain, _Account()), base, rest)

    def _take(self, account: _Account, base: int, rest: int) -> None:
        account.used_base += base
        account.used_rest += rest
        self.used += base + rest
