"""A chain that some ranks have written goes on on others, sharded in another way."""

import subprocess
import sys
from pathlib import Path

import pytest

import adacheck_store as ada
from adacheck_store.catalog import read_catalog
from adacheck_store.format.keys import part_name, rank_name
from adacheck_store.store import open_store
from tests.ranks.worker import STEPS, Attempt, Launcher

pytestmark = pytest.mark.fault

ROOT = Path(__file__).resolve().parents[2]


def known_of(attempt) -> dict[int, dict]:
    """What all ranks together had at each step, as they told it before it was stored."""
    rows = attempt.rows(0)
    found = {row["made"]: row["whole"] for row in rows if "made" in row}
    return found | {row["restored"]: row["whole"] for row in rows if "restored" in row}


def checked(attempt, known: dict[int, dict], ranks: int) -> int:
    """All ranks have restored one step, and all of it is what was there, bit for bit."""
    assert attempt.every("refused") == [None] * ranks
    (step,) = set(attempt.every("restored"))
    for found in attempt.every("restored", "whole"):
        assert found == known[step]
    return step


def relay(tmp_path, legs, **options) -> Attempt:
    """One run, leg after leg: each restores what the one before had when it was killed."""
    launcher = Launcher(tmp_path, legs[0][0], legs[0][1])
    store, known, last = tmp_path / "store", {}, 0
    for number, (kind, ranks) in enumerate(legs):
        hold = {"hold": last + 4} if number + 1 < len(legs) else {}
        attempt = launcher.start(store, ranks=ranks, kind=kind, wholes=True, **hold, **options)
        if hold:
            attempt.until(last + 4)
            attempt.kill(ranks - 1)
        else:
            assert attempt.wait() == [0] * ranks
        if known:
            step = checked(attempt, known, ranks)
            assert step >= last - 2
            before = legs[number - 1][1]
            for text in attempt.every("restored", "certificate"):
                said = f"written by {before} rank{'s' * (before > 1)}, restored on {ranks}"
                assert (said in text) == ((kind, ranks) != legs[number - 1])
        known |= known_of(attempt)
        last = attempt.last_step()
    assert last == STEPS
    assert attempt.every("stored", "error") == [""] * ranks
    return attempt


def test_four_shards_go_on_as_three_then_as_copies_then_as_one(tmp_path):
    """FSDP2 with uneven and empty shards, DDP, and a process alone."""
    relay(tmp_path, [("fsdp2", 4), ("fsdp2", 3), ("copies", 2), ("fsdp2", 2), ("one", 1)])


def test_what_nobody_is_left_to_drain_is_drained(tmp_path):
    """Two ranks go on for four, whose last steps lie in their own LMDBs alone."""
    launcher = Launcher(tmp_path, "fsdp2", 4)
    store = tmp_path / "store"
    lazy = {"base_every": 10_000, "object_lag": 10_000, "redundancy": "off"}
    first = launcher.start(store, given=dict.fromkeys(range(4), lazy), hold=5)
    first.until(5)
    first.kill()
    second = launcher.start(store, ranks=2, inspect=True)
    assert second.wait() == [0, 0]
    (step,) = set(second.every("restored"))
    with open_store(store.as_uri()) as opened:
        far = read_catalog([opened.far], "e2e")
    for rank in range(4):
        for table, name in ((far.deltas, part_name(rank)), (far.extras, rank_name(rank))):
            held = {ref.step for (_, owner), refs in table.items() if owner == name for ref in refs}
            assert set(range(1, step + 1)) <= held


def test_other_ways_to_cut(tmp_path):
    """Tensor parallelism under FSDP2, ZeRO-1, HSDP, columns instead of rows."""
    relay(
        tmp_path,
        [("tp_fsdp2", 4), ("zero1", 2), ("copies", 2), ("hsdp2", 4), ("shards", 3), ("zero1", 3)],
    )


def test_with_an_agent(tmp_path):
    """What other ranks left in an agent's memory is put together from there."""
    agents = ada.Agents(memory=1 << 30, allow_degraded=True)
    given = {rank: {"agents": agents, "redundancy": "off"} for rank in range(3)}
    command = ["-m", "adacheck_store", "agent", (tmp_path / "store").as_uri(), "--run", "e2e"]
    try:
        last = relay(tmp_path, [("fsdp2", 3), ("copies", 2), ("fsdp2", 1)], given=given)
    finally:
        stop = [sys.executable, *command, "--node", "node-a", "--stop"]
        assert subprocess.run(stop, cwd=ROOT, timeout=120, check=False).returncode == 0
    (tiers,) = last.every("restored", "tiers")
    assert tiers[0] == "agent node-a"
    assert set(tiers) <= {"agent node-a", "zarr"}  # a base may come from where it was drained


@pytest.mark.slow
@pytest.mark.parametrize("redundancy", ["off", "auto"])
@pytest.mark.parametrize(
    "legs",
    [
        [("one", 1), ("fsdp2", 4), ("tp_fsdp2", 4), ("hsdp2", 4), ("zero1", 4), ("fsdp2", 1)],
        [("hsdp2", 4), ("copies", 4), ("fsdp2", 2), ("tp2", 2), ("fsdp2", 8), ("zero1", 2)],
        [("fsdp2", 8), ("copies", 1), ("shards", 4), ("tp2", 4), ("tp_fsdp2", 4), ("one", 1)],
        [("zero1", 3), ("tp2", 3), ("copies", 3), ("hsdp2", 4), ("shards", 3), ("copies", 2)],
    ],
)
def test_wide(tmp_path, legs, redundancy):
    """All there is, one after another."""
    given = {rank: {"redundancy": redundancy} for rank in range(8)}
    relay(tmp_path, legs, given=given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("one", 1), ("fsdp2", 1), ("fsdp2", 2), ("fsdp2", 3), ("fsdp2", 8), ("copies", 2),
        ("copies", 4), ("hsdp2", 4), ("tp_fsdp2", 4), ("zero1", 2), ("zero1", 4),
    ],
)  # fmt: skip
def test_there_and_back(tmp_path, kind, ranks):
    """Four FSDP2 ranks, another topology, and four FSDP2 ranks again."""
    relay(tmp_path, [("fsdp2", 4), (kind, ranks), ("fsdp2", 4)])
