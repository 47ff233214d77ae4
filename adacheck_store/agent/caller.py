"""Callers: the thread that speaks to one peer, and asks nothing of it twice at a time."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from adacheck_store.catalog import RecordRef
from adacheck_store.drain import TierSource
from adacheck_store.format.errors import (
    AdaCheckError,
    ChainBrokenError,
    FormatError,
    PeerRefusedError,
    RecordNotFoundError,
    TierUnavailableError,
)
from adacheck_store.tiers.base import Source, TierTraits
from adacheck_store.tiers.channel import Limits
from adacheck_store.tiers.credentials import Credentials
from adacheck_store.tiers.peer import PeerTier
from adacheck_store.tiers.pool import Peer

from . import events as ev
from .door import documents
from .messages import read_opening, read_report
from .replica import LMDB, RAM
from .work import Work

if TYPE_CHECKING:
    from .shell import Shell

CALL_S = 3.0
"""Time limit of a call that carries no records."""

REST_S = 0.3
"""Pause after a call that failed: a peer that is away must not cost a processor."""


class Caller:
    """Calls one peer at ``endpoint``, or finds it missed if that is empty."""

    def __init__(
        self, shell: Shell, name: str, endpoint: str, credentials: Credentials | None
    ) -> None:
        self.endpoint = endpoint
        self.credentials = credentials
        self._shell = shell
        self._name = name
        self._known: set[str] = set()
        self._peer: Peer | None = None
        self._tier: PeerTier | None = None
        if endpoint:
            limits = Limits(answer_s=60.0)
            self._peer = Peer(endpoint, run=shell.run, credentials=credentials, limits=limits)
            self._tier = PeerTier(
                self._peer, f"ram/@{shell.node}", TierTraits(name=f"agent {name}"), shared=True
            )
        self.work: Work[ev.Forward | ev.Learn] = Work(
            f"call-{name}"[:40], self._act, self._failed, nice=0
        )

    def give(self, command: ev.Forward | ev.Learn) -> None:
        """Have the peer called."""
        self.work.give(command)

    def alive(self) -> bool:
        """Whether the peer answered a moment ago."""
        return self._peer is not None and self._peer.alive()

    def end(self) -> None:
        """Stop calling."""
        self.work.end()
        if self._peer is not None:
            self._peer.close()

    def _act(self, command: ev.Forward | ev.Learn) -> None:
        if self._peer is None or self._tier is None:
            raise TierUnavailableError(
                "nobody has said where this peer is reached", tier=f"agent {self._name}",
                hint="the next opening of a term says it",
            )  # fmt: skip
        if isinstance(command, ev.Learn):
            _, payload = self._peer.call("learn", timeout_s=CALL_S)
            if payload:
                self._shell.learn(*read_opening(payload))
            return
        refused: AdaCheckError | None = None
        if command.refs:
            try:
                self._send(self._tier, command.refs)
            except (TierUnavailableError, PeerRefusedError):
                self._known.clear()
                raise
            except AdaCheckError as error:  # its answer: what it has now, its report says
                self._known.clear()
                refused = error
        term = self._shell.core.view.term
        _, payload = self._peer.call(
            "report",
            {"node": self._shell.node, "term": term, "at": self._shell.reached_at},
            timeout_s=CALL_S,
        )
        self._shell.tell(ev.Heard(read_report(payload)))
        if refused is not None:
            raise Answered(str(refused)) from refused

    def _failed(self, command: ev.Forward | ev.Learn, error: Exception) -> None:
        time.sleep(REST_S)
        if isinstance(command, ev.Forward) and not isinstance(error, Answered):
            self._shell.tell(ev.Missed(self._name))

    def _send(self, tier: PeerTier, refs: tuple[RecordRef, ...]) -> None:
        sources: list[Source] = []
        for ref in refs:
            source = self._source(ref)
            if source is not None:
                sources.append(source)
        if not sources:
            return
        try:
            tier.put([*self._documents(), *sources])
        except ChainBrokenError:
            self._known.clear()  # it was started anew
            tier.put([*self._documents(), *sources])

    def _documents(self) -> list[Source]:
        """Layouts and manifests that the peer was not sent yet."""
        ram = self._shell.places[RAM]
        fresh = [key for key in documents(ram, self._shell.run) if key not in self._known]
        self._known.update(fresh)
        return [TierSource(ram, key) for key in fresh]

    def _source(self, ref: RecordRef) -> Source | None:
        """A record as it is here; None if it has gone since, or is damaged."""
        for place in (RAM, LMDB):
            tier = self._shell.places.get(place)
            with suppress(RecordNotFoundError, FormatError):
                if tier is not None:
                    return TierSource(tier, ref.key)
        return None


class Answered(AdaCheckError):
    """A peer has refused what it was sent, and has told what it has."""
