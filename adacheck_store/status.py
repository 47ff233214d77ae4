"""What a running writer tells about itself."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from adacheck_store.format.errors import AdaCheckError, TermError

from .catalog import RecordRef
from .drift import Drift
from .store import Store
from .tail import Progress
from .writer import Writer


class Background(Protocol):
    """What a session needs of whoever compacts, drains and prunes behind its writer."""

    @property
    def progress(self) -> Progress:
        """How far the work is."""
        ...

    @property
    def error(self) -> AdaCheckError | None:
        """What keeps something from being done, if anything does."""
        ...

    @property
    def notice(self) -> str:
        """What somebody has to do something about, though nothing fails; empty: nothing."""
        ...

    @property
    def fenced(self) -> TermError | None:
        """That a newer term has the run, once it has."""
        ...

    @property
    def busy_since(self) -> Mapping[str, float | None]:
        """Since when each thread has been at what it is doing."""
        ...

    def stored(self, step: int, refs: list[RecordRef]) -> None:
        """Take note of what is durable in the near tier."""
        ...

    def flush(self, timeout_s: float | None) -> bool:
        """Drain all that is stored; False if the time ran out."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Stop; False if the time ran out."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """State of a run's writer.

    ``step`` is the last boundary handed over, ``stored`` the last one synced in the near tier,
    ``drained`` the last one in the far tier, ``base`` the newest base. ``exposed``: training goes
    on without being saved. ``behind``: the far tier is more than ``object_lag`` steps behind what
    is stored nearer, for it does not keep up. ``degraded``: fewer than k+1 agents hold this rank's
    newest step.
    ``last_error``: what keeps something from being done, or waits for somebody to do something.
    ``exactness`` is the class of the newest base; ``mismatch`` says what the last fold found wrong
    with the chain, if one ever did. ``passed_over`` says which newer steps the restore has passed
    over because every attempt from there had died. ``redundancy`` tells what was found of copies
    on several ranks. ``drift`` is how far folds here were from what
    the trainer had, as the last captured base showed it (None: nothing was compared, as in class
    ``exact``). ``busy_s`` says for how long each thread has been at what it is doing: at a tier
    that hangs, for as long as it hangs. ``requests`` are those of this process to an S3 store, by
    kind; ``again`` counts those among them that were repeated. Bytes are totals since the
    writer started; ``background_cpu_s`` is the processor time of the writer's and upkeep's threads.
    """

    run: str
    term: str
    step: int
    stored: int
    drained: int
    base: int
    in_flight: int
    exposed: bool
    gap: str
    last_error: str
    bytes_stored: int
    bytes_bases: int
    bytes_drained: int
    compactions: int
    background_cpu_s: float
    near: str
    far: str
    exactness: str = "exact"
    mismatch: str = ""
    drift: Drift | None = None
    busy_s: Mapping[str, float] = field(default_factory=dict)
    passed_over: str = ""
    degraded: bool = False
    behind: bool = False
    requests: Mapping[str, int] = field(default_factory=dict)
    redundancy: str = ""


def status_of(
    store: Store, writer: Writer, upkeep: Background, *, run: str, term: str, step: int,
    mismatch: str, passed_over: str,
) -> Status:  # fmt: skip
    """Where a writer and its upkeep stand."""
    progress = dataclasses.replace(upkeep.progress)
    error = writer.error or upkeep.error
    return Status(
        run=run, term=term, step=step, stored=progress.stored,
        drained=progress.drained, base=progress.base, in_flight=writer.in_flight,
        exposed=writer.exposed or writer.gap is not None,
        gap=str(writer.gap["reason"]) if writer.gap else "",
        last_error=str(error) if error else upkeep.notice, bytes_stored=writer.bytes_put,
        bytes_bases=progress.bytes_bases, bytes_drained=progress.bytes_drained,
        compactions=progress.compactions, background_cpu_s=writer.cpu_s + progress.cpu_s,
        near=store.near.traits.name, far=store.far.traits.name,
        exactness=progress.exactness, mismatch=mismatch, drift=progress.drift,
        busy_s=busy(writer, upkeep), passed_over=passed_over, degraded=progress.degraded,
        behind=progress.behind,
        requests=store.far.requests(),
    )  # fmt: skip


def busy(writer: Writer, upkeep: Background) -> dict[str, float]:
    """For how many seconds each thread has been at what it is doing; those that rest are left."""
    since = {"writer": writer.busy_since, **upkeep.busy_since}
    now = time.monotonic()
    return {name: now - start for name, start in since.items() if start is not None}


def unsaved(store: Store, writer: Writer, upkeep: Background, step: int) -> str:
    """What is not stored or not drained, and who has been at it for how long."""
    near, far = store.near.traits.name, store.far.traits.name
    at = ", ".join(f"{name} busy for {s:.0f} s" for name, s in busy(writer, upkeep).items())
    return (
        f"of {step} steps, tier {near} has those up to {writer.linked}, "
        f"tier {far} those up to {max(upkeep.progress.drained, 0)} ({at or 'no thread is busy'})"
    )
