"""The ranks of a run over a store of c10d: torch.distributed's rendezvous, not its collectives.

What ranks tell each other goes through the key-value store that made them find each other, so
that no collective of ours comes between those of the training, and no device takes part.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from adacheck_store.format.errors import GroupError, UsageError
from adacheck_store.group import SOLO, Group, named

from .grid import Grid
from .life import DEAD, Life

LEFT = b"left"
"""What a rank that waits no longer says in the round to come, and then which ranks it knows to be
lost: others need not wait either."""

TIMEOUT_S = 600.0
"""Longest wait for the other ranks: each may have gigabytes to fetch and fold meanwhile."""

ALL = -1
"""Whoever wants to hear it."""

MEET_S = 180.0
"""Longest wait for the others to attach. One that died before it gives no sign to be missed by."""

SAY_S = 15.0
"""After how long it is said who has not attached yet."""

SILENT_S = 30.0
"""After how long without a sign of life a rank counts as dead."""

POLL_S = (0.01, 0.5)
"""First and longest pause before looking again whether rank 0 has let us in."""

log = logging.getLogger(__name__)


class _Attached:
    """How often a process has attached; from 0 again where torch.distributed was initialised anew.

    Else one that has outlived others and those in their places would not mean the same group.
    """

    def __init__(self) -> None:
        self._store: Any = None
        self._times = 0

    def again(self, store: Any) -> int:
        """The number of this time."""
        self._times = self._times + 1 if store is self._store else 0
        self._store = store
        return self._times


_attached = _Attached()


class StoreGroup:
    """A `Group` over a c10d store (``TCPStore``, ``FileStore``, ``PrefixStore``).

    ``prefix`` keeps what two groups say apart, and is the same on all ranks. The store may hold
    what dead processes have said under it: torchrun keeps its store over restarts. So the ranks
    first meet in a room whose name is new. Each rank deletes what all have read. Not thread-safe.
    """

    def __init__(
        self, store: Any, rank: int, size: int, *, prefix: str = "adacheck",
        timeout_s: float = TIMEOUT_S, silent_s: float = SILENT_S, meet_s: float = MEET_S,
    ) -> None:  # fmt: skip
        from torch.distributed import distributed_c10d  # absent where torch has no distributed

        self.rank = rank
        self.size = size
        self.lost: set[int] = set()

        def connect() -> Any:
            own = store.clone() if hasattr(store, "clone") else store
            made: Any = distributed_c10d.PrefixStore
            return made(prefix, own)

        self._connect = connect
        self._store: Any = connect()
        # Else a thread that waits keeps others out.
        self._other: Any = connect() if hasattr(store, "clone") else None
        self._timeout_s, self._silent_s = timeout_s, silent_s
        self._meet_s = min(meet_s, timeout_s)
        self._life: Life | None = None
        self._room = ""
        self._round = 0
        self._grid = Grid(rank, size)
        self._mine: list[tuple[str, int]] = []
        self._broken: GroupError | None = None

    def gather(self, data: bytes, timeout_s: float | None = None) -> Sequence[bytes]:
        """What every rank gave, in the order of ranks; raises `GroupError` after the time-out."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        with self._speaking():
            before = len(self._mine)
            self._say(data)
            found = self._hear(range(self.size), limit_s)
            self._forget(before, [*range(self.size), ALL])
            return found

    def broadcast(self, data: bytes | None) -> bytes:
        """What rank 0 gave; raises `GroupError` after the time-out."""
        with self._speaking():
            if self.rank == 0:
                assert data is not None
                self._say(data)
                return data
            return self._hear([0], self._timeout_s)[0]

    def exchange(self, messages: Sequence[bytes], timeout_s: float) -> Sequence[bytes]:
        """What each rank has sent to this one; raises `GroupError` after the time-out, or some."""
        return self._grid.exchange(
            messages, lambda some, times: self._swap(some, times * timeout_s)
        )

    def _swap(self, messages: Mapping[int, bytes], limit_s: float) -> list[bytes]:
        """What each of some ranks has sent to this one, which sends each a message."""
        others = [peer for peer in messages if peer != self.rank]
        found = dict(messages)
        if others:
            with self._speaking():
                before = len(self._mine)
                place = f"{self._room}/{self._round}"
                keys = [f"{place}/{peer}/{self.rank}" for peer in others]
                self._store.multi_set(keys, [messages[peer] for peer in others])
                self._mine += zip(keys, others, strict=True)
                said = self._wait_for(others, f"{place}/{self.rank}", limit_s)
                found.update(zip(others, said, strict=True))
                self._forget(before, others)
        return list(found.values())

    def room(self, name: str) -> StoreGroup:
        """The same ranks, once they have spoken, in a room of that name."""
        room = copy.copy(self)
        room._room = f"{self._room}/{name}"
        room._round, room._broken = 0, None
        return room

    def board(self) -> Board:
        """The board of these ranks; once they have spoken."""
        return Board(self._connect(), self._room, self.rank, self.size)

    @contextlib.contextmanager
    def _speaking(self) -> Iterator[None]:
        """A round. Once one has failed the ranks are out of step, and all others fail too."""
        if self._broken is not None:
            raise self._broken
        try:
            if not self._room:
                self._room = self._enter() if self.rank else self._open()
            self._round += 1
            yield
        except (RuntimeError, OSError, GroupError) as error:
            why = str(error) if isinstance(error, GroupError) else (
                f"the store of torch.distributed does not answer: {error}"
            )  # fmt: skip
            self.leave()
            self._life = None
            self._broken = GroupError(
                why, hint="all ranks must attach, restore and begin together; see the other "
                "ranks' output, and start all of them again",
            )  # fmt: skip
            raise self._broken from error

    def leave(self) -> None:
        """This rank comes to no further round: whoever waits for it there fails at once."""
        keys: dict[str, int] = {}
        for number in (self._round + 1, self._round + 2):  # whom this rank hears in the next two
            place = f"{self._room}/{number}"
            keys |= {f"{place}/{peer}/{self.rank}": peer for peer in self._grid.peers}
            keys[f"{place}/{self.rank}"] = ALL
        word = LEFT + " ".join(map(str, sorted(self.lost))).encode()
        with contextlib.suppress(RuntimeError, OSError):
            if self._room:
                self._store.multi_set(list(keys), [word] * len(keys))
                self._mine += keys.items()

    def _forget(self, count: int, heard: Collection[int]) -> None:
        """Delete what was said first to ranks that have come to this round: they have read it."""
        kept = [(key, to) for key, to in self._mine[:count] if to not in heard]
        for key, to in self._mine[:count]:
            if to in heard:
                self._store.delete_key(key)
        self._mine[:count] = kept

    def _open(self) -> str:
        """Rank 0 opens a room, and closes the door behind all others, named by their tokens."""
        room = secrets.token_hex(8)
        self._live(room)
        self._store.set("room", room)
        tokens = self._wait_for(range(1, self.size), f"{room}/token", self._meet_s, SAY_S)
        self._store.set(f"{room}/in", b" ".join(tokens))
        return room

    def _enter(self) -> str:
        """Another rank knocks where rank 0 says, until it finds its own token inside."""
        token = secrets.token_hex(8)
        began, say_s = time.monotonic(), SAY_S
        room, pause_s = "", POLL_S[0]
        while True:
            if self._store.check(["room"]):
                said = self._store.get("room").decode()
                if said != room:
                    room, pause_s = said, POLL_S[0]
                    self._live(room)
                    self._store.set(f"{room}/token/{self.rank}", token)
                if self._store.check([f"{room}/in"]):
                    if token.encode() in self._store.get(f"{room}/in").split():
                        return room
            waited_s = time.monotonic() - began
            if waited_s > min(say_s, self._meet_s):
                others = [rank for rank in range(1, self.size) if rank != self.rank]
                late = (self._absent(others, f"{room}/token") if room else []) or [0]
                if waited_s > self._meet_s:
                    raise self._late(late, self._meet_s)
                self._miss(late)
                say_s = math.inf
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, POLL_S[1])

    def _live(self, room: str) -> None:
        if self._other is not None:
            self._life = Life(self._other, room, self.rank, self._silent_s)

    def _say(self, data: bytes) -> None:
        key = f"{self._room}/{self._round}/{self.rank}"
        self._store.set(key, data)
        self._mine.append((key, ALL))

    def _hear(self, ranks: Sequence[int], limit_s: float) -> list[bytes]:
        return self._wait_for(ranks, f"{self._room}/{self._round}", limit_s)

    def _wait_for(
        self, ranks: Sequence[int], place: str, limit_s: float, say_s: float = math.inf
    ) -> list[bytes]:  # fmt: skip
        """What each rank has put under its key; who has not after ``say_s`` is said."""
        deadline = time.monotonic() + limit_s
        keys = {rank: f"{place}/{rank}" for rank in ranks}
        if self._life is not None:
            self._life.await_(keys)
        try:
            if say_s < limit_s:
                try:
                    self._store.wait(list(keys.values()), timedelta(seconds=say_s))
                except RuntimeError:
                    self._miss(self._absent(ranks, place))
            left_s = max(0.0, deadline - time.monotonic()) + 0.01  # a store counts in whole ms
            self._store.wait(list(keys.values()), timedelta(seconds=left_s))
        except RuntimeError as error:
            late = self._absent(ranks, place)
            if late and time.monotonic() >= deadline:
                raise self._late(late, limit_s) from error
            raise
        finally:
            if self._life is not None:
                self._life.await_({})
        found = dict(zip(keys, self._store.multi_get(list(keys.values())), strict=True))
        if left := [rank for rank, said in found.items() if said.startswith(LEFT)]:
            self.lost.update(
                int(each) for rank in left for each in found[rank][len(LEFT) :].split()
            )
            raise GroupError(f"{named(left)} of {self.size} waited no longer")
        if dead := [rank for rank, said in found.items() if said == DEAD]:
            self.lost.update(dead)
            raise GroupError(
                f"{named(dead)} of {self.size} gave no sign of life for {self._silent_s:g} s"
            )
        return list(found.values())

    def _absent(self, ranks: Sequence[int], place: str) -> list[int]:
        return [rank for rank in ranks if not self._store.check([f"{place}/{rank}"])]

    def _miss(self, ranks: Sequence[int]) -> None:
        """Say who has not attached: a job that stands still here is not one that hangs."""
        log.warning(
            "%s of %d: not attached yet; waiting %g s in all", named(ranks), self.size, self._meet_s
        )

    def _late(self, ranks: Sequence[int], limit_s: float) -> GroupError:
        return GroupError(f"{named(ranks)} of {self.size} did not come in {limit_s:g} s")


