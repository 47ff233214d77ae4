"""The drill: what it says would be restored is what a restore gives after that very loss."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from adacheck_store.tools.drill import drill
from tests.tools.stores import cli, cli_json, restored, train, tree_digest

FIRST, LAST = 21, 33


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two terms."""
    folder = tmp_path_factory.mktemp("drill") / "store"
    train(str(folder), FIRST)
    train(str(folder), LAST)
    return folder


@pytest.fixture
def store(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may harm."""
    shutil.copytree(trained, tmp_path / "store")
    return tmp_path / "store"


def rows(store: Path, *more: object) -> list[dict]:  # type: ignore[type-arg]
    """The drill's rows."""
    code, document = cli_json("drill", store, *more)
    assert code == document["exit_code"] == 0, document
    return list(document["rows"])


def test_it_changes_nothing_and_says_what_it_read(store: Path) -> None:
    before = tree_digest(store)
    found = rows(store)
    assert tree_digest(store) == before
    assert len(found) == 6
    for row in found:
        assert row["outcome"] == "restored"
        assert row["newest"] == LAST
        assert row["lost"] == LAST - row["step"]
        assert row["seconds"] > 0
        assert row["nbytes"] == sum(row["tiers"].values()) > 0
        assert row["certificate"]["step"] == row["step"]
        assert bool(row["reasons"]) == (row["lost"] > 0) or "damaged" not in row["loss"]


def _lose_disk(store: Path) -> None:
    shutil.rmtree(store / "lmdb")


def _lose_objects(store: Path) -> None:
    shutil.rmtree(store / "objects")


@pytest.mark.parametrize(
    ("at", "harm"), [(0, lambda store: None), (1, _lose_disk), (2, _lose_objects)]
)
def test_the_loss_itself_gives_what_it_foretold(store: Path, at: int, harm) -> None:  # type: ignore[no-untyped-def]
    foretold = rows(store)[at]
    harm(store)
    assert restored(store).step == foretold["step"]


@pytest.mark.parametrize(("at", "seed"), [(3, 0), (4, 0), (5, 0), (5, 1), (5, 2), (5, 3)])
def test_the_harm_itself_gives_what_it_foretold(store: Path, at: int, seed: int) -> None:
    """The objects that were named, changed or deleted for real."""
    foretold = rows(store, "--seed", seed)[at]
    _lose_disk(store)
    for name in foretold["harmed"]:
        path = store / "objects" / name
        data = path.read_bytes()
        path.unlink()
        if "flips" in foretold["loss"]:
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert foretold["harmed"]
    found = restored(store)
    assert found.step == foretold["step"]
    assert bool(foretold["reasons"]) == bool(found.reasons)


def test_a_flipped_bit_is_found_and_an_older_base_taken(store: Path) -> None:
    row = rows(store)[3]
    assert row["step"] == LAST  # by the base before it, and more deltas
    assert "differs from its digest" in row["reasons"][0]
    assert row["certificate"]["base_step"] < rows(store)[1]["certificate"]["base_step"]


def test_a_loss_that_leaves_nothing(store: Path) -> None:
    """One base is left in the far tier: if that goes too nothing can be restored, and if it is
    gone already the disk's loss is the end: that is what the exit code tells of."""
    bases = sorted((store / "objects").glob("*/*/*/base/*"))
    assert len(bases) > 1
    for group in bases[1:]:
        shutil.rmtree(group)
    gone = [row for row in rows(store) if row["outcome"] != "restored"]
    assert [bool(row["harmed"]) for row in gone] == [True] * len(gone) != []
    assert all(row["step"] is None and row["lost"] == LAST + 1 and row["reasons"] for row in gone)
    shutil.rmtree(bases[0])
    code, document = cli_json("drill", store)
    assert code == document["exit_code"] == 1
    assert document["rows"][0]["outcome"] == "restored"
    assert document["rows"][1]["outcome"] == "nothing left"


def test_as_a_table(store: Path) -> None:
    text = cli("drill", store).stdout
    assert "every process" in text
    assert f"step {LAST}" in text


def test_a_store_without_the_run(store: Path) -> None:
    result = cli("drill", store, "--run", "other")
    assert result.exit_code == 2
    assert "no such run" in result.stderr


def test_a_layer_that_harms_refuses_writes(store: Path) -> None:
    from adacheck_store.format.errors import TierReadOnlyError
    from adacheck_store.store import open_for_reading
    from adacheck_store.tools.drill import Harmed

    with open_for_reading(str(store)) as opened:
        harmed = Harmed(opened.far.objects)  # type: ignore[attr-defined]
        with pytest.raises(TierReadOnlyError):
            harmed.put("x", [b"x"])
        with pytest.raises(TierReadOnlyError):
            harmed.delete(["x"])
        assert list(harmed.list("")) == list(opened.far.objects.list(""))  # type: ignore[attr-defined]
        assert len(list(drill(opened))) == 6
