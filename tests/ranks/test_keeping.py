"""gc, tags, fsck and repair of a run of several ranks, while it trains and after its death."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from adacheck_store.cli_kit import open_url
from adacheck_store.policy import Retention
from adacheck_store.tools import tag
from adacheck_store.tools.findings import DAMAGE, Finding
from adacheck_store.tools.fsck import fsck
from adacheck_store.tools.gc import Ages, gc
from tests.ranks.worker import STEPS, WINDOW, Launcher, check_against
from tests.tools.stores import cli, cli_json, flip, objects

pytestmark = pytest.mark.fault

RULES = Retention(last=1, every=12)
TAGGED = 8


def damage(url: str) -> list[Finding]:
    """What fsck finds wrong."""
    with open_url(url, None) as store:
        return [row for row in fsck(store) if isinstance(row, Finding) and row.severity == DAMAGE]


def collect(url: str) -> set[int]:
    """One gc of the far tier; floors it has raised."""
    with open_url(url, None) as store:
        rows = list(gc(store, rules=RULES, apply=True, ages=Ages(grace_s=0.0)))
    return {row.step or 0 for row in rows if row.tier == "zarr" and row.done == "raised"}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):  # type: ignore[no-untyped-def]
    """Two ranks of FSDP2, and the uninterrupted run."""
    launcher = Launcher(tmp_path_factory.mktemp("keeping"), "fsdp", 2)
    return launcher, launcher.reference()


def test_tools_beside_ranks_that_train_and_die(sharded, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Floors rise under them by the command alone, fsck finds nothing, no rank notices."""
    launcher, reference = sharded
    url, floors = (tmp_path / "store").as_uri(), set()
    given = {rank: {"keep": 100} for rank in range(2)}
    for first, last, raised in ((1, 15, 1), (16, STEPS, 2)):
        attempt = launcher.start(url, given=given, hold=first)
        for step in range(first, last, 2):  # a round of all tools beside two steps
            attempt.until(step)
            attempt.gate.open(step + 2)
            if step == TAGGED + 1:
                attempt.until(TAGGED + WINDOW + 1)  # in flight no more, and no floor above it yet
                with open_url(url, None) as store:
                    tag.add(store, "early", step=TAGGED)
            floors.update(collect(url))
            assert not damage(url)
        attempt.until(last)
        while len(floors) < raised:  # as soon as the ranks, held here, have drained a base
            floors.update(collect(url))
        if last < STEPS:
            attempt.kill(1)
        else:
            attempt.gate.open()
            assert attempt.wait() == [0, 0]
        check_against(reference, attempt)
    collect(url)
    assert not damage(url)
    shutil.rmtree(tmp_path / "store" / "lmdb")
    for step in (TAGGED, STEPS):
        out = tmp_path / f"{step}.safetensors"
        named = "early" if step == TAGGED else str(step)
        assert cli("restore", url, out, "--step", named).exit_code == 0
    lost = launcher.start(url, inspect=True)
    assert lost.wait() == [0, 0]
    check_against(reference, lost)
    assert lost.every("restored") == [STEPS, STEPS]


def test_repair_of_several_ranks(sharded, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Each part is rebuilt from its own rank's disk; what a dead machine had is set aside."""
    launcher, reference = sharded
    store = tmp_path / "store"
    assert launcher.start(store).wait() == [0, 0]
    for part in ("p000000", "p000001"):
        flip(objects(store, f"*/*/{part}/base/*/*/param/c/0")[-1], 5)
    assert cli("fsck", store).exit_code == 1
    code, document = cli_json("fsck", store, "--repair")
    done = {row["key"].split("/")[2]: row["done"] for row in document["rows"]
            if row["row"] == "RepairRow"}  # fmt: skip
    assert (code, done) == (4, {"p000000": "rebuilt", "p000001": "rebuilt"})
    assert cli("fsck", store).exit_code == 0
    flip(objects(store, "*/*/p000001/base/*/*/param/c/0")[-1], 5)
    shutil.rmtree(store / "lmdb")
    code, document = cli_json("fsck", store, "--repair")
    done = [row["done"] for row in document["rows"] if row["row"] == "RepairRow"]
    assert done == ["set aside"]
    third = launcher.start(store, inspect=True)
    assert third.wait() == [0, 0]
    check_against(reference, third)
    assert third.every("restored") == [STEPS, STEPS]
