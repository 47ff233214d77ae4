"""Thousands of steps of a small model: files, bytes, memory and handles stay bounded for ever."""

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import adacheck_store as ada
from adacheck_store.config import Settings
from adacheck_store.pruner import Pruner
from adacheck_store.restore import restore_state
from adacheck_store.session import RunSession
from adacheck_store.store import open_store
from tests.core.kit import Journal, begin, make_toy, train

STEPS, EVERY = 1_200, 60
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


def test_twelve_hundred_steps_stay_bounded(tmp_path: Path) -> None:
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
        # A file of LMDB keeps its high-water mark: where upkeep once came late, on a busy machine.
        assert after <= 1.5 * before, f"{name} grow: {[s[number] for s in samples]}"
    grown = statistics.median(s[3] for s in late) - statistics.median(s[3] for s in early)
    assert grown < 24 << 20, f"memory grows: {[s[3] >> 20 for s in samples]} MiB"
    assert max(sample[0] for sample in samples) < 400
    check_each_tier(url, tmp_path, journal)


def test_the_near_floor_rises_with_the_far_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the near tier was tried just before, under the old floor."""
    url, journal, toy = f"file://{tmp_path}/store", Journal(), make_toy()
    monkeypatch.setattr(Pruner, "due", lambda self: False)
    session = RunSession.open(url, "run", settings=SETTINGS)
    begin(session, toy, journal)
    train(session, toy, journal, 40)
    session.flush(60)
    pruner, progress = session._upkeep._pruner, session._upkeep.progress
    pruner._wanted = {session.store.far.traits.name}
    pruner.prune()
    session.close()
    assert progress.near_floor == progress.far_floor == 16


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


LAST = 10_000
PACKED = 64
"""Most steps in a pack: the default lag of the far tier."""
MARKS = (2_500, 3_716, 4_996, 6_212, 7_492, 9_988)
"""Steps to look at, all of them as far after a base: 4 + a multiple of 64."""
ROOM = {
    "objects": 16, "bytes of objects": 128 << 10, "records": 128, "log entries": 0,
    "lmdb used": 8192, "lmdb pages": 600, "memory": 24 << 20, "fds": 0, "threads": 0,
}  # fmt: skip
"""How far each may rise above what it was at the first. A pack of up to 64 steps may straddle the
floor, and then stays whole; where packs begin is a matter of time. So bytes are those of steps
above the floor, and of records 63 deltas and 63 extras may come and go. LMDB's file once had 4200
pages from 2 500 steps to 7 492, and 4472 at 9 988: free pages in pieces, by guess.
"""


def anonymous() -> int:
    """Bytes of this process's own memory: what is mapped of files comes and goes."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) << 10


def straddling(objects: Path, floor: int) -> int:
    """Bytes of steps at or below the floor in packs that reach beyond it; no other pack is left."""
    found = 0
    for pack in objects.glob("run/*/*/pack/*"):
        first, last = (int(text) for text in pack.name.split("-")[:2])
        assert last > floor, f"{pack.name} is whole below the floor {floor}"
        assert last - first < PACKED
        below = max(0, floor + 1 - first)
        found += usage(pack)[1] * below // (last + 1 - first)
    return found


def measured(folder: Path, session: Any) -> dict[str, int]:
    """What a run takes up, when all that is due has been done and grace is over."""
    session.flush(300)
    upkeep, store = session._upkeep, session.store
    deadline = time.monotonic() + 300
    while upkeep._pruner._graves or not upkeep.resting:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process = psutil.Process()
    found = {
        "memory": anonymous(), "fds": process.num_fds(),
        "threads": process.num_threads(),
        "log entries": len(list(store.far.list("run/log/"))),
        "records": sum(len(list(tier.list("run/"))) for tier in store.tiers),
    }  # fmt: skip
    if folder.is_dir():
        found["objects"], stored, _ = usage(folder / "objects")
        kept = straddling(folder / "objects", upkeep.progress.far_floor)
        found["bytes of objects"], found["bytes below the floor"] = stored - kept, kept
        found["lmdb used"] = store.near.used_bytes()
        found["lmdb pages"] = store.near._env()._env.info()["last_pgno"] + 1
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_ten_thousand_steps_at_the_defaults_show_no_growth(
    tmp_path: Path, kind: str, record_property: Callable[[str, object], None]
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 70), torch.nn.Tanh(), torch.nn.Linear(70, 3))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    folder = tmp_path / "store"
    url = folder.as_uri() if kind == "file" else f"memory://{tmp_path}"
    samples: dict[int, dict[str, int]] = {}
    with ada.attach(model, optimizer, run="run", store=url) as ckpt:
        ckpt.restore()
        for step in range(1, LAST + 1):
            optimizer.zero_grad()
            model(torch.randn(4, 40)).square().mean().backward()
            optimizer.step()
            if step in MARKS:
                samples[step] = measured(folder, ckpt._session)
                record_property(f"step {step}", samples[step])
                print(kind, step, samples[step], flush=True)
        ckpt.flush(300)
        status = ckpt.status()
    assert (status.gap, status.last_error, status.mismatch) == ("", "", "")
    assert status.stored == status.drained == LAST
    first, *later = samples.values()
    for name, room in ROOM.items():
        if name in first:
            grown = [sample[name] - first[name] for sample in later]
            assert max(grown) <= room, f"{name} grow: {[s[name] for s in samples.values()]}"


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
