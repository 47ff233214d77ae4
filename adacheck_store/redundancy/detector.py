"""The detector: which tensors of a rank have copies on which others. Any doubt means none.

Tensors that are equal prove nothing: all LayerNorms are ones at first, all moments zeros. So each
rank looks at boundaries with an update between, and offers for comparison what it has seen change;
copies are those that were equal before and after. A state machine without threads or sockets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from adacheck_store.format.errors import UsageError

from .exchange import TOKEN_BYTES, Ranks, Rounds, copy_sets
from .sighting import Identity, Sighting, Standing

NEVER_CHANGED = "never changed, so equal bytes would prove nothing"
NO_UPDATE = "no update was applied between two looks"
SEEN_ONCE = "seen once only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A tensor of this rank and the ranks that hold copies of it, this one among them.

    ``changes`` if it was seen to. ``why`` says why other copies could not be proven; empty if
    all there are have been found.
    """

    identity: Identity
    copies: Ranks
    changes: bool = True
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Look:
    updates: int
    seen: Mapping[Identity, Sighting]


class Detector:
    """One rank's side. All ranks look at the same boundaries and carry the rounds out together.

    The first look has nothing to compare. Each later one compares anew everything that has ever
    been seen to change, so a tensor that changes late gets its turn, and copies that have come
    apart are found out.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._before: _Look | None = None
        self._moved: set[Identity] = set()
        self._updated = False

    def look(
        self, updates: int, sightings: Iterable[Sighting]
    ) -> Rounds[tuple[Finding, ...]] | None:
        """Look at a boundary: ``updates`` were applied so far, and this is how tensors are.

        Gives the rounds whose result are this rank's findings, in the order of the sightings;
        None at the first look. Raises `UsageError` if an identity is seen twice.
        """
        seen: dict[Identity, Sighting] = {}
        for sighting in sightings:
            if sighting.identity in seen:
                raise UsageError(
                    f"{sighting.identity.name} ({sighting.identity.role}) is there twice",
                    hint="give two tensors of one name a scope each",
                )
            seen[sighting.identity] = sighting
        before, self._before = self._before, _Look(updates, seen)
        if before is None:
            return None
        self._moved &= seen.keys()
        if updates > before.updates:
            self._updated = True
            self._moved |= {
                identity for identity, now in seen.items()
                if identity in before.seen and _changed(before.seen[identity], now)
            }  # fmt: skip
        return self._compare(before.seen, seen)

    def give_up(self, why: str) -> tuple[Finding, ...]:
        """Findings where ranks could not be asked: everything of the last look is its own."""
        seen = self._before.seen if self._before else ()
        alone = frozenset((self._rank,))
        return tuple(Finding(identity=each, copies=alone, why=why) for each in seen)

    def _compare(
        self, before: Mapping[Identity, Sighting], seen: Mapping[Identity, Sighting]
    ) -> Rounds[tuple[Finding, ...]]:
        doubts = {
            identity: self._doubt(before.get(identity), now) for identity, now in seen.items()
        }
        tokens = {
            identity: _token(before[identity], now)
            for identity, now in seen.items() if not doubts[identity]
        }  # fmt: skip
        sets = yield from copy_sets(self._rank, self._size, list(tokens.values()))
        alone = frozenset((self._rank,))
        return tuple(
            Finding(
                identity=identity, copies=alone if why else sets[tokens[identity]],
                changes=identity in self._moved, why=why,
            )
            for identity, why in doubts.items()
        )  # fmt: skip

    def _doubt(self, before: Sighting | None, now: Sighting) -> str:
        """Why a tensor is not offered for comparison; empty if it is."""
        if now.trouble:
            return now.trouble
        if before is None or before.trouble:
            return SEEN_ONCE
        if now.identity in self._moved or now.standing is not Standing.TRAINED:
            return ""
        return NEVER_CHANGED if self._updated else NO_UPDATE


def _changed(before: Sighting, now: Sighting) -> bool:
    return bool(before.digest and now.digest) and before.digest != now.digest


def _token(before: Sighting, now: Sighting) -> bytes:
    """What two looks say of a tensor: equal tokens were equal at both."""
    return hashlib.blake2b(before.digest + now.digest, digest_size=TOKEN_BYTES).digest()
