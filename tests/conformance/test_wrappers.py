"""The wrappers: faults by script, delays, counts."""

import time

import pytest

from adacheck_store.format.errors import (
    DigestMismatchError,
    TierUnavailableError,
    TruncatedError,
)
from adacheck_store.tiers.memory import MemoryTier
from adacheck_store.tiers.wrappers import CountingTier, FaultyTier, SlowTier, flip, shorten
from tests.conformance.records import MIB, World, fetch, grads, same


def test_faults_come_by_the_script() -> None:
    """Each call takes the next fault; after the last everything passes."""
    world = World()
    gone = TierUnavailableError("scripted")
    tier = FaultyTier(
        MemoryTier(),
        {"put": [None, gone], "read": [shorten, flip(77)], "sync": [gone], "list": [gone],
         "delete": [gone], "head": [None, None, gone]},
    )  # fmt: skip
    source = world.delta(1, grads())
    tier.put([*world.roots(), source])
    with pytest.raises(TierUnavailableError):
        tier.put([source])
    tier.put([source])
    array = "0/layers/grad.bf16"
    info = tier.head(source.key).head.array(array)
    assert len(tier.read(source.key, array, 0, 1)) == MIB - 1
    bad = tier.read(source.key, array, 0, 1)
    assert sum(a != b for a, b in zip(bad, source.record.arrays[array], strict=False)) == 1
    assert info.nbytes == len(tier.read(source.key, array, 0, 4))
    for act in (tier.sync, lambda: tier.list(""), lambda: tier.delete([])):
        with pytest.raises(TierUnavailableError):
            act()
        act()
    tier.head(source.key)
    with pytest.raises(TierUnavailableError):
        tier.head(source.key)
    assert same(tier, [source])
    assert tier.traits.name == "memory"


def test_damage_in_flight_is_noticed_by_the_reader() -> None:
    """Short reads and flipped bits do not verify."""
    world = World()
    source = world.delta(1, {"0/a/grad.raw": ("U8", bytes(100))})
    inner = MemoryTier()
    inner.put([*world.roots(), source])
    tier = FaultyTier(inner, {"read": [None] * 3 + [flip(9)] * 3 + [shorten] * 3})
    fetch(tier, source.key)
    with pytest.raises(DigestMismatchError):
        fetch(tier, source.key)
    with pytest.raises(TruncatedError):
        fetch(tier, source.key)


def test_counts_and_delays() -> None:
    """Requests and bytes are counted; a slow tier is slow."""
    world = World()
    tier = CountingTier(SlowTier(MemoryTier(), delay_s=0.02))
    source = world.delta(1, grads())
    started = time.monotonic()
    tier.put([*world.roots(), source])
    assert time.monotonic() - started >= 0.02
    assert same(tier, [source])
    size = sum(len(view) for view in source.record.arrays.values())
    assert tier.put_bytes == size
    assert tier.read_bytes == 3 * size  # as a whole, block by block, and into a place
    list(tier.list(""))
    tier.sync()
    tier.delete([source.key])
    assert tier.calls["put"] == tier.calls["list"] == tier.calls["sync"] == 1
    tier.close()
