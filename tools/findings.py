"""What fsck says: findings, each of a kind whose meaning and remedy stand in one table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from adacheck_store.format.errors import (
    AdaCheckError,
    ForkError,
    RecordNotFoundError,
    TierDamagedError,
    TierError,
    TooNewError,
    TruncatedError,
)

DAMAGE, WARNING, INFO = "damage", "warning", "info"

CLEAN, DAMAGED, UNCHECKED, REPAIRED = 0, 1, 3, 4
"""Exit codes of a check, and of a repair after which it is clean."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of finding: how bad it is, what follows from it, what to do, what it violates."""

    severity: str
    consequence: str
    remedy: str
    invariant: str = ""
    unchecked: bool = False


_COPY = "keep the tiers that still have it safe until the next base; restore may use them"
_OLDER = "restore takes another tier's copy, or the newest step that does not need this record"
_ALONE = "keep the other tiers safe until this one has a newer base (compact makes one)"

KINDS: dict[str, Kind] = {
    "marker": Kind(
        DAMAGE, "writers refuse the store; its records are read nevertheless",
        'put adacheck.json back: {"format": "adacheck-store", "version": 1}', "INV-37",
    ),
    "tier-unread": Kind(
        WARNING, "what it holds is unknown, not absent", "make it answer, and check again",
        unchecked=True,
    ),
    "tier-damaged": Kind(
        DAMAGE, "none of its records can be reached", "restore from the other tiers; rename its "
        "folder to NAME-damaged-1, and a writer makes a new one", "INV-01",
    ),
    "quarantined": Kind(INFO, "nothing is read from it", "delete it when nothing in it is missed"),
    "too-new": Kind(
        WARNING, "this version cannot judge it", "upgrade adacheck-store", unchecked=True
    ),
    "head": Kind(DAMAGE, _OLDER, _COPY, "INV-03"),
    "swapped": Kind(DAMAGE, _OLDER, _COPY, "INV-14"),
    "body": Kind(DAMAGE, _OLDER, _COPY, "INV-12"),
    "block": Kind(DAMAGE, _OLDER, _COPY, "INV-10"),
    "padding": Kind(
        DAMAGE, "fingerprints of the block cannot agree with the trainer's",
        "restore an older base and see which writer made this one", "INV-19",
    ),
    "loose-pieces": Kind(
        WARNING, "room is wasted", "none: an odd writer made it", "INV-38"
    ),
    "document": Kind(
        DAMAGE, "restore is not affected; plain zarr may read wrong values or none",
        "let compact make another base", "INV-02",
    ),
    "layout-missing": Kind(DAMAGE, "this tier alone cannot tell what lies in it", _COPY, "INV-20"),
    "manifest-missing": Kind(DAMAGE, "this tier alone cannot place it", _COPY, "INV-20"),
    "manifest-mismatch": Kind(DAMAGE, _OLDER, _COPY, "INV-21"),
    "layout-mismatch": Kind(DAMAGE, _OLDER, _COPY, "INV-15"),
    "fork": Kind(
        DAMAGE, "the step, and what follows it, is not restored by guessing",
        "two writers of one term: stop one; restore an earlier step", "INV-22",
    ),
    "link": Kind(
        DAMAGE, "the chain ends here until the next base",
        "restore an earlier step, or one behind the next base", "INV-23",
    ),
    "base-link": Kind(
        DAMAGE, "what follows the base cannot be folded into it", "restore through another base",
        "INV-24",
    ),
    "base-parent": Kind(DAMAGE, "the chain ends here", "restore an earlier step", "INV-25"),
    "unbased-start": Kind(
        DAMAGE, "what follows the new start cannot be restored until the next base",
        "bring the missing base back", "INV-26",
    ),
    "unexplained-start": Kind(
        DAMAGE, "nobody can tell which steps before it are unprovable",
        "trust only steps from this base on", "INV-27",
    ),
    "claim": Kind(
        DAMAGE, "a writer may take the number of this term again",
        "keep the log's tier safe; the next restore opens a newer term", "INV-28",
    ),
    "term-number": Kind(
        DAMAGE, "the line may follow an older term", "restore by naming the term", "INV-28"
    ),
    "parent-term": Kind(
        DAMAGE, "steps before the fork, and those that hang on its bases, are lost",
        "bring back the tier that holds the parent's manifest", "INV-28",
    ),
    "revision": Kind(DAMAGE, "what the term consists of is in doubt", _COPY, "INV-29"),
    "tips": Kind(
        DAMAGE, "steps behind the fork hang on no base before it",
        "restore a step with a base of this term", "INV-30",
    ),
    "extra-ref": Kind(
        DAMAGE, "the step lacks what the earlier extra held", "restore another step", "INV-31"
    ),
    "floor": Kind(
        DAMAGE, "this tier has deleted what its base was to replace", _ALONE, "INV-32"
    ),
    "fold": Kind(
        DAMAGE, "what is restored by way of this base is not what the trainer had",
        "restore a step behind another base; see which machine made this one",
    ),
    "not-folded": Kind(
        WARNING, "nothing is known of this step but that its bytes are as written",
        "check again, where its optimizer is known and nothing prunes", unchecked=True,
    ),
    "tag": Kind(
        DAMAGE, "a step that was to stay is lost", "remove the tag, and trust no other step by it",
        "INV-40",
    ),
    "floor-kept": Kind(DAMAGE, "a step that was to be kept is lost here", _ALONE, "INV-33"),
    "pack": Kind(DAMAGE, _OLDER, _COPY, "INV-34"),
    "below-floor": Kind(INFO, "they are ignored", "none: a writer deletes them", "INV-35"),
    "unnamed": Kind(INFO, "nothing here needs it", "none: a writer began and wrote no step",
                    "INV-36"),
    "foreign": Kind(
        WARNING, "it is no record, and is ignored", "see what it is, and move it away", "INV-37"
    ),
    "unfinished": Kind(
        WARNING, "without a head there is no record", "none if a writer died here; if the head "
        "was deleted, the steps that miss it are named", "INV-37",
    ),
    "unsettled": Kind(
        WARNING, "nothing is known of it: it may be damage, or what the run did meanwhile",
        "check again; what rests is settled at once", unchecked=True,
    ),
    "drift": Kind(
        WARNING, "replayed bases may have drifted further than is measured",
        "let the trainer capture a base", "INV-39",
    ),
    "gap": Kind(
        DAMAGE, "these steps cannot be restored", "bring back the tier or record that is missing; "
        "steps behind them hang on a base of their own", "INV-26",
    ),
    "parted": Kind(
        INFO, "copies on several ranks had been changed in different ways, and one was kept",
        "none: each rank's own are kept since the ranks compared them",
    ),
    "declared-gap": Kind(INFO, "these steps were never saved, or proven wrong", "none"),
    "hole": Kind(DAMAGE, "this tier alone cannot produce these steps", _ALONE, "INV-33"),
    "base-missing": Kind(
        DAMAGE, "this tier alone cannot produce what hangs on it", _ALONE, "INV-26"
    ),
    "tail": Kind(
        WARNING, "restore takes the newest complete step before them",
        "none if a writer died here",
    ),
    "unreachable": Kind(WARNING, "they cannot be restored; the line does not need them", "none"),
    "unused-claim": Kind(INFO, "a writer claimed a term and never began", "none"),
    "manifestless": Kind(
        DAMAGE, "none of the term's records can be placed",
        "bring back the tier that holds its manifest", "INV-20",
    ),
}  # fmt: skip

