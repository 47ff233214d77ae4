"""Survival: how likely a part of the run is lost with the nodes that fail. Pure.

A *group* is the nodes that have some part; it is lost if all of them fail.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

Groups = Collection[frozenset[str]]

CASES_MAX = 200_000
"""Cases that are kept apart while counting, before counting is given up."""


def minimal(groups: Iterable[frozenset[str]]) -> list[frozenset[str]]:
    """The groups that contain no other: if any is lost, one of these is."""
    found: list[frozenset[str]] = []
    for group in sorted(set(groups), key=lambda group: (len(group), sorted(group))):
        if not any(other <= group for other in found if len(other) < len(group)):
            found.append(group)
    return found


def survivals(nodes: Sequence[str], groups: Groups, most: int) -> list[float] | None:
    """The probability that no group is lost, for 0 to ``most`` nodes failing, all sets alike.

    Exact. None where nodes share groups so widely that counting would take too long.
    """
    safe = safe_sets(nodes, groups, most)
    if safe is None:
        return None
    return [count / math.comb(len(nodes), lost) for lost, count in enumerate(safe)]


def safe_sets(nodes: Sequence[str], groups: Groups, most: int) -> list[int] | None:
    """How many sets of 0 to ``most`` nodes contain no group; None if there is too much to count.

    Goes from node to node. What is still open is which nodes have failed of groups not yet
    passed: few at a time, where holders are neighbours.
    """
    most = min(most, len(nodes))
    small = [group for group in minimal(groups) if len(group) <= most]
    order = _connected(nodes, small)
    at = {node: place for place, node in enumerate(order)}
    ending: dict[int, list[frozenset[str]]] = defaultdict(list)
    last: dict[str, int] = {}
    for group in small:
        end = max(at[node] for node in group)
        ending[end].append(group)
        for node in group:
            last[node] = max(last.get(node, 0), end)
    cases: dict[frozenset[str], list[int]] = {frozenset(): [1] + [0] * most}
    for place, node in enumerate(order):
        done = frozenset(
            other for group in ending[place] for other in group if last[other] == place
        )
        after: dict[frozenset[str], list[int]] = {}
        for failed, counts in cases.items():
            _add(after, failed - done, counts)
            now = failed | {node}
            if counts[:-1].count(0) < most and not any(group <= now for group in ending[place]):
                _add(after, now - done if node in last else failed - done, [0, *counts[:-1]])
        cases = after
        if len(cases) > CASES_MAX:
            return None
    return [sum(column) for column in zip(*cases.values(), strict=True)]


def _add(cases: dict[frozenset[str], list[int]], key: frozenset[str], counts: list[int]) -> None:
    known = cases.get(key)
    cases[key] = [a + b for a, b in zip(known, counts, strict=True)] if known else counts


def _connected(nodes: Sequence[str], groups: Groups) -> list[str]:
    """The nodes, those that groups connect one after another, else in the given order."""
    of: dict[str, list[frozenset[str]]] = defaultdict(list)
    for group in groups:
        for node in group:
            of[node].append(group)
    found: list[str] = []
    seen: set[str] = set()
    place = {node: index for index, node in enumerate(nodes)}
    for first in nodes:
        if first in seen:
            continue
        part, rest = [], [first]
        seen.add(first)
        while rest:
            node = rest.pop()
            part.append(node)
            for other in {other for group in of[node] for other in group} - seen:
                seen.add(other)
                rest.append(other)
        found += sorted(part, key=lambda node: place[node])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The share of trials that survived, and its standard error."""

    share: float
    error: float


def simulate(
    units: Mapping[frozenset[str], float], groups: Groups, failures: int, *, trials: int, seed: int
) -> Simulated:
    """Let ``failures`` different units fail, each drawn by its rate; a unit is a node or a rack.

    The same for the same seed.
    """
    dice = random.Random(seed)
    choices, rates = list(units), list(units.values())
    of: dict[str, list[frozenset[str]]] = defaultdict(list)
    for group in minimal(groups):
        of[min(group)].append(group)
    failures = min(failures, sum(rate > 0 for rate in rates))
    survived = 0
    for _ in range(trials):
        drawn: set[frozenset[str]] = set()
        while len(drawn) < failures:
            drawn.update(dice.choices(choices, rates))
        lost = frozenset().union(*drawn)
        survived += not any(group <= lost for node in lost for group in of.get(node, ()))
    share = survived / trials
    return Simulated(share=share, error=math.sqrt(share * (1 - share) / trials))
