"""gc and tags beside a run that trains, dies and goes on: it never notices, and nothing is lost."""

import shutil
import time

import pytest

from adacheck_store.cli_kit import open_url
from adacheck_store.format.errors import RestoreError
from adacheck_store.policy import Retention
from adacheck_store.tools import tag
from adacheck_store.tools.findings import DAMAGE, Finding
from adacheck_store.tools.fsck import fsck
from adacheck_store.tools.gc import Ages, gc
from tests.e2e.worker import STEPS, Worker, check_against

pytestmark = pytest.mark.fault

RULES = Retention(last=1, every=12)


def collect(url):
    """One gc of what a run is writing; the floor's row of the far tier."""
    with open_url(url, None) as store:
        rows = list(gc(store, last=1, rules=RULES, apply=True, ages=Ages(grace_s=0.0)))
    return [row for row in rows if row.what == "floor" and row.tier == "zarr"]


def damage(url):
    """What fsck finds wrong."""
    with open_url(url, None) as store:
        return [row for row in fsck(store) if isinstance(row, Finding) and row.severity == DAMAGE]


def beside(url, worker, until):
    """Collect and tag as long as a worker runs, or until it has made a step; floors seen."""
    floors = set()
    while worker.last_step() < 1:
        assert worker.process.is_alive()
        time.sleep(0.05)
    while worker.process.is_alive() and worker.last_step() < until:
        try:
            for row in collect(url):
                if row.applied:
                    floors.add((row.step, tuple(row.kept)))
            with open_url(url, None) as store:
                if worker.last_step() > 8 and not list(tag.tags(store)):
                    tag.add(store, "early", step=8)
        except RestoreError:  # the term has not begun yet
            continue
    return floors


def test_gc_beside_a_run_that_trains_and_dies(tmp_path, reference):
    """Floors rise under it by the command alone; killed and gone on, it ends like the reference."""
    url = (tmp_path / "store").as_uri()
    first = Worker(tmp_path / "a", url, pause_s=0.1, given={"keep": 100})
    floors = beside(url, first, 20)
    assert first.process.is_alive()
    first.kill()
    check_against(reference, first)
    assert not damage(url)
    second = Worker(tmp_path / "b", url, pause_s=0.1, given={"keep": 100})
    floors |= beside(url, second, STEPS)
    assert second.wait() == 0
    check_against(reference, second)
    assert second.row("restored")["restored"] >= first.last_step() - 3
    assert len(floors) > 1
    collect(url)
    assert not damage(url)
    with open_url(url, None) as store:
        (row,) = tag.tags(store)
        assert (row.step, row.base, row.on_line) == (8, True, True)
    shutil.rmtree(tmp_path / "store" / "lmdb")
    lost = Worker(tmp_path / "c", url, inspect=True)
    assert lost.wait() == 0
    check_against(reference, lost)
    assert lost.row("restored")["restored"] == STEPS
    assert not damage(url)
