"""SIGKILL at any moment: restored, the run ends bit-equal to the uninterrupted one."""

import random
import shutil
import time

import pytest

from adacheck_store.format.errors import AdaCheckError
from adacheck_store.restore import restore_state
from adacheck_store.store import open_store
from tests.e2e.worker import OBJECT_LAG, STEPS, WINDOW, Worker, check_against
from tests.waits import until

pytestmark = pytest.mark.fault


def test_uninterrupted_with_a_store_is_the_same_run(tmp_path, reference):
    """Capture changes no bit of training."""
    worker = Worker(tmp_path / "w", (tmp_path / "store").as_uri())
    assert worker.wait() == 0
    check_against(reference, worker)
    assert worker.row("final")["digest"] == reference[STEPS][0]
    assert worker.row("stored") == {"stored": STEPS, "drained": STEPS, "error": ""}


@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))]
)
def test_killed_again_and_again(tmp_path, reference, seed):
    """Three kills at random moments, then to the end; then the machine is lost."""
    choose = random.Random(seed)
    store = (tmp_path / "store").as_uri()
    at = 0
    for attempt in range(3):
        worker = Worker(tmp_path / f"w{attempt}", store, pause_s=0.02, hold=STEPS)
        target = at + choose.randrange(1, 8) if choose.random() < 0.8 else -1
        worker.until(min(target, STEPS))
        time.sleep(choose.uniform(0.0, 0.1))
        assert worker.process.is_alive()
        worker.kill()
        check_against(reference, worker)
        restored = [row["restored"] for row in worker.rows() if "restored" in row]
        if restored:
            assert at - (WINDOW + 1) <= restored[0] <= at + 1
            at = max(restored[0], worker.last_step())
    last = Worker(tmp_path / "last", store, flush=False)
    assert last.wait() == 0
    check_against(reference, last)
    assert last.row("restored")["restored"] >= at - (WINDOW + 1)
    assert last.row("final")["digest"] == reference[STEPS][0]

    shutil.rmtree(tmp_path / "store" / "lmdb")
    lost = Worker(tmp_path / "lost", store, inspect=True)
    assert lost.wait() == 0
    check_against(reference, lost)
    assert lost.row("restored")["tiers"] == ["zarr"]
    assert lost.row("restored")["restored"] >= STEPS - (OBJECT_LAG + WINDOW + 1)


def a_base_is_far(store):
    """Whether the far tier proves a step on which a trainer may go on without its disk."""
    try:
        with open_store(store.as_uri()) as opened:
            return restore_state([opened.far], "e2e").step > 0
    except AdaCheckError:
        return False


def test_killed_on_a_new_machine_after_the_old_one_was_lost(tmp_path, reference):
    """Restore from zarr alone, go on, be killed, restore again: two nodes' records, one line."""
    store = (tmp_path / "store").as_uri()
    first = Worker(tmp_path / "first", store, hold=14)
    first.until(14)
    until(lambda: a_base_is_far(tmp_path / "store"), "a base is far")
    first.kill()
    shutil.rmtree(tmp_path / "store" / "lmdb")
    second = Worker(tmp_path / "second", store, node="node-b", hold=20)
    second.until(20)
    second.kill()
    third = Worker(tmp_path / "third", store, node="node-b")
    assert third.wait() == 0
    for worker in (first, second, third):
        check_against(reference, worker)
    assert second.row("restored")["tiers"] == ["zarr"]
    assert third.row("restored")["restored"] >= 20 - WINDOW - 1


def test_a_damaged_lmdb_is_set_aside_and_the_objects_go_on(tmp_path, reference):
    """Its structure does not verify: renamed, never deleted, and the run is restored from zarr."""
    store = tmp_path / "store"
    first = Worker(tmp_path / "first", store.as_uri(), hold=14)
    first.until(14)
    until(lambda: a_base_is_far(store), "a base is far")
    first.kill()
    data = store / "lmdb" / "node-a" / "data.mdb"
    size = data.stat().st_size
    with data.open("r+b") as file:
        file.truncate(size // 2)
    second = Worker(tmp_path / "second", store.as_uri())
    assert second.wait() == 0
    check_against(reference, second)
    assert second.row("restored")["tiers"] == ["zarr"]
    assert second.row("final")["digest"] == reference[STEPS][0]
    aside = store / "lmdb" / "node-a-damaged-1" / "data.mdb"
    assert aside.stat().st_size == size // 2


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path, reference):
    """A writer refuses it, naming what it holds, and makes nothing in it."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("mine")
    worker = Worker(tmp_path / "w", (tmp_path / "thesis").as_uri())
    assert worker.wait() == 1
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter.txt"]


def test_another_node_goes_on_and_then_every_lmdb_is_lost(tmp_path, reference):
    """What the first node had not drained is drained by the second, from the first one's LMDB."""
    store = (tmp_path / "store").as_uri()
    first = Worker(tmp_path / "first", store, hold=16)
    first.until(16)
    first.kill()
    second = Worker(tmp_path / "second", store, node="node-b")
    assert second.wait() == 0
    assert "lmdb:node-a" in second.row("restored")["tiers"]
    shutil.rmtree(tmp_path / "store" / "lmdb")
    lost = Worker(tmp_path / "lost", store, node="node-c", inspect=True)
    assert lost.wait() == 0
    for worker in (first, second, lost):
        check_against(reference, worker)
    assert lost.row("restored")["restored"] == STEPS
