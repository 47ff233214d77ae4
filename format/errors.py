"""Every error of adacheck-store, in one tree.

::

    AdaCheckError                    carries run, term, part, step, tier, key, path and a hint
    ├── FormatError                  bytes that are not what they should be
    │   ├── NotOursError             no record or store of ours
    │   ├── TooNewError              written by a newer format; upgrade to read it
    │   ├── TruncatedError           fewer bytes than announced
    │   ├── MalformedError           breaks a rule of FORMAT.md
    │   └── DigestMismatchError      bytes differ from their digest or id
    ├── ChainError                   records that do not fit together
    │   ├── ChainBrokenError         a parent is missing or another one
    │   ├── ForkError                two ids under one delta's key
    │   ├── BaseNeededError          what a delta follows on is nowhere: send a captured base
    │   └── ReplayMismatchError      a fold differs from the trainer's fingerprints
    ├── TierError                    a place that keeps records
    │   ├── RecordNotFoundError      no such record here
    │   ├── TierFullError            no space left
    │   ├── TierReadOnlyError        the medium or the permission refuses writes
    │   ├── TierBusyError            another process holds it
    │   ├── TierDamagedError         its own structure does not verify
    │   ├── TierUnavailableError     it does not answer
    │   ├── AccessRefusedError       credentials, permission, region or clock are refused
    │   └── PeerRefusedError         the agent there does not let us in
    ├── TermError                    a newer term has taken over this run
    ├── GroupError                   the ranks of a run do not agree, or one did not come
    ├── RestoreError                 nothing, or not what was asked, can be proven
    │   └── NotProvableError         the step asked for cannot be produced
    └── UsageError                   the caller's side
        ├── NameRefusedError         a run, part or tensor name outside the grammar
        ├── ModelMismatchError       names, shapes, dtypes or optimizer differ from the chain
        ├── UnsupportedError         known, and not supported
        └── OrderError               a call at the wrong time
"""

from __future__ import annotations

from typing import Any, Self

PLACES = ("run", "term", "part", "step", "tier", "key", "path")
"""What an error may say of where it happened."""


class AdaCheckError(Exception):
    """Root of all errors: a message, where it happened, and what to do next.

    ``message`` says what is wrong; ``hint`` what the operator can do. The place is
    given by whichever of ``run``, ``term``, ``part``, ``step``, ``tier``, ``key`` and
    ``path`` are known. ``exit_code`` is what the command line ends with.
    """

    exit_code = 3

    def __init__(self, message: str, *, hint: str = "", **place: Any) -> None:
        self.message = message
        self.hint = hint
        self.place: dict[str, Any] = {}
        super().__init__(message)
        self.at(**place)

    def at(self, **place: Any) -> Self:
        """Add what the raiser did not know about the place; known entries stay. Returns self."""
        unknown = set(place) - set(PLACES)
        if unknown:
            raise TypeError(f"unknown place of an error: {sorted(unknown)}")
        for name, value in place.items():
            if value not in (None, ""):
                self.place.setdefault(name, value)
        return self

    def __str__(self) -> str:
        where = " ".join(f"{name}={self.place[name]}" for name in PLACES if name in self.place)
        text = f"{self.message} [{where}]" if where else self.message
        return f"{text} -> {self.hint}" if self.hint else text


class FormatError(AdaCheckError):
    """Bytes that are not what they should be."""

    exit_code = 1


class NotOursError(FormatError):
    """No record or store of ours."""

    exit_code = 2


class TooNewError(FormatError):
    """Written by a newer format, or requires a feature this version does not know."""

    exit_code = 3


class TruncatedError(FormatError):
    """Fewer bytes than announced."""


class MalformedError(FormatError):
    """Breaks a rule of FORMAT.md; ``rule`` is its short name."""

    def __init__(self, message: str, *, rule: str = "", hint: str = "", **place: Any) -> None:
        self.rule = rule
        super().__init__(message, hint=hint, **place)


class DigestMismatchError(FormatError):
    """Bytes differ from their digest, or a head from its id."""


class ChainError(AdaCheckError):
    """Records that do not fit together."""

    exit_code = 1


class ChainBrokenError(ChainError):
    """A parent is missing, or is another record than the one named."""


class ForkError(ChainError):
    """Two different ids under one delta's key."""


class BaseNeededError(ChainError):
    """A step cannot be built on what the holders have: a captured base has to come."""


class ReplayMismatchError(ChainError):
    """A fold of the chain differs from what the trainer had.

    ``last_match`` is the last step at which the block that differs was seen to agree.
    """

    last_match: int = -1


class TierError(AdaCheckError):
    """A place that keeps records failed."""


class RecordNotFoundError(TierError):
    """No such record, array or block in this tier."""


class TierFullError(TierError):
    """No space left in the tier or on its medium."""


class TierReadOnlyError(TierError):
    """The medium or the permissions refuse writes."""


class TierBusyError(TierError):
    """Another process holds the tier."""


class TierDamagedError(TierError):
    """The tier's own structure does not verify; its records are not reached."""

    exit_code = 1


class TierUnavailableError(TierError):
    """The tier does not answer."""


class AccessRefusedError(TierError):
    """A server lets us in not at all: credentials, permission, region, clock or certificate."""


class PeerRefusedError(TierError):
    """The agent there does not let us in: another key, run, user or version."""


class TermError(AdaCheckError):
    """A newer term has taken over this run; this writer must stop."""


class GroupError(AdaCheckError):
    """The ranks of a run do not agree, or one of them did not come in time."""


class RestoreError(AdaCheckError):
    """Nothing, or not what was asked for, can be proven."""


class NotProvableError(RestoreError):
    """The step asked for cannot be produced from what the tiers hold."""


class UsageError(AdaCheckError):
    """The caller's side: names, order, settings."""

    exit_code = 2


class NameRefusedError(UsageError):
    """A run, part, array or tensor name outside the grammar."""


class ModelMismatchError(UsageError):
    """Names, shapes, dtypes, groups or optimizer class differ from the chain's."""


class UnsupportedError(UsageError):
    """Known, and not supported; the message says what to do instead."""


class OrderError(UsageError):
    """A call at the wrong time, or one too many."""
