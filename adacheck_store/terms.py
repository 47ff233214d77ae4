"""Terms and the run's log: claims by conditional create, fencing, floors."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from adacheck_store.format.errors import (
    AdaCheckError,
    ForkError,
    FormatError,
    RecordNotFoundError,
    TermError,
    TierDamagedError,
    TierError,
    UsageError,
)
from adacheck_store.format.keys import Term, log_key, new_term, parse_key
from adacheck_store.format.manifest import Claim, Entry, Floor, Tag, decode_log
from adacheck_store.format.record import Record
from adacheck_store.tiers.base import RecordSource, Tier
from adacheck_store.tiers.zarr import ZarrTier

from .config import writer_info

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 64
"""Log entries tried by one claim or floor before giving up: each loss means another writer won."""

CLAIM_S = 600.0
"""How long a claim without manifest or a sign of life keeps older terms from deleting."""

RENEW_S = 60.0
"""How often a claim gives a sign of life while its owner restores."""

ENDS_S = 6.0
"""Longest wait for one that is being given: a tier that hangs must not hold what comes after."""


@dataclass(frozen=True, slots=True)
class _Log:
    """A run's log: its readable entries, how many are damaged, and the newest index (0: none)."""

    entries: list[Entry]
    damaged: int
    last: int

    @classmethod
    def read(cls, tier: Tier, run: str) -> _Log:
        """The log as it stands in a tier."""
        entries: list[Entry] = []
        damaged = last = 0
        for text in tier.list(f"{run}/log/"):
            last = parse_key(text).step
            try:
                entries.append(decode_log(tier.head(text).head))
            except RecordNotFoundError:
                continue  # a superseded floor, or a tag, deleted since it was listed
            except FormatError as error:
                log.warning("damaged log entry: %s", error.at(tier=tier.traits.name, key=text))
                damaged += 1
        return cls(entries, damaged, last)


def read_log(tier: Tier, run: str) -> list[Entry]:
    """The run's log in a tier, oldest first, without entries that are damaged."""
    return _Log.read(tier, run).entries


def last_index(tier: Tier, run: str) -> int:
    """Index of the newest log entry, 0 if there is none."""
    return max((parse_key(text).step for text in tier.list(f"{run}/log/")), default=0)


def _append(tier: Tier, run: str, make: Callable[[int, _Log], Entry | None]) -> Entry | None:
    """Put an entry at the next free index; a taken one is passed over. None if ``make`` gave up.

    ``make`` is told the index and all that stands before it. Of two entries that come at the same
    time one at least is made from a log that has the other.
    """
    for _ in range(MAX_ATTEMPTS):
        seen = _Log.read(tier, run)
        index = seen.last + 1
        entry = make(index, seen)
        if entry is None:
            return None
        key = str(log_key(run, index))
        try:
            tier.put([RecordSource(key, Record(entry.seal(writer_info()), {}))])
        except (ForkError, RecordNotFoundError):
            continue  # somebody was faster, or has just taken back what stood there
        tier.sync()
        now = _Log.read(tier, run)
        if now.last == index and all(item in seen.entries for item in now.entries[:-1]):
            return entry
        # Entries exist that we have not seen: beyond ours, which took the place of a superseded
        # floor, or before it, in that of a tag taken back. What we derived from our reading is
        # stale. It has had no effect; take it back.
        tier.delete([key])
    raise TierError(
        f"no free log entry after {MAX_ATTEMPTS} attempts", run=run, tier=tier.traits.name,
        hint="many writers claim this run at once: stop all but one",
    )  # fmt: skip


def claim_term(tier: Tier, run: str, seen: Iterable[str] = ()) -> Term:
    """Open a new term by conditional create in the run's log; returns it.

    Its number is greater than any claimed in the log or named in ``seen`` (terms that other
    tiers hold, should the log have lost some); a damaged entry may have been a claim.
    """
    known = [Term.parse(text).number for text in seen]

    def make(index: int, seen: _Log) -> Claim:
        claimed = [Term.parse(item.term).number for item in seen.entries if isinstance(item, Claim)]
        number = max([0, *claimed, *known]) + seen.damaged + 1
        return Claim(run=run, term=str(new_term(number)), index=index)

    claim = _append(tier, run, make)
    assert claim is not None
    return Term.parse(claim.term)


