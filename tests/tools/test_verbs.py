"""Every verb on a sound store, through the command line and in real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from adacheck_store.cli import main
from tests.core.toy import Toy
from tests.tools.stores import (
    FIRST,
    LAST,
    RUN,
    cli,
    cli_json,
    findings,
    keys_of,
    restored,
    train,
    tree_digest,
)

VERBS = [("ls",), ("ls", "--run", RUN), ("log",), ("status",), ("show", str(LAST)), ("fsck",)]


def at(verb: tuple[str, ...], store: Path) -> list[object]:
    """A verb with its store put in."""
    return [verb[0], store, *verb[1:]]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_reading_verbs_change_nothing(store: Path, verb: tuple[str, ...]) -> None:
    """They end with 0, for people and for machines, and leave every byte as it was."""
    before = tree_digest(store)
    result = cli(*at(verb, store))
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()
    code, document = cli_json(*at(verb, store))
    assert code == 0
    assert document["rows"]
    assert document["store"] == str(store)
    assert tree_digest(store) == before


def test_ls_counts(store: Path) -> None:
    """Terms, steps, bases and bytes per tier."""
    _, document = cli_json("ls", store)
    (row,) = document["rows"]
    assert (row["run"], row["terms"], row["newest"], row["provable"]) == (RUN, 2, LAST, LAST)
    assert set(row["nbytes"]) == {"lmdb", "zarr"}
    assert min(row["nbytes"].values()) > 0
    _, document = cli_json("ls", store, "--run", RUN)
    holdings = [row for row in document["rows"] if row["row"] == "HoldingRow"]
    assert {row["tier"] for row in holdings} == {"lmdb", "zarr"}
    assert any(row["deltas"] == f"{FIRST + 1}..{LAST}" for row in holdings)


def test_log_tells_forks_and_floors(store: Path) -> None:
    """The second term leaves the first at its last step; both have a claim; floors are there."""
    _, document = cli_json("log", store)
    terms = [row for row in document["rows"] if row["row"] == "TermRow"]
    assert [row["fork_step"] for row in terms] == [None, FIRST]
    assert terms[1]["parent"] == terms[0]["term"]
    assert all(row["claim"] and row["on_line"] for row in terms)
    assert {row["tier"] for row in document["rows"] if row["row"] == "FloorRow"} >= {"lmdb"}


def test_status_per_tier(store: Path) -> None:
    """Each tier proves the last step alone; nobody holds the store."""
    _, document = cli_json("status", store)
    rows = {row["tier"]: row for row in document["rows"]}
    assert set(rows) == {"lmdb", "zarr", "all"}
    assert {row["provable"] for row in rows.values()} == {LAST}
    assert rows["lmdb"]["holder"] == ""


def test_show_a_record_by_key(store: Path) -> None:
    """A layout's sections, a base's state and a manifest's parts can be read."""
    for word, field in (("layout", "sections"), ("base", "origin"), ("manifest", "parts")):
        key = keys_of(store, "zarr", word)[-1]
        code, document = cli_json("show", store, key)
        assert code == 0
        (row,) = document["rows"]
        assert row["key"] == key
        assert row["body"][field]
    assert cli("show", store, key.split("/", 1)[1], "--run", RUN).exit_code == 0
    result = cli("show", store, "nonsense/key")
    assert result.exit_code == 2
    assert "neither a step nor a record's key" in result.stderr
    result = cli("show", store, "999")
    assert result.exit_code == 3
    assert "nothing is known of step 999" in result.stderr


def test_fsck_clean(store: Path) -> None:
    """A sound store has no findings above notes, and all tiers prove the same."""
    assert findings(store) == (0, [])
    _, document = cli_json("fsck", store)
    rows = {row["tier"]: row for row in document["rows"] if row["row"] == "Provable"}
    assert set(rows) == {"all", "lmdb", "zarr"}
    assert {row["newest"] for row in rows.values()} == {LAST}


def test_restore_writes_a_file_of_the_state(store: Path, toy: Toy, tmp_path: Path) -> None:
    """The file opens with safetensors' own loader and holds the trainer's bits."""
    target = tmp_path / "out.safetensors"
    before = tree_digest(store)
    code, document = cli_json("restore", store, target)
    assert code == 0
    assert document["rows"][0]["step"] == LAST
    assert tree_digest(store) == before
    kept = load_file(target)
    names = set()
    for index, p in enumerate(toy.params):
        name = f"w{index}"
        state = toy.optimizer.state[p]
        expected = {f"model/{name}": p.detach()}
        expected |= {f"optimizer/{name}/{role}": value for role, value in state.items()}
        names |= set(expected)
        for key, value in expected.items():
            assert kept[key].dtype == value.dtype
            assert kept[key].shape == value.shape
            assert torch.equal(kept[key], value), key
    assert set(kept) == names
    with safe_open(target, "pt") as file:
        meta = file.metadata()
    assert (meta["run"], meta["step"]) == (RUN, str(LAST))
    assert json.loads(meta["certificate"])["exactness"] == "exact"
    (optimizer,) = json.loads(meta["optimizers"])
    assert optimizer["class"] == "torch.optim.AdamW"
    assert optimizer["groups"][0]["lr"] == 1e-3
    assert optimizer["groups"][0]["params"] == ["w0", "w1", "w2", "w3"]


