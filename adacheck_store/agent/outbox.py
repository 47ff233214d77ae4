"""The outbox: what a peer lacks of what is held here. New records, a whole chain, or nothing.

Nothing is queued: what to send follows from the peer's last report. So a peer that was away, or
has lost everything, is served by the same rule as one that only lacks the newest step.
"""

from __future__ import annotations

from adacheck_store.catalog import RecordRef

from .events import Forward
from .marks import NOTHING
from .view import Peer, View

POLL_S = 0.5
"""A peer that nothing is sent to is asked for its report this often."""

BATCH = 64
"""Records in a call."""


def next_call(view: View, peer: Peer, now: float) -> Forward | None:
    """The call to make to a peer now, if any; it is then under way. None is.

    One that could not be reached is only asked for its report.
    """
    polled = now - peer.called_at >= POLL_S
    if not polled and (peer.missed or peer.tried == view.version):
        return None
    fresh: list[RecordRef] = []
    if peer.tried != view.version and not peer.missed:
        peer.tried = view.version
        fresh = [ref for ref in _lacking(view, peer, now) if ref.key not in peer.given]
    if not fresh and not polled:
        return None
    if len(fresh) > BATCH:
        peer.tried = -1  # the rest follows
    fresh.sort(key=_order)
    batch = tuple(fresh[:BATCH])
    peer.busy, peer.called_at, peer.sent = True, now, bool(batch)
    peer.given.update(ref.key for ref in batch)
    return Forward(peer.name, batch)


def _order(ref: RecordRef) -> tuple[int, str, str]:
    """Oldest first, so that a part of it is of use; a base before the delta of its step."""
    return ref.step, ref.kind, ref.key


def _lacking(view: View, peer: Peer, now: float) -> list[RecordRef]:
    report = peer.report
    if report is None or report.term != view.term:
        return []
    found: list[RecordRef] = []
    marks, watermark = report.marks, view.watermark
    for chain, replica in view.replicas.items():
        theirs = marks.get(chain, NOTHING)
        if theirs.newest >= replica.mark().newest and theirs.covers(watermark):
            continue  # nearly always
        seat = view.seats.get(chain)
        if seat is not None and peer.name in seat.holders and _provides(view, chain, peer, now):
            found += replica.lacking(theirs, view.watermark)
    return found


def _provides(view: View, chain: str, peer: Peer, now: float) -> bool:
    """True if it is on this agent to serve a holder: the first live one that is not behind."""
    mine = view.mark(view.node, chain).newest
    if mine < 0:
        return False
    for name in view.seats[chain].holders:
        if name == view.node:
            return True
        if name != peer.name and view.live(name, now) and view.mark(name, chain).newest >= mine:
            return False
    return True
