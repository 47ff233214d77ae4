"""The demo: its three losses, in small; and that it would see a bit that differs."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from adacheck_store.demo.cluster import Node
from adacheck_store.demo.command import command
from adacheck_store.demo.harness import Reference

pytestmark = pytest.mark.fault


def demo(*options: object) -> dict:
    """Run it as its user does; what it says as JSON."""
    command = [sys.executable, "-m", "adacheck_store", "demo", "--json", *map(str, options)]
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are too long for sockets
        done = subprocess.run(
            command, env={**os.environ, "TMPDIR": folder}, capture_output=True, text=True,
            timeout=280, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        assert [name for name in os.listdir(folder) if "adacheck" in name] == []
        assert not any(folder in command for command in commands()), "an agent is left"
    said = json.loads(done.stdout)
    assert said["differences"] == []
    return said


def commands() -> Iterator[str]:
    """The command lines of all processes."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_text(errors="replace")


def sources(said: dict) -> list[set[str]]:
    """The tiers that each restore read."""
    return [set(each["tiers"]) for each in said["recoveries"]]


def test_a_rank_a_node_and_all_are_lost() -> None:
    """Each time what survives gives the state, and the end is the uninterrupted run's."""
    said = demo("--nodes", 2, "--ranks", 1, "--steps", 12, "--width", 64, "--seed", 5)
    rank, node, everything = said["recoveries"]
    lost = node["loss"]["what"]
    survivor = {"node-1": "node-2", "node-2": "node-1"}[lost]
    assert rank["loss"]["what"] in ("rank 0", "rank 1")
    assert everything["loss"]["what"] == "all but zarr"
    found = sources(said)
    assert found[0] <= {f"{tier} {name}" for tier in ("agent", "lmdb of")
                        for name in ("node-1", "node-2")} | {"zarr"}  # fmt: skip
    assert f"agent {survivor}" in found[1]
    assert not any(tier.endswith(lost) for tier in found[1])
    assert found[2] == {"zarr"}
    assert 2.0 < said["bytes_per_step"] / said["parameters"] < 2.5


def test_two_nodes_with_two_ranks_unless_told_otherwise() -> None:
    """What the slow test below runs is what a user sees who names nothing."""
    names = {option.name: option.default for option in command.params}
    assert (names["nodes"], names["ranks"]) == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (1, 1), (1, 2), (3, 1)])
def test_other_shapes(nodes: int, ranks: int) -> None:
    """Where there is one node a rank is lost, and then all: there is no node to spare."""
    said = demo("--nodes", nodes, "--ranks", ranks, "--steps", 20, "--width", 128)
    assert len(said["recoveries"]) == (3 if nodes > 1 else 2)
    assert sources(said)[-1] == {"zarr"}


def test_what_differs_is_told() -> None:
    """One digest or loss that is not the reference's, one that is missing, one too many."""
    rows = [
        {"step": 0, "digests": {"a": "0", "b": "0"}},
        {"step": 1, "digests": {"a": "1", "b": "1"}, "loss": "0x1", "seconds": 1.0},
    ]
    reference = Reference.of(rows)

    def differences(**row: object) -> list[str]:
        return list(reference.differences([row]))

    assert differences(restored=1, digests={"a": "1", "b": "1"}) == []
    assert differences(step=1, loss="0x1") == []
    assert differences(restored=1, digests={"a": "1", "b": "0"}) == ["step 1: b"]
    assert differences(final=1, digests={"a": "1"}) == ["step 1: b"]
    assert differences(final=0, digests={"a": "0", "b": "0", "c": "0"}) == ["step 0: c"]
    assert differences(step=1, loss="0x2") == ["step 1: the loss"]


def test_an_agent_that_has_just_begun_is_ended_too(tmp_path: Path) -> None:
    """It has said nothing of itself yet; its node's folder in its command is enough. No other."""
    nodes = [Node(tmp_path / name) for name in ("node-1", "node-11")]
    code = "import time; time.sleep(600)"
    processes = [
        subprocess.Popen([sys.executable, "-c", code, "--cache", str(node.folder / "lmdb")])
        for node in nodes
    ]
    threads = [threading.Thread(target=process.wait, args=(60,)) for process in processes]
    for thread in threads:  # as the system reaps an agent whose starter has died
        thread.start()
    try:
        nodes[0].kill_agent()
        threads[0].join(60)
        assert processes[0].returncode == -signal.SIGKILL
        assert processes[1].poll() is None
    finally:
        nodes[1].kill_agent()
        threads[1].join(60)
