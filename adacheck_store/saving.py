"""Saving a whole state into a run from outside a training loop: one base for each rank.

A save is a term of its own. It leaves the line at the newest provable step below its own, so all
that was there stays, but for steps from its own on, which are off the line from then on. No rank
makes anything visible before the blocks of all are stored, and it has been seen that the run is
still where the save has left it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from adacheck_store.format.bodies import BaseBody, SectionState
from adacheck_store.format.dtypes import item_bytes
from adacheck_store.format.errors import GroupError, RestoreError, TermError, UsageError
from adacheck_store.format.head import ArrayInfo, Head, SealedHead
from adacheck_store.format.ids import BLOCK_BYTES, block_digest
from adacheck_store.format.keys import (
    Term,
    base_key,
    check_run,
    extra_key,
    layout_key,
    manifest_key,
    part_name,
    rank_name,
)
from adacheck_store.format.layout import Section, align
from adacheck_store.format.manifest import Manifest, PartEntry
from adacheck_store.format.record import Block, Record
from adacheck_store.tiers.base import RecordSource

from .arrays import byte_view
from .boundary import Link
from .catalog import Catalog, read_catalog
from .config import writer_info
from .foreign import LaidOut
from .group import Group, lead, share
from .recovery import Prover, RestorePlan, tolerant_line
from .store import Store
from .terms import check_fence, claim_term, excuse_term, newer_claims, renewed

SAVE_S = 7200.0
"""Longest wait for the other ranks' blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a save has made: ``nbytes`` are those of this rank's base.

    ``parent_term`` and ``fork_step`` say where it has left the history, if there was one.
    """

    run: str
    term: str
    step: int
    parent_term: str
    fork_step: int
    nbytes: int


def save(
    store: Store, run: str, step: int, group: Group, laid: LaidOut,
    extra: Callable[[Link], Record], why: str,
) -> Saved:  # fmt: skip
    """Write a state as the step of a run, in the far tier, synced; every rank of a group calls it.

    ``extra`` makes the rank's extra, ``why`` says in the log who saves. It ends a writer that has
    the run. Raises `UsageError` where all that can be proven of the run is not below ``step``,
    and what tiers raise; then nothing of it counts.
    """
    check_run(run)
    sealed = laid.layout.seal(run)
    shape = RecordSource(str(layout_key(run, sealed.id)), Record(sealed, {}))
    layouts = share(group, "layouts", lambda: _published(store, shape))
    fork = lead(group, "claim", lambda: _claimed(store, run, step, why))
    manifest = Manifest(
        run=run, term=fork["term"], step=step, ranks=tuple(map(rank_name, range(group.size))),
        parts=tuple(
            PartEntry(name=part_name(number), layout=layout, sources=(number,), owner=number)
            for number, layout in enumerate(layouts)
        ),
        parent_term=fork["parent"], fork_step=fork["step"], tips=fork["tips"],
        settings={"saved": why},
    )  # fmt: skip
    head = manifest.seal(writer_info())
    link = Link(
        run=run, term=manifest.term, part=part_name(group.rank), rank=rank_name(group.rank),
        parent=head.id, manifest=head.id, layout=sealed.id,
    )  # fmt: skip
    gate = _Gate(group, lambda: _check_fork(store, run, step, fork))
    base = StateBase(laid, link, step, gate.wait)
    key = str(extra_key(run, link.term, link.rank, step))
    document = RecordSource(str(manifest_key(run, link.term, step)), Record(head, {}))
    mine = Term.parse(link.term) if group.rank == 0 else None
    failure: Exception | None = None
    try:
        with renewed(store.far, run, mine):  # what it forks from stays while blocks are written
            store.far.put([document, RecordSource(key, extra(link)), base])
    except Exception as error:
        gate.fail(error)
        if not gate.opened:  # nothing of any rank's has been visible
            raise
        failure = error
    assert gate.opened, "the far tier asks sources before heads are visible"
    _end(store, group, failure, (base.key, key), document.key)
    lead(group, "line", lambda: _check_line(store, run, link.term))
    return Saved(
        run=run, term=link.term, step=step, parent_term=manifest.parent_term,
        fork_step=manifest.fork_step, nbytes=sum(base.sizes.values()),
    )  # fmt: skip


def _published(store: Store, shape: RecordSource) -> str:
    store.far.put([shape])
    return shape.record.sealed.id


def _claimed(store: Store, run: str, step: int, why: str) -> dict[str, Any]:
    """Claim a term (rank 0); where it leaves the history."""
    seen = [item.term for item in _all_of(store, run).manifests.values()]
    term = claim_term(store.far, run, seen)
    excuse_term(store.far, run, term, f"saved by {why}")  # it trains nothing, so it cannot die
    return {"term": str(term)} | _fork(store, run, step)


def _all_of(store: Store, run: str) -> Catalog:
    """All that there is of a run; raises where something of it cannot be read now."""
    catalog = read_catalog(store.tiers, run)
    catalog = replace(catalog, troubles=(*store.troubles, *catalog.troubles))
    catalog.raise_unread()
    return catalog


def _fork(store: Store, run: str, step: int) -> dict[str, Any]:
    """The newest provable step below a save's; of a run without history no parent."""
    found: dict[str, Any] = {"parent": "", "step": 0, "tips": {}}
    catalog = _all_of(store, run)
    if catalog.empty:
        return found
    prover = Prover(catalog, tolerant_line(catalog))
    for below in (each for each in prover.seen_steps() if each < step):
        plan = prover.prove(below)
        if isinstance(plan, RestorePlan) and not prover.doubt(below):
            tips = {part.part: part.link for part in plan.parts}
            return found | {"parent": plan.term, "step": below, "tips": tips}
    if steps := prover.provable_steps():
        stands = "it is there, if that is what was saved; else " if step in steps else ""
        raise UsageError(
            f"the run begins at step {steps[0]}, and a save at step {step} would have nothing to "
            "come after", run=run, step=step, hint=f"{stands}name a later step, or another run",
        )  # fmt: skip
    for trouble in catalog.troubles:
        raise RestoreError(
            f"no step of the run can be proven, and of its records some are damaged: "
            f"{trouble.error}", run=run, step=step,
            hint="adacheck-store fsck --repair mends what can be; or save into another run",
        ) from trouble.error  # fmt: skip
    return found


