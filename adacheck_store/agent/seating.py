"""Seating: a holder that stays away loses its seat to a spare domain, or to nobody.

Only the agent on the chain's own node decides, so there is never more than one opinion.
"""

from __future__ import annotations

from adacheck_store.placement import choose

from .marks import Seat
from .view import View


def reseat(view: View, now: float, away_s: float) -> None:
    """Give the seats of the chains of this node's trainers anew where that changes anything.

    A holder silent for ``away_s`` loses its seat, so that the watermark no longer waits for it.
    """
    if view.opened is None:
        return
    load = dict.fromkeys((n for n in view.opened.domains if view.live(n, now)), 0)
    for seat in view.seats.values():
        for name in seat.holders[1:]:
            if name in load:
                load[name] += 1
    for chain, seat in list(view.seats.items()):
        if not view.owns(chain):
            continue
        kept = [name for name in seat.holders if not _away(view, name, now, away_s)]
        while len(kept) <= view.opened.k:
            spare = choose(kept, view.opened.domains, load)
            if spare is None:
                break
            kept.append(spare)
        if tuple(kept) != seat.holders:
            view.seats[chain] = Seat(seat.version + 1, tuple(kept))
            view.version += 1


def _away(view: View, name: str, now: float, away_s: float) -> bool:
    if name == view.node:
        return False
    peer = view.peers.get(name)
    return peer is None or now - peer.heard_at > away_s
