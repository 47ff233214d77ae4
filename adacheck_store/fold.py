"""The fold: base and deltas in, base out, block by block, the state in the cache once.

Restore, compaction and export are this one function with different sinks. Windows of a section
are taken some at a time, and so are the deltas: those are applied to each window while it lies in
the cache. Every fingerprint a delta carries is checked when the fold passes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from adacheck_store.format.bodies import (
    BaseBody,
    DeltaBody,
    Grad,
    Groups,
    SectionState,
    decode_base,
    decode_delta,
    set_array,
)
from adacheck_store.format.check import check_base, check_delta
from adacheck_store.format.dtypes import item_bytes
from adacheck_store.format.errors import MalformedError, ReplayMismatchError
from adacheck_store.format.ids import BLOCK_BYTES, block_count
from adacheck_store.format.layout import Layout, Section

from .ahead import NOW, Now
from .arrays import byte_view, to_typed, torch_dtype
from .engines import Piece, StepEngine
from .fetch import ArrayReader, lost_if_malformed, refused
from .fingerprint import block_sum
from .optimizers import check_groups, folds_alike, spec_named
from .windows import (
    Leg,
    Spare,
    Updates,
    Window,
    cuts,
    decode,
    idle_pieces,
    load,
    pieces_of,
    updates_of,
)

WINDOW_BYTES = 4 << 20
"""Bytes of the narrowest role in a window: whole blocks of every role."""

Only = Mapping[str, Sequence[tuple[int, int]]]
"""Of each section the elements to be folded: ranges in order, in whole blocks of its widest role.
Of a section without any the counters alone."""


class Sink(Protocol):
    """Where a fold's windows lie: memory for a role's elements, and what becomes of them."""

    def window(self, section: Section, role: str, start: int, stop: int) -> torch.Tensor:
        """Flat contiguous memory for elements start..stop of the role; need not be zeroed."""
        ...

    def done(self, section: Section, start: int, stop: int, views: Mapping[str, Any]) -> None:
        """The window is final; ``views`` maps the section's present roles to its tensors."""
        ...


@dataclass(slots=True, kw_only=True)
class FoldReport:
    """What a fold did: ``exactness`` is ``exact`` if every delta's arithmetic is this machine's.

    ``verified_through`` is the last step of which every fingerprint seen so far agreed and all
    blocks have been seen at or after it (-1: none); ``checked`` counts fingerprints.
    """

    exactness: str = "exact"
    deltas: int = 0
    checked: int = 0
    differed: int = 0
    verified_through: int = -1
    states: dict[str, SectionState] = field(default_factory=dict)
    boundary: tuple[Groups, ...] = ()


class Delta:
    """A delta opened for folding: its body, and maps from slice to gradient."""

    def __init__(self, reader: ArrayReader, layout: Layout) -> None:
        self.reader = reader
        self.step = reader.head.step or 0
        with lost_if_malformed(reader.ref):
            self.body: DeltaBody = decode_delta(reader.head)
            check_delta(reader.head, self.body, layout)
            for update in self.body.updates:
                check_groups(layout.optimizers[update.optimizer], update.groups)
        self.grads: list[dict[tuple[str, int], Grad]] = [
            {(grad.section, grad.slice): grad for grad in update.grads}
            for update in self.body.updates
        ]
        self.sums: dict[str, dict[int, int]] = {}
        for item in self.body.fingerprints:
            self.sums.setdefault(item.array, {}).update(item.blocks())


