"""Acknowledgements: a trainer's sync is answered when every live holder can produce its steps."""

from __future__ import annotations

from collections.abc import Iterable

from adacheck_store.catalog import RecordRef

from .events import Answer, Command, Refuse, Sync
from .replica import PartReplica
from .view import View


class Acks:
    """Syncs that are ``waiting``, and what was put over each connection."""

    def __init__(self) -> None:
        self._put: dict[str, tuple[str, dict[str, int]]] = {}
        self.waiting: list[Sync] = []

    def note(self, conn: str, refs: Iterable[RecordRef]) -> None:
        """Records of a term came over a trainer's connection."""
        for ref in refs:
            _, steps = self._put.setdefault(conn, (ref.term, {}))
            steps[ref.part] = max(ref.step, steps.get(ref.part, 0))

    def wait(self, sync: Sync) -> None:
        """A trainer waits."""
        self.waiting.append(sync)

    def close(self, conn: str) -> None:
        """Nobody waits any more."""
        self._put.pop(conn, None)
        self.waiting = [sync for sync in self.waiting if sync.conn != conn]

    def settle(self, view: View, now: float) -> list[Command]:
        """Answers to those that need not wait longer."""
        said: list[Command] = []
        left: list[Sync] = []
        for sync in self.waiting:
            answer = self._answer(sync, view, now)
            if answer is None:
                left.append(sync)
            else:
                said.append(answer)
        self.waiting = left
        return said

    def _answer(self, sync: Sync, view: View, now: float) -> Command | None:
        if sync.conn not in self._put:
            return Refuse(sync.token, "lost", "this agent knows of nothing put: it has restarted")
        term, put = self._put[sync.conn]
        if term < view.term:  # its steps are not those that the marks speak of
            return Refuse(sync.token, "term", f"term {view.term} has the run")
        holders: set[str] | None = None
        short = False
        for chain, step in put.items():
            found = _producers(view, chain, step, now)
            if found is None:
                if _hopeless(view, chain, step, now):
                    return Refuse(
                        sync.token, "base", f"nobody can produce {chain} before step {step}: "
                        "a captured base is needed",
                    )  # fmt: skip
                if now >= sync.deadline:
                    return Refuse(sync.token, "time", f"{chain} at step {step} is not held by all")
                return None
            holders = found if holders is None else holders & found
            short = short or view.opened is None or len(found) <= view.opened.k
        named = sorted((name, view.boot_of(name)) for name in holders or ())
        return Answer(sync.token, tuple(named), short)


def _producers(view: View, chain: str, step: int, now: float) -> set[str] | None:
    """The holders that can produce a step, once all live ones and this agent can; else None.

    A holder without room for the chain is as good as dead.
    """
    seat = view.seats.get(chain)
    if seat is None or not view.mark(view.node, chain).covers(step):
        return None
    found: set[str] = set()
    for name in seat.holders:
        if view.mark(name, chain).covers(step):
            found.add(name)
        elif view.live(name, now) and not view.no_room(name, chain):
            return None
    return found


def _hopeless(view: View, chain: str, step: int, now: float) -> bool:
    """True if this agent cannot produce a step, and no live one has what it lacks for that."""
    replica = view.replicas.get(chain)
    if not isinstance(replica, PartReplica) or view.mark(view.node, chain).covers(step):
        return False
    before = replica.first_missing(step) - 1
    return not any(
        view.live(name, now) and (not view.knows(name) or view.mark(name, chain).covers(before))
        for name in view.peers
    )
