"""The paper's way: within each communication group, lists of digests go around a ring.

Groups that lie within another are left out. A rank compares what comes by with its own list. Half
way round it has met half of the others; of the other half it is told the result by them.
"""

from __future__ import annotations

from collections.abc import Sequence

Found = list[dict[bytes, frozenset[int]]]


def reduced(groups: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """The groups that do not lie within another one."""
    distinct = set(groups)
    return sorted((g for g in distinct if not any(g < other for other in distinct)), key=sorted)


def ring(tokens: Sequence[Sequence[bytes]], groups: Sequence[frozenset[int]]) -> tuple[Found, int]:
    """For each rank its tokens with the ranks that share them, and the bytes sent by all.

    A token takes its 16 bytes in a list; a result takes a bit for each token of the list.
    """
    found: list[dict[bytes, set[int]]] = [{t: {r} for t in each} for r, each in enumerate(tokens)]
    nbytes = 0
    for group in reduced(groups):
        order = sorted(group)
        size = len(order)
        for at, rank in enumerate(order):
            for distance in range(1, size // 2 + 1):
                peer = order[(at - distance) % size]
                nbytes += 16 * len(tokens[peer])  # passed on by the neighbour
                common = set(tokens[rank]) & set(tokens[peer])
                if 2 * distance < size:  # at half the ring both have compared
                    nbytes += -(-len(tokens[peer]) // 8)
                for token in common:
                    found[rank][token].add(peer)
                    found[peer][token].add(rank)
    return [{t: frozenset(s) for t, s in each.items()} for each in found], nbytes


def brute(tokens: Sequence[Sequence[bytes]]) -> Found:
    """The same by comparing every rank with every other, whatever groups there are."""
    return [
        {t: frozenset(r for r, other in enumerate(tokens) if t in other) for t in own}
        for own in map(tuple, tokens)
    ]
