"""Upkeep at an agent: what a session asks of its upkeep, where the agent does the work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from adacheck_store.catalog import RecordRef
from adacheck_store.format.errors import (
    AdaCheckError,
    TermError,
    TierError,
    TierUnavailableError,
)
from adacheck_store.tail import Lag, Progress

from .messages import read_json
from .node_tier import NodeTier

NEWS_S = 1.0
"""How often the agent is asked for news."""


class AgentUpkeep:
    """Asks the agent how far it is. ``step`` is the term's first.

    ``ask_for_base(reason, first)`` is called where a fold there has proven the chain of ``part``
    wrong, ``revive()`` where the agent does not answer.
    """

    def __init__(
        self, near: NodeTier, *, run: str, term: str, step: int, part: str,
        object_lag: int, ask_for_base: Callable[[str, int], None], revive: Callable[[], None],
    ) -> None:  # fmt: skip
        self._near, self._run, self._term, self._part = near, run, term, part
        self._ask_for_base = ask_for_base
        self._revive = revive
        self._ending = threading.Event()
        self.progress = Progress()
        self._lag = Lag(object_lag)
        self._first = step
        self.error: AdaCheckError | None = None
        self.notice = ""
        self._rival: TermError | None = None
        self._thread = threading.Thread(target=self._watch, name="adacheck-news", daemon=True)
        self._thread.start()

    @property
    def fenced(self) -> TermError | None:
        """The refusal of this term, once a newer one has the run."""
        return self._near.fenced or self._rival

    @property
    def busy_since(self) -> Mapping[str, float | None]:
        """Nothing: the work is done elsewhere."""
        return {}

    def stored(self, step: int, refs: list[RecordRef]) -> None:
        """Take note of what all live holders have."""
        self.progress.stored = step
        self.progress.bytes_bases += sum(ref.nbytes for ref in refs if ref.kind == "base")

    def flush(self, timeout_s: float | None) -> bool:
        """Have everything drained; False if the time ran out, or the agent fails at it."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while True:
                head, _ = self._near.peer.call("flush", {"hurry": True}, timeout_s=10.0)
                self._take_news()
                if not head.get("behind") or self.fenced is not None:
                    self._near.peer.call("flush", {"hurry": False}, timeout_s=10.0)
                    return True
                if end is None and self.error is not None:
                    return False
                if end is not None and time.monotonic() >= end:
                    return False
                self._ending.wait(0.05)
        except AdaCheckError as error:
            self.error = error
            return False

    def close(self, timeout_s: float) -> bool:
        """Stop asking."""
        self._ending.set()
        self._thread.join(timeout=timeout_s)
        return not self._thread.is_alive()

    def _watch(self) -> None:
        while not self._ending.wait(NEWS_S):
            try:
                self._take_news()
            except TierUnavailableError as error:
                self.error = error.at(run=self._run, term=self._term)
                with suppress(AdaCheckError):
                    self._revive()
            except AdaCheckError as error:
                self.error = error.at(run=self._run, term=self._term)

    def _take_news(self) -> None:
        _, payload = self._near.peer.call("news", {"part": self._part}, timeout_s=5.0)
        said: dict[str, Any] = read_json(payload)
        progress = self.progress
        # A step that got there though its save failed is about to be disowned.
        sure = min(int(said["drained"]), max(progress.stored, self._first))
        progress.drained = max(progress.drained, sure)
        self._lag.look(progress)
        progress.base = max(progress.base, int(said["base"]))
        progress.bytes_drained = int(said["bytes_drained"])
        progress.degraded = self._part in said["exposed"]
        wrong = {name: text for name, text in said["errors"].items() if "call-" not in name}
        text = "; ".join(f"{name}: {error}" for name, error in sorted(wrong.items()))
        self.error = TierError(f"the agent: {text}", run=self._run) if text else None
        self.notice = said.get("notice", "")
        if said["ask_base"] >= 0:
            self._ask_for_base("a fold at the agent differs from training", said["ask_base"])
        if said["term"] > self._term:
            self._rival = TermError(
                f"term {said['term']}{said['holder']} has taken over this run",
                run=self._run, term=self._term,
                hint="this process must stop; restore() in a new one",
            )  # fmt: skip
