"""The door: an agent's memory as a tier that is served. What comes in is for the core to decide.

A name ``ram/CALLER`` is the door for one caller: a trainer's rank by the name it has opened with,
or a peer by ``@NODE``. What the memory has no room for lies in the LMDB, and is found here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from adacheck_store.catalog import RecordRef, make_ref
from adacheck_store.drain import copy_records
from adacheck_store.format.errors import (
    AdaCheckError,
    BaseNeededError,
    OrderError,
    RecordNotFoundError,
    TermError,
    TierBusyError,
    TierFullError,
    TierUnavailableError,
    UnsupportedError,
    UsageError,
)
from adacheck_store.format.head import SealedHead
from adacheck_store.format.keys import Key, parse_key
from adacheck_store.tiers.base import Source, Tier, TierTraits
from adacheck_store.tiers.intake import LINKED_KINDS, check_sources, sizes_of
from adacheck_store.tiers.places import Places, places_of

from . import events as ev
from .replica import LMDB, RAM

NAME = "ram"
HEAD_BYTES = 8 << 10
"""What a head is taken to be before it is there; what it is beyond that has its room kept."""

PUT_S = 30.0
"""How long an offer may wait; the core decides sooner."""

SYNC_S = 20.0
"""How long a trainer waits for all live holders. One that is dead is not waited for as long."""

ERRORS: Mapping[str, type[AdaCheckError]] = {
    "term": TermError, "full": TierFullError, "base": BaseNeededError, "time": TierBusyError,
    "budget": UsageError, "lost": TierUnavailableError,
}  # fmt: skip
HINTS = {
    "term": "this process must stop; restore() in a new one",
    "full": "give the agent more memory, or its LMDB more room",
    "base": "the next boundary brings it",
    "time": "see the agents' status; a captured base follows when they answer",
    "lost": "a captured base follows",
    "budget": "start the agent with more --memory, or more agents",
}


class Desk(Protocol):
    """What a door needs of the shell behind it."""

    @property
    def places(self) -> Mapping[int, Tier]:
        """The tiers here, by place."""
        ...

    def ask(self, make: Callable[[str, float], ev.Event], timeout_s: float) -> ev.Command:
        """Tell the core an event, made of a fresh token and the end of the time limit.

        Returns the command that answers it; a refusal for want of time if none does.
        """
        ...

    def tell(self, event: ev.Event) -> None:
        """Tell the core an event."""
        ...

    def knows(self, caller: str) -> bool:
        """True if a trainer has opened its term here under that name."""
        ...

    def holder(self) -> str:
        """Who holds the newest term; see `terms.holder_of`."""
        ...


class Doors(Mapping[str, Tier]):
    """The tiers of an agent by name: ``ram/CALLER``, ``ram`` (to read) and ``lmdb``."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def __getitem__(self, name: str) -> Tier:
        kind, _, caller = name.partition("/")
        if kind == NAME:
            return Door(self._desk, caller)
        if name == "lmdb":
            return ReadOnly(self._desk.places[LMDB])
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter((NAME, "lmdb"))

    def __len__(self) -> int:
        return 2


def refusal(desk: Desk, command: ev.Command, **place: str) -> AdaCheckError | None:
    """The error that a refusal is, None for any other command."""
    if not isinstance(command, ev.Refuse):
        return None
    message = command.message
    if command.why == "term":
        message += desk.holder()
    return ERRORS[command.why](message, hint=HINTS[command.why], **place)


class ReadOnly(Tier):
    """A tier of the agent that others may read, and nobody else may change."""

    def __init__(self, inner: Tier) -> None:
        self.traits = inner.traits
        self._inner = inner

    def put(self, sources: Sequence[Source]) -> None:
        """Refused: raises `UnsupportedError`."""
        raise _refused("puts")

    def head(self, key: str) -> SealedHead:
        """The verified head of a record."""
        return self._inner.head(key)

    def read(self, key: str, array: str, first: int, count: int) -> bytes | memoryview:
        """Bytes of a run of blocks, not verified."""
        return self._inner.read(key, array, first, count)

    def places(self, key: str) -> Places | None:
        """Where a record lies in memory that other processes of this node may read."""
        return places_of(self._inner, key)

    def list(self, prefix: str) -> Iterator[str]:
        """Keys that begin with a prefix, sorted."""
        return self._inner.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        """Refused: raises `UnsupportedError`."""
        raise _refused("deletes")

    def sync(self) -> None:
        """Nothing: nobody has put anything here."""

    def close(self) -> None:
        """Nothing: the agent closes its tiers."""


