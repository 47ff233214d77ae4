"""A flipped bit anywhere is detected or provably irrelevant, and never restored as truth."""

import random
import shutil
from pathlib import Path

import pytest

from tests.e2e.worker import Worker, check_against

pytestmark = pytest.mark.fault


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A store as a killed run leaves it."""
    folder = tmp_path_factory.mktemp("written")
    worker = Worker(folder / "w", (folder / "store").as_uri(), pause_s=0.02)
    while worker.last_step() < 22:
        pass
    worker.kill()
    return folder / "store"


def _flip(folder: Path, choose: random.Random) -> str:
    """Flip one bit, chosen uniformly over the bytes that are in use below a folder."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.stat().st_size]
    files = [p for p in files if p.name not in ("lock.mdb", "writer.lock")]
    path = choose.choices(files, weights=[p.stat().st_size for p in files])[0]
    data = bytearray(path.read_bytes())
    at = choose.randrange(len(data))
    data[at] ^= 1 << choose.randrange(8)
    path.write_bytes(data)
    return f"{path.relative_to(folder)}:{at}"


def _flips(tmp_path, written, reference, tier, count):
    choose = random.Random(f"{tier}{count}")
    other = "objects" if tier == "lmdb" else "lmdb"
    outcomes = {"restored": 0, "refused": 0}
    for number in range(count):
        store = tmp_path / f"{number}"
        shutil.copytree(written, store)
        if choose.random() < 0.5 and tier == "objects":
            shutil.rmtree(store / other)  # the only copy
        where = _flip(store / tier, choose)
        worker = Worker(tmp_path / "w", store.as_uri(), inspect=True)
        code = worker.wait()
        assert code >= 0, f"died by signal {-code} after a flip at {where}"
        check_against(reference, worker)
        restored = [row["restored"] for row in worker.rows() if "restored" in row]
        outcomes["restored" if restored else "refused"] += 1
        shutil.rmtree(store)
    return outcomes


@pytest.mark.parametrize("tier", ["lmdb", "objects"])
def test_thirty_flips(tmp_path, written, reference, tier):
    """The short profile."""
    outcomes = _flips(tmp_path, written, reference, tier, 30)
    assert outcomes["restored"] >= (30 if tier == "lmdb" else 20), outcomes


@pytest.mark.slow
@pytest.mark.timeout(30_000)
@pytest.mark.parametrize("tier", ["lmdb", "objects"])
def test_two_thousand_flips(tmp_path, written, reference, tier):
    """The long profile."""
    outcomes = _flips(tmp_path, written, reference, tier, 2000)
    assert outcomes["restored"] >= (2000 if tier == "lmdb" else 1600), outcomes
