"""Several ranks, killed at any moment: restored they end bit-equal to the uninterrupted run."""

import random
import shutil
import time

import pytest

from adacheck_store.format.manifest import Floor
from adacheck_store.store import open_store
from adacheck_store.terms import read_log
from adacheck_store.tools.fsck import fsck
from tests.ranks.worker import BASE_EVERY, STEPS, WINDOW, Launcher, check_against
from tests.waits import until

pytestmark = pytest.mark.fault


@pytest.fixture(scope="module", params=["fsdp", "ddp"])
def trained(request, tmp_path_factory):
    """A launcher of two ranks, and the uninterrupted run."""
    launcher = Launcher(tmp_path_factory.mktemp(request.param), request.param, 2)
    return launcher, launcher.reference()


def test_uninterrupted_with_a_store_is_the_same_run(tmp_path, trained):
    """Capture changes no bit of training, on any rank."""
    launcher, reference = trained
    attempt = launcher.start(tmp_path / "store")
    assert attempt.wait() == [0, 0]
    check_against(reference, attempt)
    assert attempt.every("stored") == attempt.every("stored", "drained") == [STEPS, STEPS]
    assert attempt.every("stored", "error") == attempt.every("stored", "mismatch") == ["", ""]


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))]
)
def test_killed_again_and_again(tmp_path, trained, seed):
    """Kills at random moments, of one rank or of both; then to the end, then from zarr alone."""
    launcher, reference = trained
    choose = random.Random(f"{launcher.kind}{seed}")
    store = tmp_path / "store"
    at = 0
    for _ in range(3):
        attempt = launcher.start(store, pause_s=0.02, hold=STEPS)
        target = at + choose.randrange(1, 6) if choose.random() < 0.8 else -1
        attempt.until(min(target, STEPS))
        time.sleep(choose.uniform(0.0, 0.1))
        assert attempt.alive()
        attempt.kill(choose.randrange(2))
        check_against(reference, attempt)
        restored = attempt.every("restored")
        assert len({step for step in restored if step is not None}) <= 1
        if None not in restored:
            assert at - (WINDOW + 1) <= restored[0] <= at + 1
            at = max(restored[0], attempt.last_step())
    last = launcher.start(store)
    assert last.wait() == [0, 0]
    check_against(reference, last)
    assert last.every("restored")[0] >= at - (WINDOW + 1)
    assert last.every("final", "digest") == [known[STEPS][0] for known in reference]
    assert last.every("stored", "mismatch") == ["", ""]
    _clean(store)

    shutil.rmtree(store / "lmdb")
    lost = launcher.start(store, inspect=True)
    assert lost.wait() == [0, 0]
    check_against(reference, lost)
    assert lost.every("restored") == [STEPS, STEPS]
    assert lost.every("restored", "tiers") == [["zarr"], ["zarr"]]


def _clean(store):
    """Nothing is damaged, and no near tier is pruned beyond the far one."""
    with open_store(store.as_uri()) as opened:
        found = list(fsck(opened, "e2e"))
        floors = {
            tier.traits.name: max(
                (item.step for item in read_log(tier, "e2e") if isinstance(item, Floor)), default=0
            )
            for tier in opened.tiers
        }  # fmt: skip
    assert [str(item) for item in found if getattr(item, "severity", "") == "damage"] == []
    assert sorted(floors) == ["lmdb:node-a.r0", "lmdb:node-a.r1", "zarr"]
    for name in ("lmdb:node-a.r0", "lmdb:node-a.r1"):
        assert floors[name] <= floors["zarr"]


def drained(store, *, rank: int, step: int) -> bool:
    """Whether the far tier proves a step of a rank, which takes its extra: drained on its own."""
    objects = store / "objects" / "e2e"
    extras = objects.glob(f"*/r{rank:06d}/pack/*/zarr.json")
    bases = objects.glob(f"*/p{rank:06d}/base/{step:012d}-*/zarr.json")
    return any(bases) and any(int(path.parent.name.split("-")[1]) >= step for path in extras)


def test_one_near_tier_is_lost(tmp_path, trained):
    """All go back to the newest step that every rank can prove, and it is said how far."""
    launcher, reference = trained
    store = tmp_path / "store"
    first = launcher.start(store, hold=15)
    first.until(15)
    until(lambda: drained(store, rank=1, step=BASE_EVERY), "the first base is far")
    first.kill(1)
    shutil.rmtree(store / "lmdb" / "node-a.r1")
    second = launcher.start(store, node="node-b")
    assert second.wait() == [0, 0]
    check_against(reference, second)
    (step,) = set(second.every("restored"))
    assert step >= BASE_EVERY
    lost = second.every("restored", "lost")
    assert lost[0] == lost[1] >= 0
    reasons = second.every("restored", "reasons")
    if lost[0] > WINDOW + 1:  # fewer may be what was still on its way from rank 0
        assert any("p000001" in text or "r000001" in text for text in reasons[1])
    others = ["lmdb:node-a.r0"] if launcher.kind == "ddp" else []  # rank 0 writes for it
    assert second.every("restored", "tiers")[1] == [*others, "zarr"]