class Door(ReadOnly):
    """The agent's memory for one caller. ``sync`` returns when all live holders have it all."""

    def __init__(self, desk: Desk, caller: str) -> None:
        super().__init__(desk.places[RAM])
        self.traits = TierTraits(name=NAME)
        self._desk = desk
        self._caller = caller
        self._peer = caller[1:] if caller.startswith("@") else ""

    def put(self, sources: Sequence[Source]) -> None:
        """Let records in where the core says; raises `TermError` and `TierFullError` too."""
        keys = check_sources(sources)
        self._check_known()
        linked = [
            (key, source) for key, source in zip(keys, sources, strict=True)
            if key.kind in LINKED_KINDS
        ]  # fmt: skip
        if not linked:
            self._inner.put(sources)
            return
        offered = tuple(_expected(key, source) for key, source in linked)
        term = "" if self._peer else max(ref.term for ref in offered)
        token = ""

        def offer(given: str, _: float) -> ev.Event:
            nonlocal token
            token = given
            return ev.Offered(given, offered, term, self._peer)

        answer = self._desk.ask(offer, PUT_S)
        error = refusal(self._desk, answer, tier=NAME)
        if error is not None:
            raise error
        assert isinstance(answer, ev.Admit)
        tier = self._desk.places[answer.place]
        try:
            refs = self._store(tier, sources, [key for key, _ in linked])
        except BaseException as problem:
            self._desk.tell(ev.Failed(token, full=isinstance(problem, TierFullError)))
            raise
        conn = "" if self._peer else self._caller
        self._desk.tell(ev.Stored(token, refs, answer.place, conn))

    def _store(
        self, tier: Tier, sources: Sequence[Source], keys: Sequence[Key]
    ) -> tuple[RecordRef, ...]:  # fmt: skip
        spilled = tier is not self._inner
        run = keys[0].run
        if spilled:
            copy_documents(self._inner, tier, run)
        tier.put(sources)
        if spilled:
            copy_documents(tier, self._inner, run)
        name = tier.traits.name
        return tuple(make_ref(key, tier.head(str(key)), (name,)) for key in keys)

    def sync(self) -> None:
        """Wait for the acknowledgement; raises `BaseNeededError`, `TierBusyError`, `TermError`."""
        self._check_known()
        answer = self._desk.ask(lambda token, end: ev.Sync(token, self._caller, end), SYNC_S)
        error = refusal(self._desk, answer, tier=NAME)
        if error is not None:
            raise error

    def head(self, key: str) -> SealedHead:
        """The verified head of a record, in memory or spilled."""
        try:
            return super().head(key)
        except RecordNotFoundError:
            spill = self._desk.places.get(LMDB)
            if spill is None:
                raise
            return spill.head(key)

    def read(self, key: str, array: str, first: int, count: int) -> bytes | memoryview:
        """Bytes of a run of blocks, in memory or spilled; not verified."""
        try:
            return super().read(key, array, first, count)
        except RecordNotFoundError:
            spill = self._desk.places.get(LMDB)
            if spill is None:
                raise
            return spill.read(key, array, first, count)

    def _check_known(self) -> None:
        if not self._peer and not self._desk.knows(self._caller):
            raise OrderError(
                "the agent knows nothing of this trainer: it has not opened its term here, or the "
                "agent was started since", hint="open the term again", tier=NAME,
            )  # fmt: skip


def documents(tier: Tier, run: str) -> Iterator[str]:
    """Keys of the layouts and manifests that a tier holds."""
    for text in tier.list(f"{run}/"):
        if parse_key(text).kind in ("layout", "manifest"):
            yield text


def copy_documents(source: Tier, target: Tier, run: str) -> None:
    """Copy the layouts and manifests that another tier lacks."""
    have = set(documents(target, run))
    missing = [key for key in documents(source, run) if key not in have]
    if missing:
        copy_records([source], target, missing)


def _expected(key: Key, source: Source) -> RecordRef:
    """What is known of a record before it comes."""
    sizes = sizes_of(source)
    if sizes is None:
        raise OrderError("a record of unknown size", key=str(key), hint="announce its sizes")
    return RecordRef(
        key=str(key), kind=key.kind, term=key.term, part=key.part, step=key.step, id="",
        parent="", manifest="", layout="", tiers=(), nbytes=sum(sizes.values()) + HEAD_BYTES,
    )  # fmt: skip


def _refused(what: str) -> AdaCheckError:
    return UnsupportedError(
        f"an agent's tier takes no {what} from others", hint="the agent itself keeps it"
    )
