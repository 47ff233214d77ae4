"""DeepSpeed's ZeRO in bf16: the rank that steps masters keeps them, and halves follow from them."""

import pytest
import torch

from adacheck_store.catalog import read_catalog
from adacheck_store.store import open_store
from tests.ranks.test_parallel import check_bytes, held, killed_and_restored
from tests.ranks.test_shared import kept, revisions
from tests.ranks.worker import BASE_EVERY, STEPS, Launcher

pytestmark = [pytest.mark.fault, pytest.mark.deepspeed]

ELEMENTS = (38 * 9 + 38) // 2, 38 // 2
"""Of weights and of biases, what one of two ranks steps."""

FILLED = 2
"""Stages 1 and 2 fill a rank's share up to a multiple of it."""


@pytest.mark.parametrize(
    "stage", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_killed_and_restored(tmp_path, stage):
    """Each of two ranks keeps two bytes of each element that it steps; folds are exact."""
    attempt, store = killed_and_restored(tmp_path, f"deep{stage}", 2)
    shares = [n + -n % FILLED if stage < 3 else n for n in ELEMENTS]
    run = {
        rank: [
            held(f"zero.{number}", torch.empty(share, requires_grad=True), rank, [rank], [rank])
            for number, share in enumerate(shares)
        ] for rank in range(2)
    }  # fmt: skip
    check_bytes(attempt, store, run, half="zero")
    for step, text in zip(
        attempt.every("restored"), attempt.every("restored", "certificate"), strict=True
    ):
        assert f"replayed base 6 + {step - 6} deltas, exact" in text
    for text in attempt.every("stored", "redundancy"):
        assert "0 of 4 states have copies" in text
    assert revisions(store)[-1].redundancy is not None


def test_what_is_no_longer_there_is_refused_and_said(tmp_path):
    """Partitions of other pieces; a half that is not its master's; stage 0; half a step."""
    launcher = Launcher(tmp_path, "deep2flip", 2)
    store = tmp_path / "store"
    first = launcher.start(store, given={rank: {"keep": 100} for rank in range(2)})
    assert first.wait() == [0, 0]
    assert kept(store, BASE_EVERY).keys() == {"p000001"}
    assert first.every("stored") == [STEPS, STEPS]
    with open_store(store.as_uri()) as opened:
        bases = read_catalog(opened.tiers, "e2e").bases
    gaps = [(ref.step, str(ref.gap)) for (_, part), refs in bases.items() for ref in refs
            if part == "p000000" and ref.gap]  # fmt: skip
    why = "'layers.0.weight' is not what follows from its master weights"
    assert any(step > BASE_EVERY for step, gap in gaps if why in gap)
    launcher.kind = "deep2turned"
    second = launcher.start(store)
    assert second.wait() == [0, 0]
    for refused in second.every("refused"):
        assert "partition 'zero.0' is made of other pieces: the chain has ['layers.0" in refused
    assert second.every("refused", "touched") == [False, False]
    launcher.kind = "deep0"
    third = launcher.start(tmp_path / "other")
    launcher.kind = "deep2micro"
    fourth = launcher.start(tmp_path / "micro")
    assert third.wait() == [0, 0]
    assert fourth.wait() == [1, 1]  # by an `OrderError` of `end_step`
    assert [fourth.last_step(), *fourth.every("restored")] == [1, 0, 0]
    for ended in fourth.every("ended"):
        assert "1 micro-batches after a step" in ended
    for refused in third.every("refused"):
        assert "DeepSpeed's optimizer is a" in refused
        assert "use ZeRO stage 1, 2 or 3 in bf16" in refused
