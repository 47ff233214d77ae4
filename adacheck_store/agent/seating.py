"""Seating: a holder that stays away loses its seat to a spare domain, or to nobody.

Only the agent on the chain's own node decides, so there is never more than one opinion.
"""

from __future__ import annotations

from adacheck_store.placement import choose

from .marks import Seat
from .view import View


def reseat(view: View, now: float, away_s: float) -> None:
    """Give the seats of the chains of this node's trainers anew where that changes anything.

    A holder that is silent for ``away_s``, or has no room, loses its seat, so that the watermark
    no longer waits for it.
    """
    if view.opened is None:
        return
    load: dict[str, int] | None = None
    for chain, seat in list(view.seats.items()):
        if not view.owns(chain):
            continue
        kept = [name for name in seat.holders if _stays(view, name, chain, now, away_s)]
        if len(kept) <= view.opened.k:
            load = _load(view, now) if load is None else load
            able = {name: count for name, count in load.items() if not view.no_room(name, chain)}
            while len(kept) <= view.opened.k:
                spare = choose(kept, view.opened.domains, able)
                if spare is None:
                    break
                kept.append(spare)
        if tuple(kept) != seat.holders:
            view.seats[chain] = Seat(seat.version + 1, tuple(kept))
            view.version += 1


def _stays(view: View, name: str, chain: str, now: float, away_s: float) -> bool:
    """True for a holder that is live and has room, or is silent for not too long yet."""
    if view.live(name, now):
        return not view.no_room(name, chain)
    peer = view.peers.get(name)
    return peer is not None and now - peer.heard_at <= away_s


def _load(view: View, now: float) -> dict[str, int]:
    """What every live node holds for others, in seats."""
    assert view.opened is not None
    load = dict.fromkeys((name for name in view.opened.domains if view.live(name, now)), 0)
    for seat in view.seats.values():
        for name in seat.holders[1:]:
            if name in load:
                load[name] += 1
    return load