def test_restore_of_a_step_and_over_a_file(store: Path, tmp_path: Path) -> None:
    """An older step by number; a file that is there is kept unless forced; nothing is left over."""
    target = tmp_path / "out.safetensors"
    target.write_bytes(b"mine")
    result = cli("restore", store, target)
    assert result.exit_code == 2
    assert "the target exists" in result.stderr
    assert target.read_bytes() == b"mine"
    assert cli("restore", store, target, "--step", FIRST, "--force").exit_code == 0
    with safe_open(target, "pt") as file:
        assert file.metadata()["step"] == str(FIRST)
    result = cli("restore", store, tmp_path / "other", "--step", "999")
    assert result.exit_code == 3
    assert "nearest provable steps" in result.stderr
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["out.safetensors"]


def test_compact_is_idempotent_and_changes_no_state(store: Path, tmp_path: Path) -> None:
    """A base of the step appears once; done again nothing changes; the state is the same."""
    expected = restored(store).parts["p000000"].arrays
    _, document = cli_json("compact", store, "--to", FIRST + 3)
    assert document["rows"][0]["done"] == "folded"
    assert document["rows"][0]["step"] == FIRST + 3
    before = tree_digest(store)
    _, document = cli_json("compact", store, "--to", FIRST + 3)
    assert document["rows"][0]["done"] == "present"
    assert tree_digest(store) == before
    assert cli("compact", store).exit_code == 0
    assert findings(store) == (0, [])
    after = restored(store)
    assert (after.step, after.certificate.deltas) == (LAST, 0)
    for name, tensor in after.parts["p000000"].arrays.items():
        assert torch.equal(tensor, expected[name])
    result = cli("compact", store, "--to", "999")
    assert result.exit_code == 3


def test_compacted_store_can_be_trained_on(store: Path) -> None:
    """A writer goes on from a base made by hand."""
    assert cli("compact", store).exit_code == 0
    toy = train(str(store), LAST + 6)
    assert toy.same_as(restored(store).parts["p000000"])
    assert findings(store) == (0, [])


def test_choosing_the_run(store: Path) -> None:
    """With several runs one must be named; the message names them."""
    train(str(store), 3, run="other")
    result = cli("status", store)
    assert result.exit_code == 2
    assert "other, toy" in result.stderr
    assert cli("status", store, "--run", "other").exit_code == 0
    result = cli("status", store, "--run", "third")
    assert result.exit_code == 2
    assert "no such run" in result.stderr
    assert len(cli_json("ls", store)[1]["rows"]) == 2
    assert findings(store) == (0, [])


def python(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "adacheck_store", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_real_processes(store: Path, tmp_path: Path) -> None:
    """Exit codes and streams of the real command; --json prints one document and nothing else."""
    result = python("fsck", store, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["exit_code"] == 0
    assert python("restore", store, tmp_path / "out").returncode == 0
    assert python("nonsense").returncode == 2
    result = python("ls", tmp_path / "nowhere", "--json")
    assert result.returncode == 2
    assert json.loads(result.stdout)["error"] == "NotOursError"
    assert result.stderr.startswith("adacheck-store: ")
    assert "Traceback" not in result.stderr


def test_demo_is_missed_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the demo is not installed the verb says so; other verbs do not load it."""
    monkeypatch.setattr("adacheck_store.cli.DEMO", "adacheck_store.no_demo")
    result = cli("demo")
    assert result.exit_code == 2
    assert "not part of this installation" in result.stderr
    assert "demo" in cli("--help").output
    assert main.get_command(None, "demo") is not None


@pytest.mark.fault
@pytest.mark.parametrize(
    "delay_s", [0.02, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.0, 0.05, 0.1))]
)
def test_compact_killed_anywhere(store: Path, delay_s: float) -> None:
    """Killed while it folds or writes, the store is sound, and compacting again completes it."""
    code = (
        "import sys\n"
        "from adacheck_store.cli import main\n"
        "import adacheck_store.session, adacheck_store.tools.compact, rich.progress\n"
        "print('ready', flush=True)\n"
        "main(['compact', sys.argv[1]])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(store)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(delay_s)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    process.stdout.close()
    code_after, found = findings(store)
    assert code_after == 0
    assert {row["kind"] for row in found} <= {"unfinished"}
    assert restored(store).step == LAST
    assert cli("compact", store).exit_code == 0
    assert restored(store).certificate.deltas == 0


def test_status_names_the_process_that_holds_the_store(store: Path) -> None:
    """Beside a live writer everything can be read, and its pid is told."""
    code = (
        "import sys, time\n"
        "from adacheck_store.session import RunSession\n"
        "session = RunSession.open(sys.argv[1], 'toy')\n"
        "print('open', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "open\n"
        _, document = cli_json("status", store)
        rows = {row["tier"]: row for row in document["rows"]}
        assert f"pid {process.pid}" in rows["lmdb"]["holder"]
        assert findings(store) == (0, [])
        assert cli("compact", store).exit_code == 0
    finally:
        process.communicate("\n", timeout=60)
