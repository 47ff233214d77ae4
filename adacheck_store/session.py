"""A session: one writer's hold on a run, from claim to close. What `trainer_hooks` stands on."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from adacheck_store.format.errors import (
    OrderError,
    RestoreError,
    TierError,
)
from adacheck_store.format.keys import (
    Term,
    check_run,
    part_name,
    rank_name,
)
from adacheck_store.format.layout import Layout
from adacheck_store.format.manifest import Manifest
from adacheck_store.format.record import Record

from .boundary import Boundary, Link
from .catalog import Catalog, RecordRef, Trouble, read_catalog
from .config import Settings, arm_failpoints
from .deaths import Ceiling, ceiling_of
from .excuse import Excuse
from .group import SOLO, Group, lead, same, share, together
from .nearness import NOWHERE
from .opening import Opened, Opening, without_unbegun
from .redundancy.shares import Sharing
from .restore import Living, Restored, refuse_unknown, restore_state
from .revisions import Revisions
from .status import Background, Status, status_of, unsaved
from .store import Store, open_store, refuse_set_aside
from .terms import claim_term, renewed
from .topology import Need
from .upkeep import Upkeep
from .writer import Writer

if TYPE_CHECKING:
    from .agent.crew import Agents, Crew

T = TypeVar("T")

log = logging.getLogger(__name__)

CLOSE_S = 60.0
"""Longest wait for a background thread when closing."""


class RunSession:
    """Holds a run's store for writing: one rank's hold, where several write it together.

    Order of calls: `open`, `restore` (optional on a run without history), `start`, `append` ...,
    `close`. All calls but `append` and `wants_base` may be made from any one thread.
    """

    def __init__(
        self, store: Store, run: str, settings: Settings, group: Group = SOLO,
        crew: Crew | None = None,
    ) -> None:  # fmt: skip
        self._crew = crew
        self.store = store
        self.run = check_run(run)
        self.settings = settings
        self.group = group
        self.part = part_name(group.rank)
        self.rank = rank_name(group.rank)
        self._told: tuple[Trouble, ...] = ()
        self._catalog = self._read_catalog() if group.rank == 0 else Catalog(run=run)
        self._term: Term | None = None
        self._excuse = Excuse(store.far, run)
        self._ceiling: Ceiling | None = None
        self._decided = False
        self._restored: Restored | None = None
        self.living: Living | None = None
        self._writer: Writer | None = None
        self._upkeep: Background | None = None
        self._step = -1
        self._mismatch = ""
        self._revisions: Revisions | None = None
        self._layouts: dict[str, Layout] = {}
        self._known: dict[str, Manifest] = {}

    @classmethod
    def open(
        cls, store_url: str, run: str, *, cache: str | os.PathLike[str] | None = None,
        settings: Settings | None = None, group: Group = SOLO, agents: Agents | None = None,
    ) -> RunSession:  # fmt: skip
        """Open a store for writing a run, making it if absent; see `store.open_store`.

        Every rank of ``group`` opens it, with the same arguments. With ``agents`` the records go
        to the agent of this node, which is started if there is none.
        """
        arm_failpoints()
        check_run(run)
        settings = settings or Settings()
        same(group, "attach", {
            "run": run, "store": store_url, "the number of ranks": group.size,
            "agents": agents and (agents.allow_degraded, agents.peers),
            **dataclasses.asdict(settings),
        })  # fmt: skip
        if agents is not None:
            from .agent.crew import Crew

            crew = Crew(store_url, run, group, agents, settings, cache=cache)
            try:
                return cls(crew.store, run, settings, group, crew)
            except BaseException:
                crew.store.close()
                raise
        store = open_store(
            store_url, cache=cache, write=True, lmdb_bytes=settings.lmdb_bytes, group=group
        )
        try:
            return cls(store, run, settings, group)
        except BaseException:
            store.close()
            raise

    def _read_catalog(self) -> Catalog:
        """What all tiers hold; those that could not be opened are among its troubles."""
        catalog = without_unbegun(read_catalog(self.store.tiers, self.run), self.store.far)
        troubles = (*catalog.troubles, *self.store.troubles, *self._told)
        return dataclasses.replace(catalog, troubles=troubles)

    def _read_kept(self) -> Catalog:
        """What all tiers hold, and agents keep until the term opens."""
        if self._crew is not None:
            self._crew.ask(str(self._term))
        return self._read_catalog()

    def together(self, what: str, work: Callable[[], T]) -> T:
        """Do something on every rank; where it fails on any, all raise."""
        with self._excuse.refusals():
            return together(self.group, what, work)

    @property
    def has_history(self) -> bool:
        """True if the run has a term with a manifest in any tier (rank 0 knows)."""
        return not self._catalog.empty

    @property
    def term(self) -> str:
        """The term that was claimed, also after `close`; empty before."""
        return str(self._term or "")

    def restore(
        self, *, resume: str | None = None, step: int | None = None, term: str = "",
        layout: Layout | None = None, bare: frozenset[str] = frozenset(),
    ) -> Restored | None:  # fmt: skip
        """Claim a term, then plan, fetch, verify and fold into staging.

        Returns None on a run without history or under ``never``. Raises `RestoreError` on one
        without history under ``must``, or where a tier that may hold it cannot be read. ``step``
        asks for that very step, ``term`` for another branch's. ``layout`` has the pieces of tensors
        that this rank holds now (without it, they are those that it held), ``bare`` names those
        whose optimizer's state other ranks have.
        """
        resume = resume or self.settings.resume
        if self._decided:
            raise OrderError("this session has already restored", run=self.run)
        same(self.group, "restore", {"step": step, "term": term, "resume": resume})
        with self._excuse.refusals():
            if not self._enter(lambda: self._claim(resume, step)):
                return None
            if step is not None or term:
                self._excuse.give("a step or term was asked for")
                self._ceiling = None
            claim = self._term if self.group.rank == 0 else None
            with renewed(self.store.far, self.run, claim):
                restored = restore_state(
                    self.store.tiers, self.run, step=step, term=term,
                    catalog=self._catalog if self.group.rank == 0 else None,
                    max_drift=self.settings.max_drift, group=self.group, ceiling=self._ceiling,
                    need=Need(
                        rank=self.group.rank, ranks=self.group.size, layout=layout, bare=bare
                    ),
                    near=self._crew.near_to if self._crew else NOWHERE, living=self.living,
                )  # fmt: skip
        self._restored = dataclasses.replace(restored, parts={}, extras={})  # the state is large
        self._decided, self.living = True, None  # and so is what lived
        if restored.plan.passed_over:
            log.warning("run %s: %s", self.run, restored.plan.passed_over)
        return restored

    def _enter(self, claim: Callable[[], bool]) -> bool:
        """Have rank 0 claim the term; whether there is something to restore."""

        def claimed() -> list[Any]:
            history = claim()
            return [str(self._term), history]

        unread = [[trouble.tier, str(trouble.error)] for trouble in self.store.troubles]
        told = share(self.group, "tiers that cannot be read", lambda: unread)
        self._told = tuple(
            Trouble(tier=tier, key="", error=TierError(text)) for each in told[1:]
            for tier, text in each
        )  # fmt: skip
        term, history = lead(self.group, "claim", claimed)
        self._term = Term.parse(term)
        self._decided = not history
        return bool(history)

    def _claim(self, resume: str, step: int | None) -> bool:
        """Claim a term (rank 0); whether there is a history to restore from."""
        if resume == "must" and not self.has_history:
            raise RestoreError(
                "resume='must', and the run has no history", run=self.run,
                path=self.store.url, hint="check the store's URL and the run's name",
            )  # fmt: skip
        if self._term is None:  # a try that found nothing to restore leaves its claim to the next
            seen = [manifest.term for manifest in self._catalog.manifests.values()]
            self._term = self._excuse.term = claim_term(self.store.far, self.run, seen)
        self._catalog = self._read_kept()
        self._ceiling = ceiling_of(self._catalog, str(self._term), self.settings.max_deaths)
        if resume != "never":
            refuse_unknown(self._catalog)
            if not self.has_history:
                refuse_set_aside(self.store, self.run)
        history = resume != "never" and self.has_history
        if step is not None and resume != "never" and not history:
            raise RestoreError("the run has no history", run=self.run, step=step)
        return history

    def _claim_unrestored(self) -> bool:
        """Claim a term for a run that nobody has asked to restore."""
        if self.has_history and self.settings.resume != "never":
            raise OrderError(
                "the run has history, and restore() was not called", run=self.run,
                hint="call restore() first, or attach with resume='never'",
            )  # fmt: skip
        return self._claim(self.settings.resume, None)

    def start(
        self, layout: Layout, *, start_step: int,
        base: Callable[[Link], Record], extra: Callable[[Link], Record],
    ) -> None:  # fmt: skip
        """Write the manifest and start the background threads; after loading, before training.

        On a fresh run, and where ``layout`` is not the restored one, the captured base that
        ``base(link)`` makes of the live tensors and the extra of ``extra(link)`` go with it,
        synced. A session that has not restored must be of a run without history (or
        ``resume="never"``).
        """
        if self._writer is not None:
            raise OrderError("this session has already started", run=self.run)
        if not self._decided and self._enter(self._claim_unrestored):
            raise OrderError("the run has got a history meanwhile: restore it", run=self.run)
        self.living = None
        assert self._term is not None
        opening = Opening(
            store=self.store, run=self.run, term=self._term, group=self.group,
            settings=self.settings, restored=self._restored, base=base, extra=extra,
            announce=self._announce, drains=self._crew is None,
        )  # fmt: skip
        with self._excuse.refusals():
            opened = opening.open(layout, start_step)
        self._layouts[opened.link.layout] = layout
        self._run_threads(opened, layout)
        self._step = opened.manifest.step

    def follow(
        self, layout: Layout, step: int, sharing: Sharing | None = None, group: Group | None = None
    ) -> None:
        """From this boundary on the part has another layout; see `revisions.Revisions.follow`."""
        self._running()
        assert self._revisions is not None
        self._revisions.follow(layout, step, sharing, group)

    def _announce(self, manifest: Manifest, layout: Layout) -> None:
        if self._crew is not None:
            self._known[manifest.seal().id] = manifest
            self._crew.open(manifest, {**self._catalog.manifests, **self._known}, layout)

    def _run_threads(self, opened: Opened, layout: Layout) -> None:
        assert self._term is not None
        revisions = self._revisions = Revisions(
            self.run, self.group, opened.manifest, self._layouts, self.settings.stall_timeout_s,
            self._announce,
        )  # fmt: skip
        writer = Writer(
            self.store.near, opened.link, opened.manifest.step, window=self.settings.window,
            stall_timeout_s=self.settings.stall_timeout_s, on_stored=self._stored, layout=layout,
            revise=revisions.revise, documents=revisions.documents,
        )  # fmt: skip
        ask, crew = partial(self._mistrust, writer), self._crew
        upkeep: Background = crew.upkeep(opened.manifest, ask) if crew else Upkeep(
            self.store, run=self.run, term=self._term, group=self.group, layouts=self._layouts,
            settings=self.settings, tail=opened.tail, backlog=opened.backlog, ask_for_base=ask,
        )  # fmt: skip
        if opened.tail.base is not None:
            upkeep.progress.exactness = opened.tail.base.exactness
        self._upkeep, self._writer = upkeep, writer

    def _mistrust(self, writer: Writer, reason: str, first: int) -> None:
        """A fold has proven the chain wrong (called on a thread of upkeep's)."""
        self._mismatch = reason
        writer.ask_for_base(reason, first)

    def _stored(self, step: int, refs: list[RecordRef]) -> None:
        """Called on the writer's thread when a boundary has become durable."""
        if self._revisions is not None:
            self._revisions.stored(refs)
        if self._upkeep is not None:
            self._upkeep.stored(step, refs)

    def _running(self) -> tuple[Writer, Background]:
        if self._writer is None or self._upkeep is None:
            raise OrderError("the session has not started", run=self.run)
        return self._writer, self._upkeep

    def append(self, boundary: Boundary) -> None:
        """Hand a closed boundary over; see `writer.Writer.append`."""
        writer, _ = self._running()
        self._step = boundary.step
        writer.append(boundary)

    def wants_base(self, *, now: bool = False) -> dict[str, object] | None:
        """Not None: the next boundary must come with a captured base that has this gap."""
        return self._running()[0].wants_base(now=now)

    def check(self) -> None:
        """Raise `TermError` if a newer term owns the run; if strict, the last error of saving."""
        writer, upkeep = self._running()
        if upkeep.fenced is not None:
            raise upkeep.fenced
        if self.settings.strict:
            error = writer.error or upkeep.error
            if error is not None:
                raise error

    def flush(
        self, timeout_s: float | None = None, *, far: bool = True,
        settled: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Wait until all handed over is synced in the near tier and, if ``far``, drained.

        ``settled`` is called when nothing is in flight, and may hand a boundary over. Raises what
        keeps it from happening, or `TierError` when the time runs out, which says what is not
        stored or drained.
        """
        writer, upkeep = self._running()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for call in (settled, lambda: None):
            if not writer.wait_stored(_left(deadline)):
                raise TierError(f"the near tier did not answer in time: {self._unsaved()}")
            call()
        if writer.gap is not None:
            raise writer.error or TierError(
                f"not saved since step {writer.gap['from']}: {writer.gap['reason']}",
                run=self.run, hint="the next boundary closes the gap if the tier answers",
            )  # fmt: skip
        if far and not upkeep.flush(_left(deadline)):
            raise upkeep.error or TierError(f"flush: {self._unsaved()}", run=self.run)
        if upkeep.fenced is not None:
            raise upkeep.fenced

    def hurry(self) -> None:
        """Have all that is stored drained, whatever the lag, without waiting (any thread)."""
        self._running()[1].flush(0.0)

    def status(self) -> Status:
        """Where the session stands."""
        writer, upkeep = self._running()
        over = self._restored.plan.passed_over if self._restored else ""
        return status_of(self.store, writer, upkeep, run=self.run, term=str(self._term),
                         step=self._step, mismatch=self._mismatch, passed_over=over)  # fmt: skip

    def _unsaved(self) -> str:
        return unsaved(self.store, *self._running(), self._step)

    def close(self, timeout_s: float | None = None) -> None:
        """Stop the threads and close the tiers; what is in flight is stored first.

        Waits no longer than that (`CLOSE_S`): a thread that hangs in a tier is left to end with the
        process.
        """
        timeout_s = CLOSE_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        clean = self._writer is None or self._writer.close(timeout_s)
        if self._upkeep is not None:
            clean = self._upkeep.close(max(0.0, deadline - time.monotonic())) and clean
        if clean and self._restored is not None:  # a run's first attempt never counts
            clean = self._excuse.at_end(max(0.0, deadline - time.monotonic()))
        if clean:
            self.store.close()
        else:
            log.warning("run %s is left though not all is saved: %s", self.run, self._unsaved())
        self._writer = self._upkeep = None


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
