"""Records with right ids and nonsense inside: nothing but errors of ours, and in bounded time."""

from __future__ import annotations

import random

import pytest

from adacheck_store.format import canonical
from tests.attack.forged import copy_of, everything, mutate, plant, relink, sound

pytestmark = pytest.mark.fault


def attack(count: int, seed: int) -> dict[str, int]:
    """So many forged records, each in a store of its own."""
    draw = random.Random(seed)
    tier, _ = sound()
    heads = {key: canonical.loads(sealed.raw) for key, (sealed, _) in tier._records.items()}
    keys = sorted(heads)
    weights = [4 if "/delta/" in key or "/base/" in key else 1 for key in keys]
    outcome = {"refused": 0, "restored": 0, "nothing": 0}
    for number in range(count):
        (key,) = draw.choices(keys, weights)
        forged = mutate(heads[key], draw)
        victim = copy_of(tier)
        if not plant(victim, key, forged):
            outcome["refused"] += 1
            continue
        if "/delta/" in key and draw.random() < 0.8:
            relink(victim, key)
        try:
            step = everything(victim, draw)
        except BaseException as error:
            raise AssertionError(f"number {number} of seed {seed}: {key} {forged}") from error
        outcome["restored" if step >= 0 else "nothing"] += 1
    return outcome


def test_forged_bodies() -> None:
    outcome = attack(1000, 0)
    assert outcome["refused"] > 30
    assert outcome["restored"] > 300


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 11))
def test_ten_thousand_forged_bodies(seed: int) -> None:
    attack(1000, seed)
