"""Each kind of bad input has its own error, an exit code, and leaves everything as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.forked import run
from tests.tools.stores import (
    LAST,
    LOCK,
    RUN,
    cli,
    cli_json,
    keys_of,
    restored,
    train,
    tree_digest,
)

VERBS = ["ls", "log", "status", "fsck", "compact"]


def refused(*arguments: object) -> str:
    """The one line on stderr of a verb that is refused as misuse or as not to be checked."""
    result = cli(*arguments)
    assert result.exit_code in (2, 3), result.output
    assert isinstance(result.exception, SystemExit)
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("adacheck-store: ")
    assert "->" in line
    assert result.stdout == ""
    return line


@pytest.mark.parametrize("verb", VERBS)
def test_no_store(verb: str, tmp_path: Path) -> None:
    """Nothing there, an empty folder, a file, a folder of something else, an empty one of ours."""
    file = tmp_path / "file"
    file.write_text("x")
    empty = tmp_path / "empty"
    empty.mkdir()
    other = tmp_path / "other"
    (other / "objects").mkdir(parents=True)
    (other / "objects" / "photo.jpg").write_text("x")
    hollow = tmp_path / "hollow"
    (hollow / "objects").mkdir(parents=True)
    before = tree_digest(tmp_path)
    assert "no store here" in refused(verb, tmp_path / "nowhere")
    assert "no store here" in refused(verb, empty)
    assert "a file, not the folder of a store" in refused(verb, file)
    assert "a place of something else" in refused(verb, other)
    assert "empty" in refused(verb, hollow)
    assert tree_digest(tmp_path) == before


def test_strange_urls() -> None:
    """A scheme nobody knows, and no bucket."""
    assert "not a store URL" in refused("ls", "ftp://host/x")
    assert "not a bucket and prefix" in refused("ls", "s3:///x")
    assert "an empty store URL" in refused("ls", "")
    assert "not a store URL" in refused("ls", "file://host/x")


@pytest.mark.parametrize("name", ["-x", "a/b", "a b", "../up", "x" * 129, ".hidden"])
def test_malformed_run(name: str, store: Path) -> None:
    """The grammar of run names is told."""
    before = tree_digest(store)
    line = refused("status", store, f"--run={name}")
    assert "not a run name" in line
    assert "1 to 128" in line
    assert tree_digest(store) == before


def test_usage_errors_end_with_2(store: Path) -> None:
    """Unknown verbs and options, missing arguments."""
    for arguments in (["nope"], ["ls"], ["ls", store, "--nope"], ["restore", store],
                      ["restore", store, "x", "--step", "-1"], ["show", store]):  # fmt: skip
        assert cli(*arguments).exit_code == 2


def test_newer_store(store: Path) -> None:
    """A store of a newer version is not judged: 3, and how to go on."""
    marker = store / "objects" / "adacheck.json"
    marker.write_text(json.dumps({"format": "adacheck-store", "version": 2}))
    before = tree_digest(store)
    for verb in VERBS:
        assert "upgrade adacheck-store" in refused(verb, store)
    assert tree_digest(store) == before


def test_newer_record(store: Path) -> None:
    """One record of a newer version: the rest is checked, and the exit code tells."""
    (document,) = (store / "objects" / RUN / "log").glob("000000000001/zarr.json")
    text = json.loads(document.read_text())
    head = json.loads(text["attributes"]["adacheck"])
    head["version"] = 2
    text["attributes"]["adacheck"] = json.dumps(head, sort_keys=True, separators=(",", ":"))
    document.write_text(json.dumps(text))
    code, found = cli_json("fsck", store)
    assert code == 3
    (row,) = [row for row in found["rows"] if row["row"] == "Finding" and row["unchecked"]]
    assert row["kind"] == "too-new"


def test_target_in_no_folder(store: Path, tmp_path: Path) -> None:
    """A target that is a folder, or lies in none."""
    before = tree_digest(store)
    assert "is a folder" in refused("restore", store, tmp_path)
    assert "does not exist" in refused("restore", store, tmp_path / "no" / "out")
    assert tree_digest(store) == before


def test_a_term_deleted_from_the_middle(tmp_path: Path) -> None:
    """It is named; what stands without it is restored, kept by gc, and gone on with."""
    store = tmp_path / "store"
    for to in (LAST - 10, LAST, LAST + 12):
        train(str(store), to, even=True, keep_bases=100)
    shutil.rmtree(store / "lmdb")
    (middle,) = (store / "objects" / RUN).glob("t000002-*")
    shutil.rmtree(middle)
    code, found = cli_json("fsck", store)
    assert code == 1
    assert any(middle.name in str(row) for row in found["rows"] if row["row"] == "Finding")
    assert restored(store).step == LAST + 12
    given = ("--format", "safetensors", "--step", LAST - 2)
    line = refused("export", store, tmp_path / "out", *given)
    assert "nearest provable steps" in line
    assert not (tmp_path / "out").exists()
    before = set(keys_of(store, "zarr", "base"))
    code, rows = cli_json("gc", store, "--last", 1, "--grace", 0, "--apply")
    assert code == 0, rows
    gone = before - set(keys_of(store, "zarr", "base"))
    assert not any("/t000001-" in key for key in gone), "of what hangs on nothing nothing goes"
    toy = train(str(store), LAST + 14)
    assert toy.same_as(restored(store).parts["p000000"])


def test_error_as_json(store: Path) -> None:
    """A machine gets type, message, hint and place."""
    code, document = cli_json("restore", store, store / "out", "--step", "999")
    assert code == document["exit_code"] == 3
    assert document["error"] == "NotProvableError"
    assert document["place"] == {"run": RUN, "step": 999}
    assert document["hint"].startswith("nearest provable steps")


def bound_by_permissions(*arguments: object) -> tuple[int, str]:
    """The command line where permissions bind: its exit code, and what it said."""
    return run(["tests.tools.unprivileged", *map(str, arguments)])


def test_read_only_folder(store: Path, tmp_path: Path) -> None:
    """A store nobody may write to can be read; writing into it is refused, and says where."""
    for path in (store, *store.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = tree_digest(store)
    code, said = bound_by_permissions("fsck", store, "--json")
    assert code == 0, said
    code, said = bound_by_permissions("compact", store)
    assert (code, "cannot be written" in said, "Traceback" in said) == (3, True, False), said
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o555)
    code, said = bound_by_permissions("restore", store, closed / "out")
    assert code == 3
    assert f"path={closed}/out" in said
    (store / "objects").chmod(0o000)
    code, said = bound_by_permissions("fsck", store)
    assert (code, "Traceback" in said) == (3, False), said
    (store / "objects").chmod(0o555)
    assert tree_digest(store) == before
    for path in (store, *store.rglob("*")):
        path.chmod(0o755)


def test_readers_leave_only_the_table_of_readers(store: Path) -> None:
    """What a reader adds beside the records is LMDB's own table, and nothing else."""
    names = {path.relative_to(store) for path in store.rglob("*")}
    assert cli("fsck", store).exit_code == 0
    added = {path.relative_to(store) for path in store.rglob("*")} - names
    assert {path.name for path in added} <= {LOCK}
