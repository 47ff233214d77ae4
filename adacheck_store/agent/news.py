"""What an agent tells of itself: to a trainer every second (news), to people (status)."""

from __future__ import annotations

import time
from typing import Any

from adacheck_store.config import memory_resident

from .marks import Mark
from .replica import FAR, LMDB, RAM, Replica
from .shell import Shell
from .work import Work

PLACE_NAMES = {RAM: "ram", LMDB: "lmdb", FAR: "far"}


def news(shell: Shell, part: str) -> dict[str, Any]:
    """What a part's trainer wants to know.

    ``ask_base``: the first step of its chain that is wrong, once; else -1. ``behind``: records
    that are still to be drained. ``notice``: what somebody has to do something about.
    """
    with shell.lock:
        view = shell.core.view
        replica = view.replicas.get(part)
        held = shell.prunes.held
        return {
            "term": view.term, "holder": shell.holder(), "watermark": view.watermark,
            "behind": shell.behind,
            "ask_base": shell.asked.pop(part, -1), "base": _newest_base(replica),
            "drained": shell.core.far.newest(part), "errors": errors(shell),
            "notice": str(held[1]) if held else "",
            "exposed": sorted(shell.core.view.exposed(time.monotonic())),
            "bytes_drained": sum(d.bytes_drained for d in shell.drainers.values()),
        }  # fmt: skip


def status(shell: Shell, memory: int) -> dict[str, Any]:
    """All there is to know of the run at this agent; bytes and steps as numbers.

    ``memory``: what the process may take.
    """
    with shell.lock:
        view, now = shell.core.view, time.monotonic()
        exposed = view.exposed(now)
        chains = {
            name: _chain(shell, name, now) | {"exposed": name in exposed}
            for name in sorted({*view.replicas, *view.seats})
        }  # fmt: skip
        last = {_name(work): (work.last, work.error is not None) for work in _works(shell)}
        last["floor"] = shell.prunes.held, True
        return {
            "term": view.term, "watermark": view.watermark, "chains": chains,
            "memory": {
                "limit": memory, "resident": memory_resident(), "room": shell.core.budget.total,
                "reserved": shell.core.budget.reserved(), "used": shell.core.budget.used,
            },
            "peers": {
                name: {"live": view.live(name, now), "endpoint": shell.endpoints.get(name, ""),
                       "silent_s": round(now - peer.heard_at, 1)}
                for name, peer in view.peers.items()
            },
            "drains": {PLACE_NAMES[place]: _drain(shell, place, now) for place in shell.drainers},
            "floors": {PLACE_NAMES[place]: shell.prunes.floor(place) for place in shell.drainers},
            "trainers": shell.trainers, "errors": errors(shell),
            "last_errors": {
                name: {"error": str(said[1]), "ago_s": round(now - said[0], 1), "now": fails}
                for name, (said, fails) in last.items() if said is not None
            },
            "frozen": shell.core.lease.frozen(now),
        }  # fmt: skip


def errors(shell: Shell) -> dict[str, str]:
    """What is wrong now, by what it is wrong with."""
    return {_name(work): str(work.error) for work in _works(shell) if work.error is not None}


def _works(shell: Shell) -> list[Work[Any]]:
    works: list[Work[Any]] = [
        shell.folding,
        shell.prunes.work,
        *(d.work for d in shell.drainers.values()),
    ]
    return works + [caller.work for caller in shell.callers]


def _name(work: Work[Any]) -> str:
    return work.thread.name.removeprefix("adacheck-")


def _drain(shell: Shell, place: int, now: float) -> dict[str, Any]:
    """How far the way to a lower place is behind; steps of this node's own chains."""
    view, drainer = shell.core.view, shell.drainers[place]
    backlog = shell.core.drains.backlog(place, now)
    newest = max((view.mark(view.node, name).newest for name in view.seats if view.owns(name)),
                 default=-1)  # fmt: skip
    return {
        "waiting_records": backlog.records, "waiting_bytes": backlog.nbytes,
        "lag_steps": max(0, newest - backlog.oldest_step + 1) if backlog.records else 0,
        "lag_s": round(backlog.oldest_s, 1), "drained_bytes": drainer.bytes_drained,
        "busy_s": _busy(drainer.work.busy_since, now), "pause_s": drainer.work.pausing_s,
        "requests": dict(shell.places[place].requests()),
    }  # fmt: skip


def _chain(shell: Shell, name: str, now: float) -> dict[str, Any]:
    view = shell.core.view
    replica = view.replicas.get(name)
    seat = view.seats.get(name)
    holders = seat.holders if seat else ()
    marks: dict[str, Mark] = {holder: view.mark(holder, name) for holder in holders}
    sizes = dict.fromkeys(PLACE_NAMES.values(), 0)
    for ref in replica.refs.values() if replica else ():
        for place, word in PLACE_NAMES.items():
            sizes[word] += ref.nbytes if replica and replica.places[ref.key] & place else 0
    return {
        "replica_step": _newest_base(replica),
        "newest_step": replica.mark().newest if replica else -1,
        "records": len(replica.refs) if replica else 0, "bytes": sizes,
        "owner": view.owns(name), "drained": [list(span) for span in shell.core.far.spans(name)],
        "holders": {
            holder: {"newest": mark.newest, "live": view.live(holder, now)}
            for holder, mark in marks.items()
        },
    }  # fmt: skip


def _newest_base(replica: Replica | None) -> int:
    refs = replica.refs.values() if replica else ()
    return max((ref.step for ref in refs if ref.kind == "base"), default=-1)


def _busy(since: float | None, now: float) -> float:
    return 0.0 if since is None else round(now - since, 1)
