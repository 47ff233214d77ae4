"""gc and tags beside a run that trains, dies and goes on: it never notices, and nothing is lost."""

import shutil

import pytest

from adacheck_store.cli_kit import open_url
from adacheck_store.policy import Retention
from adacheck_store.tools import tag
from adacheck_store.tools.findings import DAMAGE, Finding
from adacheck_store.tools.fsck import fsck
from adacheck_store.tools.gc import Ages, gc
from tests.e2e.worker import STEPS, WINDOW, Worker, check_against

pytestmark = pytest.mark.fault

RULES = Retention(last=1, every=12)
TAGGED = 8


def collect(url):
    """One gc of what a run is writing; the floor's row of the far tier."""
    with open_url(url, None) as store:
        rows = list(gc(store, last=1, rules=RULES, apply=True, ages=Ages(grace_s=0.0)))
    return [row for row in rows if row.what == "floor" and row.tier == "zarr"]


def damage(url):
    """What fsck finds wrong."""
    with open_url(url, None) as store:
        return [row for row in fsck(store) if isinstance(row, Finding) and row.severity == DAMAGE]


def beside(url, worker, steps, floors, wanted):
    """Collect and tag beside each two of some steps, and on until so many floors were seen."""
    for step in steps:
        worker.until(step)
        worker.gate.open(step + 2)
        if step == TAGGED + WINDOW:
            worker.until(step + 1)  # so the one to tag is in flight no more, and no floor above it
            with open_url(url, None) as store:
                tag.add(store, "early", step=TAGGED)
        floors.update((row.step, tuple(row.kept)) for row in collect(url) if row.applied)
    worker.until(steps[-1] + 2)
    while len(floors) < wanted:  # as soon as what it has done has been drained
        floors.update((row.step, tuple(row.kept)) for row in collect(url) if row.applied)


def test_gc_beside_a_run_that_trains_and_dies(tmp_path, reference):
    """Floors rise under it by the command alone; killed and gone on, it ends like the reference."""
    url = (tmp_path / "store").as_uri()
    floors = set()
    first = Worker(tmp_path / "a", url, hold=2, given={"keep": 100})
    beside(url, first, range(2, 20, 2), floors, 1)
    first.kill()
    check_against(reference, first)
    assert not damage(url)
    second = Worker(tmp_path / "b", url, hold=22, given={"keep": 100})
    beside(url, second, range(22, STEPS, 2), floors, 2)
    second.gate.open()
    assert second.wait() == 0
    check_against(reference, second)
    assert second.row("restored")["restored"] >= first.last_step() - 3
    collect(url)
    assert not damage(url)
    with open_url(url, None) as store:
        (row,) = tag.tags(store)
        assert (row.step, row.base, row.on_line) == (TAGGED, True, True)
    shutil.rmtree(tmp_path / "store" / "lmdb")
    lost = Worker(tmp_path / "c", url, inspect=True)
    assert lost.wait() == 0
    check_against(reference, lost)
    assert lost.row("restored")["restored"] == STEPS
    assert not damage(url)