def excuse_term(tier: Tier, run: str, term: Term, why: str) -> None:
    """Say in the log that the end of a term is no death: by a second claim, which opens nothing."""
    _append(tier, run, lambda index, _: Claim(run=run, term=str(term), index=index, excuse=why))


def put_floor(
    tier: Tier, run: str, *, term: str, terms: tuple[str, ...], step: int, kept: tuple[int, ...],
    ignore: Iterable[str] = (), logged: int | None = None,
) -> Floor | None:  # fmt: skip
    """Write a floor for a tier into that tier's log, synced; older floors it covers go.

    None if the log has a newer claim (but those to ``ignore``, while they have no manifest): its
    owner may be restoring from what lies below, or have begun a term that stands on it; if it has
    a tag for a step that the floor covers; and if it has a floor after the entry ``logged``, by
    which this one was chosen: it may keep steps that this one would not.
    Raises `TierDamagedError` for a log with an entry that cannot be read, which may keep any step.
    """
    name = tier.traits.name
    dead = set(ignore)

    def revived() -> bool:
        return any(any(tier.list(f"{run}/{claim}/manifest/")) for claim in dead)

    def make(index: int, seen: _Log) -> Floor | None:
        if {claim.term for claim in _newer(seen.entries, Term.parse(term))} - dead or revived():
            return None
        floor = Floor(run=run, term=term, index=index, tier=name, terms=terms, step=step, kept=kept)
        if seen.damaged:
            raise TierDamagedError(
                f"{seen.damaged} entries of the log cannot be read: what they keep is not known, "
                "and nothing is deleted", run=run, term=term, tier=name,
                hint="adacheck-store fsck --repair rebuilds them or sets them aside",
            )  # fmt: skip
        late = logged is not None and any(
            isinstance(entry, Floor) and entry.index > logged for entry in seen.entries
        )
        tags = [entry for entry in seen.entries if isinstance(entry, Tag)]
        if late:
            return None
        return None if any(floor.covers(tag.term, "base", tag.step) for tag in tags) else floor

    floor = _append(tier, run, make)
    if floor is None:
        return None
    assert isinstance(floor, Floor)
    if revived():  # it has begun meanwhile, and may not have seen this floor
        tier.delete([str(log_key(run, floor.index))])
        return None
    covered = [
        str(log_key(run, old.index))
        for old in read_log(tier, run)
        if isinstance(old, Floor) and old.index < floor.index
        and set(old.terms) <= set(terms) and old.step <= step
        and {below for below in kept if below < old.step} <= set(old.kept)
    ]  # fmt: skip
    tier.delete(covered)
    return floor


def put_tag(tier: Tier, run: str, *, term: str, name: str, step: int) -> Tag:
    """Give a step of a term (or of its ancestors) a name, synced; no later floor covers the step.

    A floor and a tag that come at the same time see each other: an entry of the log is made from
    all that stand before it. Raises `UsageError` if the name is taken, or the step already gone.
    """

    def make(index: int, seen: _Log) -> Tag:
        for entry in seen.entries:
            if isinstance(entry, Tag) and entry.name == name:
                raise UsageError(
                    f"the tag {name!r} stands, for step {entry.step}", run=run, step=step,
                    hint="choose another name, or remove it first",
                )  # fmt: skip
            if isinstance(entry, Floor) and entry.covers(term, "base", step):
                raise UsageError(
                    f"the step lies below the floor of tier {tier.traits.name}, step {entry.step}",
                    run=run, step=step, hint="what is below a floor is about to be deleted",
                )  # fmt: skip
        return Tag(run=run, term=term, index=index, name=name, step=step)

    tag = _append(tier, run, make)
    assert isinstance(tag, Tag)
    return tag


def remove_tag(tier: Tier, run: str, name: str) -> list[Tag]:
    """Take a tag back; the next floor may pass its step. Empty if there is none of that name."""
    found = [tag for tag in read_log(tier, run) if isinstance(tag, Tag) and tag.name == name]
    tier.delete([str(log_key(run, tag.index)) for tag in found])
    tier.sync()
    return found


