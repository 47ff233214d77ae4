"""Another topology on several nodes, each with its agent, where one of them is lost on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

import adacheck_store as ada
from tests.agent.kit import Node
from tests.agent.trainer import MEMORY, RUN
from tests.ranks.test_topology import checked, known_of
from tests.ranks.worker import STEPS, WINDOW, Attempt, Launcher

pytestmark = pytest.mark.fault


def start(
    launcher: Launcher, nodes: dict[str, Node], kind: str, where: str, **options: int
) -> Attempt:  # fmt: skip
    """Ranks on nodes: rank 0 on that of the first letter, and so on."""
    use = {"agents": ada.Agents(memory=MEMORY), "run": RUN, "redundancy": "off", "k": 1}
    names = ("ADACHECK_NODE", "ADACHECK_RUNTIME", "OMP_NUM_THREADS")
    return launcher.start(
        nodes["a"].store, ranks=len(where), kind=kind, wholes=True, **options,
        given=dict.fromkeys(range(len(where)), use),
        envs={
            rank: {name: nodes[node].env[name] for name in names} for rank, node in enumerate(where)
        },
        local={rank: where[:rank].count(node) for rank, node in enumerate(where)},
    )  # fmt: skip


def test_a_node_is_lost_between_topologies(tmp_path: Path) -> None:
    """Four shards on two nodes; one is lost with all of it; copies, then shards, on others."""
    nodes = {name: Node(tmp_path, name) for name in "abc"}
    launcher = Launcher(tmp_path, "fsdp2", 4)
    try:
        nodes["a"].agent()
        nodes["b"].agent()
        first = start(launcher, nodes, "fsdp2", "aabb", hold=7)
        first.until(7)
        first.kill()
        nodes["b"].kill()
        nodes["b"].burn_disk()
        known, last = known_of(first), first.last_step()
        nodes["c"].agent()
        second = start(launcher, nodes, "copies", "ac", hold=last + 4)
        second.until(last + 4)
        second.kill()
        assert checked(second, known, 2) >= last - (WINDOW + 1)
        known, last = known | known_of(second), second.last_step()
        third = start(launcher, nodes, "fsdp2", "acc")
        assert third.wait() == [0, 0, 0]
        assert checked(third, known, 3) >= last - (WINDOW + 1)
        assert third.last_step() == STEPS
        assert third.every("stored", "error") == [""] * 3
        assert all("agent a" in tiers for tiers in second.every("restored", "tiers"))
    finally:
        for node in nodes.values():
            node.end()
