"""Handing over: who holds just what a lost rank held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from adacheck_store.redundancy.handover import givers
from adacheck_store.redundancy.states import Holding
from tests.redundancy.kit import ddp, figure6, zero1, zero3
from tests.redundancy.test_shares import manifest_of, of

Run = Mapping[int, Sequence[Holding]]


@pytest.mark.parametrize(
    ("run", "living", "found"),
    [
        (ddp(2), {1}, {0: 1}),
        (ddp(4, tensors=3), {1, 3}, {0: 1, 2: 3}),
        (ddp(4, tensors=3), {0, 1, 2, 3}, {}),
        (zero3(4, replicas=2), {0, 1}, {2: 0, 3: 1}),
        (zero3(4, replicas=2), {0, 2}, "what rank 1 held"),
        (zero3(4), {0, 1, 2}, "what rank 3 held"),
        (zero1(2), {0}, "what rank 1 held"),
        (figure6(4), {0, 1, 2}, "what rank 3 held"),
    ],
    ids=["ddp", "ddp4", "all", "hsdp", "hsdp-lost", "zero3", "zero1", "moe"],
)
def test_givers(run: Run, living: set[int], found: Mapping[int, int] | str) -> None:
    """All that it held, in the same pieces; givers take turns."""
    chosen = givers(manifest_of(of(run)), living)
    if isinstance(found, str):
        assert isinstance(chosen, str)
        assert found in chosen
    else:
        assert chosen == found


def test_without_proof_nobody_gives() -> None:
    """What no look has proven to be on several ranks is not handed over."""
    manifest = replace(manifest_of(of(ddp(2))), redundancy=None)
    assert givers(manifest, {0}) == "no copies had been found by then"