def newer_claims(tier: Tier, run: str, term: Term) -> dict[str, float]:
    """Terms claimed in a tier's log with a greater number, and when their owners last gave a sign
    of life, by the store's clock (0.0 in a tier that keeps no time).

    One whose time is not told, for it is being written at this moment, gives a sign now (inf)."""
    newer = _newer(read_log(tier, run), term)
    keeps = isinstance(tier, ZarrTier)
    times = tier.times(f"{run}/log/") if newer and isinstance(tier, ZarrTier) else {}
    found: dict[str, float] = {}
    for claim in newer:
        at = times.get(str(log_key(run, claim.index)), math.inf if keeps else 0.0)
        found[claim.term] = max(at, found.get(claim.term, 0.0))
    return found


def _newer(entries: Iterable[Entry], term: Term) -> list[Claim]:
    claims = [entry for entry in entries if isinstance(entry, Claim)]
    return [claim for claim in claims if Term.parse(claim.term).number > term.number]


@contextmanager
def renewed(tier: Tier, run: str, term: Term | None) -> Iterator[None]:
    """Give signs of life of a claim while its owner restores, however long that takes.

    Every `RENEW_S` the claim is written again as it is: nobody but the clock sees it. Nothing is
    done without a term (ranks but the one that has claimed), or in a tier that keeps no time.
    """
    if term is None or not isinstance(tier, ZarrTier):
        yield
        return
    ended = threading.Event()

    def renew() -> None:
        keys = [str(log_key(run, entry.index)) for entry in read_log(tier, run)
                if isinstance(entry, Claim) and entry.term == str(term)]  # fmt: skip
        if keys:
            tier.renew(keys[0])

    def work() -> None:
        while not ended.wait(RENEW_S):
            try:
                renew()
            except AdaCheckError as error:
                log.warning("the claim of term %s was not renewed: %s", term, error)

    thread = threading.Thread(target=work, name="adacheck-claim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=ENDS_S)


class Rivals:
    """Newer claims as a writer sees them: those that may be restoring, and those given up.

    A newer claim with a manifest fences; one that has stood here for `CLAIM_S` without, and
    without a sign of life, is taken for dead: else a failed start would keep the older term from
    pruning for ever.
    """

    def __init__(self, tier: Tier, run: str, term: Term) -> None:
        self._place = (tier, run, term)
        self._seen: dict[tuple[str, float], float] = {}

    def look(self) -> tuple[set[str], set[str]]:
        """Claims to wait for, and claims to ignore."""
        now, signs = time.monotonic(), newer_claims(*self._place).items()
        self._seen = {sign: self._seen.get(sign, now) for sign in signs}
        dead = {claim for (claim, _), since in self._seen.items() if now - since > CLAIM_S}
        return {claim for claim, _ in signs} - dead, dead


def fenced_by(tier: Tier, run: str, term: Term) -> Term | None:
    """A newer term that has both a claim and a manifest in the log's tier, or None."""
    for entry in reversed(read_log(tier, run)):
        if isinstance(entry, Claim):
            other = Term.parse(entry.term)
            newer = other.number > term.number
            if newer and any(tier.list(f"{run}/{entry.term}/manifest/")):
                return other
    return None


def holder_of(tier: Tier, run: str, term: str) -> str:
    """Who holds a term, as its manifest says: `` (host h, pid 7)``; empty if nobody can tell."""
    with suppress(AdaCheckError, ValueError):
        for key in tier.list(f"{run}/{term}/manifest/"):
            info = json.loads(tier.head(key).info)
            if "host" in info:
                pid = f", pid {info['pid']}" if "pid" in info else ""
                return f" (host {info['host']}{pid})"
    return ""


def check_fence(tier: Tier, run: str, term: Term) -> None:
    """Before anything counts as acknowledged in the log's tier, or is deleted: is the run ours?"""
    other = fenced_by(tier, run, term)
    if other is not None:
        raise TermError(
            f"term {other}{holder_of(tier, run, str(other))} has taken over this run",
            run=run, term=str(term),
            hint="this process must stop; restore() in a new one",
        )  # fmt: skip
