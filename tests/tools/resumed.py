"""A check that goes on with a journal, and may kill itself: what it read and found, as JSON.

``python -m tests.tools.resumed STORE JOURNAL VERB KILL_AT``: SIGKILL comes before the read of so
many bytes (0: never). VERB is ``fsck``, ``deep`` or ``repair``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from adacheck_store.store import open_for_reading
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.lmdb import LmdbTier
from adacheck_store.tiers.zarr import ZarrTier
from adacheck_store.tools.findings import Finding
from adacheck_store.tools.fsck import fsck
from adacheck_store.tools.fsck_deep import FoldedRow
from adacheck_store.tools.fsck_journal import ResumedRow, open_journal
from adacheck_store.tools.repair import repair
from adacheck_store.tools.rows import to_json

DEEP = 4


class Reads:
    """Counts the bytes of blocks that are read, by tier and record."""

    def __init__(self, kill_at: int) -> None:
        self.done: dict[str, int] = {}
        self._left, self._lock = kill_at, threading.Lock()
        for where in (LmdbTier, ZarrTier):
            where.read_into = self._counted(where.read_into)  # type: ignore[method-assign]

    def _counted(self, read: Any) -> Any:
        def counted(
            tier: Tier, key: str, array: str, first: int, count: int, out: memoryview
        ) -> None:
            with self._lock:
                name = f"{tier.traits.name} {key}"
                self.done[name] = self.done.get(name, 0) + len(out)
                if self._left:
                    self._left -= len(out)
                    if self._left <= 0:
                        os.kill(os.getpid(), signal.SIGKILL)
            read(tier, key, array, first, count, out)

        return counted


def main(store: str, journal: str, verb: str, kill_at: str) -> None:
    """Check, and print what came of it."""
    reads = Reads(int(kill_at))
    with open_for_reading(store) as opened, open_journal(journal, opened) as noted:
        if verb == "repair":
            rows: list[Any] = list(repair(opened, journal=noted))
        else:
            rows = list(fsck(opened, deep=DEEP if verb == "deep" else 0, journal=noted))
    found = sorted(json.dumps(to_json(row)) for row in rows if not isinstance(row, ResumedRow))
    print(json.dumps({
        "found": found, "read": reads.done,
        "resumed": [to_json(row) for row in rows if isinstance(row, ResumedRow)],
        "kinds": [row.kind for row in rows if isinstance(row, Finding)],
        "folds": sum(isinstance(row, FoldedRow) for row in rows),
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