class Board:
    """Notes that the ranks of a group leave each other, over a connection of its own.

    For one thread, which need not be the training's. Raises what the store raises.
    """

    def __init__(self, store: Any, room: str, rank: int, size: int) -> None:
        self._store, self._room, self._rank, self._size = store, room, rank, size

    def post(self, name: str, text: str) -> None:
        """Leave a note for all."""
        self._store.set(f"{self._room}/board/{name}", text)

    def look(self, name: str) -> str | None:
        """The note of that name, if anybody has left it."""
        key = f"{self._room}/board/{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def all(self, name: str) -> list[str] | None:
        """What each rank has left under ``name/<rank>``; None while any has not."""
        keys = [f"{self._room}/board/{name}/{rank}" for rank in range(self._size)]
        if not self._store.check(keys):
            return None
        return [note.decode() for note in self._store.multi_get(keys)]

    def exchange(self, name: str, text: str, timeout_s: float) -> list[str]:
        """Leave a note of one's own, and wait for those of all ranks."""
        self.post(f"{name}/{self._rank}", text)
        keys = [f"{self._room}/board/{name}/{rank}" for rank in range(self._size)]
        self._store.wait(keys, timedelta(seconds=timeout_s))
        return [note.decode() for note in self._store.multi_get(keys)]


def find_board(group: Group) -> Board:
    """The board of a group; raises `UsageError` for a group of another class than ours."""
    if not isinstance(group, StoreGroup):
        raise UsageError(
            f"{type(group).__name__} gives ranks no way to agree where to stop",
            hint="leave group= to attach, or do without sigterm_grace_s",
        )
    return group.board()


def find_group(
    timeout_s: float = TIMEOUT_S, silent_s: float = SILENT_S, meet_s: float = MEET_S
) -> Group:
    """The ranks of torch.distributed, where it is initialised with more than one process.

    Each call is another group: all ranks must attach the same number of times. ``timeout_s`` bounds
    each wait for the others, ``meet_s`` the first one: until all have attached. ``silent_s``: after
    so long without a sign of life a rank is not waited for.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return SOLO
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()
    return StoreGroup(
        store, dist.get_rank(), dist.get_world_size(), prefix=f"adacheck/{_attached.again(store)}",
        timeout_s=timeout_s, silent_s=silent_s, meet_s=meet_s,
    )  # fmt: skip
