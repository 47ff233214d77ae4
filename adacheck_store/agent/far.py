"""Far: what the far tier has of this node's own chains, and so the steps it can produce alone.

Said of what lies there and not of what was sent, by the planner's own proofs: what a drain has
passed over, what a gap disowns and what another process has left there need no rules of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

from adacheck_store.catalog import RecordRef

from .marks import Spans, both
from .replica import FAR, PartReplica, Replica, make_replica
from .view import View


class Far:
    """The far tier's side of the own chains of a term.

    ``known`` is false from the beginning of a term until `found` has said what was there before.
    """

    def __init__(self) -> None:
        self.known = False
        self._term = ""
        self._chains: dict[str, Replica] = {}

    def open(self, view: View) -> None:
        """A term begins, or has another revision: only what a survey finds of it is known."""
        if view.term != self._term:
            self._term, self.known = view.term, False
            self._chains = {name: make_replica(name) for name in view.seats if view.owns(name)}
            for name in self._chains.keys() & view.replicas.keys():
                self.disown(view.replicas[name].refs.values())
        for chain in self._chains.values():
            chain.follow(view.line, view.opened.manifests if view.opened else {})

    @property
    def chains(self) -> tuple[str, ...]:
        """The own chains."""
        return tuple(self._chains)

    def found(self, refs: Iterable[RecordRef]) -> None:
        """All that was there when the far tier was read in this term."""
        self.known = True
        self.add(refs)

    def add(self, refs: Iterable[RecordRef]) -> None:
        """Records have got there."""
        touched = set()
        for ref in refs:
            chain = self._chains.get(ref.part)
            if chain is not None:
                chain.add(ref, FAR)
                touched.add(ref.part)
        for name in touched:
            self._trim(name)

    def disown(self, refs: Iterable[RecordRef]) -> None:
        """Of records here: those that tell of a gap disown what the far tier has of it."""
        for ref in refs:
            part = self._chains.get(ref.part) if ref.gap is not None else None
            if isinstance(part, PartReplica):
                part.disown(ref)

    def spans(self, part: str) -> Spans:
        """Steps of a part and its rank's extras that the far tier can produce.

        The newest may be such as a save has failed for: its trainer knows not to count them.
        """
        pair = [self._chains[name].mark().spans for name in (part, "r" + part[1:])
                if name in self._chains]  # fmt: skip
        return both(*pair) if len(pair) == 2 and self.known else ()

    def newest(self, part: str) -> int:
        """The newest of these steps, -1 if there is none."""
        spans = self.spans(part)
        return spans[-1][1] if spans else -1

    def _trim(self, name: str) -> None:
        """Forget what no later step hangs on: the base that the newest is folded from bounds it."""
        part, extras = self._chains.get("p" + name[1:]), self._chains.get("r" + name[1:])
        if part is None or extras is None:
            return
        doomed = part.doomed(part.mark().newest)
        part.lose([ref.key for ref in doomed], FAR)
        bases = [ref.step for ref in part.refs.values() if ref.kind == "base"]
        if bases:
            extras.lose([ref.key for ref in extras.doomed(min(bases))], FAR)
