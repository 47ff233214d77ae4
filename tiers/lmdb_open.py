"""The LMDB environments this process has open: one a folder, shared and counted."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from .lmdb_entries import Ledger, take_stock
from .lmdb_env import LmdbEnv


@dataclass(slots=True, eq=False)
class Shared:
    """An environment with its users, and its ledger where it is written to."""

    path: str
    env: LmdbEnv
    ledger: Ledger | None = None
    users: int = 0


_lock = threading.Lock()
_open: dict[str, Shared] = {}
_abandoned: list[Shared] = []


def acquire(path: str, tier: str, capacity_bytes: int, *, readonly: bool) -> Shared:
    """The environment of a folder, opened or already open; give it back with `release`."""
    with _lock:
        shared = _open.get(path)
        if shared is None:
            shared = Shared(path, LmdbEnv(path, tier, capacity_bytes, readonly=readonly))
        elif not readonly:
            shared.env.promote(capacity_bytes)
        try:
            if not readonly and shared.ledger is None:
                shared.ledger = take_stock(shared.env)
        except BaseException:
            if not shared.users:
                shared.env.close()
            raise
        shared.users += 1
        _open[path] = shared
        return shared


def release(shared: Shared) -> None:
    """Give an environment back; the last user closes it."""
    with _lock:
        shared.users -= 1
        if shared.users or shared.env.forked:
            return
        _open.pop(shared.path, None)
        shared.env.close()


def _before_fork() -> None:
    _lock.acquire()


def _in_parent() -> None:
    _lock.release()


def _in_child() -> None:
    # LMDB forbids to use, and even to close, an environment across a fork.
    for shared in _open.values():
        shared.env.after_fork()
        _abandoned.append(shared)
    _open.clear()
    _lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
