"""Beginning: what the far tier gets of the state a term begins with, on another topology.

Every rank has put a captured base into its near tier. The far tier needs no such base where it can
produce the fork step by itself, exactly: a derived base says that the rest follows from there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from adacheck_store.format.derived import derived_head
from adacheck_store.format.errors import AdaCheckError
from adacheck_store.format.head import Head, SealedHead
from adacheck_store.format.keys import base_key, parse_key
from adacheck_store.format.layout import Layout
from adacheck_store.format.record import Record
from adacheck_store.tiers.base import RecordSource

from .boundary import Link
from .config import writer_info
from .derived import FORKS_MAX
from .drain import copy_records, in_batches
from .group import Group, lead, share
from .recovery import Prover, RestorePlan, tolerant_line
from .restore import Restored
from .retention import tier_catalog
from .store import Store

log = logging.getLogger(__name__)

BATCH = 16
"""Records in a put."""

DRAIN_S = 60.0
"""How long a start waits for what earlier terms have left: about what their writers were behind."""


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
        drained = share(self.group, "what the parent left", self._drain)
        if not all(drained) or not lead(self.group, "fork state", self._is_proven):
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
        right = base is not None and base.body["class"] == "exact" and began.gives(base.arrays)
        return base if right else None

    def _before(self, text: str) -> bool:
        key = parse_key(text)
        return key.kind != "base" and key.term != self.link.term

    def _drain(self) -> bool:
        """Drain what earlier terms have left; False if anything of it cannot be, or not soon."""
        far, end = self.store.far, time.monotonic() + DRAIN_S
        try:
            for batch in in_batches(filter(self._before, self.inherited), BATCH):
                if time.monotonic() > end:
                    log.warning("what an earlier term left is drained while training goes on")
                    return False
                copy_records(self.store.uppers, far, batch)
            far.sync()
        except AdaCheckError as error:
            log.warning("what an earlier term left is not drained yet: %s", error)
            return False
        return True

    def _is_proven(self) -> bool:
        """Whether the far tier alone gives the fork step, under the tips of the manifest."""
        before, run = self.restored.plan, self.link.run
        try:
            catalog = tier_catalog(self.store.far, run)
            prover = Prover(catalog, tolerant_line(catalog, before.term))
            plan = prover.prove(self.restored.step)
        except AdaCheckError as error:
            plan = str(error)
        if not isinstance(plan, RestorePlan):
            log.warning("the far tier gets whole bases: %s", plan)
            return False
        tips = {part.part: part.link for part in plan.parts}
        same = tips == {part.part: part.link for part in before.parts}
        return same and plan.term == before.term and plan.forks < FORKS_MAX

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
