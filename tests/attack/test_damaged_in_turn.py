"""Each record of a run damaged or lost in turn: the newest step that stands without it."""

from __future__ import annotations

import pytest

from adacheck_store.format.errors import NotProvableError
from adacheck_store.format.keys import parse_key
from adacheck_store.restore import restore_state
from adacheck_store.tiers.memory import MemoryTier
from tests.attack.forged import copy_of, sound
from tests.core.kit import Journal

pytestmark = pytest.mark.fault

LAST = 19


@pytest.fixture(scope="module")
def written() -> tuple[MemoryTier, Journal]:
    """A store with bases of steps 8 and 16, and what follows them."""
    tier, journal = sound(LAST)
    return tier, journal


def provable(tier: MemoryTier, without: str) -> set[int]:
    """By brute force: an extra, and a base from which every delta is there."""
    kept = [parse_key(key) for key in tier._records if key != without]
    held = {kind: {key.step for key in kept if key.kind == kind}
            for kind in ("base", "delta", "extra")}  # fmt: skip
    return {
        step for step in held["extra"]
        if any(set(range(base + 1, step + 1)) <= held["delta"]
               for base in held["base"] if base <= step)
    }  # fmt: skip


@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_the_newest_step_that_stands(written: tuple[MemoryTier, Journal], how: str) -> None:
    whole, journal = written
    keys = [key for key in sorted(whole._records) if parse_key(key).kind in _KINDS]
    assert len([key for key in keys if "/base/" in key]) >= 2
    fell = 0
    for key in keys:
        sealed, blocks = whole._records[key]
        tier = copy_of(whole)
        if how == "gone":
            del tier._records[key]
        elif not blocks:
            continue
        else:
            place = next(place for place in sorted(blocks) if len(blocks[place]))
            wrong = bytes([blocks[place][0] ^ 4]) + bytes(blocks[place][1:])
            tier._records[key] = (sealed, {**blocks, place: wrong})
        expected = max(provable(whole, key))
        restored = restore_state([tier], "run")
        journal.assert_same(restored)
        assert restored.step == expected, key
        if expected < LAST:
            fell += 1
            assert restored.lost == LAST - expected or how == "gone"
            assert restored.reasons, key
            with pytest.raises(NotProvableError):
                restore_state([tier], "run", step=LAST)
    assert fell >= 3


_KINDS = ("base", "delta", "extra")