class Fold:
    """A base with its consecutive deltas, ready to be folded into a sink.

    Raises `BlocksLostError` for a record whose body is wrong or does not fit the layout,
    `UnsupportedError` for an optimizer that cannot be folded here, and while running
    `MalformedError` for an update that the optimizer refuses, and `ReplayMismatchError` (class
    ``exact`` only), whose ``last_match`` is the last step at which the differing block agreed.
    """

    def __init__(self, layout: Layout, base: ArrayReader, deltas: Sequence[ArrayReader]) -> None:
        self.layout = layout
        self.base = base
        with lost_if_malformed(base.ref):
            self.base_body: BaseBody = decode_base(base.head)
            check_base(base.head, self.base_body, layout)
        self.deltas = [Delta(reader, layout) for reader in deltas]
        self.report = FoldReport(deltas=len(self.deltas), boundary=self.base_body.boundary)
        if self.deltas:
            self.report.boundary = self.deltas[-1].body.boundary
        self.report.exactness = "exact" if self._same_arithmetic() else "bounded"
        self._engines = {
            index: StepEngine(spec_named(name))
            for index, name in enumerate(layout.optimizers)
            if self.deltas
        }
        self._last_match: dict[tuple[str, int], int] = {}
        self._scalars: dict[tuple[str, int], dict[str, Any]] = {}
        self._spare = Spare()
        self.base_step = base.head.step or 0

    def _same_arithmetic(self) -> bool:
        """Whether this machine's vector equals the trainer's, for every delta, from an exact base.

        What follows a base with drift has drift too, whatever arithmetic it was folded with.
        """
        if self.base_body.exactness != "exact":
            return False
        for index, name in enumerate(self.layout.optimizers):
            dtypes = sorted({
                s.roles[0][1] for s in self.layout.sections if s.optimizer == index and s.slices
            })  # fmt: skip
            for delta in self.deltas:
                for update in delta.body.updates:
                    if update.optimizer != index:
                        continue
                    theirs = delta.body.arithmetic[index]
                    with lost_if_malformed(delta.reader.ref), refused(delta.reader):
                        if not folds_alike(name, update.groups, dtypes, theirs):
                            return False
        return True

    def present(self, section: Section) -> list[bool]:
        """Which slices of a section have optimizer state after the fold."""
        state = self.base_body.states.get(section.name)
        present = list(state.present) if state else [False] * len(section.slices)
        if len(present) != len(section.slices):
            raise MalformedError(f"states of section {section.name}", rule="base")
        for delta in self.deltas:
            for grads in delta.grads:
                for name, index in grads:
                    if name == section.name and section.state_roles:
                        present[index] = True
        return present

    def roles(self, section: Section) -> list[str]:
        """Roles of a section that have an array after the fold."""
        names = [section.main_role]
        if any(self.present(section)):
            names += section.state_roles
        return names

    def run(self, sink: Sink, reader: Now = NOW, only: Only | None = None) -> FoldReport:
        """Fold everything, or ``only`` that, into the sink."""
        for _ in self.steps(sink, reader, only):
            pass
        return self.report

    def steps(
        self, sink: Sink, reader: Now = NOW, only: Only | None = None
    ) -> Iterator[FoldReport]:  # fmt: skip
        """Fold leg by leg, yielding the report after each; the last one is complete.

        A ``reader`` that reads ahead needs a sink whose windows are memory of their own. Of the
        sections that are not in ``only`` nothing is folded, counters included.
        """
        waiting: deque[Leg] = deque()
        self.base.prepare(only)
        try:
            for leg in self._legs(sink, reader, only):
                self._start(leg, reader)
                waiting.append(leg)
                if len(waiting) > reader.legs:
                    self._finish(waiting.popleft(), sink)
                    yield self.report
            while waiting:
                self._finish(waiting.popleft(), sink)
                yield self.report
        finally:
            self.base.forget()
        for section in self.layout.sections:
            self.report.states[section.name] = self._final_state(section)
        self.report.verified_through = self._verified_through()
        yield self.report

    def _legs(self, sink: Sink, reader: Now, only: Only | None) -> Iterator[Leg]:
        """All legs, in order; nothing is read."""
        for windows in self._windows(sink, reader.windows, only):
            starts = range(0, len(self.deltas), reader.deltas)
            groups = [self.deltas[at : at + reader.deltas] for at in starts] or [[]]
            for number, deltas in enumerate(groups, 1):
                yield Leg(windows, deltas, first=number == 1, last=number == len(groups))

    def _windows(self, sink: Sink, most: int, only: Only | None) -> Iterator[list[Window]]:
        """All windows, in order, up to so many at a time, with memory and nothing in it."""
        for section in self.layout.sections:
            if not section.slices or (only is not None and section.name not in only):
                continue
            width = WINDOW_BYTES // min(item_bytes(dtype) for _, dtype in section.roles)
            kind = torch_dtype(section.roles[0][1])
            scratch = torch.empty(min(width, section.elements), dtype=kind)
            steps = section.optimizer >= 0 and self.deltas
            state, roles = self.base_body.states.get(section.name), self.roles(section)
            idle = set(range(len(section.slices)))
            whole = ((0, max(section.elements, 1)),)
            ranges = cuts(section, width, whole if only is None else only[section.name])
            for at in range(0, len(ranges), most):
                found = []
                for start, stop in ranges[at : at + most]:
                    views = {role: sink.window(section, role, start, stop) for role in roles}
                    pieces = pieces_of(section, start, stop, views, scratch, state) if steps else []
                    idle -= {piece.slice for piece in pieces}
                    found.append(Window(section, start, stop, views, pieces))
                yield found
            if steps and only is not None:
                views = {role: sink.window(section, role, 0, 0) for role in roles}
                yield [Window(
                    section, 0, 0, views, idle_pieces(section, sorted(idle), views, scratch, state)
                )]  # fmt: skip

    def _start(self, leg: Leg, reader: Now) -> None:
        """Have everything read that the base, at first, and the leg's deltas have for it."""
        section = leg.windows[0].section
        for window in leg.windows if leg.first else ():
            for role, view in window.views.items():
                self._check_array(section, role)
                name = f"{section.name}/{role}"
                want = None
                if self.base.info(name) is not None:
                    want = self.base.want(name, window.start, window.start + view.numel())
                leg.loads.append(reader.start(load, want, view, reader.legs > 0))
        for delta in leg.deltas:

            def read(name: str, begin: int, end: int, delta: Delta = delta) -> Future[Any]:
                want = delta.reader.want(name, begin, end)
                leg.reads.append(reader.start(want.elements, self._spare.take))
                return leg.reads[-1]

            found = [
                updates_of(leg.windows, number, delta.grads[number], read)
                for number, update in enumerate(delta.body.updates)
                if update.optimizer == section.optimizer
            ]
            leg.updates.append([list(of_window) for of_window in zip(*found, strict=True)])

    def _finish(self, leg: Leg, sink: Sink) -> None:
        """Fold a leg, as soon as all of it is here."""
        for loaded in leg.loads:
            loaded.result()
        for index, window in enumerate(leg.windows):
            section = window.section
            if leg.first:
                self._check(window, self.base_step, {})
            for delta, updates in zip(leg.deltas, leg.updates, strict=True):
                self._apply(section, delta, updates[index] if updates else [])
                self._apply_sets(window, delta)
                self._check(window, delta.step, delta.sums)
            if leg.last:
                for piece in window.pieces:
                    self._scalars[section.name, piece.slice] = dict(piece.scalars)
                sink.done(section, window.start, window.stop, window.views)
        for read in leg.reads:
            self._spare.give(read.result())

    def _check_array(self, section: Section, role: str) -> None:
        info = self.base.info(f"{section.name}/{role}")
        if info is None and role == section.main_role:
            raise MalformedError(f"the base has no array {section.name}/{role}", rule="base")
        fits = (section.dtypes[role], section.elements)
        if info is not None and (info.dtype, info.elements) != fits:
            raise MalformedError(
                f"array {section.name}/{role} does not fit the layout", rule="base"
            )  # fmt: skip

    def _apply(self, section: Section, delta: Delta, updates: Updates) -> None:
        engine = self._engines[section.optimizer] if updates else None
        for number, stepping, runs in updates:
            assert engine is not None
            groups = delta.body.updates[number].groups
            with refused(delta.reader):
                halves = engine.takes_halves(groups)
            for run in runs:
                decode(run, halves)
            with refused(delta.reader):
                engine.apply(stepping, groups)
                _refuse_new_state(stepping)

    def _apply_sets(self, window: Window, delta: Delta) -> None:
        section, start = window.section, window.start
        for entry in delta.body.sets:
            if entry.section != section.name:
                continue
            item = section.slices[entry.slice]
            low, high = max(item.offset, start), min(item.offset + item.elements, window.stop)
            if low < high:
                begin = entry.offset + low - item.offset
                delta.reader.read_into(
                    set_array(section.name, entry.role), begin,
                    window.views[entry.role][low - start : high - start],
                )  # fmt: skip

    def _check(self, window: Window, step: int, sums: Mapping[str, Mapping[int, int]]) -> None:
        """Compare the window's blocks with the trainer's fingerprints of this step, if any."""
        section = window.section
        for role, view in window.views.items():
            name = f"{section.name}/{role}"
            expected = sums.get(name)
            if not expected and step != self.base_step:
                continue
            size = item_bytes(section.dtypes[role])
            first, end = window.start * size, (window.start + view.numel()) * size
            blocks = range(first // BLOCK_BYTES, block_count(end))
            if not expected:
                self._last_match.update(((name, index), step) for index in blocks)
                continue
            due = [index for index in blocks if index in expected]
            if not due:
                continue
            data, total = byte_view(view), section.elements * size
            for index in due:
                at = index * BLOCK_BYTES
                if first <= at and min(at + BLOCK_BYTES, total) <= end:
                    block = data[at - first : at - first + BLOCK_BYTES]
                    self._compare(name, index, step, block, expected[index])

    def _compare(self, name: str, index: int, step: int, data: memoryview, expected: int) -> None:
        self.report.checked += 1
        if block_sum(data) == expected:
            self._last_match[name, index] = step
            return
        self.report.differed += 1
        if self.report.exactness != "exact":
            return
        error = ReplayMismatchError(
            f"block {index} of {name} is not what the trainer had", step=step,
            part=self.base.ref.part, run=self.base.head.run, term=self.deltas[-1].reader.ref.term,
            hint="the chain ends at the last step that agreed; a captured base follows",
        )  # fmt: skip
        error.last_match = self._last_match.get((name, index), self.base_step)
        raise error

    def _verified_through(self) -> int:
        return min(self._last_match.values(), default=self.base_step)

    def _final_state(self, section: Section) -> SectionState:
        base = self.base_body.states.get(section.name)
        present = self.present(section)
        names = set(base.scalars) if base else set()
        finals = [self._scalars.get((section.name, i)) for i in range(len(present))]
        for final in finals:
            names.update(final or {})
        scalars: dict[str, tuple[Any, ...]] = {}
        for name in sorted(names):
            values: list[Any] = []
            for index, final in enumerate(finals):
                if final is not None:
                    values.append(to_typed(final.get(name)))
                else:
                    values.append(base.scalars[name][index] if base else None)
            scalars[name] = tuple(values)
        return SectionState(present=tuple(present), scalars=scalars)


def _refuse_new_state(pieces: Sequence[Piece]) -> None:
    """State of the optimizer for which the layout has no role would be lost without a word."""
    for piece in pieces:
        for name, value in piece.scalars.items():
            if isinstance(value, torch.Tensor) and value.dim():
                raise MalformedError(f"the layout has no role {name}", rule="delta")
