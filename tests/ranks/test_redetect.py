"""What is found anew, and what ranks cannot agree on: said by name, and saved on every rank."""

import shutil
import subprocess
import sys

import pytest

import adacheck_store
from adacheck_store.format.errors import NotProvableError
from adacheck_store.format.keys import manifest_key
from adacheck_store.redundancy.listing import summary
from adacheck_store.restore import restore_state
from adacheck_store.store import open_store
from tests.ranks.test_shared import FOUND_AT, KEPT, kept, revisions
from tests.ranks.worker import GROWN_AT, STEPS, Launcher, check_against

pytestmark = pytest.mark.fault

TROUBLED = "0.weight"


def test_another_number_of_ranks_is_another_term_and_is_looked_at_anew(tmp_path):
    """Two ranks of DDP, then three: the new term begins without copies, and finds its own."""
    launcher = Launcher(tmp_path, "ddp", 2)
    reference = launcher.reference()
    store = tmp_path / "store"
    first = launcher.start(store, hold=9, given=KEPT)
    first.until(9)
    first.kill(0)
    check_against(reference, first)
    wider = {rank: {"keep": 100} for rank in range(3)}
    second = launcher.start(store, ranks=3, given=wider)
    assert second.wait() == [0, 0, 0]
    (step,) = set(second.every("restored"))
    assert step >= 7
    before, *_, begun, found = revisions(store)
    assert (len(before.ranks), len(begun.ranks), len(found.ranks)) == (2, 3, 3)
    assert before.term < begun.term == found.term
    assert (begun.step, begun.redundancy) == (step, None)
    assert found.step == step + FOUND_AT
    told = summary(found)
    assert sum(part["states"] for part in told["parts"]) == 9 + 6


def test_a_model_that_changes_is_looked_at_anew(tmp_path):
    """In the run each rank writes all again, until copies are found; a restart is another term."""
    launcher = Launcher(tmp_path, "widen", 2)
    reference = launcher.reference()
    store = tmp_path / "store"
    first = launcher.start(store, hold=GROWN_AT + 8, given=KEPT)
    first.until(GROWN_AT + 8)
    first.kill(0)
    check_against(reference, first)
    begun, found, grown, again = revisions(store)
    assert [each.step for each in (begun, found, grown)] == [0, FOUND_AT, GROWN_AT]
    assert [each.redundancy is None for each in (begun, found, grown, again)] == [
        True, False, True, False,
    ]  # fmt: skip
    assert again.step == GROWN_AT + FOUND_AT
    sizes = kept(store, GROWN_AT + 4)
    assert sum("5.weight" in each for each in sizes.values()) == 1
    second = launcher.start(store, given=KEPT, grown=True)
    assert second.wait() == [0, 0]
    check_against(reference, second)
    (step,) = set(second.every("restored"))
    assert step > GROWN_AT
    last = revisions(store)[-1]
    assert last.term > again.term
    assert last.step == step + FOUND_AT


def test_a_stale_manifest_is_refused(tmp_path):
    """What was written under a revision that is lost is not read by the one before it."""
    launcher = Launcher(tmp_path, "ddp", 2)
    reference = launcher.reference()
    store = tmp_path / "store"
    first = launcher.start(store, given=KEPT)
    assert first.wait() == [0, 0]
    found = revisions(store)[-1]
    shutil.rmtree(store / "lmdb")
    with open_store(store.as_uri(), write=True, cache=tmp_path / "other") as opened:
        opened.far.delete([str(manifest_key("e2e", found.term, found.step))])
        with pytest.raises(NotProvableError, match="a manifest revision that is missing"):
            restore_state(opened.tiers, "e2e", step=STEPS)
    second = launcher.start(store, inspect=True)
    assert second.wait() == [0, 0]
    check_against(reference, second)
    assert second.every("restored") == [FOUND_AT - 1] * 2
    for reasons in second.every("restored", "reasons"):
        assert "a manifest revision that is missing" in " ".join(reasons)


def run_another_version(rank: int) -> None:
    """Rank 1 has been updated, and rank 0 has not."""
    if rank == 1:
        adacheck_store.__version__ = "9.9"


