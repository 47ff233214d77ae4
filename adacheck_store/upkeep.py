"""Upkeep: what happens behind a writer: compacting, draining and pruning.

Each has a thread of its own, so that a far tier that hangs does not hold up the near tier.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable

from adacheck_store.format.bodies import BOUNDED_STEPS
from adacheck_store.format.errors import (
    AdaCheckError,
    FormatError,
    NotProvableError,
    RecordNotFoundError,
    ReplayMismatchError,
    TermError,
)
from adacheck_store.format.keys import Key, Term, parse_key, part_name
from adacheck_store.format.layout import Layout

from .catalog import RecordRef, make_ref, read_catalog
from .compact import ReplayedBase
from .config import Settings
from .drain import copy_records, in_batches
from .drift import CapturedBases
from .duty import Duty
from .fetch import BlocksLostError, Fetcher
from .group import Group
from .pruner import Pruner
from .recovery import PartPlan, Prover, tolerant_line
from .store import Store
from .tail import Lag, Progress, Tail
from .terms import check_fence

log = logging.getLogger(__name__)


class Upkeep:
    """Compacts at multiples of ``base_every``, drains at ``object_lag``, prunes behind both.

    ``stored`` is told what became durable (any thread). A failure is kept in ``error`` and tried
    again later; losing the run to a newer term is final and kept in ``fenced``.
    ``ask_for_base(reason, first)`` is called when a fold proves the chain wrong. Captured bases
    that the chain reaches are compared with its fold before it is compacted further. ``layouts``
    are the run's by id, more of which may come later.
    """

    def __init__(
        self, store: Store, *, run: str, term: Term, group: Group, layouts: dict[str, Layout],
        settings: Settings, tail: Tail, backlog: list[str],
        ask_for_base: Callable[[str, int], None],
    ) -> None:  # fmt: skip
        self._store = store
        self._run_name = run
        self._term = term
        self._part = part_name(group.rank)
        self._layouts = layouts
        self._settings = settings
        self._tail = tail
        self._ask_for_base = ask_for_base
        self._undrained: list[Key] = [parse_key(text) for text in backlog]
        self._oldest = time.monotonic()
        self._lost: set[tuple[str, str]] = set()
        self._far_bases: set[int] = set()
        self._farthest = -1
        self._captured = CapturedBases(settings.max_drift)
        self._flushing = bool(backlog)
        self._changed = threading.Condition(threading.RLock())
        self._progress = Progress(base=tail.base.step if tail.base else -1)
        self._lag = Lag(settings.object_lag)
        self._pruner = Pruner(
            store, run=run, term=term, group=group, settings=settings, changed=self._changed,
            progress=self._progress, captured=self._captured,
        )  # fmt: skip
        self.fenced: TermError | None = None
        self._compacting = self._duty("compact", self._compact_due, self._compact_next)
        self._draining = self._duty("drain", self._drain_due, self._drain)
        self._pruning = self._duty("prune", self._pruner.due, self._pruner.prune)
        self._duties = (self._compacting, self._draining, self._pruning)
        for duty in self._duties:
            duty.thread.start()

    def _duty(self, name: str, due: Callable[[], bool], work: Callable[[], None]) -> Duty:
        return Duty(name, self._changed, due, work, self._failed)

    @property
    def progress(self) -> Progress:
        """How far everything is; ``cpu_s`` of all threads together."""
        self._progress.drift = self._captured.drift
        self._progress.cpu_s = sum(duty.cpu_s for duty in self._duties)
        return self._progress

    @property
    def error(self) -> AdaCheckError | None:
        """What keeps something from being done, if anything does."""
        errors = (duty.error for duty in (self._draining, self._compacting, self._pruning))
        return next((error for error in errors if error is not None), None)

    @property
    def notice(self) -> str:
        """What somebody has to do something about, though nothing fails."""
        held = self._pruner.held
        return "" if held is None else str(held)

    @property
    def busy_since(self) -> dict[str, float | None]:
        """When each duty has begun what it is doing; None for one that rests."""
        return {
            duty.thread.name.removeprefix("adacheck-"): duty.busy_since for duty in self._duties
        }

    @property
    def resting(self) -> bool:
        """True if all that is due has been done or has failed."""
        return all(duty.resting for duty in self._duties)

    def stored(self, step: int, refs: list[RecordRef]) -> None:
        """Take note of records that became durable in the near tier."""
        with self._changed:
            if not self._undrained:
                self._oldest = time.monotonic()
            for ref in refs:
                if ref.kind == "base" and ref.gap is None:
                    self._captured.add(self._tail.plan(self._part, ref.step), ref)
                self._tail.add(ref)
                if ref.kind == "base":
                    self._progress.base, self._progress.exactness = ref.step, ref.exactness
                    self._progress.bytes_bases += ref.nbytes
                    self._pruner.want_near()
                self._undrained.append(parse_key(ref.key))
            self._progress.stored = step
            self._lag.look(self._progress)
            self._changed.notify_all()

    def flush(self, timeout_s: float | None) -> bool:
        """Drain everything stored so far; False if the time ran out.

        Without a limit of time, one failed try is the answer.
        """
        with self._changed:
            self._flushing = self._draining.hurry = True
            failures = self._draining.failures
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (
                    self.fenced is not None
                    or self._idle()
                    or (timeout_s is None and self._draining.failures > failures)
                ),
                timeout=timeout_s,
            )
            return self.fenced is not None or self._idle()

    def _idle(self) -> bool:
        return not self._undrained and self._draining.busy_since is None and self.resting

    def close(self, timeout_s: float) -> bool:
        """Stop the threads after what they are doing; False if the time ran out."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            for duty in self._duties:
                duty.end()
        for duty in self._duties:
            duty.thread.join(timeout=max(0.0, deadline - time.monotonic()))
        return not any(duty.thread.is_alive() for duty in self._duties)

    def _failed(self, error: AdaCheckError) -> None:
        """Take note of a failure; being fenced ends all duties."""
        error.at(run=self._run_name, term=str(self._term))
        log.warning("%s", error)
        if isinstance(error, TermError):
            self.fenced = error
            for duty in self._duties:
                duty.end()

    # Compaction ------------------------------------------------------------------------------

    def _compact_due(self) -> bool:
        return bool(self._captured) or self._target() is not None

    def _compact_next(self) -> None:
        target = self._target()
        if self._captured:
            self._compare()
        elif target is not None:
            self._compact(target)

    def _compare(self) -> None:
        """Hold the oldest captured base against the fold that should give it.

        A difference ends the chain at the exact base before: what was folded since is wrong.
        """
        plan, truth = self._captured.first()
        fetcher, layout = Fetcher(self._store.tiers), self._layouts[plan.layout]
        try:
            self._captured.compare(fetcher, layout, self._anywhere(plan), self._held(truth))
        except ReplayMismatchError as error:
            self._distrust(str(error), error.last_match + 1)
            raise
        finally:
            with self._changed:
                self._captured.done()
                self._pruner.want_all()

    def _target(self) -> int | None:
        """The multiple of ``base_every`` to compact to next, if the tail reaches one."""
        own = [delta.step for delta in self._tail.deltas if delta.term == str(self._term)]
        if self._tail.base is None or not own:
            return None
        target = own[-1] // self._settings.base_every * self._settings.base_every
        return target if target >= own[0] and target > self._tail.base.step else None

    def _compact(self, step: int) -> None:
        with self._changed:
            plan = self._tail.plan(self._part, step)
        if plan is None:
            with self._changed:  # a gap: nothing to fold until the captured base that closes it
                self._tail.base = None
            return
        near, fetcher = self._store.near, Fetcher(self._store.tiers)
        try:
            source = ReplayedBase(
                fetcher, self._layouts[plan.layout], self._anywhere(plan),
                run=self._run_name, term=str(self._term), step=step,
                manifest=plan.deltas[-1].manifest,
            )  # fmt: skip
            near.put([source])
            near.sync()
        except ReplayMismatchError as error:
            self._distrust(str(error), max(plan.base.step, error.last_match + 1))
            raise
        except NotProvableError as error:
            self._distrust(str(error), plan.base.since + BOUNDED_STEPS + 1)
            raise
        except BlocksLostError as error:
            if self._tail.base is not plan.base or self._based_anew(plan, error):
                return  # a newer base came, and what was being folded may have been pruned
            fetcher.raise_unread(str(error.place["key"]))
            at = int(error.place.get("step", plan.base.step))  # of a fork's parent it may be
            self._distrust(str(error), max(plan.base.step, at))
            raise
        key = parse_key(source.key)
        ref = make_ref(key, near.head(source.key), (near.traits.name,))
        with self._changed:
            if self._tail.base is plan.base:
                self._tail.add(ref)
                self._lost.clear()
                self._progress.base, self._progress.exactness = step, ref.exactness
            self._undrained.append(key)
            self._progress.compactions += 1
            self._progress.bytes_bases += ref.nbytes
            self._pruner.want_near()
            self._changed.notify_all()

    def _based_anew(self, plan: PartPlan, error: BlocksLostError) -> bool:
        """Whether another base than the plan's gives the newest step; it is folded from that then.

        Others may have written a later one, and a floor may have passed what this fold began with.
        And where a term began on another topology, its parent gives what it began with. Raises
        the trouble of a tier, or of a record, that could not be read: it may be whole.
        """
        with self._changed:
            newest = self._tail.deltas[-1] if self._tail.deltas else plan.deltas[-1]
        catalog = read_catalog(self._store.tiers, self._run_name)
        catalog.raise_unread()
        line = tolerant_line(catalog, str(self._term))
        lost = self._lost | set(error.lost)
        prover = Prover(catalog.without(lost), line)
        proofs = prover.parts[self._part].get(str(self._term), {})
        proof = proofs.get(newest.step, {}).get(newest.id)
        if proof is None or prover.flaw(proof):
            return False
        (found,) = prover.part_plans({self._part: proof})
        another = found.base.step > plan.base.step or found.origin is not None
        if not another or found.base.exactness not in ("exact", plan.base.exactness):
            return False
        with self._changed:
            if self._tail.base is plan.base:
                self._lost = lost
                self._tail.begin_anew(found)
        return True

    def _anywhere(self, plan: PartPlan) -> PartPlan:
        """The plan with every tier as a holder: what is damaged here may have been drained."""
        return dataclasses.replace(
            plan, base=self._held(plan.base), deltas=tuple(map(self._held, plan.deltas))
        )

    def _held(self, ref: RecordRef) -> RecordRef:
        return dataclasses.replace(ref, tiers=tuple(tier.traits.name for tier in self._store.tiers))

    def _distrust(self, why: str, first: int) -> None:
        """The chain is wrong from ``first`` on: stop folding it, ask for a captured base."""
        with self._changed:
            self._tail.base = None
            self._tail.deltas = []
        self._ask_for_base(why, first)

    # Draining --------------------------------------------------------------------------------

    def _drain_due(self) -> bool:
        waiting = self._undrained
        if self._store.near is self._store.far or not waiting:
            return bool(waiting)
        steps = {key.step for key in waiting}
        late = time.monotonic() - self._oldest > self._settings.object_lag_s
        base = any(key.kind == "base" for key in waiting)
        # At half the lag: what is made while this is under way comes on top.
        return self._flushing or late or base or 2 * len(steps) >= self._settings.object_lag

    def _drain(self) -> None:
        with self._changed:
            waiting = sorted(self._undrained, key=lambda key: (key.step, str(key)))
        if self._store.near is self._store.far:
            self._drained(waiting)
            return
        done: list[Key] = []
        try:
            for batch in in_batches(map(str, waiting), self._settings.object_lag):
                self._drain_batch(batch)
                done += map(parse_key, batch)
        finally:  # what did arrive need not be sent again
            if done:
                self._store.far.sync()
                check_fence(self._store.far, self._run_name, self._term)
                self._drained(done)

    def _drained(self, keys: Iterable[Key]) -> None:
        """Take note of records that are synced in the far tier."""
        with self._changed:
            done = set(keys)
            self._undrained = [key for key in self._undrained if key not in done]
            self._flushing = self._flushing and bool(self._undrained)
            self._oldest = time.monotonic()
            self._far_bases |= {key.step for key in done if key.kind == "base"}
            left = [key.step - 1 for key in self._undrained]
            self._farthest = max(self._farthest, *(key.step for key in done))
            reached = min(left) if left else self._farthest
            self._progress.drained = max(self._progress.drained, reached)
            self._lag.look(self._progress)
            self._pruner.want_near()  # the far floor may be higher
            whole = [step for step in self._far_bases if step <= self._progress.drained]
            if whole and max(whole) > self._progress.far_base:
                self._progress.far_base = max(whole)
                self._far_bases -= set(whole)
                self._pruner.want_all()

    def _drain_batch(self, batch: list[str]) -> None:
        far = self._store.far
        try:
            self._progress.bytes_drained += copy_records(self._store.uppers, far, batch)
        except (RecordNotFoundError, FormatError) as error:
            if len(batch) > 1:
                for key in batch:
                    self._drain_batch([key])
            else:
                self._given_up(parse_key(batch[0]), error)

    def _given_up(self, key: Key, error: AdaCheckError) -> None:
        """A record that is gone or damaged in the near tier must not hold up those after it."""
        if isinstance(error, RecordNotFoundError) and key.step < self._progress.near_floor:
            return  # pruned since it was stored
        log.warning("not drained: %s", error.at(tier=self._store.near.traits.name, key=str(key)))
        with self._changed:
            folded = self._tail.base is not None and key.step <= self._tail.base.step
        if key.kind == "delta" and key.term == str(self._term) and not folded:
            self._distrust(f"the delta of step {key.step} is damaged", key.step)
