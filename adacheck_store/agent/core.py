"""The core of an agent: what it does about one run, decided without threads, sockets or bytes.

Told of an `events.Event`, it answers with commands. What it decides follows from what is held
here and what peers last said (`view`): the watermark, what may be dropped, the next fold, who is
admitted, who is acknowledged, what peers lack, what is to be drained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from adacheck_store.catalog import RecordRef
from adacheck_store.recovery import PartPlan

from . import events as ev
from .acks import Acks
from .budget import Budget, memory_for
from .drains import Drains
from .events import Command, Event
from .far import Far
from .leases import Lease
from .outbox import next_call
from .replica import FAR, LMDB, RAM, PartReplica, Replica
from .seating import reseat
from .view import View

HOLD_S = 10.0
"""How long a trainer's offer waits for room before it is refused."""

HOLD_PEER_S = 1.0
"""How long a peer's does: it holds up what else that peer has to send."""

FOLD_MOST = 32
"""Deltas that one fold takes in: something of each is in memory meanwhile, beside all records."""

FULL_S = 10.0
"""How long a place that was full is not tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What an agent is told: places below memory (bits), and the run's own settings.

    ``away_s``: how long a holder may be silent before its seat goes to another.
    """

    places: int = LMDB | FAR
    window: int = 2
    fold_every: int = 8
    base_every: int = 64
    object_lag: int = 64
    object_lag_s: float = 60.0
    away_s: float = 30.0


