"""Ranks on two nodes, each with its agent: killed together, and a node lost with all it had."""

import json
from collections.abc import Callable

import torch.distributed as dist

from tests.agent.kit import Node, until


class Ranks:
    """The ranks of one start, one a node."""

    def __init__(self, nodes: list[Node], steps: int, pause_ms: int = 0) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = [
            node.run(
                "tests.agent.rank", node.url, str(rank), str(len(nodes)), str(self.store.port),
                str(steps), str(pause_ms),
            )
            for rank, node in enumerate(nodes)
        ]  # fmt: skip
        ready = [self._say(rank, "ready") for rank in range(len(nodes))]
        self.begun = {int(words[1]) for words in ready}
        self.tiers = [json.loads(" ".join(words[2:-1])) for words in ready]
        assert {words[-1] for words in ready} == {"True"}, ready

    def _say(self, rank: int, word: str) -> list[str]:
        said = ""
        for line in self.processes[rank].stdout:
            if line.startswith(word):
                return line.split()
            said += line
        raise AssertionError(f"rank {rank} has ended: {said}")

    def stored(self) -> set[int]:
        """Steps that the ranks' agents have acknowledged, at their end."""
        return {int(self._say(rank, "stored")[1]) for rank in range(len(self.processes))}

    def kill(self) -> None:
        """SIGKILL all ranks."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(60)


def test_ranks_and_then_a_node_are_lost(nodes: Callable[[str], Node], here: Node) -> None:
    pair = [here, nodes("b")]
    ranks = Ranks(pair, 12)
    assert ranks.begun == {0}
    assert ranks.stored() == {12}
    ranks.kill()
    ranks = Ranks(pair, 24)
    assert ranks.begun == {12}
    assert ranks.tiers == [["agent a"], ["agent b"]]  # nothing crossed the network
    assert ranks.stored() == {24}
    chains = [node.status()["chains"] for node in pair]
    for held in chains:
        assert {name: chain["newest_step"] for name, chain in held.items()} == dict.fromkeys(
            ["p000000", "p000001", "r000000", "r000001"], 24
        )
    ranks.kill()
    pair[1].kill()
    pair[1].burn_disk()
    ranks = Ranks(pair, 30)
    assert ranks.begun == {24}
    # Once in some runs a rank also reads of zarr, though memory has all; why is not known yet.
    assert all("agent a" in tiers for tiers in ranks.tiers)
    assert ranks.stored() == {30}
    seeded = pair[1]
    until(lambda: seeded.status()["chains"]["p000000"]["newest_step"] == 30, "it is seeded")
    ranks.kill()
