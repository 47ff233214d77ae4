"""What detection costs: bytes a rank sends, counted without sending any."""

from __future__ import annotations

from dataclasses import dataclass

from .exchange import NAME_BYTES, TOKEN_BYTES

COUNT_BYTES = 8
"""A message's length, told before the message: what an all-to-all of uneven sizes needs."""

ROUNDS = 4

MOST_RANKS = 512
"""With more, what ranks tell each other would be too much for the one store it goes through: a look
would hold training up for many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Bytes that a rank sends, on average: what it has to say, and the lengths of its messages."""

    payload: int
    counts: int = 0


def exchange_bytes(*, tokens: int, sets: int, runs: int, size: int = 0) -> Sent:
    """Of the exchange: ``tokens`` a rank offers, in ``sets`` copy sets of ``runs`` runs together.

    Sets of all ranks and of one alone are not counted, they need not be told. ``size`` is how
    many ranks there are.
    """
    answered = tokens * (TOKEN_BYTES + NAME_BYTES)
    told = sets * (NAME_BYTES + 4) + runs * 12
    return Sent(payload=answered + told, counts=ROUNDS * COUNT_BYTES * size)


def ring_bytes(*, tokens: int, group: int) -> int:
    """Of the paper's ring in a communication group of ``group`` ranks.

    Lists of digests go half way round; then those who compared tell the others, a bit for each.
    """
    lists = group // 2
    return lists * tokens * TOKEN_BYTES + (group - 1) // 2 * -(-tokens // 8)
