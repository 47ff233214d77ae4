"""The budget: memory that is never exceeded, and a reserve in it for every chain.

A part has room for its base and the deltas that the flow of training can need at once; one more
base may come in at a time. What no reserve claims is anybody's. The room of the incoming base is
how all else is freed, by a fold or by a captured base: neither deltas beyond their reserve take it,
nor a captured base that nothing could settle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MEBI = 1 << 20
PROGRAM_BYTES = 384 * MEBI
"""What the agent takes whatever it holds: the program, 223 MiB of it once torch is loaded, pages on
their way to the disk, the windows of a fold. `tests.benchmarks.resident` measures it."""

KEPT_SHARE = 8
"""One part in so many of the rest is kept: for heads, buffers and a fold under way."""

LEAST_BYTES = PROGRAM_BYTES + 16 * MEBI
"""Less memory is no use to an agent."""

BEYOND_WINDOW = 3
"""Deltas that a chain may need beyond the W in flight.

The one being received, the one that the slowest rank's last step is settled by, and that step.
"""


def room_of(memory: int) -> int:
    """Bytes that records may fill in the memory that an agent's process has."""
    return max(0, memory - PROGRAM_BYTES) * (KEPT_SHARE - 1) // KEPT_SHARE


def memory_for(room: int) -> int:
    """The least memory of an agent's process, whole MiB, in which records may fill so much."""
    kept = -(-room // (KEPT_SHARE - 1))
    return -(-(PROGRAM_BYTES + room + kept) // MEBI) * MEBI


@dataclass(slots=True)
class _Account:
    """A chain's reserve and use, in bytes: bases and the rest; use has what was admitted.

    ``one``: the delta or extra that the reserve has been made of.
    """

    base: int = 0
    rest: int = 0
    one: int = 0
    used_base: int = 0
    used_rest: int = 0

    def within(self, more: bool) -> bool:
        """True if deltas or extras are within their reserve, or leave room in it for one more."""
        return self.used_rest + (self.one if more else 0) <= self.rest


class Budget:
    """Bytes of memory for all runs of an agent, each of which has a share."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._shares: list[Share] = []

    def share(self) -> Share:
        """A share for one run: empty, and free to take what nobody has reserved."""
        made = Share(self)
        self._shares.append(made)
        return made

    def give_up(self, share: Share) -> None:
        """A run is over: nothing of it is in memory any more."""
        self._shares.remove(share)
        self.used -= sum(each.used_base + each.used_rest for each in share.accounts.values())

    def missing(self, beside: bool = False) -> int:
        """Bytes by which use, what is reserved and unused, and one incoming base exceed it all.

        ``beside``: one more than may have come in already.
        """
        kept = incoming = over = 0
        for each in self._accounts():
            kept += max(0, each.base - each.used_base) + max(0, each.rest - each.used_rest)
            incoming = max(incoming, each.base)
            over += max(0, each.used_base - each.base)
        return self.used + kept + max(0, incoming - (0 if beside else over)) - self.total

    def reserved(self) -> int:
        """Bytes of all reserves, with one incoming base."""
        accounts = list(self._accounts())
        incoming = max((each.base for each in accounts), default=0)
        return sum(each.base + each.rest for each in accounts) + incoming

    def _accounts(self) -> Iterator[_Account]:
        for share in self._shares:
            yield from share.accounts.values()


class Share:
    """What one run has of a budget: an account for each chain, by name."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.accounts: dict[str, _Account] = defaultdict(_Account)

    def reserve(self, chains: Mapping[str, tuple[int, int]], window: int) -> int:
        """Reserve for these chains and no others: the bytes of a base and of a delta (or extra).

        Returns the bytes by which all reserves exceed the budget; if there are any, nothing has
        changed.
        """
        before = {name: (each.base, each.rest, each.one) for name, each in self.accounts.items()}
        deltas = window + BEYOND_WINDOW
        self._set({name: (base, deltas * rest, rest) for name, (base, rest) in chains.items()})
        missing = self.budget.reserved() - self.budget.total
        if missing > 0:
            self._set(before)
        return max(0, missing)

    def admit(self, sizes: Mapping[str, tuple[int, int]]) -> bool:
        """Take bytes of bases and others for each chain, if what others have reserved leaves them.

        With a base comes the duty to keep room for what settles it. What has that room in the
        reserve may take the room of the incoming base; other records leave it.
        """
        for chain, (base, rest) in sizes.items():
            self.charge(chain, base, rest)
        bases = any(base for base, _ in sizes.values())
        within = all(self.accounts[chain].within(bases) for chain in sizes)
        if self.budget.missing(beside=not within) <= 0:
            return True
        self.give_back(sizes)
        return False

    def admit_fold(self, chain: str, base: int) -> bool:
        """Take the bytes of a base that a fold makes: it frees what it is made of."""
        self.charge(chain, base, 0)
        if self.budget.missing() <= 0:
            return True
        self.charge(chain, -base, 0)
        return False

    def give_back(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        """What was admitted is not there, or no longer."""
        for chain, (base, rest) in sizes.items():
            self.charge(chain, -base, -rest)

    def charge(self, chain: str, base: int, rest: int) -> None:
        """Count bytes that are in use (negative: no longer), whatever is reserved."""
        account = self.accounts[chain]
        account.used_base += base
        account.used_rest += rest
        self.budget.used += base + rest

    def _set(self, reserves: Mapping[str, tuple[int, int, int]]) -> None:
        for name in {*self.accounts, *reserves}:
            account = self.accounts[name]
            account.base, account.rest, account.one = reserves.get(name, (0, 0, 0))
