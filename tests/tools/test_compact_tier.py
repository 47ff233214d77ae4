"""`compact --tier`: a base in an LMDB, which stands like one that upkeep has made there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import torch

from adacheck_store.restore import restore_state
from adacheck_store.store import open_for_reading
from tests.tools.stores import (
    FIRST,
    LAST,
    RUN,
    cli,
    cli_json,
    findings,
    keys_of,
    restored,
    tiers_of,
    train,
    tree_digest,
)

STEP = LAST - 1
"""A step of which no tier has a base."""


def compacted(store: Path, *more: object) -> list[dict[str, object]]:
    """The rows of a compaction into the LMDB."""
    code, document = cli_json("compact", store, "--tier", "lmdb", *more)
    assert code == 0, document
    return document["rows"]


def test_a_base_in_the_lmdb(store: Path) -> None:
    """It comes there alone, once; the tier gives the step by it, and the state is the same."""
    expected = restored(store).parts["p000000"].arrays
    objects = tree_digest(store / "objects")
    (row,) = compacted(store, "--to", STEP)
    assert (row["tier"], row["step"], row["done"]) == ("lmdb", STEP, "folded")
    assert row["key"] in keys_of(store, "lmdb", "base")
    assert tree_digest(store / "objects") == objects
    assert compacted(store, "--to", STEP)[0]["done"] == "present"
    assert findings(store) == (0, [])
    tier = tiers_of(store)["lmdb"]
    alone = restore_state([tier], RUN)
    assert (alone.step, alone.certificate.base_step, alone.certificate.deltas) == (LAST, STEP, 1)
    assert restore_state([tier], RUN, step=STEP).certificate.deltas == 0
    tier.close()
    for name, tensor in alone.parts["p000000"].arrays.items():
        assert torch.equal(tensor, expected[name])


def test_one_that_another_tier_has_is_copied(store: Path) -> None:
    """Under its own key, so that it is one record in two tiers."""
    assert cli("compact", store, "--to", STEP).exit_code == 0
    (row,) = compacted(store, "--to", STEP)
    assert row["done"] == "copied"
    assert row["key"] in keys_of(store, "lmdb", "base")
    assert row["key"] in keys_of(store, "zarr", "base")
    assert findings(store) == (0, [])


def test_the_run_goes_on_from_it(store: Path) -> None:
    """It is drained like any base; floors are raised by it and past it, and nothing is lost."""
    (row,) = compacted(store, "--to", STEP)
    toy = train(str(store), LAST + 1)
    assert row["key"] in keys_of(store, "zarr", "base")
    assert toy.same_as(restored(store).parts["p000000"])
    assert findings(store) == (0, [])
    code, document = cli_json("gc", store, "--last", 1, "--grace", 0, "--apply")
    floors = {each["tier"]: each["step"] for each in document["rows"] if each["what"] == "floor"}
    assert code == 0
    assert floors["zarr"] >= STEP
    assert floors["lmdb"] >= STEP
    assert findings(store) == (0, [])
    toy = train(str(store), LAST + 20, even=True)
    assert toy.same_as(restored(store).parts["p000000"])
    assert findings(store) == (0, [])
    assert row["key"] not in keys_of(store, "lmdb", "base")


def test_the_object_tier_may_be_gone(store: Path) -> None:
    """The near tier is all there is: it gets its base, and gives the run by itself."""
    shutil.rmtree(store / "objects")
    assert cli("compact", store, "--to", STEP).exit_code != 0
    assert compacted(store, "--to", STEP)[0]["done"] == "folded"
    assert restored(store).step == LAST


def test_refusals(store: Path) -> None:
    """No such tier, an agent's memory, a step below the tier's floor: nothing is written."""
    before = tree_digest(store)
    result = cli("compact", store, "--tier", "nvme")
    assert result.exit_code == 2
    assert "one of: lmdb, zarr" in result.output
    result = cli("compact", store, "--tier", "agent a")
    assert result.exit_code == 2
    assert "folds by itself" in result.output
    result = cli("compact", store, "--tier", "lmdb", "--to", FIRST - 9)
    assert result.exit_code != 0
    assert tree_digest(store) == before
    assert cli("compact", store, "--tier", "zarr", "--to", STEP).exit_code == 0
    assert any(f"/{STEP:012d}-" in key for key in keys_of(store, "zarr", "base"))


def test_an_lmdb_that_a_trainer_holds_is_left_to_it(store: Path) -> None:
    """Who holds it is named, and what to do instead; that works beside it."""
    code = (
        "import sys\n"
        "from adacheck_store.session import RunSession\n"
        "session = RunSession.open(sys.argv[1], 'toy')\n"
        "print('open', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "open\n"
        result = cli("compact", store, "--tier", "lmdb", "--to", STEP)
        assert result.exit_code != 0
        assert f"pid {process.pid}" in result.output
        assert "without --tier" in result.output
        assert cli("compact", store, "--to", STEP).exit_code == 0
    finally:
        process.communicate("\n", timeout=60)
    assert compacted(store, "--to", STEP)[0]["done"] == "copied"


def test_an_lmdb_of_one_rank_gets_its_own_part(sharded: Path, tmp_path: Path) -> None:
    """Bases of other ranks' parts would hold its floor down for ever."""
    store = shutil.copytree(sharded, tmp_path / "store")
    with open_for_reading(str(store)) as opened:
        names = [tier.traits.name for tier in opened.uppers]
        run = next(iter(opened.far.list(""))).split("/")[0]
        newest = restore_state(opened.tiers, run).step
    assert len(names) == 2
    for number, name in enumerate(sorted(names)):
        code, document = cli_json("compact", store, "--tier", name, "--to", newest - 1)
        assert code == 0, document
        (row,) = document["rows"]
        assert (row["part"], row["tier"]) == (f"p{number:06d}", name)
    assert findings(store) == (0, [])
