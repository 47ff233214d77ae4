"""What upkeep knows of a part without asking a tier, and how far its work is."""

from __future__ import annotations

import dataclasses
import logging
import time

from .catalog import RecordRef
from .drift import Drift
from .recovery import PartPlan, RestorePlan

log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Tail:
    """The newest base of a part and what follows it, in memory: what the next fold takes.

    ``origin`` is what a derived base gets its bytes from.
    """

    base: RecordRef | None = None
    deltas: list[RecordRef] = dataclasses.field(default_factory=list)
    origin: RestorePlan | None = None

    def add(self, ref: RecordRef) -> None:
        """Take note of a stored base or delta."""
        if ref.kind == "delta":
            self.deltas.append(ref)
        elif ref.kind == "base" and (self.base is None or ref.step >= self.base.step):
            self.base, self.origin = ref, None
            self.deltas = [delta for delta in self.deltas if delta.step > ref.step]

    def begin_anew(self, plan: PartPlan) -> None:
        """Fold what a plan has from now on, and then what follows it here."""
        self.base, self.origin = plan.base, plan.origin
        self.deltas = [*plan.deltas, *(ref for ref in self.deltas if ref.step > plan.step)]

    def plan(self, part: str, step: int) -> PartPlan | None:
        """The fold that gives ``step``, if the tail reaches it without a gap."""
        deltas = tuple(delta for delta in self.deltas if delta.step <= step)
        if self.base is None or self.base.step + len(deltas) != step or not deltas:
            return None
        return PartPlan(
            part=part, layout=self.base.layout, base=self.base, deltas=deltas, link=deltas[-1].id,
            origin=self.origin,
        )  # fmt: skip


@dataclasses.dataclass(slots=True)
class Progress:
    """How far the background work is; read by status."""

    stored: int = -1
    drained: int = -1
    base: int = -1
    far_base: int = -1
    near_floor: int = -1
    far_floor: int = -1
    bytes_drained: int = 0
    bytes_bases: int = 0
    compactions: int = 0
    drift: Drift | None = None
    exactness: str = "exact"
    cpu_s: float = 0.0
    degraded: bool = False
    behind: bool = False


SAID_AGAIN_S = 60.0


class Lag:
    """Says that the far tier is further behind than it may be, once a minute at most.

    ``most``: steps. What was stored before this process counts for nothing here.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._first: int | None = None
        self._quiet_until = 0.0

    def look(self, progress: Progress) -> None:
        """Something was stored, or drained: whether it is ``behind``."""
        if self._first is None and progress.stored >= 0:
            self._first = progress.stored
        if self._first is None:
            return
        steps = progress.stored - max(progress.drained, self._first - 1)
        if steps > self._most and time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + SAID_AGAIN_S
            log.warning(
                "the far tier is %d steps behind, more than object_lag (%d): it does not keep up, "
                "and a machine that is lost takes these steps along", steps, self._most,
            )  # fmt: skip
        progress.behind = steps > self._most
