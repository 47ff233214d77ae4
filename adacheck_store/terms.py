"""Terms and the run's log: claims by conditional create, fencing, floors."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

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

from .config import writer_info

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 64
"""Log entries tried by one claim or floor before giving up: each loss means another writer won."""

CLAIM_S = 600.0
"""How long a claim without manifest keeps older terms from deleting."""


def read_log(tier: Tier, run: str) -> list[Entry]:
    """The run's log in a tier, oldest first, without entries that are damaged."""
    return _read_log(tier, run)[0]


def _read_log(tier: Tier, run: str) -> tuple[list[Entry], int]:
    """The log's readable entries, and how many are damaged."""
    entries: list[Entry] = []
    damaged = 0
    for text in tier.list(f"{run}/log/"):
        try:
            entries.append(decode_log(tier.head(text).head))
        except RecordNotFoundError:
            continue  # a superseded floor, or a tag, deleted since it was listed
        except FormatError as error:
            log.warning("damaged log entry: %s", error.at(tier=tier.traits.name, key=text))
            damaged += 1
    return entries, damaged


def last_index(tier: Tier, run: str) -> int:
    """Index of the newest log entry, 0 if there is none."""
    return max((parse_key(text).step for text in tier.list(f"{run}/log/")), default=0)


def _append(tier: Tier, run: str, make: Callable[[int], Entry | None]) -> Entry | None:
    """Put an entry at the next free index; a taken one is passed over. None if ``make`` gave up."""
    for _ in range(MAX_ATTEMPTS):
        index = last_index(tier, run) + 1
        entry = make(index)
        if entry is None:
            return None
        key = str(log_key(run, index))
        try:
            tier.put([RecordSource(key, Record(entry.seal(writer_info()), {}))])
        except (ForkError, RecordNotFoundError):
            continue  # somebody was faster, or has just taken back what stood there
        tier.sync()
        if last_index(tier, run) == index:
            return entry
        # Entries beyond ours exist: our listing was stale (ours took the place of a superseded
        # floor), so what we derived from it is too. It has had no effect; take it back.
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

    def make(index: int) -> Claim:
        entries, damaged = _read_log(tier, run)
        claimed = [Term.parse(entry.term).number for entry in entries if isinstance(entry, Claim)]
        number = max([0, *claimed, *known]) + damaged + 1
        return Claim(run=run, term=str(new_term(number)), index=index)

    claim = _append(tier, run, make)
    assert claim is not None
    return Term.parse(claim.term)


def excuse_term(tier: Tier, run: str, term: Term, why: str) -> None:
    """Say in the log that the end of a term is no death: by a second claim, which opens nothing."""
    _append(tier, run, lambda index: Claim(run=run, term=str(term), index=index, excuse=why))


def put_floor(
    tier: Tier, run: str, *, term: str, terms: tuple[str, ...], step: int, kept: tuple[int, ...],
    ignore: Iterable[str] = (), logged: int | None = None,
) -> Floor | None:  # fmt: skip
    """Write a floor for a tier into that tier's log, synced; older floors it covers go.

    None if the log has a newer claim (but those to ``ignore``): its owner may be restoring from
    what lies below; if it has a tag for a step that the floor covers; and if it has a floor after
    the entry ``logged``, by which this one was chosen: it may keep steps that this one would not.
    Raises `TierDamagedError` for a log with an entry that cannot be read, which may keep any step.
    """
    name = tier.traits.name
    dead = set(ignore)

    def make(index: int) -> Floor | None:
        if set(newer_claims(tier, run, Term.parse(term))) - dead:
            return None
        floor = Floor(run=run, term=term, index=index, tier=name, terms=terms, step=step, kept=kept)
        entries, damaged = _read_log(tier, run)
        if damaged:
            raise TierDamagedError(
                f"{damaged} entries of the log cannot be read: what they keep is not known, and "
                "nothing is deleted", run=run, term=term, tier=name,
                hint="adacheck-store fsck --repair rebuilds them or sets them aside",
            )  # fmt: skip
        late = logged is not None and any(
            isinstance(entry, Floor) and entry.index > logged for entry in entries
        )
        tags = [entry for entry in entries if isinstance(entry, Tag)]
        if late:
            return None
        return None if any(floor.covers(tag.term, "base", tag.step) for tag in tags) else floor

    floor = _append(tier, run, make)
    if floor is None:
        return None
    assert isinstance(floor, Floor)
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

    def make(index: int) -> Tag:
        for entry in read_log(tier, run):
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


def newer_claims(tier: Tier, run: str, term: Term) -> list[str]:
    """Terms claimed in a tier's log with a greater number."""
    claims = [entry.term for entry in read_log(tier, run) if isinstance(entry, Claim)]
    return [claim for claim in claims if Term.parse(claim).number > term.number]


class Rivals:
    """Newer claims as a writer sees them: those that may be restoring, and those given up.

    A newer claim with a manifest fences; one that has stood here for `CLAIM_S` without is taken
    for dead, lest a failed start keep the older term from pruning for ever.
    """

    def __init__(self, tier: Tier, run: str, term: Term) -> None:
        self._place = (tier, run, term)
        self._seen: dict[str, float] = {}

    def look(self) -> tuple[set[str], set[str]]:
        """Claims to wait for, and claims to ignore."""
        now = time.monotonic()
        self._seen = {claim: self._seen.get(claim, now) for claim in newer_claims(*self._place)}
        dead = {claim for claim, since in self._seen.items() if now - since > CLAIM_S}
        return self._seen.keys() - dead, dead


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
