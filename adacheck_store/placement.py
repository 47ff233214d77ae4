"""Placement: which nodes hold a rank's part and extra. Pure, and the same for the same input.

The own node comes first, for it costs no network; then k nodes, each of another failure domain,
so chosen that every node carries about as much for others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from adacheck_store.format.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node that has an agent.

    ``boot_id`` is the kernel's: two nodes that report one boot id run on one host. ``label``
    names the failure domain (``zone/rack/node``, any text), empty if nobody has said.
    """

    name: str
    boot_id: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The holders of every rank's part and extra, own node first.

    ``missing`` says what is missing for k+1 of them; empty if nothing is.
    """

    holders: Mapping[int, tuple[str, ...]]
    missing: str = ""


def parse_labels(text: str) -> dict[str, str]:
    """Labels by node from a file: a node's name and its label on each line, ``#`` for comments.

    Raises `UsageError` that names the line.
    """
    labels: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or words[0] in labels:
            said = "a node named twice" if len(words) == 2 else "not a node and a label"
            raise UsageError(
                f"label file, line {number}: {said}: {line.strip()[:80]!r}",
                hint="write a node's name and its label on each line: n3 zone-a/rack-2/n3",
            )
        labels[words[0]] = words[1]
    return labels


def check_label(label: str) -> None:
    """Raise `UsageError` unless a label could stand in a label file: one word."""
    if label.split() != [label] or "#" in label or not label.isprintable():
        raise UsageError(
            f"not a label of a failure domain: {label[:80]!r}",
            hint="one word without #, such as zone-a/rack-2/n3",
        )


def domains(nodes: Iterable[Node]) -> dict[str, str]:
    """The failure domain of every node: its label, else its host.

    A node without label belongs where the labelled nodes of its host do. Raises `UsageError` if
    they are said to be apart: where it belongs nobody can tell.
    """
    ordered = sorted(nodes, key=lambda node: node.name)
    known: dict[str, set[str]] = defaultdict(set)
    for node in ordered:
        if node.label and node.boot_id:
            known[node.boot_id].add(node.label)
    found: dict[str, str] = {}
    for node in ordered:
        labels = {node.label} if node.label else set(known.get(node.boot_id, ()))
        if len(labels) > 1:
            raise UsageError(
                f"{node.name} has no label, and other nodes of its host have several: "
                f"{', '.join(sorted(labels))}", hint="label it too, or none of them",
            )  # fmt: skip
        host = f"host {node.boot_id}" if node.boot_id else f"node {node.name}"
        found[node.name] = f"label {labels.pop()}" if labels else host
    return found


def place(
    ranks: Mapping[int, str], nodes: Sequence[Node], k: int, *,
    sizes: Mapping[int, int] | None = None, allow_degraded: bool = False,
) -> Placement:  # fmt: skip
    """Holders for every rank, given the node it runs on; ``sizes`` are bytes of their parts.

    Raises `UsageError` if a rank's node has no agent, or there are fewer than k+1 failure
    domains and ``allow_degraded`` is not set; the message names what is missing.
    """
    domain = domains(nodes)
    missing = check(ranks, nodes, k, allow_degraded=allow_degraded)
    load = dict.fromkeys(domain, 0)
    holders: dict[int, tuple[str, ...]] = {}
    for rank, size in _rounds(ranks, sizes or {}):
        chosen = [ranks[rank]]
        while len(chosen) <= k and (other := choose(chosen, domain, load)) is not None:
            chosen.append(other)
            load[other] += size
        holders[rank] = tuple(chosen)
    return Placement(holders={rank: holders[rank] for rank in sorted(holders)}, missing=missing)


def check(
    ranks: Mapping[int, str], nodes: Sequence[Node], k: int, *, allow_degraded: bool = False
) -> str:
    """What is missing for k+1 failure domains, if that is accepted; raises as `place` does."""
    domain = domains(nodes)
    agentless = sorted({node for node in ranks.values() if node not in domain})
    if agentless:
        raise UsageError(
            f"no agent on {', '.join(agentless)}", hint="start one there: adacheck-store agent"
        )
    missing = _missing(domain, nodes, k)
    if missing and not allow_degraded:
        raise UsageError(
            missing,
            hint="start agents in more failure domains, label those that are apart, or accept "
            "fewer copies with Agents(allow_degraded=True)",
        )
    return missing


def _rounds(ranks: Mapping[int, str], sizes: Mapping[int, int]) -> list[tuple[int, int]]:
    """Ranks with their sizes, largest first; of equals one of each node, then the second ones.

    So each round goes once about the ring, and nobody is left with two at the end.
    """
    seen: dict[str, int] = defaultdict(int)
    order: list[tuple[int, int, str, int]] = []
    for rank in sorted(ranks):
        order.append((-sizes.get(rank, 1), seen[ranks[rank]], ranks[rank], rank))
        seen[ranks[rank]] += 1
    return [(rank, -size) for size, _, _, rank in sorted(order)]


def choose(chosen: Sequence[str], domain: Mapping[str, str], load: Mapping[str, int]) -> str | None:
    """One more holder: of a domain not among those ``chosen``, with the least load; or None.

    ``load`` has every candidate. Of equals it is the next after the first chosen, by name, as
    on a ring: else all would choose the same one.
    """
    taken = {domain[name] for name in chosen if name in domain}
    order = sorted(load)
    start = order.index(chosen[0]) if chosen[0] in load else 0
    ring = order[start:] + order[:start]
    free = [name for name in ring if domain[name] not in taken]
    return min(free, key=lambda name: load[name], default=None)


def _missing(domain: Mapping[str, str], nodes: Sequence[Node], k: int) -> str:
    """What is missing for k+1 failure domains."""
    names: dict[str, list[str]] = defaultdict(list)
    for node in sorted(nodes, key=lambda node: node.name):
        names[domain[node.name]].append(node.name)
    if len(names) > k:
        return ""
    found = "; ".join(f"{' and '.join(group)} ({what})" for what, group in sorted(names.items()))
    return f"k={k} needs {k + 1} failure domains, and there are {len(names)}: {found or 'none'}"
