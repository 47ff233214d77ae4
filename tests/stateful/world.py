"""The state machine's world: a store and its writers, and all that happens to them.

What must come back meanwhile is `truth`; verbs over the store are in `verbs`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from adacheck_store.catalog import RecordRef
from adacheck_store.format.errors import (
    AdaCheckError,
    TermError,
    TierError,
    TierFullError,
)
from adacheck_store.format.keys import Term, parse_key
from adacheck_store.policy import Retention
from adacheck_store.session import RunSession
from adacheck_store.store import open_store
from adacheck_store.terms import newer_claims
from adacheck_store.tiers import failpoints
from adacheck_store.tools import tag as tags
from adacheck_store.tools.findings import Finding
from adacheck_store.tools.fsck import fsck
from tests.core.kit import BrokenTier, load
from tests.core.toy import Toy
from tests.stateful.places import Place
from tests.stateful.trainers import (
    BASE_EVERY,
    DONE,
    NODES,
    PART,
    RUN,
    SETTINGS,
    SHAPES,
    WAIT_S,
    Checked,
    Writer,
    adamw,
    digest_of_toy,
)
from tests.stateful.truth import At, Truth


class World(Truth):
    """One store under test and its live writers. ``log`` (if given) is told what is trained."""

    def __init__(self, place: Place, log: Callable[..., None] | None = None) -> None:
        super().__init__(place, log)
        self.writers: dict[str, Writer] = {}
        self.stumbling = False
        self.seed = 0

    # Writers ---------------------------------------------------------------------------------

    def _open(self, node: str, keep_bases: int, every: int) -> tuple[RunSession, list[BrokenTier]]:
        os.environ["ADACHECK_NODE"] = node
        try:
            store = open_store(
                self.place.url, cache=self.place.cache, write=True, lmdb_bytes=SETTINGS.lmdb_bytes
            )
        finally:
            os.environ["ADACHECK_NODE"] = NODES[0]
        near = BrokenTier(store.near)
        if self.place.one:  # a memory store outlives its writers
            near.close = lambda: None  # type: ignore[method-assign]
        far = near if store.near is store.far else BrokenTier(store.far)
        wrapped = replace(store, near=near, far=far)
        rules = Retention(last=keep_bases, every=every) if every else None
        settings = replace(SETTINGS, keep_bases=keep_bases, retention=rules)
        try:
            return RunSession(wrapped, RUN, settings), [near, far]
        except BaseException:
            store.close()
            raise

    def begin(
        self, node: str = "a", *, step: int | None = None, keep_bases: int = 2, every: int = 0
    ) -> At:
        """Restore (the newest, or a step) and start a term; returns where it begins."""
        session, broken = self._open(node, keep_bases, every)
        toy = Toy(SHAPES, adamw, seed=self.next_seed(), absent=0.2, base_every=BASE_EVERY)
        try:
            restored = session.restore(step=step)
            if restored is not None:
                if self.trust_truth:
                    self.check_restored(restored)
                load(toy, restored.parts[PART], None, self.seed)  # type: ignore[arg-type]
            else:
                self._log(fresh=digest_of_toy(toy))
            session.start(toy.layout, start_step=toy.step, base=toy.base, extra=toy.extra)
        except BaseException:
            session.close()
            raise
        term = session.status().term
        if restored is not None:
            DONE["forked" if step is not None else "went on"] += 1
            self._born(term, restored.plan.term, restored.step)
        writer = self.writers[node] = Writer(node, session, toy, term, broken, keep_bases)
        self._note(writer)
        self._watch(writer)
        if restored is None:
            self.promise(term, toy.step)
        if broken[0] is not broken[1]:
            session.flush(WAIT_S)
        return term, toy.step

    def next_seed(self) -> int:
        """A seed that no trainer has had."""
        self.seed += 1
        return self.seed

    def _watch(self, writer: Writer) -> None:
        """Hear of every record that becomes durable."""
        inner = writer.session._writer
        assert inner is not None
        hand_on = inner._on_stored

        def heard(step: int, refs: list[RecordRef]) -> None:
            hand_on(step, refs)
            writer.acknowledged += refs
            self.promise(writer.term, step)

        inner._on_stored = heard

    def _note(self, writer: Writer) -> None:
        self.truth[writer.term, writer.toy.step] = digest = digest_of_toy(writer.toy)
        self._log(trained=[writer.term, writer.toy.step, digest])

    def append(self, node: str, steps: int, *, checked: bool = False) -> bool:
        """So many boundaries; False if a newer term has taken over, and the writer is gone."""
        writer = self.writers[node]
        try:
            for _ in range(steps):
                writer.session.check()
                gap = writer.session.wants_base()
                writer.toy.train()
                self._note(writer)
                boundary = Checked(writer.toy) if checked and gap is None else None
                writer.session.append(boundary or writer.toy.boundary(gap))
            self.settle(writer)
            writer.session.check()
        except TermError:
            DONE["fenced"] += 1
            self.close(node)
            return False
        return True

    def settle(self, writer: Writer) -> None:
        """Wait until all that is due has been done."""
        session = writer.session
        assert session._writer is not None
        assert session._upkeep is not None
        assert session._writer.wait_stored(WAIT_S)
        upkeep, deadline = session._upkeep, time.monotonic() + WAIT_S
        while not self.planted and not self.stumbling and upkeep.error and not upkeep.fenced:
            assert time.monotonic() < deadline, f"it never succeeds: {upkeep.error}"
            time.sleep(0.001)
        while upkeep.fenced is None and not upkeep.resting:
            assert time.monotonic() < deadline, f"upkeep never rests: {upkeep.error}"
            time.sleep(0.001)
        if not self.planted and not self.stumbling:
            assert upkeep.error is None or isinstance(upkeep.error, TermError), upkeep.error

    def flush(self, node: str) -> bool:
        """Everything to the far tier; False if fenced."""
        writer = self.writers[node]
        try:
            writer.session.flush(WAIT_S)
        except TermError:
            self.close(node)
            return False
        self.settle(writer)
        return True

    def skip(self, node: str, steps: int, fault: Exception | None = None) -> bool:
        """The near tier fails for so many steps; then a captured base closes the gap."""
        writer = self.writers[node]
        error = fault or TierFullError("planned")
        writer.broken[0].fault = lambda keys: (
            error if any("/delta/" in key or "/extra/" in key for key in keys) else None
        )
        there = self.append(node, steps)
        DONE["exposed"] += there and writer.session.status().exposed
        writer.broken[0].fault = lambda keys: None
        return there and self._close_gap(node)

    def declare_gap(self, node: str, back: int) -> bool:
        """Something finds the last steps wrong: they are disowned, a captured base follows.

        Not the step that a floor stands on: its base was proven when it was folded.
        """
        writer = self.writers[node]
        lowest = max(self._begun(writer.term), self._all_floors().get(writer.term, -1)) + 1
        first = max(lowest, writer.toy.step - back + 1)
        if first > writer.toy.step:
            return True
        DONE["disowned"] += 1
        inner = writer.session._writer
        assert inner is not None
        inner.ask_for_base("planned", first)
        upkeep = writer.session._upkeep
        assert upkeep is not None
        with upkeep._changed:
            upkeep._tail.base = None
            upkeep._tail.deltas = []
        self.promised = {
            place for place in self.promised if place[0] != writer.term or place[1] < first
        }
        there = self._close_gap(node)
        self._forget_lost_tags(writer.term, first)
        return there

    def _forget_lost_tags(self, term: str, first: int) -> None:
        """Tags of steps that were found wrong are gone where fsck says so, as its hint wants it."""
        with self.read() as store:
            said = [row.what for row in fsck(store, RUN)
                    if isinstance(row, Finding) and row.kind == "tag"]  # fmt: skip
            for name, at in list(self.tagged.items()):
                if (
                    at[0] == term
                    and at[1] >= first
                    and any(text.startswith(f"tag {name}:") for text in said)
                ):
                    tags.remove(store, name, RUN)
                    del self.tagged[name]
                    DONE["tag disowned"] += 1

    def prune(self, node: str) -> bool:
        """Train until what lies before the last bases can be deleted, and see that it is.

        A claim of somebody who was killed before it began keeps it for a while, as it should.
        """
        writer = self.writers[node]
        for _ in range(writer.keep_bases + 2):  # upkeep that is behind makes only the newest base
            if not self.append(node, BASE_EVERY):
                return False
        if not self.flush(node):
            return False
        far = writer.session.store.far
        if newer_claims(far, RUN, Term.parse(writer.term)):
            DONE["kept for a claim"] += 1
        elif not self.planted:
            low = writer.toy.step - (writer.keep_bases + 2) * BASE_EVERY
            deadline = time.monotonic() + WAIT_S
            while late := self._kept_below(writer.term, low):
                assert time.monotonic() < deadline, (late, low)
                time.sleep(0.005)
            DONE["pruned"] += 1
        return True

    def _kept_below(self, term: str, low: int) -> list[str]:
        """Tiers that hold a delta of a term at a step or below it."""
        with self.read() as store:
            return [
                tier.traits.name for tier in store.tiers
                if any(key.kind == "delta" and key.step <= low
                       for key in map(parse_key, tier.list(f"{RUN}/{term}/")))
            ]  # fmt: skip

    def _begun(self, term: str) -> int:
        return min(step for name, step in self.truth if name == term)

    def stumble(self, node: str, steps: int, failpoint: str) -> None:
        """One call of the medium fails while a writer trains; it goes on by itself."""
        failpoints.arm(failpoint)
        self.stumbling = True
        try:
            there = self.append(node, steps)
            if there:
                with suppress(TierError):  # it says what is not saved
                    there = self.flush(node)
            there = there and self._close_gap(node)
            DONE["stumbled"] += not failpoints._armed
        finally:
            failpoints.disarm()
            self.stumbling = False
        if there:
            self.flush(node)

    def _close_gap(self, node: str) -> bool:
        session, deadline = self.writers[node].session, time.monotonic() + WAIT_S
        while session.status().exposed:
            if not self.append(node, 1):
                return False
            assert time.monotonic() < deadline, "the gap stays open"
        return True

    def close(self, node: str) -> None:
        """End a writer in order."""
        self.writers.pop(node).session.close()

    def crash(self, node: str, pending: int) -> None:
        """A writer whose last steps never arrive; nothing it does from here on has an effect."""
        DONE["crashed"] += 1
        writer = self.writers[node]

        def dead(keys: list[str]) -> Exception:
            return TierError("the process is dead")

        for tier in writer.broken:
            tier.fault = dead
            tier.delete = lambda keys: None  # type: ignore[method-assign]
        for _ in range(pending):
            writer.toy.train()
            self._note(writer)
            writer.session.append(writer.toy.boundary(writer.session.wants_base()))
        self.close(node)

    def close_all(self) -> None:
        """End all writers."""
        for node in list(self.writers):
            self.close(node)

    def check(self, choose: Callable[[list[int]], int] | None = None) -> list[Finding]:
        """Fsck is clean or truthful; what it calls provable is true; what was promised is there.

        A live writer may prune meanwhile (where damage made it fail before): then once more.
        """
        for _ in range(4):
            for writer in self.writers.values():
                self.settle(writer)
            before = self._all_floors()
            try:
                return super().check(choose)
            except (AdaCheckError, AssertionError):
                if not self.writers or before == self._all_floors():
                    raise
        return super().check(choose)

    def _all_floors(self) -> dict[str, int]:
        with self.read() as store:
            return self._floors(self.catalog(store))
