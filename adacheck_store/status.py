"""What a running writer tells about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """State of a run's writer.

    ``step`` is the last boundary handed over, ``stored`` the last one synced in the near tier,
    ``drained`` the last one in the far tier, ``base`` the newest base. ``exposed``: training goes
    on without being saved. ``exactness`` is the class of the newest base; ``mismatch`` says what
    the last fold found wrong with the chain, if one ever did. ``drift`` is the largest difference
    of any number of the state, in its own unit, between folds here and what the trainer had, as
    the last captured base showed it, ``drift_ulps`` the largest in units in the last place,
    ``drift_steps`` over how many steps (None: nothing compared yet, or all is ``exact``). Bytes
    are totals since the writer started; ``background_cpu_s`` is the processor time of the writer's
    and upkeep's threads.
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
    drift: float | None = None
    drift_ulps: int | None = None
    drift_steps: int | None = None
