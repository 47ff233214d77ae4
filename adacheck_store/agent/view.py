"""The view: what an agent knows of a run. Its own replicas, what peers last said, the watermark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from adacheck_store.catalog import Catalog, RecordRef
from adacheck_store.proof import Segment
from adacheck_store.recovery import tolerant_line

from .events import Opened
from .marks import NOTHING, Mark, Report, Seat, newest_common
from .replica import PartReplica, Replica, make_replica

DEAD_S = 3.0
"""Silence after which a peer is not waited for: what it holds is exposed."""


@dataclass(slots=True)
class Peer:
    """Another agent: what it last said and when; the call to it that is under way.

    ``sent``: that call carries records; ``missed``: the last one failed. ``given`` are keys it
    has or was sent; ``tried`` is the view's version that was looked through for more.
    """

    name: str
    heard_at: float
    called_at: float = -1e9
    busy: bool = False
    sent: bool = False
    missed: bool = False
    report: Report | None = None
    given: set[str] = field(default_factory=set)
    tried: int = -1


class View:
    """One run as an agent knows it: ``term`` is the newest it was told of, empty if none.

    ``agreed`` is the newest watermark that was found with k+1 holders of every chain.
    ``version`` grows with every change of what is held here. ``frozen``, while a restore is
    planned, has what was settled here of each chain when that began.
    """

    def __init__(self, node: str, boot: str) -> None:
        self.node = node
        self.boot = boot
        self.opened: Opened | None = None
        self.term = ""
        self.line: tuple[Segment, ...] = ()
        self.seats: dict[str, Seat] = {}
        self.replicas: dict[str, Replica] = {}
        self.peers: dict[str, Peer] = {}
        self.watermark = self.agreed = -1
        self.version = 0
        self.refused: frozenset[str] = frozenset()
        self.frozen: dict[str, int] | None = None
        self._heard = 0
        self._advanced = (-1, -1)
        self._told: tuple[int, Mapping[str, Mark]] = (-1, {})

    def open(self, opened: Opened, now: float) -> None:
        """A term begins, or one known has another revision. Its watermark is not known yet."""
        if opened.term != self.term:
            self.seats, self.watermark, self.agreed = dict(opened.seats), -1, -1
        elif self.opened is not None:  # whoever says it again may know fewer revisions
            known = {**self.opened.manifests, **opened.manifests}
            opened = replace(opened, manifests=known)
        before, self.opened, self.term = self.opened, opened, opened.term
        if before is None or (before.term, before.manifests) != (opened.term, opened.manifests):
            self.line = tolerant_line(Catalog(run="", manifests=opened.manifests), opened.term)
            for replica in self.replicas.values():
                replica.follow(self.line, opened.manifests)
        for name in opened.domains:
            if name != self.node and name not in self.peers:
                self.peers[name] = Peer(name, heard_at=now)
        for name in [name for name in self.peers if name not in opened.domains]:
            del self.peers[name]
        self.version += 1

    def replica(self, chain: str) -> Replica:
        """The replica of a chain, made if there is none."""
        found = self.replicas.get(chain)
        if found is None:
            found = self.replicas[chain] = make_replica(chain)
            if self.opened is not None:
                found.follow(self.line, self.opened.manifests)
        return found

    def parts(self) -> list[PartReplica]:
        """Replicas of parts that this node has a seat for."""
        return [
            replica for chain, replica in self.replicas.items()
            if isinstance(replica, PartReplica) and self.holds(chain)
        ]  # fmt: skip

    def holds(self, chain: str) -> bool:
        """True if this node has a seat for the chain."""
        seat = self.seats.get(chain)
        return seat is not None and self.node in seat.holders

    def owns(self, chain: str) -> bool:
        """True if the chain's trainer is on this node."""
        seat = self.seats.get(chain)
        return seat is not None and bool(seat.holders) and seat.holders[0] == self.node

    def hear(self, report: Report, now: float) -> None:
        """A peer has answered. Its seats count where they are newer, and so does its watermark.

        That was found with k+1 holders of every chain: a fact about them all, whoever has seen it.
        """
        peer = self.peers.get(report.node)
        if peer is None:
            return
        before = peer.report
        if before is None or before.marks != report.marks or before.term != report.term:
            self._heard += 1
            peer.tried = -1
        if peer.missed or (not peer.sent and peer.given):  # what it lacks it has not kept
            peer.given.clear()
            peer.missed, peer.tried = False, -1
        peer.report, peer.heard_at, peer.busy = report, now, False
        if report.term == self.term:
            self.agreed = max(self.agreed, report.watermark)
            self.watermark = max(self.watermark, self.agreed)
            for chain, seat in report.seats.items():
                known = self.seats.get(chain)
                if known == seat:
                    continue  # nearly always
                own = seat.holders[:1] == (report.node,)  # of equals the own node's word counts
                if known is None or (seat.version, own) > (known.version, False):
                    self.seats[chain] = seat

    def has(self, name: str, refs: Iterable[RecordRef]) -> None:
        """A peer has these records: it has sent them."""
        if name in self.peers:
            self.peers[name].given.update(ref.key for ref in refs)

    def live(self, name: str, now: float) -> bool:
        """True unless a peer has been silent for too long."""
        if name == self.node:
            return True
        peer = self.peers.get(name)
        return peer is not None and now - peer.heard_at < DEAD_S

    def no_room(self, name: str, chain: str) -> bool:
        """True if a node has said that it has no room for a chain."""
        if name == self.node:
            return chain in self.refused
        report = self.peers[name].report if name in self.peers else None
        return report is not None and chain in report.refused

    def exposed(self, now: float) -> dict[str, int]:
        """Chains whose newest step here fewer than k+1 live holders can produce: how many can."""
        found: dict[str, int] = {}
        for chain, seat in self.seats.items() if self.opened is not None else ():
            owed = self._owed(chain)
            able = [
                name for name in seat.holders
                if self.live(name, now) and any(map(self.mark(name, chain).covers, owed))
            ]  # fmt: skip
            if self.opened is not None and len(able) <= self.opened.k:
                found[chain] = len(able)
        return found

    def _owed(self, chain: str) -> tuple[int, ...]:
        """Steps of which a holder should have one: the newest here may be on its way to others."""
        mark = self.mark(self.node, chain)
        if not self.holds(chain) or mark.newest < 0:
            return (max(self.watermark, 0),)
        if mark.newest <= self.line[-1].first:
            return (mark.newest,)
        return (mark.newest, mark.before(mark.newest))

    def knows(self, name: str) -> bool:
        """True if a peer has told of the term that this view is of."""
        report = self.peers[name].report
        return report is not None and report.term == self.term

    def mark(self, name: str, chain: str) -> Mark:
        """What a node has last said of a chain, in this term."""
        if name == self.node:
            replica = self.replicas.get(chain)
            found = replica.mark() if replica else NOTHING
            if self.frozen is None or found.settled <= (least := self.frozen.get(chain, -1)):
                return found
            return replace(found, settled=least)
        peer = self.peers.get(name)
        if peer is None or (report := peer.report) is None or report.term != self.term:
            return NOTHING
        return report.marks.get(chain, NOTHING)

    def freeze(self, frozen: bool) -> None:
        """Settle nothing more while a restore is planned from what is here, or go on.

        So no watermark passes, at any agent, what a planner has read here: what it reads elsewhere
        later still has the steps that it saw here.
        """
        if frozen != (self.frozen is not None):
            marks = {chain: replica.mark() for chain, replica in self.replicas.items()}
            now = {chain: mark.settled for chain, mark in marks.items()}
            self.frozen = now if frozen else None
            self.version += 1

    def boot_of(self, name: str) -> str:
        """The start of a node's agent that its mark is of."""
        report = self.peers[name].report if name != self.node else None
        return report.boot if report else self.boot

    def report(self) -> Report:
        """What this agent says of itself."""
        return Report(
            node=self.node, boot=self.boot, term=self.term, seats=dict(self.seats),
            marks=self._marks(),
            watermark=self.agreed, refused=self.refused,
        )  # fmt: skip

    def _marks(self) -> Mapping[str, Mark]:
        if self._told[0] != self.version:
            marks = {chain: self.mark(self.node, chain) for chain in self.replicas}
            self._told = self.version, marks
        return self._told[1]

    def advance(self, now: float) -> None:
        """Move the watermark to what all holders have said; it never goes back within a term.

        Every holder counts, the dead with what they said last: what nobody else needs, a holder
        that comes back may. Others are told of it only where each chain has k+1 holders.
        """
        state = (self.version, self._heard)
        if state == self._advanced or self.opened is None:
            return
        self._advanced = state
        known, whole = self.watermark, True
        chains: list[list[Mark]] = []
        for chain, seat in self.seats.items():
            marks: list[Mark] = []
            for name in seat.holders:
                marks.append(self.mark(name, chain))
                if marks[-1].settled <= known:
                    return  # nearly always
            if len(seat.holders) <= self.opened.k:
                whole = False
                unseated = self._unseated(chain, seat, now)
                if any(mark.settled <= known for mark in unseated):
                    return
                marks += unseated
            chains.append(marks)
        found = newest_common(chains)
        if found > known:
            self.watermark = found
            self.agreed = found if whole else self.agreed

    def _unseated(self, chain: str, seat: Seat, now: float) -> list[Mark]:
        """Marks of live nodes that hold a chain and have lost their seats.

        They are about to have them back, and until then may be all that is left of the chain.
        """
        marks = [
            self.mark(name, chain) for name in (self.node, *self.peers)
            if name not in seat.holders and self.live(name, now) and not self.no_room(name, chain)
        ]  # fmt: skip
        return [mark for mark in marks if mark.spans]
