"""The ranks of a run over a store of c10d: torch.distributed's rendezvous, not its collectives.

What ranks tell each other goes through the key-value store that made them find each other, so
that no collective of ours comes between those of the training, and no device takes part.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from adacheck_store.format.errors import GroupError
from adacheck_store.group import SOLO, Group, named

TIMEOUT_S = 600.0
"""Longest wait for the other ranks: each may have gigabytes to fetch and fold meanwhile."""

_attached = itertools.count()


class StoreGroup:
    """A `Group` over a c10d store (``TCPStore``, ``FileStore``, ``PrefixStore``).

    ``prefix`` keeps what two groups say apart: it must be new in the store, and the same on all
    ranks. Each rank deletes what all have read. Not thread-safe.
    """

    def __init__(
        self, store: Any, rank: int, size: int, *, prefix: str = "adacheck",
        timeout_s: float = TIMEOUT_S,
    ) -> None:  # fmt: skip
        from torch.distributed import distributed_c10d  # absent where torch has no distributed

        self.rank = rank
        self.size = size
        self._store: Any = distributed_c10d.PrefixStore(prefix, store)
        self._timeout_s = timeout_s
        self._round = 0
        self._mine: list[str] = []
        self._broken: GroupError | None = None

    def gather(self, data: bytes) -> Sequence[bytes]:
        """What every rank gave, in the order of ranks; raises `GroupError` after the time-out."""
        before, self._mine = self._mine, []
        self._begin(data)
        found = self._await(range(self.size))
        for key in before:  # whoever has come here has read what was said before
            self._store.delete_key(key)
        return found

    def broadcast(self, data: bytes | None) -> bytes:
        """What rank 0 gave; raises `GroupError` after the time-out."""
        self._begin(data if self.rank == 0 else None)
        if data is not None and self.rank == 0:
            return data
        return self._await([0])[0]

    def _begin(self, data: bytes | None) -> None:
        if self._broken is not None:
            raise self._broken
        self._round += 1
        if data is None:
            return
        key = f"{self._round}/{self.rank}"
        try:
            self._store.set(key, data)
        except (RuntimeError, OSError) as error:
            self._fail(f"the store of torch.distributed does not answer: {error}")
        self._mine.append(key)

    def _await(self, ranks: Sequence[int]) -> list[bytes]:
        deadline = time.monotonic() + self._timeout_s
        keys = [f"{self._round}/{rank}" for rank in ranks]
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
            return [self._store.get(key) for key in keys]
        except (RuntimeError, OSError) as error:
            if time.monotonic() < deadline:
                self._fail(f"the store of torch.distributed does not answer: {error}")
            self._late(ranks, keys)

    def _late(self, ranks: Sequence[int], keys: Sequence[str]) -> NoReturn:
        try:
            late = [rank for rank, key in zip(ranks, keys, strict=True)
                    if not self._store.check([key])]  # fmt: skip
        except (RuntimeError, OSError) as error:
            self._fail(f"the store of torch.distributed does not answer: {error}")
        self._fail(f"{named(late or ranks)} of {self.size} did not come in {self._timeout_s:g} s")

    def _fail(self, why: str) -> NoReturn:
        self._broken = GroupError(
            why, hint="all ranks must attach, restore and begin together; see the other "
            "ranks' output, and start all of them again",
        )  # fmt: skip
        raise self._broken


def find_group(timeout_s: float = TIMEOUT_S) -> Group:
    """The ranks of torch.distributed, where it is initialised with more than one process.

    Each call is another group: all ranks must attach the same number of times.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return SOLO
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()
    return StoreGroup(
        store, dist.get_rank(), dist.get_world_size(), prefix=f"adacheck/{next(_attached)}",
        timeout_s=timeout_s,
    )  # fmt: skip
