"""What an agent's core is told, and what it tells its shell to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from adacheck_store.catalog import RecordRef
from adacheck_store.format.manifest import Manifest
from adacheck_store.recovery import PartPlan

from .marks import Report, Seat


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A term has begun: said by a trainer that attaches, or learned from a peer.

    ``manifests`` are those of the line by id, ``term`` the newest. ``seats`` say who holds each
    chain, ``domains`` the failure domain of every node that has an agent, ``reserve`` the bytes
    of a base and of a delta (or extra) of each chain. ``token``: who waits for an answer.
    """

    term: str
    manifests: Mapping[str, Manifest]
    seats: Mapping[str, Seat]
    domains: Mapping[str, str]
    k: int
    reserve: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    token: str = ""


@dataclass(frozen=True, slots=True)
class Offered:
    """Somebody wants to put records: a trainer of ``term``, or a ``peer``; the other is empty."""

    token: str
    refs: tuple[RecordRef, ...]
    term: str = ""
    peer: str = ""


@dataclass(frozen=True, slots=True)
class Stored:
    """Records became visible in a place here; ``token``: of the offer or fold they came by.

    ``conn`` names the trainer's client, whatever its connections, if it was one that put them.
    """

    token: str
    refs: tuple[RecordRef, ...]
    place: int
    conn: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """What an `Admit` or `Fold` let begin has ended without records; ``full``: for want of room.

    ``last_match``: where a fold was wrong, the last step that agreed.
    """

    token: str
    full: bool = False
    last_match: int | None = None


@dataclass(frozen=True, slots=True)
class Sync:
    """A trainer waits until all that its client has put is held by all live holders."""

    token: str
    conn: str
    deadline: float


@dataclass(frozen=True, slots=True)
class Closed:
    """A trainer's client is gone."""

    conn: str


@dataclass(frozen=True, slots=True)
class Called:
    """A peer has called; it knows ``term`` as the newest."""

    peer: str
    term: str


@dataclass(frozen=True, slots=True)
class Heard:
    """A call to a peer (`Forward`) was answered. One call to a peer at a time."""

    report: Report


@dataclass(frozen=True, slots=True)
class Missed:
    """A call to a peer failed, or was not answered in time: what it carried may have arrived.

    An answer that comes later is thrown away.
    """

    peer: str


@dataclass(frozen=True, slots=True)
class Drained:
    """Records are synced in a lower place; those in neither tuple are to be tried again.

    ``passed``: they did not get there and never will, gone or damaged here, or not taken there.
    ``full``: that place has no room.
    """

    place: int
    keys: tuple[str, ...]
    full: bool = False
    passed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lost:
    """Records are no longer in a place: damaged and set aside, or pruned there."""

    place: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What the far tier has of this node's own chains of a term; None if it could not be read."""

    term: str
    refs: tuple[RecordRef, ...] | None


@dataclass(frozen=True, slots=True)
class Asked:
    """The planner of a restore that has claimed ``term`` reads the catalog, or renews its lease."""

    term: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. At least twice a second. ``attended``: trainers of this node are there."""

    attended: bool = True


Event = (
    Opened | Offered | Stored | Failed | Sync | Closed | Called | Heard | Missed | Drained | Lost
    | Surveyed | Asked | Tick
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Admit:
    """Let an offer be put, into that place; then `Stored` or `Failed` (also if nobody waits)."""

    token: str
    place: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer an offer, sync or opening with an error: ``why`` is one of `REFUSALS`."""

    token: str
    why: str
    message: str


REFUSALS = ("term", "full", "base", "time", "budget", "lost")
"""A newer term has the run; no room; need base: a captured one; not in time; memory too small;
what was put is unknown, for this process has not seen it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A sync is done: every live holder can produce what was put.

    ``holders`` are those holders, each with its ``boot``; ``short`` if they are fewer than k+1.
    """

    token: str
    holders: tuple[tuple[str, str], ...] = ()
    short: bool = False


@dataclass(frozen=True, slots=True)
class Forward:
    """Call a peer: put these records there (with their documents), and ask for its report."""

    peer: str
    refs: tuple[RecordRef, ...]


@dataclass(frozen=True, slots=True)
class Learn:
    """Ask a peer for the opening of the newest term it knows; comes back as `Opened`."""

    peer: str


@dataclass(frozen=True, slots=True)
class Fold:
    """Fold a part to a base of ``step`` into a place here; then `Stored` or `Failed`."""

    token: str
    plan: PartPlan
    step: int
    place: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Delete records from a place here; done at once."""

    place: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Copy records to a lower place and sync it; then `Drained`."""

    place: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Survey:
    """Read what the far tier has of these chains of a term; then `Surveyed`."""

    term: str
    chains: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prune:
    """The LMDB may give up what retention allows of this node's own chains, not above a step."""

    watermark: int


@dataclass(frozen=True, slots=True)
class AskBase:
    """Tell a part's trainer that its chain is wrong from ``first`` on: a captured base is due."""

    chain: str
    first: int


Command = Admit | Refuse | Answer | Forward | Learn | Fold | Drop | Drain | Survey | Prune | AskBase
