"""The topology of a plan: a TOML or JSON file that says what the cluster is like."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from adacheck_store.format.errors import UsageError
from adacheck_store.placement import Node
from adacheck_store.redundancy.assign import Topology

FOLD_ELEMENTS_PER_S = (32 << 20) / 6.6e-3
"""Elements of AdamW that one core folds in a second: the figure in docs/performance.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a topology file says. GB are 10^9 bytes, Gbit 10^9 bits, GiB 2^30 bytes.

    ``domains`` are what may fail at once: ``node`` or ``rack``. Memory, disk and cores are those
    of a node that its agent may use. ``object_gb_s`` is of all nodes together.
    """

    nodes: int
    ranks_per_node: int
    step_s: float
    network_gbit_s: float
    disk_gb_s: float
    object_gb_s: float
    memory_gib: float
    disk_gib: float
    cores: float
    node_failures_per_day: float
    nodes_per_rack: int = 0
    rack_failures_per_day: float = 0.0
    domains: str = "node"
    fold_elements_per_s: float = FOLD_ELEMENTS_PER_S

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the nodes, in order."""
        width = len(str(self.nodes - 1))
        return tuple(f"n{number:0{width}}" for number in range(self.nodes))

    @property
    def racks(self) -> tuple[frozenset[str], ...]:
        """The nodes of each rack; none if the file does not tell."""
        step, names = self.nodes_per_rack, self.names
        if not step:
            return ()
        return tuple(frozenset(names[at : at + step]) for at in range(0, self.nodes, step))

    @property
    def units(self) -> dict[frozenset[str], float]:
        """What fails at once, and how often a day."""
        rates = {frozenset((name,)): self.node_failures_per_day for name in self.names}
        for rack in self.racks:
            rates[rack] = rates.get(rack, 0.0) + self.rack_failures_per_day
        return rates

    def topology(self) -> Topology:
        """Where ranks run, in the words of the assignment."""
        labels = {}
        if self.domains == "rack":
            labels = {node: f"rack-{at}" for at, rack in enumerate(self.racks) for node in rack}
        names = self.names
        return Topology(
            nodes=[Node(name=name, label=labels.get(name, "")) for name in names],
            ranks={rank: names[rank // self.ranks_per_node] for rank in range(self.world)},
        )


def read_cluster(path: str) -> Cluster:
    """The cluster in a file ``.toml`` or ``.json``; raises `UsageError` naming what is wrong."""
    try:
        text = Path(path).read_text("utf-8")
        given = json.loads(text) if path.endswith(".json") else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"no topology: {error}", path=path, hint="a TOML or JSON file: see docs/plan.md"
        ) from error
    try:
        return cluster(given)
    except UsageError as error:
        raise error.at(path=path)  # noqa: B904


def cluster(given: Any) -> Cluster:
    """The cluster that a table of names and values describes."""
    known = {field.name: str(field.type) for field in fields(Cluster)}
    optional = {"nodes_per_rack", "rack_failures_per_day", "domains", "fold_elements_per_s"}
    if not isinstance(given, Mapping):
        raise UsageError("a topology is a table of names and values", hint="see docs/plan.md")
    for what, names in (
        ("unknown", given.keys() - known.keys()),
        ("missing", known.keys() - optional - given.keys()),
    ):
        if names:
            raise UsageError(
                f"{what} in the topology: {', '.join(sorted(names))}",
                hint=f"it has {', '.join(known)}",
            )
    for name, value in given.items():
        _check(name, known[name], value)
    found = Cluster(**given)
    if found.nodes_per_rack > found.nodes:
        raise UsageError("nodes_per_rack is more than nodes", hint="give at most all nodes")
    if (found.domains == "rack" or found.rack_failures_per_day) and not found.nodes_per_rack:
        raise UsageError("racks are named and nodes_per_rack is not given", hint="give it")
    return found


def _check(name: str, kind: str, value: Any) -> None:
    """One value of a file; raises `UsageError`."""
    if kind == "str":
        if value not in ("node", "rack"):
            raise UsageError(f"{name} is {value!r}", hint='"node" or "rack"')
        return
    allowed = (int,) if kind == "int" else (int, float)
    least_is_zero = name in ("nodes_per_rack", "rack_failures_per_day")
    if type(value) not in allowed or not 0 <= value < 1e18 or (value == 0 and not least_is_zero):
        number = "a whole number" if kind == "int" else "a number"
        raise UsageError(
            f"{name} is {value!r}",
            hint=f"{number}, {'not negative' if least_is_zero else 'above 0'}",
        )
