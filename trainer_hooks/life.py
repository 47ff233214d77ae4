"""Signs of life that ranks give each other over a store, and what is said in a dead one's stead.

Where every node's torchrun starts its own ranks anew, nobody ends the ranks of the others: they
would wait for one that has been killed until their time is out, and the new one for them.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Mapping
from typing import Any

from . import background

DEAD = b"dead"
"""What is said under a key in the stead of a rank that gives no sign of life."""

SIGNS = 5
"""Signs given within the time after which a rank counts as dead."""


class Life:
    """Gives signs of life of a rank, by a thread, for as long as this object is held.

    ``store`` is used by that thread alone. ``place`` is a prefix of keys, common to all ranks.
    """

    def __init__(self, store: Any, place: str, rank: int, silent_s: float) -> None:
        self._store, self._place, self._silent_s = store, place, silent_s
        self._awaited: Mapping[int, str] = {}
        self._heard: dict[int, tuple[bytes, float]] = {}
        key = f"{place}/life/{rank}"
        store.set(key, "0")
        background.start("adacheck-life", _live, weakref.ref(self), store, key, silent_s / SIGNS)

    def await_(self, keys: Mapping[int, str]) -> None:
        """These ranks are waited for, under these keys; nobody, if there are none."""
        self._awaited = keys

    def look(self) -> None:
        """Say that a rank is dead that is waited for and gives no sign of life any more.

        One that was never heard of may be on its way. So may one whose time is not out: seconds
        count from when it was first missed.
        """
        now = time.monotonic()
        for rank, wanted in self._awaited.items():
            key = f"{self._place}/life/{rank}"
            if self._store.check([wanted]) or not self._store.check([key]):
                continue
            said = self._store.get(key)
            known, since = self._heard.get(rank, (b"", now))
            if said != known:
                self._heard[rank] = (said, now)
            elif now - since > self._silent_s:
                self._store.set(wanted, DEAD)


def _live(life: weakref.ref[Life], store: Any, key: str, pause_s: float) -> None:
    """The thread's work; it ends with the object."""
    for number in itertools.count(1):
        ending = background.pause(pause_s)
        held = life()
        if held is None or ending:
            return
        try:
            store.set(key, str(number))
            held.look()
        except (RuntimeError, OSError):  # the store has gone, and with it whoever would ask
            return
        del held