class AgentCore:
    """One run at one agent. ``budget`` is shared by the runs of the agent."""

    def __init__(self, node: str, boot: str, budget: Budget, settings: AgentSettings) -> None:
        self.view = View(node, boot)
        self.budget = budget
        self.share = budget.share()
        self.settings = settings
        self.lease = Lease()
        self.acks = Acks()
        self.drains = Drains(
            settings.places, settings.base_every, settings.object_lag, settings.object_lag_s
        )
        self.far = Far()
        self._surveying = ""
        self._offers: list[tuple[float, ev.Offered]] = []
        self._taken: dict[str, Mapping[str, tuple[int, int]]] = {}
        self._folding = ""
        self._wrong: dict[str, int] = {}
        self._lmdb_full_until = 0.0
        self._pressed: set[str] = set()
        self._pruned = -1
        self._swept: tuple[tuple[str, int, bool], int] | None = None
        self._fresh: set[str] = set()
        self._foldable = False
        self._bases = 0
        self._serial = 0
        self._attended = True
        self._handlers: dict[type[Any], Callable[[Any, float], Iterable[Command]]] = {
            ev.Opened: self._opened, ev.Offered: self._offered, ev.Stored: self._stored,
            ev.Failed: self._failed, ev.Sync: self._sync, ev.Closed: self._closed,
            ev.Called: self._called, ev.Heard: self._heard, ev.Missed: self._missed,
            ev.Drained: self._drained, ev.Lost: self._lost, ev.Surveyed: self._surveyed,
            ev.Asked: self._asked, ev.Tick: self._tick,
        }  # fmt: skip

    def adapt(self, settings: AgentSettings) -> None:
        """Take over other settings of the run; the places stay."""
        self.settings = settings
        self.drains.adapt(settings.base_every, settings.object_lag, settings.object_lag_s)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take note of an event; what is to be done now."""
        view = self.view
        out = list(self._handlers[type(event)](event, now))
        if view.opened is None:
            return out
        view.freeze(frozen := self.lease.frozen(now))
        view.advance(now)
        if not frozen:
            out += self._sweep(now)
        if self._offers or self._pressed:
            out += self._admissions(now)
        if self.acks.waiting:
            out += self.acks.settle(view, now)
        for peer in view.peers.values():
            if not peer.busy and (call := next_call(view, peer, now)) is not None:
                out.append(call)
        if not self.far.known:
            out += self._survey()
        if not self.drains.idle:
            out += self.drains.due(now, self.far.known)
        return out

    # Terms -----------------------------------------------------------------------------------

    def _opened(self, event: ev.Opened, now: float) -> Iterable[Command]:
        if event.term < self.view.term:
            yield ev.Refuse(event.token, "term", f"term {self.view.term} has the run")
            return
        mine = {
            chain: event.reserve.get(chain, (0, 0))
            for chain, seat in event.seats.items() if self.view.node in seat.holders
        }  # fmt: skip
        missing = self.share.reserve(mine, self.settings.window)
        if missing and event.token:
            yield ev.Refuse(
                event.token, "budget",
                f"memory is too small for the {len(mine)} parts and extras that {self.view.node} "
                f"is to hold: {memory_for(self.budget.total + missing) >> 20} MiB are needed",
            )  # fmt: skip
            return
        self.view.refused = frozenset(mine) if missing else frozenset()
        self.view.open(event, now)
        self.lease.opened(event.term)
        self._pruned = -1
        self.far.open(self.view)
        for replica in self.view.replicas.values():
            if self.view.owns(replica.name):
                for key, ref in replica.refs.items():
                    self.drains.note(ref, replica.places[key], now)
        if event.token:
            yield ev.Answer(event.token)

    def _called(self, event: ev.Called, now: float) -> Iterable[Command]:
        if event.term > self.view.term:
            yield ev.Learn(event.peer)

    def _asked(self, event: ev.Asked, now: float) -> Iterable[Command]:
        if event.term > self.view.term:
            self.lease.ask(event.term, now)
        return ()

    # Records ---------------------------------------------------------------------------------

    def _offered(self, event: ev.Offered, now: float) -> Iterable[Command]:
        self._offers.append((now + (HOLD_PEER_S if event.peer else HOLD_S), event))
        self.view.has(event.peer, event.refs)
        if self.view.opened is None:  # nothing is known of the run: no reserves, no hold
            yield from self._admissions(now)

    def _admissions(self, now: float) -> Iterable[Command]:
        """Let in what there is room for; refuse what has waited too long."""
        waiting, self._offers = self._offers, []
        self._pressed.clear()
        for deadline, offer in waiting:
            fenced = offer.term and offer.term < self.view.term
            place = 0 if fenced else self._room(offer, now)
            if fenced:
                yield ev.Refuse(offer.token, "term", f"term {self.view.term} has the run")
            elif place:
                yield ev.Admit(offer.token, place)
            elif now >= deadline:
                yield ev.Refuse(offer.token, "full", "no memory for it, and no LMDB that has room")
            else:
                self._offers.append((deadline, offer))
                self._pressed.update(ref.part for ref in offer.refs)

    def _room(self, offer: ev.Offered, now: float) -> int:
        """The place an offer may be put into, its bytes taken; 0 if it must wait."""
        sizes: dict[str, tuple[int, int]] = {}
        for ref in offer.refs:
            if not self.view.replica(ref.part).places.get(ref.key, 0) & RAM:
                base, rest = sizes.get(ref.part, (0, 0))
                more = (ref.nbytes, 0) if ref.kind == "base" else (0, ref.nbytes)
                sizes[ref.part] = base + more[0], rest + more[1]
        if not self._must_fold_first(sizes, now) and self.share.admit(sizes):
            self._taken[offer.token] = sizes
            return RAM
        return LMDB if self._lmdb(now) else 0

    def _must_fold_first(self, sizes: Mapping[str, tuple[int, int]], now: float) -> bool:
        """True if a base would take the room that the next fold needs, and there is no other."""
        bases = [chain for chain, (base, _) in sizes.items() if base]
        return bool(bases) and not self._lmdb(now) and any(
            part.name in bases and self._plan(part) is not None for part in self.view.parts()
        )  # fmt: skip

    def _lmdb(self, now: float) -> bool:
        return bool(self.settings.places & LMDB) and now >= self._lmdb_full_until

    def _stored(self, event: ev.Stored, now: float) -> Iterable[Command]:
        self.share.give_back(self._taken.pop(event.token, {}))
        if event.token and event.token == self._folding:
            self._folding = ""
        for ref in event.refs:
            replica = self.view.replica(ref.part)
            if event.place == RAM and not replica.places.get(ref.key, 0) & RAM:
                self._charge(ref, 1)
            fills = ref.kind == "base" and not replica.mark().covers(ref.step)
            replica.add(ref, event.place)
            self._fresh.add(ref.part)
            if self.view.owns(ref.part):
                self.drains.note(ref, replica.places[ref.key], now, fills=fills)
            if ref.kind == "base":
                self.far.disown((ref,))
                self._bases += 1
                if ref.origin == "captured":
                    self._wrong.pop(ref.part, None)
        self.view.version += 1
        if event.conn:
            self.acks.note(event.conn, event.refs)
        return ()

    def _charge(self, ref: RecordRef, sign: int) -> None:
        size = sign * ref.nbytes
        self.share.charge(ref.part, *((size, 0) if ref.kind == "base" else (0, size)))

    def _failed(self, event: ev.Failed, now: float) -> Iterable[Command]:
        self.share.give_back(self._taken.pop(event.token, {}))
        if event.full:
            self._lmdb_full_until = now + FULL_S
        if event.token == self._folding:
            chain, self._folding = self._folding.partition("/")[0], ""
            self._foldable = True
            if event.last_match is not None:
                self._wrong[chain] = event.last_match
                if self.view.owns(chain):
                    yield ev.AskBase(chain, event.last_match + 1)

    def _drained(self, event: ev.Drained, now: float) -> Iterable[Command]:
        self.drains.done(event.place, (*event.keys, *event.passed), now)
        if event.place == LMDB and (event.full or event.keys):
            self._lmdb_full_until = now + FULL_S if event.full else now
        for replica in self.view.replicas.values():
            there = [key for key in event.keys if key in replica.refs]
            for key in there:
                replica.places[key] |= event.place
            if event.place == FAR:
                self.far.add(replica.refs[key] for key in there)
            for key in event.passed:
                if key in replica.refs:
                    self.drains.broken(replica.refs[key])
        self._swept = None
        return ()

    def _survey(self) -> Iterable[Command]:
        """Have it read what the far tier has of the own chains, once in a term."""
        if not self.settings.places & FAR or not self.far.chains:
            self.far.found(())
        elif self._surveying != self.view.term:
            self._surveying = self.view.term
            yield ev.Survey(self.view.term, self.far.chains)

    def _surveyed(self, event: ev.Surveyed, now: float) -> Iterable[Command]:
        if event.term != self.view.term:
            return
        if event.refs is None:
            self._surveying = ""  # again
            return
        self.far.found(event.refs)
        yield from self._drained(ev.Drained(FAR, tuple(ref.key for ref in event.refs)), now)

    def _lost(self, event: ev.Lost, now: float) -> Iterable[Command]:
        for replica in list(self.view.replicas.values()):
            self._forget(replica, [key for key in event.keys if key in replica.refs], event.place)
            self._fresh.add(replica.name)
        return ()

    def _forget(self, replica: Replica, keys: list[str], place: int) -> None:
        for key in keys:
            if place == RAM and replica.places[key] & RAM:
                self._charge(replica.refs[key], -1)
        replica.lose(keys, place)
        self.view.version += bool(keys)

    # What the watermark frees ----------------------------------------------------------------

    def _sweep(self, now: float) -> Iterable[Command]:
        """Drop and fold what the watermark allows; not while a restore is planned.

        Where only bases have come, nothing can go but of what has come since the last sweep.
        """
        view = self.view
        state = (view.term, view.watermark, bool(self._pressed)), self._bases
        if state != self._swept:
            alike = self._swept is not None and state[0] == self._swept[0] and not self._pressed
            swept = self._fresh if alike else view.replicas.keys()
            for replica in [found for name, found in view.replicas.items() if name in swept]:
                yield from self._drop(replica)
            self._swept = state
            self._fresh.clear()
            if view.watermark > self._pruned and self.settings.places & LMDB:
                self._pruned = view.watermark
                yield ev.Prune(view.watermark)
            self._foldable = True
        if self._foldable and not self._folding:
            self._foldable = False
            yield from self._fold(now)

    def _drop(self, replica: Replica) -> Iterable[Command]:
        """Drop what is doomed; what is to be drained stays until it is, if there is room."""
        doomed = [*replica.stray(), *replica.doomed(self.view.watermark)]
        if not doomed:
            return
        own = self.view.owns(replica.name)
        lower = self.settings.places if own and replica.name not in self._pressed else 0
        for place in (RAM, LMDB):
            keys = [
                ref.key for ref in doomed
                if replica.places.get(ref.key, 0) & place
                and (not lower or replica.places[ref.key] & lower & ~place
                     or not self.drains.wants(ref.key))
                and not (own and place == LMDB)
            ]  # fmt: skip
            if keys:
                for key in keys:
                    if own and not replica.places[key] & self.settings.places:
                        self.drains.skipped(replica.refs[key])
                self._forget(replica, keys, place)
                yield ev.Drop(place, tuple(keys))

    def _plan(self, part: PartReplica) -> PartPlan | None:
        """The fold that brings a part to the watermark, as far as one fold goes.

        That is to a base that is drained, if one is on the way.
        """
        if part.name in self._wrong and part.name not in self._pressed:
            return None
        every = self.settings.base_every if self.view.owns(part.name) else 0
        return part.fold_plan(self.view.watermark, every, FOLD_MOST)

    def _fold(self, now: float) -> Iterable[Command]:
        """Begin the next fold: one at a time, for there is room for one base more."""
        for part in sorted(self.view.parts(), key=lambda part: part.name not in self._pressed):
            plan = self._plan(part)
            if plan is None or not self._worth(plan):
                continue
            self._serial += 1
            token = f"{part.name}/{self._serial}"
            size = plan.base.nbytes
            if self.share.admit_fold(part.name, size):
                self._taken[token] = {part.name: (size, 0)}
                place = RAM
            elif self._lmdb(now) and not self.drains.backlog(LMDB, now).records:
                place = LMDB  # no drain will make room
            else:
                continue
            self._folding = token
            yield ev.Fold(token, plan, plan.step, place)
            return

    def _worth(self, plan: PartPlan) -> bool:
        """True for one that brings much, room or a base to drain; for any before a restore here."""
        many = len(plan.deltas) >= self.settings.fold_every
        many = many or (self.view.owns(plan.part) and not self._attended)
        return many or plan.part in self._pressed or plan.step < self.view.watermark

    # Trainers and peers ----------------------------------------------------------------------

    def _sync(self, event: ev.Sync, now: float) -> Iterable[Command]:
        self.acks.wait(event)
        return ()

    def _closed(self, event: ev.Closed, now: float) -> Iterable[Command]:
        self.acks.close(event.conn)
        return ()

    def _heard(self, event: ev.Heard, now: float) -> Iterable[Command]:
        self.view.hear(event.report, now)
        if event.report.term > self.view.term:
            yield ev.Learn(event.report.node)

    def _missed(self, event: ev.Missed, now: float) -> Iterable[Command]:
        peer = self.view.peers.get(event.peer)
        if peer is not None:
            peer.busy, peer.missed = False, True
        return ()

    def _tick(self, event: ev.Tick, now: float) -> Iterable[Command]:
        reseat(self.view, now, self.settings.away_s)
        self._foldable, self._attended = True, event.attended  # there may be room by now
        return ()
