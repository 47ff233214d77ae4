"""The tier a trainer puts to: its own node's agent. What is synced there all live holders have."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from adacheck_store.format.errors import (
    OrderError,
    TermError,
    TierUnavailableError,
    UnsupportedError,
)
from adacheck_store.format.keys import parse_key
from adacheck_store.tiers.base import Source, TierTraits
from adacheck_store.tiers.peer import PeerTier
from adacheck_store.tiers.pool import Peer


class NodeTier(PeerTier):
    """An agent's memory as one rank's near tier, under the name ``caller``.

    An agent that was started anew is told of the term again, with its layouts and manifests,
    before the next put. ``fenced`` is the refusal of an older term, once there is one.
    """

    def __init__(self, peer: Peer, caller: str, node: str) -> None:
        """Connects to nothing yet."""
        super().__init__(peer, f"ram/{caller}", TierTraits(name=f"agent {node}"), shared=True)
        self.caller = caller
        self.fenced: TermError | None = None
        self._opening: tuple[Mapping[str, Any], bytes] | None = None
        self._documents: dict[str, Source] = {}
        self._put_since = False
        self._manifests: set[str] = set()
        self._lock = threading.Lock()

    def open(self, opening: bytes, settings: Mapping[str, Any], manifest: str) -> None:
        """Tell the agent of a term; puts belong to it, under that manifest, from here on.

        Raises `UsageError` where the agent has not the memory for it, `TermError`.
        """
        self._manifests.add(manifest)  # those before may still be on their way
        self._opening = ({"caller": self.caller, "settings": dict(settings)}, opening)
        self._open()

    def _open(self) -> None:
        if self._opening is None:
            raise OrderError("a put before the term was opened", tier=self.traits.name)
        try:
            self.peer.call("open", *self._opening)
        except TermError as error:
            self.fenced = error.at(tier=self.traits.name)
            raise

    def put(self, sources: Sequence[Source]) -> None:
        """Store records; see `Tier.put`."""
        coming = {}
        for source in sources:
            if parse_key(source.key).kind in ("layout", "manifest"):
                coming[source.key] = source
            if (
                parse_key(source.key).kind == "manifest"
                and source.expected_id not in self._manifests
            ):
                raise UnsupportedError(
                    "the model's tensors or their groups have changed, which agents cannot follow "
                    "yet: nothing is saved from here on", key=source.key,
                    hint="restart: the last step before the change is restored",
                )  # fmt: skip
        with self._lock:
            self._documents |= coming
            known = [item for key, item in self._documents.items() if key not in coming]
        try:
            try:
                super().put(sources)
            except OrderError:
                if self._closed:
                    raise
                self._open()  # it was started since
                super().put([*known, *sources])
        except TermError as error:
            self.fenced = error.at(tier=self.traits.name)
            raise
        self._put_since = self._put_since or len(coming) < len(sources)

    def sync(self) -> None:
        """Return when all live holders can produce what was put; see `core` for who they are.

        Raises `BaseNeededError`, `TierBusyError`, `TermError`, `TierUnavailableError`.
        """
        if not self._put_since:
            return
        self._put_since = False
        try:
            super().sync()
        except OrderError as error:
            if self._closed:
                raise
            raise TierUnavailableError(
                "the agent was started since: what it had not passed on is gone",
                tier=self.traits.name, hint="a captured base follows",
            ) from error  # fmt: skip
        except TermError as error:
            self.fenced = error.at(tier=self.traits.name)
            raise

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def close(self) -> None:
        """Say that this trainer is done, and close the connections."""
        if not self._closed and self._opening is not None and self.peer.alive():
            with suppress(TierUnavailableError):
                self.peer.call("close", {"caller": self.caller}, timeout_s=2.0)
        super().close()
        self.peer.close()