def test_ranks_of_different_versions_share_nothing_and_say_it(tmp_path):
    """Who runs which; each keeps all that it has, until all run one."""
    launcher = Launcher(tmp_path, "ddp", 2)
    reference = launcher.reference()
    store = tmp_path / "store"
    first = launcher.start(store, given=KEPT, before_attach=run_another_version)
    assert first.wait() == [0, 0]
    check_against(reference, first)
    for text in first.every("stored", "redundancy"):
        assert "what rank 1 says it holds cannot be read: it runs version 9.9" in text
    assert [each.redundancy for each in revisions(store)] == [None]
    sizes = kept(store, STEPS)
    assert sizes["p000000"] == sizes["p000001"]
    second = launcher.start(store, inspect=True)
    assert second.wait() == [0, 0]
    check_against(reference, second)
    assert second.every("restored") == [STEPS] * 2


def test_a_model_of_many_parameters(tmp_path):
    """More than one line of text holds digests of: compared again, and restored."""
    launcher = Launcher(tmp_path, "many", 2)
    reference = launcher.reference()
    store = tmp_path / "store"
    first = launcher.start(store, hold=9)
    first.until(9)
    first.kill(1)
    check_against(reference, first)
    second = launcher.start(store)
    assert second.wait() == [0, 0]
    check_against(reference, second)
    assert min(second.every("restored")) >= 7
    for text in second.every("stored", "redundancy"):
        assert text.endswith("154 of 154 states have copies on several ranks and are kept once")


def make_undigestible(rank: int) -> None:
    """Torch does not give the bytes of one tensor."""
    from adacheck_store.redundancy import sighting

    real = sighting.fingerprint

    def refuse(identity, tensor):
        if identity.name == TROUBLED and identity.role == "param":
            raise RuntimeError("no bytes for you")
        return real(identity, tensor)

    sighting.fingerprint = refuse


def test_a_tensor_without_a_digest_is_saved_on_every_rank_and_said(tmp_path):
    """The others are kept once; a kill later every bit is there."""
    launcher = Launcher(tmp_path, "ddp", 2)
    reference = launcher.reference()
    store = tmp_path / "store"
    first = launcher.start(store, given=KEPT, before_attach=make_undigestible)
    assert first.wait() == [0, 0]
    check_against(reference, first)
    for text in first.every("stored", "redundancy"):
        assert "8 of 14 states have copies on several ranks" in text
        assert "unproven (cannot be digested: no bytes for you)" in text
    assert all(TROUBLED in sizes for sizes in kept(store, STEPS).values())
    second = launcher.start(store, inspect=True)
    assert second.wait() == [0, 0]
    check_against(reference, second)


def test_ranks_that_have_built_different_models_are_told(tmp_path):
    """Which tensor is what on which ranks; each keeps its own, and goes on with it."""
    launcher = Launcher(tmp_path, "unlike", 2)
    reference = launcher.reference()
    store = tmp_path / "store"
    first = launcher.start(store, hold=9, given=KEPT)
    first.until(9)
    first.kill(1)
    check_against(reference, first)
    second = launcher.start(store, given=KEPT)
    assert second.wait() == [0, 0]
    check_against(reference, second)
    assert second.every("final", "digest") == [known[STEPS][0] for known in reference]
    for text in second.every("stored", "redundancy"):
        assert "0.weight is [37, 9] of 4 bytes each on rank 0 and [38, 9] of 4 bytes each" in text


def test_rounded_gradients_of_all_are_rounded_on_all(tmp_path):
    """Policy ``bf16``: what another rank keeps is stepped here by what is kept, and stays equal."""
    launcher = Launcher(tmp_path, "ddp", 2)
    given = {rank: {"keep": 100, "policy": "bf16"} for rank in range(2)}
    whole = launcher.start(tmp_path / "whole", given=given)
    assert whole.wait() == [0, 0]
    store = tmp_path / "store"
    first = launcher.start(store, given=given, hold=10)
    first.until(10)
    first.kill(0)
    second = launcher.start(store, given=given)
    assert second.wait() == [0, 0]
    assert min(second.every("restored")) >= 8
    assert second.every("final", "digest") == whole.every("final", "digest")
    for text in second.every("stored", "redundancy"):
        assert text.endswith("9 of 13 states have copies on several ranks and are kept once")


FSDP1 = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
import adacheck_store as ada

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
try:
    ada.attach(model, torch.optim.AdamW(model.parameters()), run="r", store="memory://")
except ada.format.errors.UnsupportedError as error:
    print("refused:", error)
"""


def test_torchs_first_fsdp_is_refused_by_name():
    """The real class, on one rank."""
    done = subprocess.run(
        [sys.executable, "-c", FSDP1], timeout=120, check=False, capture_output=True, text=True
    )
    assert "refused: FullyShardedDataParallel (FSDP1) is not supported" in done.stdout, done.stderr
    assert "use FSDP2" in done.stdout
