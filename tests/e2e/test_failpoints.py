"""Death and failure at every failpoint of a real training run."""

import shutil
import signal

import pytest

from adacheck_store.store import open_store
from adacheck_store.tiers import failpoints
from adacheck_store.tools.findings import Finding
from adacheck_store.tools.fsck import fsck
from tests.e2e.worker import STEPS, WINDOW, Worker, check_against

pytestmark = pytest.mark.fault

# Reached only where a store is repaired: tests/faults/test_crash_tiers.py passes them.
REPAIR_ONLY = {"lmdb.sweep", "lmdb.quarantine"}

POINTS = [name for name in failpoints.names() if name.rsplit(".", 1)[0] not in REPAIR_ONLY]


def _damage(url: str) -> list:
    with open_store(url) as store:
        found = [item for item in fsck(store) if isinstance(item, Finding)]
    return [finding for finding in found if finding.severity == "damage"]


def _ends_like_the_reference(tmp_path, store, reference, at):
    """The run goes on, is flushed, and then loses its machine."""
    last = Worker(tmp_path / "last", store)
    assert last.wait() == 0
    check_against(reference, last)
    assert last.row("restored")["restored"] >= at - (WINDOW + 1)
    assert last.row("final")["digest"] == reference[STEPS][0]
    shutil.rmtree(tmp_path / "store" / "lmdb")
    lost = Worker(tmp_path / "lost", store, inspect=True)
    assert lost.wait() == 0
    check_against(reference, lost)
    assert lost.row("restored")["restored"] == STEPS


def _often(name: str) -> bool:
    """Passed at every step, not just once or a few times in a run."""
    seldom = ("lmdb.marker", "lmdb.create", "lmdb.page", "lmdb.delete", "local.unlink")
    return name.rsplit(".", 1)[0] not in seldom


@pytest.mark.parametrize(
    ("name", "count"),
    [(name, 1) for name in POINTS]
    + [
        pytest.param(name, 9, marks=[pytest.mark.slow] if name.endswith("after") else [])
        for name in POINTS
        if _often(name)
    ],
)
def test_killed_at(tmp_path, reference, name, count):
    """SIGKILL there; fsck finds no damage; the run goes on and ends bit-equal."""
    store = (tmp_path / "store").as_uri()
    # What is passed seldom is passed while the far tier keeps up with training.
    keeps_up = {} if _often(name) else {"flush_every": 3}
    worker = Worker(tmp_path / "w", store, failpoint=f"{name}:{count}", **keeps_up)
    assert worker.wait() == -signal.SIGKILL, f"{name} was not reached {count} times"
    check_against(reference, worker)
    if (tmp_path / "store" / "objects" / "adacheck.json").exists():
        assert not _damage(store)
    _ends_like_the_reference(tmp_path, store, reference, worker.last_step())


@pytest.mark.parametrize("name", [n for n in POINTS if n.endswith("before") and _often(n)])
def test_failing_at(tmp_path, reference, name):
    """The disk is full once, there: training is not stopped and nothing wrong is restored."""
    store = (tmp_path / "store").as_uri()
    worker = Worker(tmp_path / "w", store, fails=f"{name}:3=raise", flush_every=3)
    assert worker.wait() == 0
    check_against(reference, worker)
    assert worker.last_step() == STEPS
    assert worker.row("final")["fired"], f"{name} was not reached 3 times in training"
    assert not _damage(store)
    inspected = Worker(tmp_path / "i", store, inspect=True)
    assert inspected.wait() == 0
    check_against(reference, inspected)
    assert inspected.row("restored")["restored"] == STEPS
