"""A flipped bit anywhere is detected or provably irrelevant, and never restored as truth.

Every flip is met by a trainer that starts in a process of its own, on a store of its own.
"""

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.worker import Worker, check_against, make_reference

pytestmark = pytest.mark.fault

TIERS = {"lmdb": "objects", "objects": "lmdb"}
"""Each tier's folder, and the other's."""
SMALL = {"base_every": 4, "width": 256}
"""Steps between bases, and the model's width: the smaller a store, the more flips in a minute, and
the more of them in what is no tensor."""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A store as a killed run leaves it, and the last step that was finished."""
    folder = tmp_path_factory.mktemp("written")
    store = folder / "store"
    worker = Worker(folder / "w", store.as_uri(), hold=14, **SMALL)
    worker.until(14)
    worker.kill()
    again = Worker(folder / "w", store.as_uri(), inspect=True, **SMALL)
    assert again.wait() == 0  # so that both tiers have bases
    for tier in TIERS:  # the same without the other tier
        shutil.copytree(store / tier, folder / tier / tier)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Step -> (digest, loss) of the uninterrupted run."""
    return make_reference(tmp_path_factory.mktemp("small"), SMALL["width"])


def mend(sound: Path, damaged: Path) -> None:
    """Make a folder what another one is: only what differs is copied or removed."""
    wanted = {path.relative_to(sound): path for path in sound.rglob("*")}
    for path in sorted(damaged.rglob("*"), reverse=True):
        twin = wanted.get(path.relative_to(damaged))
        if twin is None or (path.is_file() and _stamp(path) != _stamp(twin)):
            path.rmdir() if path.is_dir() else path.unlink()
    for name, path in sorted(wanted.items()):
        if path.is_dir():
            (damaged / name).mkdir(parents=True, exist_ok=True)
        elif not (damaged / name).exists():
            shutil.copy2(path, damaged / name)


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _flip(folder: Path, choose: random.Random) -> str:
    """Flip one bit, chosen uniformly over the bytes of the files below a folder."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.stat().st_size]
    files = [p for p in files if p.name not in ("lock.mdb", "writer.lock")]
    path = choose.choices(files, weights=[p.stat().st_size for p in files])[0]
    at, bit = choose.randrange(path.stat().st_size), choose.randrange(8)
    with path.open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), at)
    return f"{path.relative_to(folder)}:{at}.{bit}"


def _meet(store: Path, reference, where: str) -> tuple[int, list[str]]:
    """A trainer starts there: the step it is given, -1 if refused, and the reasons.

    It dies as soon as it has said so: what it would drain and delete next is for other tests.
    """
    worker = Worker(store.parent / "w", store.as_uri(), inspect="die", **SMALL)
    code = worker.wait()
    assert code >= 0, f"died by signal {-code} after a flip at {where}"
    check_against(reference, worker)
    for row in worker.rows():
        if "restored" in row:
            return row["restored"], row["reasons"]
    return -1, []


def _flips(tmp_path, written, reference, tier, count):
    choose = random.Random(f"{tier}{count}")
    sound = {"both": written / "store", "alone": written / tier}
    store, best = {}, {}
    for name, folder in sound.items():
        store[name] = tmp_path / name / "store"
        mend(folder, store[name])
        best[name] = _meet(store[name], reference, "nowhere")[0]
        assert best[name] > SMALL["base_every"]
    outcomes = Counter()
    for _ in range(count):
        name = choose.choice(["both", "alone"])
        mend(sound[name], store[name])
        where = f"{name} {_flip(store[name] / tier, choose)}"
        step, reasons = _meet(store[name], reference, where)
        outcome = "same" if step == best[name] else "older" if step >= 0 else "refused"
        outcomes[name, outcome] += 1
        assert outcome != "older" or reasons, f"step {step} without a word after {where}"
        assert name == "alone" or outcome != "refused", f"refused after {where}"
        assert step != 0 or best[name] == 0, f"begun anew after {where}: {reasons}"
    return outcomes


@pytest.mark.parametrize("tier", TIERS)
def test_thirty_flips(tmp_path, written, small, tier):
    """The short profile."""
    outcomes = _flips(tmp_path, written, small, tier, 30)
    assert outcomes["both", "same"] + outcomes["alone", "same"] >= 15, outcomes


@pytest.mark.slow
@pytest.mark.timeout(30_000)
@pytest.mark.parametrize("tier", TIERS)
def test_two_thousand_flips(tmp_path, written, small, tier):
    """The long profile."""
    outcomes = _flips(tmp_path, written, small, tier, 2000)
    print(tier, outcomes)
    assert outcomes["both", "same"] > 900, outcomes
    assert outcomes["alone", "older"] > 5, outcomes  # else no flip has hit what matters
