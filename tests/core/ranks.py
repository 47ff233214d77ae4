"""Ranks as threads: a group of them, and their sessions on tiers that outlive a session."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from adacheck_store.config import Settings
from adacheck_store.format.errors import DigestMismatchError, GroupError
from adacheck_store.group import named
from adacheck_store.session import RunSession
from adacheck_store.store import Store
from adacheck_store.tiers.base import Source, Tier
from adacheck_store.tiers.wrappers import WrapperTier
from tests.core.kit import QUICK, Journal, KeptTier, load, make_toy


class Killed(BaseException):
    """What ends a rank where it stands."""


class _Talk:
    """What the threads of a group share: what was said in each round, and who is dead."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.said: defaultdict[int, dict[int, bytes]] = defaultdict(dict)
        self.dead: set[int] = set()


class ThreadGroup:
    """A rank of a group whose ranks are threads of this process."""

    def __init__(self, rank: int, size: int, talk: _Talk) -> None:
        self.rank, self.size, self._talk = rank, size, talk
        self._round = 0

    @property
    def lost(self) -> set[int]:
        """Ranks that have ended."""
        return self._talk.dead

    def room(self, name: str) -> ThreadGroup:
        """The same room."""
        return self

    def leave(self) -> None:
        """Who waits goes on waiting."""

    def gather(self, data: bytes, timeout_s: float | None = None) -> Sequence[bytes]:
        """What every rank gave."""
        self._round += 1
        return self._await(range(self.size), data, timeout_s)

    def broadcast(self, data: bytes | None) -> bytes:
        """What rank 0 gave."""
        self._round += 1
        return self._await([0], data)[0]

    def exchange(self, messages: Sequence[bytes], timeout_s: float) -> Sequence[bytes]:
        """What every rank has for this one."""
        told = self.gather(json.dumps([each.hex() for each in messages]).encode(), timeout_s)
        return [bytes.fromhex(json.loads(each)[self.rank]) for each in told]

    def _await(
        self, ranks: Sequence[int], data: bytes | None, timeout_s: float | None = None
    ) -> list[bytes]:
        with self._talk.changed:
            said = self._talk.said[self._round]  # made by whoever comes first: under the lock
            if data is not None:
                said[self.rank] = data
                self._talk.changed.notify_all()
            self._talk.changed.wait_for(
                lambda: all(rank in said or rank in self._talk.dead for rank in ranks),
                timeout=timeout_s or 120,
            )
            missing = [rank for rank in ranks if rank not in said]
        if missing:
            raise GroupError(f"{named(missing)} did not come")
        return [said[rank] for rank in ranks]


def on_ranks(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Do work on every rank at once; gives each one's result or what it raised."""
    talk = _Talk()
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(rank, size, talk))
        except (Exception, Killed) as error:
            results[rank] = error
        with talk.changed:
            talk.dead.add(rank)
            talk.changed.notify_all()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive(), "a rank hangs"
    return results


class CutTier(WrapperTier):
    """A tier that lets so many puts and syncs pass, shared with others, and then kills."""

    def __init__(self, inner: Tier, left: list[int]) -> None:
        super().__init__(inner)
        self._left = left

    def _spend(self) -> None:
        self._left[0] -= 1
        if self._left[0] < 0:
            raise Killed

    def put(self, sources: Sequence[Source]) -> None:
        """Hand on, or die."""
        self._spend()
        super().put(sources)

    def sync(self) -> None:
        """Hand on, or die."""
        self._spend()
        super().sync()


class BlindTier(WrapperTier):
    """A tier that has lost the blocks of some records."""

    def __init__(self, inner: Tier, lost: str) -> None:
        super().__init__(inner)
        self._lost = lost

    def read(self, key: str, array: str, first: int, count: int) -> bytes | memoryview:
        """Hand on, or refuse."""
        if self._lost in key:
            raise DigestMismatchError("rotten")
        return super().read(key, array, first, count)


class NotingTier(WrapperTier):
    """A tier that notes the keys put into it."""

    def __init__(self, inner: Tier, keys: list[str]) -> None:
        super().__init__(inner)
        self._keys = keys

    def put(self, sources: Sequence[Source]) -> None:
        """Note, and hand on."""
        self._keys += [source.key for source in sources]
        super().put(sources)


class Fleet:
    """Ranks with a near tier each and one far tier, and a journal of what each rank had."""

    def __init__(self, size: int, settings: Settings = QUICK) -> None:
        self.size, self.settings = size, settings
        self.nears = [KeptTier(f"near{rank}") for rank in range(size)]
        self.far = KeptTier("far")
        self.journals = [Journal() for _ in range(size)]

    def session(
        self, group: Any, wrap: Callable[[Tier], Tier] = lambda tier: tier, **settings: Any
    ) -> RunSession:
        """A rank's session."""
        nears = [wrap(tier) for tier in self.nears]
        mine = nears.pop(group.rank)
        chosen = dataclasses.replace(self.settings, **settings)
        store = Store("memory://given", mine, wrap(self.far), tuple(nears))
        return RunSession(store, "run", chosen, group)

    def begin(self, group: Any, session: RunSession, **how: Any) -> tuple[Any, Any]:
        """Restore, load and start a rank; gives its toy and what was restored."""
        toy, journal = make_toy(seed=group.rank), self.journals[group.rank]
        restored = session.restore(**how)
        if restored is not None:
            (state,) = restored.parts.values()
            (tree,) = restored.extras.values()
            assert tree == {"n": restored.step}
            load(toy, state, journal)
            assert toy.same_as(state)
        journal.note(toy)
        session.start(toy.layout, start_step=toy.step, base=toy.base, extra=toy.extra)
        return toy, restored

    def train(self, group: Any, session: RunSession, toy: Any, steps: int) -> None:
        """So many boundaries."""
        for _ in range(steps):
            session.check()
            gap = session.wants_base()
            toy.train()
            self.journals[group.rank].note(toy)
            session.append(toy.boundary(gap))

    def life(
        self, steps: int, wrap: Callable[[Tier], Tier] = lambda tier: tier, *, size: int = 0,
        how: dict[str, Any] | None = None, **settings: Any,
    ) -> list[Any]:  # fmt: skip
        """All ranks from restore to close; gives what each restored, or what it raised."""

        def live(group: Any) -> Any:
            session = self.session(group, wrap, **settings)
            try:
                toy, restored = self.begin(group, session, **(how or {}))
                self.train(group, session, toy, steps)
                session.flush(120, far=False)
                return restored
            finally:
                session.close()

        return on_ranks(size or self.size, live)
