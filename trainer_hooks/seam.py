"""What a checkpointer needs of the store's side, and what it reports of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from adacheck_store.boundary import Boundary, Link
from adacheck_store.format.layout import Layout
from adacheck_store.format.record import Record
from adacheck_store.group import Group
from adacheck_store.redundancy.shares import Sharing

T = TypeVar("T")

log = logging.getLogger(__name__)


class Session(Protocol):
    """What a checkpointer needs of `adacheck_store.session.RunSession`."""

    run: str

    @property
    def term(self) -> str:
        """The term that was claimed, also after `close`."""
        ...

    def restore(
        self, *, step: int | None = None, layout: Layout | None = None,
        bare: frozenset[str] = ...,
    ) -> Any:  # fmt: skip
        """Claim a term; the restored state in the pieces of ``layout``, None on a fresh run.

        Of those named in ``bare`` the optimizer's state is not needed.
        """
        ...

    def start(
        self, layout: Layout, *, start_step: int,
        base: Callable[[Link], Record], extra: Callable[[Link], Record],
    ) -> None:  # fmt: skip
        """Write the manifest, and a first base where the chain needs one."""
        ...

    def together(self, what: str, work: Callable[[], T]) -> T:
        """Do something on every rank; where it fails on any, all raise."""
        ...

    def follow(
        self, layout: Layout, step: int, sharing: Sharing | None = None, group: Group | None = None
    ) -> None:
        """Tell all ranks, in ``group``, that from this boundary on the part has another layout."""
        ...

    def append(self, boundary: Boundary) -> None:
        """Hand a boundary over."""
        ...

    def wants_base(self, *, now: bool = False) -> Mapping[str, Any] | None:
        """The gap that the next boundary should close."""
        ...

    def check(self) -> None:
        """Raise what must stop this writer."""
        ...

    def flush(
        self, timeout_s: float | None = None, *, far: bool = True,
        settled: Callable[[], None] = ...,
    ) -> None:  # fmt: skip
        """Wait until everything is synced and, if ``far``, drained.

        ``settled`` is called once all handed over is stored or given up.
        """
        ...

    def status(self) -> Any:
        """Where the writer stands."""
        ...

    def hurry(self) -> None:
        """Have everything stored drained at once, without waiting for it; any thread."""
        ...

    def close(self, timeout_s: float | None = None) -> None:
        """Stop."""
        ...


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Log what would be raised."""
    try:
        yield
    except Exception as error:
        log.warning("while an exception leaves: %s", error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What `Checkpointer.restore` found.

    ``step`` is the step the run goes on from (``start_step`` on a fresh run, where
    ``certificate`` is None). ``lost`` counts newer steps that were seen and not taken, for
    ``reasons``; ``tiers`` maps tiers to the bytes they gave. ``carried`` is what
    `Checkpointer.carry` was given before that step.
    """

    step: int
    certificate: Any = None
    lost: int = 0
    reasons: tuple[str, ...] = ()
    tiers: Mapping[str, int] | None = None
    carried: Any = None

    @classmethod
    def of(cls, restored: Any, carried: Any) -> RestoreReport:
        """What there is to report of a `restore.Restored`."""
        return cls(
            step=restored.step, certificate=restored.certificate, lost=restored.lost,
            reasons=tuple(restored.reasons), tiers=restored.tiers, carried=carried,
        )  # fmt: skip

    @property
    def fresh(self) -> bool:
        """True where there was nothing to restore."""
        return self.certificate is None
