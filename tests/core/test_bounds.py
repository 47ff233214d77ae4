"""Two thousand steps of a small model: files, bytes and memory stay bounded for ever."""

import os
import shutil
import statistics
from pathlib import Path

import psutil
import pytest

from adacheck_store.config import Settings
from adacheck_store.restore import restore_state
from adacheck_store.session import RunSession
from adacheck_store.store import open_store
from tests.core.kit import Journal, begin, make_toy, train

STEPS, EVERY = 2_000, 100
SETTINGS = Settings(base_every=16, object_lag=8, grace_s=0.0)


def usage(store: Path) -> tuple[int, int, int]:
    """Files, their bytes, and bytes of LMDB's file."""
    files = nbytes = lmdb = 0
    for folder, _, names in os.walk(store):
        for name in names:
            try:
                size = os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
            files += 1
            nbytes += size
            lmdb += size if name == "data.mdb" else 0
    return files, nbytes, lmdb


class Forgetful(Journal):
    """Keeps the last steps only, so that what grows is not the test."""

    def note(self, toy) -> None:
        """Write down the present, forget what is long past."""
        super().note(toy)
        self.at.pop(toy.step - 40, None)


def test_two_thousand_steps_stay_bounded(tmp_path: Path) -> None:
    url, journal, toy = f"file://{tmp_path}/store", Forgetful(), make_toy()
    session = RunSession.open(url, "run", settings=SETTINGS)
    begin(session, toy, journal)
    process = psutil.Process()
    samples: list[tuple[int, ...]] = []
    for _ in range(STEPS // EVERY):
        train(session, toy, journal, EVERY)
        session.flush(60)
        samples.append((*usage(tmp_path / "store"), process.memory_info().rss))
    status = session.status()
    session.close()
    assert status.gap == ""
    assert status.last_error == ""
    assert status.compactions >= STEPS // EVERY
    early, late = samples[2 : len(samples) // 2], samples[len(samples) // 2 :]
    for number, name in enumerate(("files", "bytes", "bytes of LMDB")):
        before = max(sample[number] for sample in early)
        after = max(sample[number] for sample in late)
        assert after <= 1.25 * before, f"{name} grow: {[s[number] for s in samples]}"
    grown = statistics.median(s[3] for s in late) - statistics.median(s[3] for s in early)
    assert grown < 24 << 20, f"memory grows: {[s[3] >> 20 for s in samples]} MiB"
    assert max(sample[0] for sample in samples) < 400
    check_each_tier(url, tmp_path, journal)


def check_each_tier(url: str, folder: Path, journal: Journal) -> None:
    """The last step is provable from each tier alone, and nothing verifies wrongly."""
    with open_store(url) as store:
        for tiers in (store.tiers, [store.near], [store.far]):
            done = restore_state(tiers, "run")
            assert done.step == STEPS
            assert done.lost == 0
            journal.assert_same(done)
            for step in range(STEPS - 16, STEPS):
                journal.assert_same(restore_state(tiers, "run", step=step))
    shutil.rmtree(folder / "store" / "lmdb")
    with open_store(url) as store:
        journal.assert_same(restore_state(store.tiers, "run"))


@pytest.mark.slow
def test_two_hundred_restarts_stay_bounded(tmp_path: Path) -> None:
    """Every term ends in a kill soon after it began; the line's records are pruned all the same."""
    url, journal = f"file://{tmp_path}/store", Journal()
    files = []
    for _ in range(200):
        toy = make_toy()
        session = RunSession.open(url, "run", settings=SETTINGS)
        begin(session, toy, journal)
        train(session, toy, journal, 7)
        session.flush(60)
        session.close()
        files.append(usage(tmp_path / "store")[0])
    with open_store(url) as store:
        done = restore_state(store.tiers, "run")
    assert done.step == 1_400
    journal.assert_same(done)
    # a term leaves its claim, its manifest and its folders, and no more
    assert files[-1] - files[100] <= 100 * 6