_RULES = {
    "INV-01": ("header-size", "trailing"),
    "INV-02": ("header", "metadata", "zarr", "chunk"),
    "INV-04": ("canonical", "depth", "duplicate-key", "integer-range", "json", "utf-8",
               "head-size", "openings"),
    "INV-05": ("fields", "kind", "version", "run"),
    "INV-06": ("place",),
    "INV-07": ("links", "id"),
    "INV-08": ("array-name", "order"),
    "INV-09": ("array-size", "array-digests"),
    "INV-11": ("info",),
    "INV-12": ("layout", "shape", "manifest", "delta", "base", "extra", "log"),
    "INV-13": ("typed-value", "hex", "float", "dtype"),
    "INV-14": ("swapped", "key"),
    "INV-15 INV-16 INV-17": ("delta-layout",),
    "INV-17 INV-18": ("base-layout",),
    "INV-34": ("pack",),
}  # fmt: skip
BY_RULE = {rule: name for name, rules in _RULES.items() for rule in rules}
"""Short name of a rule -> the invariants it stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something fsck found: in which tier, at which key, what it is and what follows.

    ``severity`` is ``damage``, ``warning`` or ``info``; ``invariant`` names the rule of the
    format that is violated; ``unchecked`` says that something could not be looked at. ``span`` has
    the first and the last step that it is about, where it is about steps.
    """

    severity: str
    kind: str
    tier: str
    key: str
    what: str
    consequence: str
    remedy: str
    run: str = ""
    path: str = ""
    invariant: str = ""
    unchecked: bool = False
    span: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Provable:
    """Which steps of a run's line are provable: from all tiers (``tier`` is ``all``) or one."""

    run: str
    tier: str
    steps: str
    newest: int | None
    count: int


def finding(
    kind: str, what: str, *, tier: str = "", key: str = "", run: str = "", path: str = "",
    invariant: str = "", span: tuple[int, int] | None = None,
) -> Finding:  # fmt: skip
    """A finding of a kind of the table."""
    known = KINDS[kind]
    return Finding(
        severity=known.severity, kind=kind, tier=tier, key=key, what=what, path=path,
        run=run or (key.split("/", 1)[0] if "/" in key else ""), consequence=known.consequence,
        remedy=known.remedy, invariant=invariant or known.invariant, unchecked=known.unchecked,
        span=span,
    )  # fmt: skip


def of_tier(error: AdaCheckError, tier: str) -> Finding:
    """The finding of a tier that could not be opened or listed."""
    kind = "tier-damaged" if error.exit_code == DAMAGED else "tier-unread"
    if isinstance(error, TooNewError):
        kind = "too-new"
    return finding(kind, error.message, tier=tier, path=str(error.place.get("path", "")))


def of_error(error: AdaCheckError, tier: str, key: str, kind: str = "head") -> Finding:
    """The finding of a record that was refused; ``kind`` unless the error says which it is."""
    rule = str(getattr(error, "rule", ""))
    if isinstance(error, TooNewError):
        kind = "too-new"
    elif isinstance(error, ForkError):
        kind = "fork"
    elif rule in ("swapped", "pack"):
        kind = rule
    elif isinstance(error, TierError) and not isinstance(
        error, TierDamagedError | RecordNotFoundError
    ):
        kind = "tier-unread"
    invariant = BY_RULE.get(rule, "")
    if isinstance(error, TruncatedError) and kind == "head":
        invariant = "INV-01"
    path = str(error.place.get("path", ""))
    return finding(kind, error.message, tier=tier, key=key, path=path, invariant=invariant)


def exit_code(findings: Iterable[Finding]) -> int:
    """0 clean, 1 damage found, 3 something could not be checked."""
    code = CLEAN
    for item in findings:
        if item.severity == DAMAGE:
            return DAMAGED
        if item.unchecked:
            code = UNCHECKED
    return code
