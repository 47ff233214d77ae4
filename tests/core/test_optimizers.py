"""The arithmetic vector: what it separates, what it does not, and what it leaves alone."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from adacheck_store.format.canonical import to_json
from adacheck_store.format.errors import UnsupportedError
from adacheck_store.optimizers import (
    _vector_digest,
    arithmetic_digest,
    group_values,
    raw_step,
    spec_named,
    spec_of,
)
from tests.core.rig import Rig

NAME = "torch.optim.AdamW"


def digest(name: str = NAME, dtypes: tuple[str, ...] = ("F32",), **flags: object) -> str:
    """The digest for one group of a fresh optimizer."""
    cls = spec_named(name).cls
    optimizer = cls([torch.nn.Parameter(torch.zeros(3))], **{"lr": 1e-3, **flags})
    return arithmetic_digest(name, [group_values(g) for g in optimizer.param_groups], dtypes)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    _vector_digest.cache_clear()


def test_fused_differs_from_plain_and_plain_equals_foreach() -> None:
    plain, foreach, fused = digest(foreach=False), digest(foreach=True), digest(fused=True)
    assert plain == digest()
    # The flags are not in the digest, only what they do to the bits.
    assert plain == foreach
    assert fused != plain


def test_what_changes_the_update_changes_the_digest() -> None:
    seen = [
        digest(), digest(amsgrad=True), digest(maximize=True), digest(fused=True),
        digest("torch.optim.Adam"), digest("torch.optim.SGD"), digest(dtypes=("BF16",)),
        digest("torch.optim.SGD", momentum=0.9), digest(dtypes=("BF16", "F32")),
        digest("torch.optim.SGD", momentum=0.9, nesterov=True),
    ]  # fmt: skip
    assert len(set(seen)) == len(seen)
    assert digest(dtypes=("F32", "BF16")) == digest(dtypes=("BF16", "F32", "F32"))


def test_numbers_do_not_matter_but_their_kind_does() -> None:
    assert digest(lr=1e-3) == digest(lr=7e-5)
    assert digest(betas=(0.9, 0.999)) == digest(betas=(0.8, 0.95))
    assert digest(weight_decay=0.0) == digest(weight_decay=0.3)
    assert digest(lr=torch.tensor(1e-3)) == digest(lr=torch.tensor(5e-3))
    assert digest(lr=torch.tensor(1e-3)) != digest(lr=1e-3)
    assert digest("torch.optim.SGD", momentum=0.5) == digest("torch.optim.SGD", momentum=0.9)


def test_threads_do_not_matter() -> None:
    found = set()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        _vector_digest.cache_clear()
        found.add((digest(), digest(fused=True)))
    assert len(found) == 1


def test_nothing_is_drawn_from_any_generator() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    digest(), digest(fused=True, amsgrad=True)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


PROBE = f"""
import torch
from adacheck_store.optimizers import arithmetic_digest, group_values
for flags in ({{}}, {{"fused": True}}):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))], lr=1e-3, **flags)
    groups = [group_values(g) for g in optimizer.param_groups]
    print(arithmetic_digest({NAME!r}, groups, ["F32"]))
"""


def elsewhere(**environment: str) -> list[str]:
    """The digests of another process: plain, then fused."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env={**os.environ, **environment}, check=True,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.stdout.split()


@pytest.mark.vectors
def test_another_process_has_the_same_arithmetic_and_another_capability_has_not() -> None:
    here = [digest(), digest(fused=True)]
    assert elsewhere() == here
    other = elsewhere(ATEN_CPU_CAPABILITY="default")
    assert other[0] != here[0]
    assert other[1] != here[1]


@pytest.mark.vectors
def test_flushing_denormals_is_another_arithmetic() -> None:
    """Gradients near the smallest numbers give other bits: the vector must tell."""
    usual = digest(), digest(fused=True)
    assert torch.set_flush_denormal(True)
    try:
        flushed = digest(), digest(fused=True)
    finally:
        torch.set_flush_denormal(False)
    assert flushed[0] != usual[0]
    assert flushed[1] != usual[1]
    assert (digest(), digest(fused=True)) == usual


def test_folding_fires_no_hook_of_the_user() -> None:
    """Global optimizer hooks are the user's; neither the vector nor a fold may run them."""
    rig = Rig([(70,), (3,)], lambda groups: torch.optim.AdamW(groups[0], lr=1e-3))
    base = rig.put_base()
    deltas = [rig.train() for _ in range(3)]
    fired: list[object] = []
    handle = register_optimizer_step_post_hook(lambda *args: fired.append(args))
    try:
        _vector_digest.cache_clear()
        fold, sink = rig.fold(base, deltas)
        assert not fired
        rig.optimizer.step()
        assert len(fired) == 1
    finally:
        handle.remove()
    assert fold.report.exactness == "exact"
    assert sink.arrays


def test_only_exact_classes_are_known() -> None:
    class Mine(torch.optim.AdamW):
        """A subclass may do anything."""

    params = [torch.nn.Parameter(torch.zeros(3))]
    for optimizer in (Mine(params), torch.optim.Adafactor(params)):
        with pytest.raises(UnsupportedError, match="is not supported") as caught:
            spec_of(optimizer)
        assert type(optimizer).__qualname__ in str(caught.value)
    with pytest.raises(UnsupportedError, match="upgrade"):
        spec_named("torch.optim.Unheard")
    assert spec_of(torch.optim.SGD(params, lr=0.1)).name == "torch.optim.SGD"
    assert getattr(raw_step(spec_named(NAME)), "hooked", None) is None


def test_group_values_keep_what_has_a_typed_value() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))], lr=torch.tensor(1e-3))
    optimizer.param_groups[0]["note"] = object()
    values = group_values(optimizer.param_groups[0])
    assert "params" not in values
    assert "note" not in values
    assert values["betas"] == (0.9, 0.999)
    to_json(values)
