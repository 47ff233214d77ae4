"""Saving a whole state into a run from outside a training loop: one base for each rank.

A save is a term of its own. It leaves the line at the newest provable step below its own, so all
that was there stays, but for steps from its own on, which are off the line from then on. No rank
makes anything visible before the blocks of all have been written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from adacheck_store.format.bodies import BaseBody, SectionState
from adacheck_store.format.dtypes import item_bytes
from adacheck_store.format.errors import GroupError, UsageError
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
from .catalog import read_catalog
from .config import writer_info
from .foreign import LaidOut
from .group import Group, lead, share, together
from .recovery import Prover, RestorePlan, tolerant_line
from .restore import refuse_unknown
from .store import Store
from .terms import claim_term, excuse_term, renewed

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
    gate = _Gate(group)
    base = StateBase(laid, link, step, gate.wait)
    key = str(extra_key(run, link.term, link.rank, step))
    document = RecordSource(str(manifest_key(run, link.term, step)), Record(head, {}))
    mine = Term.parse(link.term) if group.rank == 0 else None
    try:
        with renewed(store.far, run, mine):  # what it forks from stays while blocks are written
            store.far.put([document, RecordSource(key, extra(link)), base])
    except Exception as error:
        gate.fail(error)
        raise
    together(group, "save", store.far.sync)
    return Saved(
        run=run, term=link.term, step=step, parent_term=manifest.parent_term,
        fork_step=manifest.fork_step, nbytes=sum(base.sizes.values()),
    )  # fmt: skip


def _published(store: Store, shape: RecordSource) -> str:
    store.far.put([shape])
    return shape.record.sealed.id


def _claimed(store: Store, run: str, step: int, why: str) -> dict[str, Any]:
    """Claim a term (rank 0); where it leaves the history."""
    seen = [item.term for item in read_catalog(store.tiers, run).manifests.values()]
    term = claim_term(store.far, run, seen)
    excuse_term(store.far, run, term, f"saved by {why}")  # it trains nothing, so it cannot die
    found: dict[str, Any] = {"term": str(term), "parent": "", "step": 0, "tips": {}}
    catalog = read_catalog(store.tiers, run)
    refuse_unknown(catalog)
    if catalog.empty:
        return found
    prover = Prover(catalog, tolerant_line(catalog))
    for below in (each for each in prover.seen_steps() if each < step):
        plan = prover.prove(below)
        if isinstance(plan, RestorePlan) and not prover.doubt(below):
            tips = {part.part: part.link for part in plan.parts}
            return found | {"parent": plan.term, "step": below, "tips": tips}
    if steps := prover.provable_steps():
        raise UsageError(
            f"the run begins at step {steps[0]}, and a save at step {step} would have nothing to "
            "come after", run=run, step=step, hint="name a later step, or another run",
        )  # fmt: skip
    return found


class _Gate:
    """Ranks wait here for each other: all come, or who has failed is told to all."""

    def __init__(self, group: Group) -> None:
        self._group, self._passed = group, False

    def wait(self) -> None:
        """All blocks of this rank are written; returns when those of all are."""
        self._passed = True
        share(self._group, "blocks", lambda: None, timeout_s=SAVE_S)

    def fail(self, error: Exception) -> None:
        """This rank has none: tell it those who wait."""
        if not self._passed and not isinstance(error, GroupError):
            self._passed = True

            def failed() -> None:
                raise error

            share(self._group, "blocks", failed, timeout_s=SAVE_S)


class StateBase:
    """A captured base of a laid-out state, as a `tiers.base.Source`: a tensor at a time.

    ``ready`` is called when all blocks have been handed on, before the head is made.
    """

    expected_id: str | None = None

    def __init__(self, laid: LaidOut, link: Link, step: int, ready: Callable[[], None]) -> None:
        self._laid, self._link, self._step, self._ready = laid, link, step, ready
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
        """The head, once all ranks are as far."""
        self._ready()
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