def _check_fork(store: Store, run: str, step: int, fork: Mapping[str, Any]) -> None:
    """Before anything is visible (rank 0): nobody has gone on with the run since the claim.

    Else what others have saved meanwhile would be off the line. Raises `TermError`.
    """
    term = Term.parse(fork["term"])
    check_fence(store.far, run, term)
    if newer := newer_claims(store.far, run, term):
        raise TermError(
            f"term {max(newer)} has claimed the run while this save was written", run=run,
            term=str(term), step=step, hint="one save at a time; save again if it is wanted",
        )  # fmt: skip
    now = _fork(store, run, step)
    if any(now[key] != fork[key] for key in ("parent", "step")):
        raise TermError(
            f"the run went on to step {now['step']} of term {now['parent']} while this save was "
            f"written, which was to come after step {fork['step']} of term {fork['parent']}",
            run=run, term=str(term), step=step,
            hint="stop the training that writes the run, and save again",
        )  # fmt: skip


def _check_line(store: Store, run: str, term: str) -> None:
    """Once all is there (rank 0): who has taken the run over since goes on from here, or it is off
    the line. Raises `TermError`."""
    try:
        check_fence(store.far, run, Term.parse(term))
    except TermError:
        line = tolerant_line(read_catalog(store.tiers, run))
        if term not in {segment.term for segment in line}:
            raise


def _end(
    store: Store, group: Group, failure: Exception | None, own: tuple[str, ...], manifest: str
) -> None:  # fmt: skip
    """All ranks' records are there, synced; or one has failed: then none stay, and all raise."""
    if failure is None:
        try:
            store.far.sync()
        except Exception as error:
            failure = error
    if any(share(group, "save", lambda: failure is not None)):
        with suppress(Exception):  # what stays is a step that is not whole
            share(group, "withdrawn", lambda: store.far.delete(own))
            lead(group, "manifest", lambda: store.far.delete([manifest]))  # named by none now

    def told() -> None:
        if failure is not None:
            raise failure

    share(group, "saved", told)


