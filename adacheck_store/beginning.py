"""Beginning: what the far tier gets of the state a term begins with, on another topology.

Every rank has put a captured base into its near tier. The far tier needs no such base where it can
produce the fork step by itself, exactly: a derived base says that the rest follows from there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from adacheck_store.format.derived import derived_head
from adacheck_store.format.errors import AdaCheckError
from adacheck_store.format.head import ArrayInfo, Head, SealedHead
from adacheck_store.format.keys import base_key, parse_key
from adacheck_store.format.layout import Layout
from adacheck_store.format.record import Record
from adacheck_store.tiers.base import RecordSource

from .ahead import Ahead
from .boundary import Link
from .catalog import Catalog, RecordRef
from .config import writer_info
from .derived import FORKS_MAX
from .drain import copy_records
from .fetch import Fetcher
from .group import Group, lead, share
from .plan_json import decode_plan, encode_plan
from .proof import Segment
from .recovery import Prover, RestorePlan, tolerant_line
from .restore import Restored
from .retention import tier_catalog
from .store import Store

log = logging.getLogger(__name__)

DRAIN_S = 60.0
"""How long a start waits for what earlier terms have left: about what their writers were behind.
As long, at most, for what is read back."""

WAIT_S = 900.0
"""How long ranks wait for each other meanwhile: one may be at a record when the time is up."""


Place = tuple[str, str, int]
"""Term, part and step of a base."""


def stood_in(catalog: Catalog, line: Sequence[Segment]) -> set[Place]:
    """Where derived bases of a line give what the captured ones would, by what heads say.

    ``catalog`` is of one tier alone.
    """
    prover = Prover(catalog, line)
    return {
        (segment.term, part, segment.first)
        for segment in prover.line for part, proofs in prover.parts.items()
        if any(
            proof.base is not None and proof.origin is not None and not prover.flaw(proof)
            for proof in proofs.get(segment.term, {}).get(segment.first, {}).values()
        )
    }  # fmt: skip


def _encoded(plan: RestorePlan | None) -> Any:
    return None if plan is None else encode_plan(plan)


def _decoded(value: Any) -> RestorePlan | None:
    return None if value is None else decode_plan(value)


def _blocks(fetcher: Fetcher, plan: RestorePlan) -> Iterator[tuple[RecordRef, ArrayInfo, int]]:
    """Every block of all that a plan reads; raises `BlocksLostError`."""
    for ref in plan.records:
        for info in fetcher.head(ref).head.arrays:
            for index in range(len(info.digests)):
                yield ref, info, index


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The beginning of a part's chain, of which the near tier has all and the far tier nothing.

    ``first`` are the records that this rank has put, ``inherited`` the keys of those of the terms
    before that it is to drain.
    """

    store: Store
    group: Group
    restored: Restored
    link: Link
    layout: Layout
    first: Sequence[RecordSource]
    inherited: Sequence[str]

    def backlog(self) -> list[str]:
        """What the far tier is to get in the background; all ranks call it.

        What the parent's writers could not drain any more goes there now, but for bases, and
        then, where that proves the fork step, the derived base. What keeps it from that is told
        in the log, and the captured base is drained.
        """
        everything = [*(source.key for source in self.first), *self.inherited]
        base = self._base()
        if not any(share(self.group, "derived bases", lambda: base is not None)):
            return everything
        drained = share(self.group, "what the parent left", self._drain, timeout_s=WAIT_S)
        if not all(drained):
            return everything
        plan = lead(self.group, "fork state", self._proven, encode=_encoded, decode=_decoded)
        if plan is None or not self._is_read(plan):
            return everything
        done = {key for key in self.inherited if self._before(key)}
        if base is not None and self._put(base):
            done |= {source.key for source in self.first if parse_key(source.key).kind == "base"}
        return [key for key in everything if key not in done]

    def _base(self) -> Head | None:
        """The captured base, if it is just what was put together, and that exactly."""
        restored, began = self.restored, self.restored.began
        certificate = restored.certificate
        if began is None or began.layout != self.layout or certificate.exactness != "exact":
            return None
        if "saved" in restored.plan.manifest.settings:  # by another program: no chain to lean on
            return None
        heads = [source.record.sealed.head for source in self.first]
        base = next((head for head in heads if head.kind == "base"), None)
        right = base is not None and base.body["class"] == "exact" and base.body["gap"] is None
        return base if right and base is not None and began.gives(base.arrays) else None

    def _before(self, text: str) -> bool:
        key = parse_key(text)
        return key.kind != "base" and key.term != self.link.term

    def _drain(self) -> bool:
        """Drain what earlier terms have left; False if anything of it cannot be, or not soon."""
        far, end = self.store.far, time.monotonic() + DRAIN_S
        try:
            for key in sorted(filter(self._before, self.inherited)):
                if time.monotonic() > end:
                    log.warning("what an earlier term left is drained while training goes on")
                    return False
                copy_records(self.store.uppers, far, [key])
            far.sync()
        except AdaCheckError as error:
            log.warning("what an earlier term left is not drained yet: %s", error)
            return False
        return True

    def _proven(self) -> RestorePlan | None:
        """How the far tier alone gives the fork step, under the tips of the manifest, if it does:
        by what its heads say."""
        before, run = self.restored.plan, self.link.run
        try:
            catalog = tier_catalog(self.store.far, run)
            prover = Prover(catalog, tolerant_line(catalog, before.term))
            plan = prover.prove(self.restored.step)
        except AdaCheckError as error:
            plan = str(error)
        if not isinstance(plan, RestorePlan):
            log.warning("the far tier gets whole bases: %s", plan)
            return None
        tips = {part.part: part.link for part in plan.parts}
        same = tips == {part.part: part.link for part in before.parts}
        right = same and plan.term == before.term and len(plan.levels) <= FORKS_MAX
        return plan if right else None

    def _is_read(self, plan: RestorePlan) -> bool:
        """Whether all bytes of the fork step have come from the far tier; all ranks call it.

        Where a nearer one gave any, they are read back now, by each rank as many, if that does
        not take too long.
        """
        far = self.store.far.traits.name
        alone = share(self.group, "what was read", lambda: set(self.restored.tiers) <= {far})
        if all(alone):
            return True
        return all(share(self.group, "read back", lambda: self._read_back(plan), timeout_s=WAIT_S))

    def _read_back(self, plan: RestorePlan) -> bool:
        """Read this rank's share of a plan's blocks, verified; False if that fails, or is slow."""
        fetcher, end = Fetcher([self.store.far]), time.monotonic() + DRAIN_S
        mine = islice(_blocks(fetcher, plan), self.group.rank, None, self.group.size)

        def read(ref: RecordRef, info: ArrayInfo, index: int) -> bool:
            if time.monotonic() > end:
                return False
            fetcher.read(ref, info, index, 1)
            return True

        try:
            with Ahead(fetcher.parallel) as reader:
                while some := list(islice(mine, 4 * reader.threads)):
                    begun = [reader.start(read, *block) for block in some]
                    if not all(each.result() for each in begun):
                        log.warning("the far tier gets whole bases: reading back takes too long")
                        return False
        except AdaCheckError as error:
            log.warning("the far tier gets whole bases: %s", error)
            return False
        return True

    def _put(self, base: Head) -> bool:
        """Put the derived base into the far tier, synced; False if that cannot be done."""
        link, far = self.link, self.store.far
        head = derived_head(base, self.group.size)
        key = str(base_key(link.run, link.term, link.part, base.step or 0))
        try:
            far.put([RecordSource(key, Record(SealedHead.seal(head, writer_info()), {}))])
            far.sync()
        except AdaCheckError as error:
            log.warning("the far tier gets a whole base: %s", error)
            return False
        return True
