"""A chain folded under another arithmetic than its trainer's: class bounded, drift measured."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from adacheck_store.config import Settings
from adacheck_store.drift import Drift, _ordered
from adacheck_store.restore import restore_state
from adacheck_store.store import open_store
from tests.hooks.helpers import adamw, attach, bits, mlp, restored, same, train

ROOT = Path(__file__).resolve().parents[2]
STEPS = 21


def make(seed: int = 0) -> Any:
    """The other process's model and optimizer."""
    model = mlp(seed)
    return model, adamw(model, foreach=False)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a run that was trained with the arithmetic of a CPU without AVX."""
    url = (tmp_path_factory.mktemp("drift") / "store").as_uri()
    subprocess.run(
        [sys.executable, "-m", "tests.optimizers.drifting", url, str(STEPS)], cwd=ROOT, check=True,
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default"}, timeout=200,
    )  # fmt: skip
    return url


@pytest.mark.vectors
def test_a_restore_elsewhere_is_bounded_and_says_its_drift(elsewhere: str) -> None:
    with open_store(elsewhere) as store:
        done = restore_state(store.tiers, "r")
        at_base = restore_state(store.tiers, "r", step=16)
    found = done.certificate
    assert (done.step, found.base_step, found.deltas) == (STEPS, 16, 5)
    assert found.exactness == "bounded"
    assert done.lost == 0
    assert found.drift is not None
    assert 0 < found.drift < 1e-4
    assert found.drift_ulps is not None
    assert found.drift_ulps > 0
    assert f"drift {found.drift:.3g}" in str(found)
    assert at_base.certificate.exactness == "exact", "a base of the trainer's own is what it was"


@pytest.mark.vectors
def test_too_much_drift_is_a_mismatch(elsewhere: str) -> None:
    with open_store(elsewhere) as store:
        done = restore_state(store.tiers, "r", max_drift=1e-12)
    assert done.step == 16
    assert done.lost == STEPS - 16
    assert any("more than max_drift 1e-12" in reason for reason in done.reasons)
    assert done.certificate.exactness == "exact"


@pytest.mark.vectors
def test_what_follows_a_bounded_restore_is_exact_again(elsewhere: str, tmp_path: Path) -> None:
    """The new term begins with what was loaded, so that a third machine gets the same."""
    marks = {}
    with restored(make, elsewhere, base_every=8, keep=9) as (model, optimizer, ckpt, report):
        assert report.certificate.exactness == "bounded"
        marks[STEPS] = bits(model, optimizer)
        for number in range(STEPS + 1, STEPS + 7):
            train(model, optimizer)
            marks[number] = bits(model, optimizer)
        ckpt.flush()
        assert ckpt.status().exactness == "exact"
    with restored(make, elsewhere) as (again, mine, _, report):
        assert report.step == STEPS + 6
        assert report.certificate.exactness == "exact"
        same(bits(again, mine), marks[report.step])


def test_drift_is_joined_by_the_largest() -> None:
    one = Drift(steps=3, absolute=1e-7, ulps=9)
    assert one.joined(None) is one
    assert one.joined(Drift(steps=1, absolute=1e-6, ulps=2)) == Drift(
        steps=3, absolute=1e-6, ulps=9
    )
    assert Settings().max_drift == 1e-3


def test_attach_twice_does_not_drift(tmp_path: Path) -> None:
    """The same arithmetic on the same machine: nothing is measured, all is exact."""
    url = (tmp_path / "store").as_uri()
    for turn in range(2):
        model, optimizer = make(turn)
        with attach(model, optimizer, url, base_every=4) as ckpt:
            report = ckpt.restore()
            for _ in range(6):
                train(model, optimizer)
        if turn:
            assert report.certificate.exactness == "exact"
            assert report.certificate.drift is None


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bfloat16, torch.float32, torch.float64])
def test_neighbouring_numbers_are_one_apart(dtype: torch.dtype) -> None:
    numbers = _ordered(torch.tensor([-2.0, -0.0, 0.0, 1.0, 1.5], dtype=dtype)).tolist()
    assert numbers == sorted(numbers)
    assert numbers[1] == numbers[2]
    one = torch.tensor([1.0], dtype=dtype)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    after = (one.view(bits) + 1).view(dtype)
    assert int(_ordered(after) - _ordered(one)) == 1
