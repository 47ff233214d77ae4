"""What finding copies costs a rank of a plan, and what the paper's ring would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adacheck_store.format.rank_sets import runs_of
from adacheck_store.redundancy.costs import exchange_bytes, ring_bytes
from adacheck_store.redundancy.exchange import Ranks

from .plan_strategy import Cells, Placed, shard_range


@dataclass(frozen=True, slots=True, kw_only=True)
class LookRow:
    """Bytes that the busiest rank sends at a look at which copies are compared.

    ``exchange`` what it offers of ``tensors`` and answers, ``counts`` the lengths of its messages;
    each byte goes twice among 16 ranks or more. ``ring``: what it would send the paper's way,
    around each communication group that lies within no other.
    """

    tensors: int
    exchange: int
    counts: int
    ring: int


def looks(placed: Sequence[Placed], moments: int, world: int) -> LookRow:
    """The row of a model that lies so among ``world`` ranks.

    For each of its tensors the optimizer has so many ``moments``.
    """
    tokens: Counter[int] = Counter()
    sets: Counter[int] = Counter()
    runs: Counter[int] = Counter()
    alike: Counter[tuple[Cells, int]] = Counter()
    for tensor in placed:
        alike[tensor.params, tensor.elements] += 1
        alike[tensor.optimizer, tensor.elements] += moments
    told: set[Ranks] = set()
    for (cells, elements), count in alike.items():
        for at, copies in enumerate(cells):
            start, stop = shard_range(elements, at, len(cells))
            if start < stop and count:
                tokens.update(dict.fromkeys(copies, count))
                told.add(copies)
    for copies in told:
        if 1 < len(copies) < world:
            sets.update(copies)
            runs.update(dict.fromkeys(copies, len(runs_of(copies)) // 3))
    ring: Counter[int] = Counter()
    for group in _reduced(frozenset().union(*each.params) for each in placed):
        for rank in group:
            ring[rank] += ring_bytes(tokens=tokens[rank], group=len(group))
    sent = [
        exchange_bytes(tokens=tokens[rank], sets=sets[rank], runs=runs[rank], size=world)
        for rank in range(world)
    ]
    return LookRow(
        tensors=max(tokens.values()), exchange=max(each.payload for each in sent),
        counts=sent[0].counts, ring=max(ring.values()),
    )  # fmt: skip


def _reduced(groups: Iterable[Ranks]) -> list[Ranks]:
    """The groups that lie within no other."""
    distinct = set(groups)
    return [group for group in distinct if not any(group < other for other in distinct)]
