"""Upkeep: the background thread that compacts, drains and prunes behind a writer."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable

from adacheck_store.format.errors import (
    AdaCheckError,
    FormatError,
    RecordNotFoundError,
    ReplayMismatchError,
    TermError,
    TierError,
)
from adacheck_store.format.keys import Key, Term, parse_key
from adacheck_store.format.layout import Layout
from adacheck_store.format.manifest import Floor
from adacheck_store.tiers.base import Tier

from .catalog import RecordRef, make_ref
from .compact import ReplayedBase
from .config import Settings
from .drain import copy_records, in_batches
from .fetch import BlocksLostError, Fetcher
from .recovery import PartPlan
from .retention import below, choose_floor, read_back, tier_catalog
from .store import Store
from .tail import Progress, Tail
from .terms import Rivals, fenced_by, put_floor, read_log

log = logging.getLogger(__name__)

IDLE_S = 1.0
BACKOFF_S = (1.0, 30.0)


class Upkeep:
    """Compacts at multiples of ``base_every``, drains at ``object_lag``, prunes behind both.

    ``stored`` is told what became durable (any thread); the work is done on one thread of its
    own. A failure is kept in ``error`` and tried again later; losing the run to a newer term is
    final and kept in ``fenced``. ``ask_for_base(reason, first)`` is called when a fold proves
    the chain wrong. ``layouts`` are the run's by id, more of which may come later.
    """

    def __init__(
        self, store: Store, *, run: str, term: Term, part: str, layouts: dict[str, Layout],
        settings: Settings, tail: Tail, backlog: list[str],
        ask_for_base: Callable[[str, int], None],
    ) -> None:  # fmt: skip
        self._store = store
        self._run_name = run
        self._term = term
        self._part = part
        self._layouts = layouts
        self._settings = settings
        self._rivals = Rivals(store.far, run, term)
        self._tail = tail
        self._ask_for_base = ask_for_base
        self._undrained: list[Key] = [parse_key(text) for text in backlog]
        self._oldest = time.monotonic()
        self._graves: list[tuple[float, Tier, list[str]]] = []
        self._flushing = bool(backlog)
        self._prune_wanted: set[str] = {store.near.traits.name, store.far.traits.name}
        self._closing = False
        self._busy = False
        self._hurry = False
        self._failures = 0
        self._changed = threading.Condition()
        self.progress = Progress()
        if tail.base is not None:
            self.progress.base, self.progress.exactness = tail.base.step, tail.base.exactness
        self.error: AdaCheckError | None = None
        self.fenced: TermError | None = None
        self._thread = threading.Thread(target=self._loop, name="adacheck-upkeep", daemon=True)
        self._thread.start()

    def stored(self, step: int, refs: list[RecordRef]) -> None:
        """Take note of records that became durable in the near tier."""
        with self._changed:
            if not self._undrained:
                self._oldest = time.monotonic()
            for ref in refs:
                self._tail.add(ref)
                if ref.kind == "base":
                    self.progress.base, self.progress.exactness = ref.step, ref.exactness
                    self.progress.bytes_bases += ref.nbytes
                    self._prune_wanted.add(self._store.near.traits.name)
                self._undrained.append(parse_key(ref.key))
            self.progress.stored = step
            self._changed.notify_all()

    def flush(self, timeout_s: float | None) -> bool:
        """Drain everything stored so far; False if the time ran out.

        Without a limit of time, one failed try is the answer.
        """
        with self._changed:
            self._flushing = self._hurry = True
            failures = self._failures
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (
                    self.fenced is not None
                    or self._idle()
                    or (timeout_s is None and self._failures > failures)
                ),
                timeout=timeout_s,
            )
            return self.fenced is not None or self._idle()

    def _idle(self) -> bool:
        return not self._undrained and not self._busy

    def close(self, timeout_s: float) -> bool:
        """Stop the thread after what it is doing; False if the time ran out."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=timeout_s)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        pause_s = BACKOFF_S[0]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._due(), timeout=IDLE_S)
                if self._closing or self.fenced is not None:
                    return
                self._busy = True
            before = time.thread_time()
            failed = False
            try:
                self._work()
                self.error = None
            except TermError as error:
                self.fenced = error
                log.error("%s", error)  # noqa: TRY400 - the place says it all
            except AdaCheckError as error:
                failed = True
                self._note(error)
            except Exception as error:
                failed = True
                log.exception("background work failed")
                self._note(TierError(f"background work failed: {type(error).__name__}: {error}"))
            finally:
                self.progress.cpu_s += time.thread_time() - before
                with self._changed:
                    self._busy = False
                    if not self._undrained:
                        self._flushing = False
                    self._failures += failed
                    self._hurry = False
                    self._changed.notify_all()
                    if failed:
                        self._changed.wait_for(
                            lambda: self._closing or self._hurry, timeout=pause_s
                        )
            pause_s = min(2 * pause_s, BACKOFF_S[1]) if failed else BACKOFF_S[0]

    def _note(self, error: AdaCheckError) -> None:
        self.error = error.at(run=self._run_name, term=str(self._term))
        log.warning("%s", self.error)

    def _due(self) -> bool:
        return (
            self._target() is not None or self._drain_wanted() or bool(self._prune_wanted)
            or any(at <= time.monotonic() for at, _, _ in self._graves)
        )  # fmt: skip

    def _work(self) -> None:
        """Each duty is tried, whatever became of the one before: a full tier needs its prune."""
        first: Exception | None = None
        for duty in (self._compact_due, self._drain_due, self._prune):
            try:
                duty()
            except TermError:
                raise
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def _compact_due(self) -> None:
        target = self._target()
        if target is not None:
            self._compact(target)

    # Compaction ------------------------------------------------------------------------------

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
        source = ReplayedBase(
            Fetcher(self._store.tiers), self._layouts[plan.layout], self._anywhere(plan),
            run=self._run_name, term=str(self._term), step=step, manifest=plan.deltas[-1].manifest,
        )  # fmt: skip
        near = self._store.near
        try:
            near.put([source])
            near.sync()
        except ReplayMismatchError as error:
            self._distrust(str(error), error.last_match + 1)
            raise
        except BlocksLostError as error:
            self._distrust(str(error), int(error.place.get("step", plan.base.step)))
            raise
        key = parse_key(source.key)
        ref = make_ref(key, near.head(source.key), (near.traits.name,))
        with self._changed:
            self._tail.add(ref)
            self._undrained.append(key)
            self.progress.base, self.progress.exactness = step, ref.exactness
            self.progress.compactions += 1
            self.progress.bytes_bases += ref.nbytes
            self._prune_wanted.add(near.traits.name)

    def _anywhere(self, plan: PartPlan) -> PartPlan:
        """The plan with every tier as a holder: what is damaged here may have been drained."""
        names = tuple(tier.traits.name for tier in self._store.tiers)
        return dataclasses.replace(
            plan,
            base=dataclasses.replace(plan.base, tiers=names),
            deltas=tuple(dataclasses.replace(ref, tiers=names) for ref in plan.deltas),
        )

    def _distrust(self, why: str, first: int) -> None:
        """The chain is wrong from ``first`` on: stop folding it, ask for a captured base."""
        with self._changed:
            self._tail.base = None
            self._tail.deltas = []
        self._ask_for_base(why, first)

    # Draining --------------------------------------------------------------------------------

    def _drain_wanted(self) -> bool:
        waiting = self._undrained
        if self._store.near is self._store.far:
            return bool(waiting)
        if not waiting:
            return False
        steps = {key.step for key in waiting}
        late = time.monotonic() - self._oldest > self._settings.object_lag_s
        base = any(key.kind == "base" for key in waiting)
        return self._flushing or late or base or len(steps) >= self._settings.object_lag

    def _drain_due(self) -> None:
        if not self._drain_wanted():
            return
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
                self._check_fence()
                self._drained(done)

    def _drained(self, keys: Iterable[Key]) -> None:
        """Take note of records that are synced in the far tier."""
        near, far = self._store.near, self._store.far
        with self._changed:
            done = set(keys)
            self._undrained = [key for key in self._undrained if key not in done]
            self._oldest = time.monotonic()
            self.progress.drained = max([self.progress.drained, *(key.step for key in done)])
            bases = [key.step for key in done if key.kind == "base"]
            if bases:
                self.progress.far_base = max([self.progress.far_base, *bases])
                self._prune_wanted |= {near.traits.name, far.traits.name}

    def _drain_batch(self, batch: list[str]) -> None:
        near, far = self._store.near, self._store.far
        try:
            self.progress.bytes_drained += copy_records(near, far, batch)
        except (RecordNotFoundError, FormatError) as error:
            if len(batch) > 1:
                for key in batch:
                    self._drain_batch([key])
            else:
                self._given_up(parse_key(batch[0]), error)

    def _given_up(self, key: Key, error: AdaCheckError) -> None:
        """A record that is gone or damaged in the near tier must not hold up those after it."""
        if isinstance(error, RecordNotFoundError) and key.step < self.progress.near_floor:
            return  # pruned since it was stored
        log.warning("not drained: %s", error.at(tier=self._store.near.traits.name, key=str(key)))
        with self._changed:
            folded = self._tail.base is not None and key.step <= self._tail.base.step
        if key.kind == "delta" and key.term == str(self._term) and not folded:
            self._distrust(f"the delta of step {key.step} is damaged", key.step)

    def _check_fence(self) -> None:
        """Before anything drained counts as acknowledged: does a newer term own the run?"""
        other = fenced_by(self._store.far, self._run_name, self._term)
        if other is not None:
            raise TermError(
                f"term {other} has taken over this run", run=self._run_name,
                term=str(self._term), hint="this process must stop; restore() in a new one",
            )  # fmt: skip

    # Pruning ---------------------------------------------------------------------------------

    def _prune(self) -> None:
        with self._changed:
            wanted, self._prune_wanted = self._prune_wanted, set()
        near, far = self._store.near, self._store.far
        if far.traits.name in wanted:
            self.progress.far_floor = self._raise_floor(far, None, self.progress.far_floor)
        if near is not far and near.traits.name in wanted:
            cap = min(self.progress.drained, self.progress.far_base)
            self.progress.near_floor = self._raise_floor(near, cap, self.progress.near_floor)
        now = time.monotonic()
        due = [grave for grave in self._graves if grave[0] <= now]
        self._graves = [grave for grave in self._graves if grave[0] > now]
        for _, tier, keys in due:
            tier.delete(keys)

    def _raise_floor(self, tier: Tier, cap: int | None, current: int) -> int:
        """Write a higher floor for a tier if it can bear one, and bury what lies below it."""
        choice = choose_floor(tier_catalog(tier, self._run_name), self._settings.keep_bases, cap)
        if choice is None or choice.step <= current:
            return current
        read_back(tier, choice.bases)
        self._check_fence()
        live, dead = self._rivals.look()
        if live or not put_floor(
            tier, self._run_name, term=str(self._term), terms=choice.terms, step=choice.step,
            kept=(), ignore=dead,
        ):  # fmt: skip
            return current
        entries = read_log(tier, self._run_name)
        floors = [entry for entry in entries if isinstance(entry, Floor)]
        doomed = below(tier.list(f"{self._run_name}/"), floors)
        grace = self._settings.grace_s if tier.traits.shared or tier.traits.log else 0.0
        if tier is self._store.near:
            grace = 0.0
        if doomed:
            self._graves.append((time.monotonic() + grace, tier, doomed))
        return choice.step