class _Gate:
    """Ranks wait here for each other: all come, or who has failed is told to all.

    When all are here rank 0 does ``check``, and what that raises all raise.
    """

    def __init__(self, group: Group, check: Callable[[], None]) -> None:
        self._group, self._check = group, check
        self._reached = self.opened = False

    def wait(self) -> None:
        """All blocks of this rank are stored; returns when those of all are."""
        self._reached = True
        share(self._group, "blocks", lambda: None, timeout_s=SAVE_S)
        lead(self._group, "fork", self._check)
        self.opened = True

    def fail(self, error: Exception) -> None:
        """This rank has none: tell it those who wait."""
        if not self._reached and not isinstance(error, GroupError):
            self._reached = True

            def failed() -> None:
                raise error

            share(self._group, "blocks", failed, timeout_s=SAVE_S)


class StateBase:
    """A captured base of a laid-out state, as a `tiers.base.Source`: a tensor at a time.

    ``before_heads`` is called when all is stored, and before any head is visible.
    """

    expected_id: str | None = None

    def __init__(
        self, laid: LaidOut, link: Link, step: int, before_heads: Callable[[], None]
    ) -> None:
        self._laid, self._link, self._step = laid, link, step
        self.before_heads = before_heads
        self.key = str(base_key(link.run, link.term, link.part, step))
        self._arrays = {
            f"{section.name}/{role}": (section, role)
            for section in laid.layout.sections for role in _kept(section, laid.states)
        }  # fmt: skip
        self.sizes = {
            name: section.elements * item_bytes(section.dtypes[role])
            for name, (section, role) in self._arrays.items()
        }
        self._digests: dict[str, list[str]] = {name: [] for name in self._arrays}

    def blocks(self) -> Iterator[Block]:
        """The blocks, array after array."""
        for name, (section, role) in self._arrays.items():
            digests = self._digests[name]
            for data in _cut(self._bytes(section, role)):
                digests.append(block_digest(data))
                yield Block(name, len(digests) - 1, data)

    def _bytes(self, section: Section, role: str) -> Iterator[memoryview]:
        """The bytes of an array, in runs of any length."""
        size = item_bytes(section.dtypes[role])
        for index, piece in enumerate(section.slices):
            found = self._laid.sources.get((section.name, index, role))
            left = align(piece.elements) * size
            if found is not None:
                data = byte_view(found.read().contiguous())
                if data.nbytes != piece.elements * size:
                    raise UsageError(
                        f"{role} of {piece.name!r} has {data.nbytes} bytes, not "
                        f"{piece.elements * size}", hint="nothing may change while it is saved",
                    )  # fmt: skip
                yield data
                left -= data.nbytes
            while left:  # padding, and state that is absent
                zeros = min(left, BLOCK_BYTES)
                yield memoryview(bytes(zeros))
                left -= zeros

    def seal(self) -> SealedHead:
        """The head, once all blocks have been handed on."""
        link, laid = self._link, self._laid
        body = BaseBody(
            origin="captured", exactness="exact", states=laid.states, boundary=laid.boundary
        )
        arrays = tuple(
            ArrayInfo(
                name=name, dtype=section.dtypes[role], elements=section.elements,
                digests=tuple(self._digests[name]),
            )
            for name, (section, role) in self._arrays.items()
        )  # fmt: skip
        head = Head(
            kind="base", run=link.run, term=link.term, part=link.part, step=self._step,
            parent=link.parent, manifest=link.manifest, layout=link.layout, arrays=arrays,
            body=body.to_json(),
        )  # fmt: skip
        return SealedHead.seal(head, writer_info())


def _kept(section: Section, states: Mapping[str, SectionState]) -> tuple[str, ...]:
    """Roles with an array: those of state where any slice has it."""
    if not section.slices:
        return ()
    state = states.get(section.name)
    return (section.main_role, *(section.state_roles if state and any(state.present) else ()))


def _cut(runs: Iterator[memoryview]) -> Iterator[memoryview]:
    """Runs of bytes as blocks, all but the last of them whole."""
    begun = bytearray()
    for data in runs:
        while data.nbytes:
            if not begun and data.nbytes >= BLOCK_BYTES:
                yield data[:BLOCK_BYTES]
                data = data[BLOCK_BYTES:]
                continue
            room = BLOCK_BYTES - len(begun)
            begun += data[:room]
            data = data[room:]
            if len(begun) == BLOCK_BYTES:
                yield memoryview(begun)
                begun = bytearray()
    if begun:
        yield memoryview(begun)
