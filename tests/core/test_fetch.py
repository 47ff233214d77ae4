"""Damaged blocks: taken from another tier, one by one; lost everywhere, an older step, aloud."""

import dataclasses
from pathlib import Path

import pytest
import torch

from adacheck_store.catalog import RecordRef, read_catalog
from adacheck_store.fetch import ArrayReader, BlocksLostError, Fetcher
from adacheck_store.format.errors import DigestMismatchError, NotProvableError, TierUnavailableError
from adacheck_store.restore import restore_state
from adacheck_store.session import RunSession
from adacheck_store.store import open_store
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.memory import MemoryTier
from adacheck_store.tiers.wrappers import FaultyTier, WrapperTier
from tests.core.kit import QUICK, Journal, KeptTier, begin, make_toy, session_on, train
from tests.core.rig import Rig, small_blocks

WAIT_S = 120.0


class Flipping(WrapperTier):
    """A tier that reads chosen blocks wrongly: (key part, array, block index)."""

    def __init__(self, inner: Tier, *bad: tuple[str, str, int]) -> None:
        super().__init__(inner)
        self.bad = set(bad)
        self.reads: list[tuple[str, str, int, int]] = []

    def read(self, key: str, array: str, first: int, count: int) -> bytes | memoryview:
        """Flip a bit in each bad block of the run."""
        self.reads.append((key, array, first, count))
        data = bytearray(self.inner.read(key, array, first, count))
        size = -(-len(data) // count)
        for part, name, index in self.bad:
            if part in key and name == array and first <= index < first + count:
                data[(index - first) * size] ^= 4
        return bytes(data)


def base_with_copies(monkeypatch: pytest.MonkeyPatch) -> tuple[Rig, RecordRef, MemoryTier]:
    """A base of many small blocks in two tiers."""
    small_blocks(monkeypatch)
    rig = Rig([(2_000,)], lambda groups: torch.optim.AdamW(groups[0], lr=1e-3))
    ref = rig.put_base()
    second = KeptTier("second")
    second._records.update(rig.tier._records)
    return rig, ref, second


def both(ref: RecordRef) -> RecordRef:
    """The reference with both holders."""
    return dataclasses.replace(ref, tiers=("memory", "second"))


def test_each_block_comes_from_whichever_tier_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tiers damaged, in different blocks of one array: nothing is lost."""
    rig, ref, second = base_with_copies(monkeypatch)
    ref = both(ref)
    near = Flipping(rig.tier, ("/base/", "s0/param", 1), ("/base/", "s0/param", 4))
    far = Flipping(second, ("/base/", "s0/param", 2))
    fetcher = Fetcher([near, far])
    reader = ArrayReader(fetcher, ref)
    got = reader.elements("s0/param", 0, 2_048)
    assert bytes(got.numpy().tobytes()) == rig.arrays()["s0/param"].numpy().tobytes()
    assert set(fetcher.used) == {"memory", "second"}
    assert any(isinstance(error, DigestMismatchError) for error in fetcher.failures)
    far.bad.add(("/base/", "s0/param", 4))
    with pytest.raises(BlocksLostError, match="no tier has this base whole") as caught:
        ArrayReader(Fetcher([near, far]), ref).elements("s0/param", 0, 2_048)
    assert {tier for tier, _ in caught.value.lost} == {"memory", "second"}
    for word in ("tier=memory", "tier=second", "block 4", "part=", "step=0", "fsck"):
        assert word in str(caught.value)


def test_a_tier_that_does_not_answer_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, ref, second = base_with_copies(monkeypatch)
    away = [TierUnavailableError("away")] * 100
    near = FaultyTier(rig.tier, {"read": away})
    reader = ArrayReader(Fetcher([near, second]), both(ref))
    for start in range(0, 2_000, 256):
        reader.elements("s0/param", start, start + 64)
    assert len(near._script["read"]) == 99


def damage_lmdb(store: Path, word: bytes) -> None:
    """Flip a bit in every page of the LMDB file that holds the word."""
    path = next(store.glob("lmdb/*/data.mdb"))
    data = bytearray(path.read_bytes())
    at = data.find(word)
    assert at >= 0
    while at >= 0:
        data[at] ^= 1
        at = data.find(word, at + 1)
    path.write_bytes(data)


def test_a_block_damaged_in_lmdb_is_taken_from_zarr(tmp_path: Path) -> None:
    url, journal = f"file://{tmp_path}/store", Journal()
    toy = make_toy()
    session = RunSession.open(url, "run", settings=QUICK)
    begin(session, toy, journal)
    train(session, toy, journal, 12)
    session.flush(WAIT_S)
    session.close()
    with open_store(url) as store:
        plan = restore_state(store.tiers, "run").plan.parts[0]
        info = store.near.head(plan.base.key).head.array("s0/exp_avg")
        word = bytes(store.near.read(plan.base.key, info.name, 0, 1))[:64]
    damage_lmdb(tmp_path / "store", word)
    with open_store(url) as store:
        done = restore_state(store.tiers, "run")
        assert done.step == 12
        assert done.lost == 0
        assert set(done.tiers) == {"lmdb", "zarr"}
        journal.assert_same(done)
        alone = restore_state([store.near], "run")
        assert alone.step <= 12
        assert alone.plan.parts[0].base.key != plan.base.key
        journal.assert_same(alone)


def test_a_block_damaged_everywhere_ends_in_an_older_step_and_is_said() -> None:
    near, far = KeptTier("near"), KeptTier("far")
    session = session_on(near, far)
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    train(session, toy, journal, 14)
    session.flush(WAIT_S)
    session.close()
    bad = ("/delta/000000000013", "0/s0/grad.bf16", 0)
    tiers = [Flipping(near, bad), Flipping(far, bad)]
    done = restore_state(tiers, "run")
    assert done.step == 12
    assert done.lost == 2
    journal.assert_same(done)
    assert any("no tier has this delta whole" in reason for reason in done.reasons)
    assert any("step=13" in reason for reason in done.reasons)
    with pytest.raises(NotProvableError, match="no tier has this delta whole"):
        restore_state(tiers, "run", step=14)
    one = restore_state([Flipping(near, bad), far], "run")
    assert one.step == 14
    assert one.lost == 0
    journal.assert_same(one)


def test_compaction_takes_from_the_far_tier_what_the_near_one_has_damaged() -> None:
    near, far = Flipping(KeptTier("near")), KeptTier("far")
    session = session_on(near, far)
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    train(session, toy, journal, 5)
    session.flush(WAIT_S)
    near.bad.add(("/delta/000000000003", "0/s0/grad.bf16", 0))
    train(session, toy, journal, 6)
    session.flush(WAIT_S)
    assert session.status().base == 8
    assert session.status().gap == ""
    session.close()
    assert any(ref.step == 8 for refs in read_catalog([near], "run").bases.values() for ref in refs)
    journal.assert_same(restore_state([near], "run"))


def test_a_head_damaged_in_one_tier_is_read_from_another() -> None:
    near, far = KeptTier("near"), KeptTier("far")
    session = session_on(near, far)
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    train(session, toy, journal, 10)
    session.flush(WAIT_S)
    session.close()

    class Blind(WrapperTier):
        """Heads of deltas do not verify."""

        def head(self, key: str):
            if "/delta/" in key:
                raise DigestMismatchError("a flipped bit")
            return super().head(key)

    done = restore_state([Blind(near), far], "run")
    assert done.step == 10
    journal.assert_same(done)
    alone = restore_state([Blind(near)], "run")
    assert alone.step == 8
    assert alone.lost == 2
    assert any("a flipped bit" in reason and "tier=near" in reason for reason in alone.reasons)
