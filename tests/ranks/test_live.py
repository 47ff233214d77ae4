"""A rank is killed, another process takes its place, and gets what a rank that lives on holds."""

import os
import signal
import time

import pytest

from tests.ranks.live import KILLED_AT, live_rank
from tests.ranks.worker import STEPS, Launcher, _context, check_rows, rows_of

pytestmark = pytest.mark.fault

NOT_READ = {"base", "delta"}
"""The kinds of records that a state is made of."""


def starter(folder, launcher: Launcher, kind: str, **options):
    """What starts a rank of two, at an attempt."""

    def start(rank: int, first: int):
        given = {"kind": kind, "store": (folder / "store").as_uri(), "first": first, **options}
        args = (str(folder / f"{rank}.jsonl"), rank, 2, launcher.server.port, given)
        process = _context.Process(target=live_rank, daemon=True, args=args)
        process.start()
        return process

    return start


def killed_and_replaced(folder, kind: str, killed: int) -> list[list[dict]]:
    """The rows of each rank of two, the killed one's with those of its successor."""
    launcher = Launcher(folder, kind, 2)
    reference = launcher.reference()
    outs = [folder / f"{rank}.jsonl" for rank in range(2)]
    start = starter(folder, launcher, kind, waits=killed)
    processes = [start(rank, 0) for rank in range(2)]
    deadline = time.monotonic() + 120
    while not any("waits" in row for row in rows_of(outs[killed])):
        assert time.monotonic() < deadline
        assert processes[killed].is_alive()
        time.sleep(0.01)
    os.kill(processes[killed].pid, signal.SIGKILL)
    processes[killed].join(30)
    processes[killed] = start(killed, 1)
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    found = [rows_of(out) for out in outs]
    for known, rows in zip(reference, found, strict=True):
        check_rows(known, rows)
        assert rows[-1]["final"] == STEPS
    return found


def test_a_survivor_hands_over_what_it_holds(tmp_path):
    """DDP, where the new rank 0 even sends all others its weights first; no tier gives a state."""
    replaced, survivor = killed_and_replaced(tmp_path, "copies", 0)
    restored = [[row for row in rows if "restored" in row] for rows in (replaced, survivor)]
    assert [[row["restored"] for row in rows] for rows in restored] == [[0, KILLED_AT]] * 2
    assert [row["lives"] for row in survivor if "lives" in row] == [KILLED_AT]
    assert [row["live"] for row in restored[0]] == ["", "rank 1 handed it over, live"]
    assert [row["live"] for row in restored[1]] == ["", "rank 1 still held it, live"]
    assert [rows[1]["read"] for rows in restored] == [["extra"], ["extra"]]
    assert [rows[1]["lost"] for rows in restored] == [0, 0]


def test_what_a_rank_had_for_itself_comes_from_the_tiers(tmp_path):
    """A BatchNorm's statistics differ on each rank: nobody holds what the killed one held."""
    rows = killed_and_replaced(tmp_path, "ddp", 1)
    for each in rows:
        restored = [row for row in each if "restored" in row][1]
        assert (restored["restored"], restored["live"]) == (KILLED_AT, "")
        assert set(restored["read"]) >= NOT_READ


def test_ranks_that_are_numbered_anew_do_not_train_on_with_each_others_state(tmp_path):
    """What each held of its own (a BatchNorm's statistics) is its old number's: tiers are read."""
    launcher = Launcher(tmp_path, "ddp", 2)
    reference = launcher.reference()
    start = starter(tmp_path, launcher, "ddp", waits=-1, swaps=True)
    processes = [start(rank, 0) for rank in range(2)]
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    for rank in range(2):
        rows = rows_of(tmp_path / f"{rank}.jsonl")
        (turn,) = (at for at, row in enumerate(rows) if row.get("rank") == 1 - rank)
        assert [row["lives"] for row in rows if "lives" in row] == [KILLED_AT]
        check_rows(reference[rank], rows[:turn])
        (restored,) = (row for row in rows[turn:] if "restored" in row)
        assert (restored["restored"], restored["live"]) == (KILLED_AT, "")
        assert set(restored["read"]) >= NOT_READ
        check_rows(reference[1 - rank], rows[turn:])
        assert rows[-1]["final"] == STEPS
