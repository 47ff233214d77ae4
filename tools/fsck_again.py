"""What is damage, and what a race: a second reading tells them apart.

A run that trains raises floors, deletes, drains and begins terms while it is checked. What a
reading misses may have gone, or come, behind it. But a writer puts the floor before it deletes, and
what a record hangs on before the record: so a reading that begins after another has ended does not
miss for such a reason what that one missed. Damage is what two readings in a row say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from adacheck_store.catalog import Catalog, may_pass, read_catalog
from adacheck_store.format.errors import AdaCheckError
from adacheck_store.tiers.base import Tier

from .findings import DAMAGE, KINDS, Finding

READINGS_MAX = 5
"""Readings of one thing: each may begin while the run does something else."""

Row = TypeVar("Row")


def settled(first: Iterable[Row], again: Callable[[], Iterable[Row]]) -> list[Row]:
    """What a judgement amounts to: its rows, if it finds no damage, else those of another reading.

    ``again`` reads anew what was judged, and judges it. That is done until all damage that it tells
    was told by the reading before. What no two readings agree about, and what could not be read
    again, is ``unsettled``.
    """
    before: list[Row] = []
    rows = list(first)
    for _ in range(READINGS_MAX - 1):
        if not any(_doubtful(row, before) for row in rows):
            return rows
        try:
            later = list(again())
        except AdaCheckError as error:
            return [_unsettled(row, before, error.message) for row in rows]
        if unread := [row for row in later if _unread(row) and not _told(row, rows)]:
            why = "it could not be read again"
            return [*(_unsettled(row, before, why) for row in rows), *unread]
        before, rows = rows, later
    return [_unsettled(row, before, "each reading found something else") for row in rows]


def read_again(tiers: Sequence[Tier], before: Catalog) -> Catalog:
    """The catalog, read anew; raises what keeps a tier that was read from telling as much."""
    known = {(trouble.tier, trouble.key) for trouble in before.troubles}
    fresh = read_catalog(tiers, before.run)
    for trouble in fresh.troubles:
        if (trouble.tier, trouble.key) not in known and (
            not trouble.key or may_pass(trouble.error)
        ):
            raise trouble.error
    return fresh


def _suspect(row: object) -> bool:
    """Whether a row tells what a race may look like."""
    return isinstance(row, Finding) and (row.severity == DAMAGE or row.kind == "not-folded")


def _unread(row: object) -> bool:
    return isinstance(row, Finding) and row.unchecked and not _suspect(row)


def _doubtful(row: object, before: Sequence[object]) -> bool:
    return _suspect(row) and not _told(row, before)


def _told(row: object, before: Sequence[object]) -> bool:
    """Whether a finding of the same kind, place and steps is among those of a reading before."""
    return any(_alike(row, known) for known in before)


def _alike(one: object, other: object) -> bool:
    if not isinstance(one, Finding) or not isinstance(other, Finding):
        return False
    if (one.kind, one.tier, one.run) != (other.kind, other.tier, other.run):
        return False
    if one.span is None or other.span is None:
        same = one.key == other.key
        return same and (bool(one.key) or one.what == other.what)
    if one.key.rpartition("/")[0] != other.key.rpartition("/")[0]:
        return False
    return max(one.span[0], other.span[0]) <= min(one.span[1], other.span[1])


def _unsettled(row: Row, before: Sequence[object], why: str) -> Row:
    """A row as it is, or what is left of it where nobody could tell whether it was a race."""
    if not isinstance(row, Finding) or row.severity != DAMAGE or not _doubtful(row, before):
        return row
    kind = KINDS["unsettled"]
    return replace(
        row, kind="unsettled", severity=kind.severity, consequence=kind.consequence,
        remedy=kind.remedy, invariant=kind.invariant, unchecked=kind.unchecked,
        what=f"{row.kind}: {row.what} (not settled: {why})",
    )  # fmt: skip
