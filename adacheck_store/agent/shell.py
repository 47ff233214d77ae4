"""The shell: one lock around the core; events in, commands out to threads that carry them out."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adacheck_store.catalog import RecordRef, make_ref, read_catalog
from adacheck_store.config import Settings
from adacheck_store.format.errors import (
    ReplayMismatchError,
    TierFullError,
)
from adacheck_store.format.keys import parse_key
from adacheck_store.recovery import PartPlan
from adacheck_store.terms import holder_of
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.credentials import Credentials
from adacheck_store.tiers.serve_calls import PeerInfo

from . import events as ev
from .budget import Budget
from .caller import Caller
from .core import AgentCore, AgentSettings
from .door import copy_documents
from .drainer import Drainer
from .prune import Prunes
from .replica import FAR, LMDB, RAM
from .work import Work

if TYPE_CHECKING:
    from adacheck_store.compact import ReplayedBase

log = logging.getLogger(__name__)

TICK_S = 0.4

ALONE_S = 1.0
"""So long after the last word from this node all is folded: a restore is what comes next."""


@dataclass(slots=True)
class _Ticket:
    """Who waits for the core's word about a token."""

    done: threading.Event = field(default_factory=threading.Event)
    answer: ev.Command | None = None


class Shell:
    """One run at one agent, alive: the core, its tiers by place, and its threads.

    Any thread may call any method. ``boot`` names this start of the process.
    """

    def __init__(
        self, run: str, node: str, boot: str, places: Mapping[int, Tier], memory_bytes: int,
        settings: Settings,
    ) -> None:  # fmt: skip
        self.run, self.node, self.boot = run, node, boot
        self.places = places
        self.settings = settings
        self.lock = threading.RLock()
        self.credentials: Credentials | None = None
        self.endpoints: dict[str, str] = {}
        self.reached_at = ""
        """Where peers reach this agent; they are told with each call."""
        self.asked: dict[str, int] = {}
        self._tickets: dict[str, _Ticket] = {}
        self._serial = itertools.count(1)
        self._trainers: dict[str, PeerInfo] = {}
        self._unheard: dict[str, PeerInfo] = {}
        self._callers: dict[str, Caller] = {}
        self._ending = threading.Event()
        self.active_at = time.monotonic()
        self.core = AgentCore(node, boot, Budget(memory_bytes), _core_settings(settings, places))
        self.folding: Work[ev.Fold] = Work("fold", self._fold, self._unfolded)
        self.drainers = {
            place: Drainer(self, place) for place in (LMDB, FAR) if place in places
        }  # fmt: skip
        self.prunes = Prunes(self)
        self._load_lmdb()
        self._ticker = threading.Thread(target=self._tick, name="adacheck-tick", daemon=True)
        self._ticker.start()

    # What the door asks -----------------------------------------------------------------------

    def knows(self, caller: str) -> bool:
        """True if a trainer has opened its term here under that name."""
        return caller in self._trainers

    def holder(self) -> str:
        """Who holds the newest term; see `terms.holder_of`."""
        return holder_of(self.places[RAM], self.run, self.core.view.term)

    def admit_trainer(self, caller: str, peer: PeerInfo) -> None:
        """A trainer has opened its term; ``peer`` is who it is to the server."""
        with self.lock:
            self._trainers[caller] = peer
            self._unheard.pop(caller, None)
            self.active_at = time.monotonic()
            self.core.drains.hurry = False

    def ask(self, make: Callable[[str, float], ev.Event], timeout_s: float) -> ev.Command:
        """Tell the core an event; the command that answers it. See `door.Desk`."""
        token, ticket = f"{self.boot}.{next(self._serial)}", _Ticket()
        with self.lock:
            self._tickets[token] = ticket
            self.active_at = time.monotonic()
        self.tell(make(token, time.monotonic() + timeout_s))
        ticket.done.wait(timeout_s + 5.0)
        with self.lock:
            self._tickets.pop(token, None)
            if ticket.answer is None:  # whatever comes of it now, nobody takes it
                return ev.Refuse(token, "time", "the agent has not decided in time")
        return ticket.answer

    def tell(self, event: ev.Event) -> None:
        """Tell the core an event, and see to what it commands."""
        with self.lock:
            for command in self.core.handle(event, time.monotonic()):
                self._carry_out(command)

    def _carry_out(self, command: ev.Command) -> None:
        match command:
            case ev.Admit() | ev.Refuse() | ev.Answer():
                self._resolve(command)
            case ev.Forward() | ev.Learn():
                self._caller(command.peer).give(command)
            case ev.Fold():
                self.folding.give(command)
            case ev.Drain():
                self.drainers[command.place].give(command)
            case ev.Drop():
                self.places[command.place].delete(command.keys)
            case ev.Survey():
                self.drainers[FAR].give(command)
            case ev.Prune():
                self.prunes.want(command.watermark)
            case ev.AskBase():
                self.asked[command.chain] = min(
                    command.first, self.asked.get(command.chain, command.first)
                )

    def _resolve(self, command: ev.Admit | ev.Refuse | ev.Answer) -> None:
        ticket = self._tickets.get(command.token)
        if ticket is not None:
            ticket.answer = command
            ticket.done.set()
        elif isinstance(command, ev.Admit):  # who offered it has gone: its room is free again
            self.tell(ev.Failed(command.token))

    # Terms and peers --------------------------------------------------------------------------

    def open(self, opened: ev.Opened, endpoints: Mapping[str, str]) -> ev.Command:
        """A trainer's opening; the answer to it. One that is said again tells no news of peers."""
        with self.lock:
            known = self.endpoints if opened.term == self.core.view.term else {}
            self.endpoints.update({**endpoints, **known})
        return self.ask(lambda token, _: dataclasses.replace(opened, token=token), 10.0)

    def learn(self, opened: ev.Opened, endpoints: Mapping[str, str]) -> None:
        """What a peer has told of a newer term."""
        with self.lock:
            if opened.term > self.core.view.term:
                self.endpoints.update(endpoints)
                self.tell(opened)

    def adapt(self, settings: Settings) -> None:
        """Take over the settings of the run as a trainer has them."""
        with self.lock:
            self.settings = settings
            self.core.adapt(_core_settings(settings, self.places))

    def _caller(self, name: str) -> Caller:
        endpoint = self.endpoints.get(name, "")
        found = self._callers.get(name)
        if found is None or found.endpoint != endpoint or found.credentials != self.credentials:
            if found is not None:
                found.end()
            found = self._callers[name] = Caller(self, name, endpoint, self.credentials)
        return found

    def heartbeat(self, look: Callable[[], Mapping[str, PeerInfo]]) -> None:
        """Called now and then; ``look`` gives the sessions there are: who has none is gone.

        One whose connections were lost has another session at its next call, and is no other
        trainer: what waits for it there goes on. Whoever is connected from this node keeps the
        agent from being idle: a trainer that restores has not opened yet.
        """
        with self.lock:
            sessions = look()
            clients = {session.client for session in sessions.values()}
            gone = [name for name, peer in self._trainers.items() if peer.client not in clients]
            for name in gone:
                self._unheard[name] = self._trainers.pop(name)
                self.tell(ev.Closed(name))
            if any(not session.proven for session in sessions.values()):
                self.active_at = time.monotonic()
            self.prunes.tick()

    def close_trainer(self, caller: str) -> None:
        """A trainer says that it is done."""
        with self.lock:
            self._unheard.pop(caller, None)
            if self._trainers.pop(caller, None) is not None:
                self.tell(ev.Closed(caller))

    @property
    def trainers(self) -> list[str]:
        """Names of the trainers that are connected."""
        return sorted(self._trainers)

    def awaited(self) -> bool:
        """Whether trainers are connected, or live though they are not heard of just now."""
        with self.lock:
            dead = [name for name, peer in self._unheard.items() if not _lives(peer)]
            for name in dead:
                del self._unheard[name]
            return bool(self._trainers or self._unheard)

    @property
    def callers(self) -> list[Caller]:
        """Those who speak to peers."""
        return list(self._callers.values())

    @property
    def behind(self) -> int:
        """Records of this node's own chains that some lower place has not received."""
        return self.core.drains.behind

    def hurry(self, on: bool = True) -> None:
        """Drain all there is, whatever the lag."""
        with self.lock:
            self.core.drains.hurry = on
            self.tell(ev.Tick())

    # Folding ----------------------------------------------------------------------------------

    def held(self, ref: RecordRef) -> RecordRef:
        """A reference that any tier here may serve."""
        names = tuple(tier.traits.name for tier in self.places.values())
        return dataclasses.replace(ref, tiers=names)

    def replay(self, plan: PartPlan, step: int) -> ReplayedBase:
        """The base that a plan folds to, as a source for a tier."""
        # Torch is loaded when it is first needed: an agent is to be up in no time.
        from adacheck_store.compact import ReplayedBase
        from adacheck_store.fetch import Fetcher
        from adacheck_store.reading import open_layout

        tiers = list(self.places.values())
        anywhere = dataclasses.replace(
            plan, base=self.held(plan.base), deltas=tuple(map(self.held, plan.deltas))
        )
        last = plan.deltas[-1]
        return ReplayedBase(
            Fetcher(tiers), open_layout(tiers, self.run, plan.layout), anywhere, run=self.run,
            term=last.term, step=step, manifest=last.manifest,
        )  # fmt: skip

    def _fold(self, command: ev.Fold) -> None:
        tier = self.places[command.place]
        source = self.replay(command.plan, command.step)
        if command.place == LMDB:
            copy_documents(self.places[RAM], tier, self.run)
        tier.put([source])
        ref = self.ref_of(tier, source.key)
        self.tell(ev.Stored(command.token, (ref,), command.place))

    def _unfolded(self, command: ev.Fold, error: Exception) -> None:
        last = error.last_match if isinstance(error, ReplayMismatchError) else None
        self.tell(ev.Failed(command.token, isinstance(error, TierFullError), last))

    def ref_of(self, tier: Tier, key: str) -> RecordRef:
        """The reference of a record in a tier."""
        return make_ref(parse_key(key), tier.head(key), (tier.traits.name,))

    # Life -------------------------------------------------------------------------------------

    def _load_lmdb(self) -> None:
        """Take note of what an earlier agent of this node has left in the LMDB."""
        lmdb = self.places.get(LMDB)
        if lmdb is None:
            return
        catalog = read_catalog([lmdb], self.run)
        tables = (catalog.bases, catalog.deltas, catalog.extras)
        refs = tuple(ref for table in tables for found in table.values() for ref in found)
        if not refs:
            return
        copy_documents(lmdb, self.places[RAM], self.run)
        self.tell(ev.Stored("", refs, LMDB))

    def _tick(self) -> None:
        while not self._ending.wait(TICK_S):
            with self.lock:
                now = time.monotonic()
                for name, caller in self._callers.items():
                    peer = self.core.view.peers.get(name)
                    if peer is not None and peer.busy and caller.alive():
                        peer.heard_at = now  # it takes what it is sent, and answers pings
            try:
                self.tell(ev.Tick(attended=now - self.active_at < ALONE_S))
            except Exception:
                log.exception("a tick failed")

    def end(self) -> None:
        """Stop all threads after what they are doing; waits a moment for them."""
        self._ending.set()
        works: list[Work[Any]] = [
            self.folding,
            self.prunes.work,
            *(d.work for d in self.drainers.values()),
        ]
        for work in works:
            work.end()
        for caller in self._callers.values():
            caller.end()
        until = time.monotonic() + 5.0
        for thread in [self._ticker, *(work.thread for work in works)]:
            thread.join(timeout=max(0.0, until - time.monotonic()))


def _core_settings(settings: Settings, places: Mapping[int, Tier]) -> AgentSettings:
    lower = sum(place for place in (LMDB, FAR) if place in places)
    return AgentSettings(
        places=lower, window=settings.window, base_every=settings.base_every,
        object_lag=settings.object_lag, object_lag_s=settings.object_lag_s,
    )  # fmt: skip


def _lives(peer: PeerInfo) -> bool:
    """Whether a process of this node lives, be it stopped."""
    try:
        stat = Path("/proc", peer.where.removeprefix("pid "), "stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
