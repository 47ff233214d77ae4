"""What an agent's process takes, measured from outside, never exceeds what it was told it may."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from adacheck_store.agent.budget import BEYOND_WINDOW, memory_for
from tests.agent.kit import Node, two
from tests.agent.trainer import MEMORY, SETTINGS
from tests.benchmarks import resident
from tests.benchmarks.resident import MEBI, Flood, watched
from tests.waits import until

ELEMENTS = 1_000_000
"""A base of 12 MB, and deltas of 2 MB; records may fill 112 MiB."""

FULL = "lmdb.head.before=raise@{0},lmdb.page.before=raise@{0}"
"""The disk takes nothing more while a file exists, be it large or small."""


def part(node: Node) -> dict[str, object]:
    """What a node tells of the part."""
    return node.status()["chains"]["p000000"]


def folded(node: Node) -> None:
    """Wait until the agent has torch and folds: from there on nothing new is loaded."""
    until(lambda: part(node)["replica_step"] > 0, "a fold", 120.0)


def test_far_tier_that_hangs_and_a_disk_that_is_full(here: Node, tmp_path: Path) -> None:
    """Memory, then the disk; without either the watermark frees what it can, and steps go on."""
    hangs, full = tmp_path / "hangs", tmp_path / "full"
    hangs.touch()
    here.agent(fail=f"local.rename.before=hang@{hangs},{FULL.format(full)}", program=True)
    flood = Flood(here, ELEMENTS)
    with watched(here.pid()) as watch:
        flood.steps(20)
        folded(here)
        flood.steps(80)
        flood.session.flush(60.0, far=False)
        status, memory = flood.session.status(), here.status()["memory"]
        assert (status.stored, status.last_error) == (100, "")
        assert here.status()["drains"]["far"]["lag_steps"] >= 90
        assert part(here)["bytes"]["lmdb"] > memory["room"]  # what memory has no room for
        full.touch()
        flood.steps(60)
        until(lambda: flood.caught_up(), "the watermark makes room")
        assert "no room" in here.status()["last_errors"]["drain-lmdb"]["error"]
        assert here.status()["memory"]["used"] <= memory["room"]
        full.unlink()
        hangs.unlink()
    assert memory["room"] < watch.peak <= MEMORY
    flood.session.close()


@pytest.mark.slow  # half a minute of waiting; tests/sim/test_rules.py has the rule it stands on
def test_peer_that_is_stopped_and_a_disk_that_is_full(
    pair: tuple[Node, Node], tmp_path: Path
) -> None:
    """Nothing may go that the peer may come back for: the trainer waits, and then is refused.

    So it is until the peer goes on, or (silent for ``away_s``, 30 s) has lost its seat.
    """
    here, other = pair
    full = tmp_path / "full"
    room = ELEMENTS * (2 * 12 + 4 * (SETTINGS.window + BEYOND_WINDOW)) + MEBI
    limit = memory_for(room)  # just what is reserved: some ten deltas fill it
    here.agent("--memory", str(limit), fail=FULL.format(full), program=True)
    flood = Flood(here, ELEMENTS, two(here, other))
    flood.steps(10)
    folded(here)
    flood.session.flush(60.0)
    full.touch()
    pid, errors = other.pid(), set()

    def said(start: str) -> bool:
        flood.steps(1)
        errors.add(flood.session.status().last_error)
        return any(error.startswith(start) for error in errors)

    with watched(here.pid()) as watch:
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: said("the tier has not answered for 5 s"), "back-pressure")
            until(lambda: said("no memory for it, and no LMDB that has room"), "a refusal")
            assert part(here)["exposed"]
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: flood.caught_up() and not part(here)["exposed"], "two again, with room")
    refusal = next(error for error in errors if error.startswith("no memory"))
    assert "tier=agent a] -> give the agent more memory, or its LMDB more room" in refusal
    assert watch.peak <= limit
    flood.session.close()


@pytest.mark.parametrize(
    ("steps", "elements"),
    [
        (600, 1 << 12),
        pytest.param(10_000, 1 << 14, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_deltas_by_the_thousand(steps: int, elements: int) -> None:
    rows = list(resident.rows(steps, elements))
    assert len(rows) == 2
    assert all(row.met for row in rows), rows


def test_watch_sees_what_is_taken(nodes: Callable[[str], Node]) -> None:
    """The measure itself: 64 MiB more are seen, and seen to go."""
    with watched(os.getpid()) as watch:
        until(lambda: len(watch.samples) > 3, "samples")
        before = watch.samples[-1][1]
        taken = bytearray(os.urandom(64 << 20))
        until(lambda: watch.samples[-1][1] > before + (60 << 20), "it is seen")
        del taken
        until(lambda: watch.samples[-1][1] < before + (30 << 20), "it is seen to go")
