"""The doctor: what it finds is there, and what is wrong it names with a remedy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from adacheck_store.tiers.object_local import LocalObjects
from adacheck_store.tools import doctor as looks
from tests.tools.stores import cli, cli_json, train, tree_digest


def rows(url: object, *more: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and rows by their check."""
    code, document = cli_json("doctor", url, *more)
    assert code == document["exit_code"]
    return code, {row["check"]: row for row in document["rows"]}


def test_a_place_to_be(tmp_path: Path) -> None:
    """All is looked at, and nothing is left behind."""
    code, found = rows(tmp_path / "new" / "store")
    assert code == 0, found
    assert {"libraries", "place", "write", "conditional writes", "bandwidth", "clock", "room",
            "flush", "available", "shared", "sockets", "open files"} <= found.keys()  # fmt: skip
    assert "MB/s" in found["bandwidth"]["found"]
    assert not (tmp_path / "new").exists()


def test_a_store_is_left_as_it_was(tmp_path: Path) -> None:
    train(str(tmp_path / "store"), 3)
    before = tree_digest(tmp_path)
    code, found = rows(tmp_path / "store")
    assert code == 0, found
    assert "a store" in found["place"]["found"]
    assert tree_digest(tmp_path) == before
    _, found = rows(tmp_path / "store", "--read-only")
    assert "write" not in found
    assert "flush" not in found


def test_somebody_elses_folder(tmp_path: Path) -> None:
    LocalObjects(tmp_path / "objects").put("thesis.tex", [b"x"])
    code, found = rows(tmp_path)
    assert code == 1
    assert found["place"]["verdict"] == "bad"
    assert found["place"]["remedy"]
    assert "write" not in found


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, found = rows(tmp_path / "file" / "store")
    assert code == 1
    assert any(row["verdict"] == "bad" and row["remedy"] for row in found.values())


def test_a_clock_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LocalObjects.written_at
    for ahead, verdict in ((30.0, "ok"), (-120.0, "warning"), (3600.0, "bad")):
        monkeypatch.setattr(
            LocalObjects, "written_at", lambda self, name, ahead=ahead: real(self, name) + ahead
        )
        _, found = rows(tmp_path / "store")
        assert found["clock"]["verdict"] == verdict
        assert bool(found["clock"]["remedy"]) == (verdict != "ok")


def test_bytes_that_come_back_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LocalObjects.get

    def get(self: LocalObjects, name: str, *more: Any) -> bytes:
        data = real(self, name, *more)
        return data[:-1] + bytes([data[-1] ^ 1]) if looks.SCRATCH in name else data

    monkeypatch.setattr(LocalObjects, "get", get)
    code, found = rows(tmp_path / "store")
    assert code == 1
    assert found["read back"]["verdict"] == "bad"


def test_a_runtime_folder_with_too_long_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADACHECK_RUNTIME", str(tmp_path / ("x" * 120)))
    code, found = rows(tmp_path / "store")
    assert code == 1
    assert "shorter folder" in found["sockets"]["remedy"]


def test_a_network_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "_file_system", lambda folder: "nfs4")
    code, found = rows(tmp_path / "store")
    assert code == 1
    assert "--cache" in found["file system"]["remedy"]


def test_the_kind_of_a_file_system() -> None:
    assert looks._file_system(Path("/proc/self")) == "proc"
    assert looks._file_system(Path(os.curdir)) not in ("", "proc")


def test_as_a_table_and_misuse(tmp_path: Path) -> None:
    text = cli("doctor", tmp_path / "store").stdout
    assert "conditional writes" in text
    assert cli("doctor", "ftp://x").exit_code == 2
