"""Compaction: a fold whose sink is a tier, giving a replayed base."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from adacheck_store.format.bodies import BOUNDED_STEPS, BaseBody
from adacheck_store.format.dtypes import item_bytes
from adacheck_store.format.errors import NotProvableError
from adacheck_store.format.head import ArrayInfo, Head, SealedHead
from adacheck_store.format.ids import BLOCK_BYTES, block_digest
from adacheck_store.format.keys import base_key
from adacheck_store.format.layout import Layout, Section
from adacheck_store.format.record import Block

from .ahead import NOW, Now
from .arrays import byte_view, torch_dtype
from .config import writer_info
from .fetch import Fetcher
from .fold import Fold, FoldReport
from .reading import open_fold
from .recovery import PartPlan
from .windows import Spare


class _BlockSink:
    """A sink that hands out windows and collects finished blocks, whose memory they are."""

    def __init__(self) -> None:
        self.digests: dict[str, list[str]] = defaultdict(list)
        self._ready: list[Block] = []
        self._lent: list[torch.Tensor] = []
        self._spare = Spare()

    def window(self, section: Section, role: str, start: int, stop: int) -> torch.Tensor:
        """Memory of its own."""
        dtype = section.dtypes[role]
        return self._spare.take((stop - start) * item_bytes(dtype)).view(torch_dtype(dtype))

    def taken(self) -> Iterator[Block]:
        """Finished blocks, each good until the next is asked for."""
        yield from self._ready
        self._ready.clear()
        while self._lent:
            self._spare.give(self._lent.pop())

    def done(
        self, section: Section, start: int, stop: int, views: Mapping[str, torch.Tensor]
    ) -> None:
        """Cut the window into blocks."""
        self._lent += views.values()
        for role, view in views.items():
            name = f"{section.name}/{role}"
            data = byte_view(view)
            for at in range(0, len(data), BLOCK_BYTES):
                block = data[at : at + BLOCK_BYTES]
                self._ready.append(Block(name, len(self.digests[name]), block))
                self.digests[name].append(block_digest(block))


class ReplayedBase:
    """A base made by folding a plan, as a `tiers.base.Source`: streamed in bounded memory.

    `blocks` raises `ReplayMismatchError` or `BlocksLostError` where the fold does; then nothing
    becomes visible. After `seal`, ``report`` says what the fold did. Raises `NotProvableError`
    where a fold of class ``bounded`` would go on for more than `BOUNDED_STEPS`.
    """

    expected_id: str | None = None

    def __init__(
        self, fetcher: Fetcher, layout: Layout, plan: PartPlan, *, run: str, term: str,
        step: int, manifest: str, reader: Now = NOW,
    ) -> None:  # fmt: skip
        self._reader = reader
        self._fold: Fold = open_fold(fetcher, layout, plan)
        self._layout = layout
        self._plan = plan
        self._since = plan.base.since if self.exactness == "bounded" else None
        if self._since is not None and step - self._since > BOUNDED_STEPS:
            raise NotProvableError(
                f"folds here drift, and step {self._since} is the last that is exact: they serve "
                f"for {BOUNDED_STEPS} steps from there", run=run, part=plan.part, step=step,
                hint="fold it on a machine with the trainer's arithmetic, or a nearer step",
            )  # fmt: skip
        self._place = {"run": run, "term": term, "part": plan.part, "step": step}
        self._manifest = manifest
        self._sink = _BlockSink()
        self.key = str(base_key(run, term, plan.part, step))
        self.report: FoldReport | None = None

    @property
    def exactness(self) -> str:
        """The class of what this machine's fold gives."""
        return self._fold.report.exactness

    def blocks(self) -> Iterator[Block]:
        """The folded blocks, window by window."""
        for report in self._fold.steps(self._sink, self._reader):
            yield from self._sink.taken()
            self.report = report

    def seal(self) -> SealedHead:
        """The base's head, from the digests of what `blocks` gave."""
        report = self.report
        assert report is not None
        body = BaseBody(
            origin="replayed", exactness=report.exactness, states=report.states,
            boundary=report.boundary, since=self._since,
        )  # fmt: skip
        arrays = tuple(self._array(section, role) for section, role in self._roles())
        place: dict[str, Any] = self._place
        head = Head(
            kind="base", **place, parent=self._plan.link, manifest=self._manifest,
            layout=self._plan.layout, arrays=arrays, body=body.to_json(),
        )  # fmt: skip
        return SealedHead.seal(head, writer_info())

    def _roles(self) -> Iterator[tuple[Section, str]]:
        for section in self._layout.sections:
            if section.slices:
                for role in self._fold.roles(section):
                    yield section, role

    def _array(self, section: Section, role: str) -> ArrayInfo:
        name = f"{section.name}/{role}"
        return ArrayInfo(
            name=name, dtype=section.dtypes[role], elements=section.elements,
            digests=tuple(self._sink.digests[name]),
        )  # fmt: skip
