"""What is special about the zarr tier: plain zarr, packs, the log."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from adacheck_store.format.errors import (
    AdaCheckError,
    DigestMismatchError,
    ForkError,
    MalformedError,
    RecordNotFoundError,
    TierFullError,
)
from adacheck_store.format.ids import BLOCK_BYTES
from adacheck_store.format.keys import parse_key
from adacheck_store.tiers import failpoints, zarr_writer
from adacheck_store.tiers.base import RecordSource
from adacheck_store.tiers.object_local import LocalObjects
from adacheck_store.tiers.zarr import ZarrTier
from adacheck_store.tiers.zarr_meta import chunk_bytes, chunk_count
from tests.conformance.records import MIB, StreamSource, World, fetch, grads, noise, same, state


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[ZarrTier]:
    """A tier in a folder."""
    tier = ZarrTier(LocalObjects(tmp_path))
    yield tier
    tier.close()


def packs(path: Path) -> list[str]:
    """Names of the packs in a folder."""
    return sorted(file.parent.name for file in path.rglob("pack/*/zarr.json"))


def test_plain_zarr_opens_a_base(tier: ZarrTier, tmp_path: Path) -> None:
    """Named arrays, raw unsigned integers, true dtypes among the attributes."""
    world = World()
    values = np.arange(3 * MIB, dtype=np.float32)
    arrays = {
        "layers/param": ("F32", values.tobytes()),
        "layers/exp_avg": ("BF16", bytes(range(256)) * 2),
        "flags/buffer": ("BOOL", b"\1\0\1"),
        "tiny/param": ("F8_E4M3", b"\x38\x39"),
        "wave/buffer": ("C128", np.array([1 + 2j, 3j], np.complex128).tobytes()),
        "spare/param": ("F64", b""),
    }
    base = world.base(8, arrays)
    tier.put([*world.roots(), base])
    group = zarr.open_group(tmp_path / base.key, mode="r")
    assert group.attrs["id"] == base.expected_id
    names = sorted(name for name, item in group.members(max_depth=None) if hasattr(item, "shape"))
    assert names == sorted(arrays)
    read = np.asarray(group["layers/param"][:])
    assert read.dtype == np.uint32
    assert np.array_equal(read.view(np.float32), values)
    assert group["layers/param"].attrs["dtype"] == "F32"
    assert group["layers/exp_avg"].dtype == np.uint16
    assert group["flags/buffer"].shape == (3,)
    assert group["spare/param"].shape == (0,)
    pairs = np.asarray(group["wave/buffer"][:])
    assert pairs.dtype == np.uint64
    assert np.array_equal(pairs.view(np.complex128), [1 + 2j, 3j])
    for source in world.roots():
        assert zarr.open_group(tmp_path / source.key, mode="r").attrs["id"] == source.expected_id


@given(st.integers(0, 1 << 36))
def test_chunks_waste_little(nbytes: int) -> None:
    """Whole blocks, at most 8 MiB, and at most 3 % of padding beyond the last block."""
    chunk = chunk_bytes(nbytes)
    assert chunk <= 8 * MIB
    count = chunk_count(nbytes, chunk)
    assert count * chunk >= nbytes
    if count > 1:
        assert chunk % BLOCK_BYTES == 0
        assert chunk >= 4 * MIB
        assert count * chunk - nbytes < BLOCK_BYTES + max(3 * MIB, nbytes // 32)
    else:
        assert chunk == nbytes


def test_packs_hold_consecutive_steps(tier: ZarrTier, tmp_path: Path) -> None:
    """One put becomes one pack for each part and run of steps."""
    world = World()
    tier.put(world.roots())
    tier.put([world.delta(step, grads(500)) for step in (3, 1, 2, 7, 8, 20)]
             + [world.extra(step) for step in (1, 2)])  # fmt: skip
    spans = [tuple(int(word) for word in name.split("-")[:2]) for name in packs(tmp_path)]
    assert sorted(spans) == [(1, 2), (1, 3), (7, 8), (20, 20)]
    for pack in tmp_path.rglob("pack/*"):
        assert zarr.open_group(pack, mode="r")["data"].dtype == np.uint8


def test_a_pack_goes_as_a_whole(tier: ZarrTier, tmp_path: Path) -> None:
    """Records of a pack are deleted when all of them are named together."""
    world = World()
    sources = [world.delta(step, grads(500)) for step in range(1, 9)]
    tier.put([*world.roots(), *sources[:4]])
    tier.put(sources[4:])
    tier.delete([source.key for source in sources[:6]])
    assert same(tier, sources[4:])
    with pytest.raises(RecordNotFoundError):
        tier.head(sources[0].key)
    assert len(packs(tmp_path)) == 1
    tier.delete([source.key for source in sources])
    assert not packs(tmp_path)


def test_the_same_pack_again_is_repaired_in_place(tier: ZarrTier, tmp_path: Path) -> None:
    """No second pack is made of records that one holds already; a missing chunk comes back."""
    world = World()
    sources = [world.delta(step, grads(6 * MIB)) for step in (1, 2)]
    tier.put([*world.roots(), *sources])
    chunks = sorted(tmp_path.rglob("pack/*/data/c/*"))
    assert len(chunks) == 2
    whole = chunks[1].read_bytes()
    chunks[1].unlink()
    with pytest.raises(RecordNotFoundError, match="chunk 1"):
        fetch(tier, sources[1].key)
    tier.put(sources)
    assert chunks[1].read_bytes() == whole
    assert same(tier, sources)
    assert len(packs(tmp_path)) == 1


def offsets(pack: Path) -> list[int]:
    """Where the records of a pack begin, as its document says."""
    records = json.loads((pack / "zarr.json").read_text())["attributes"]["records"]
    return [record["offset"] for record in records]


@pytest.mark.parametrize("streamed", [False, True])
def test_long_records_of_a_pack_begin_with_a_chunk(
    tier: ZarrTier, tmp_path: Path, streamed: bool
) -> None:
    """Their runs of blocks are whole objects; short ones follow each other without a gap."""
    world, size = World(), 15 * MIB + MIB // 2
    long = [world.delta(step, {"set/s0/param": ("U8", noise(size))}) for step in (1, 2)]
    short = [world.delta(step, grads(5 * MIB)) for step in (5, 6, 7)]
    sources = [StreamSource(source) for source in long] if streamed else long
    tier.put([*world.roots(), *sources])
    tier.put(short)
    one, other = (next(tmp_path.rglob(f"pack/{number:012d}-*")) for number in (1, 5))
    assert offsets(one) == [0, 16 * MIB]
    assert offsets(other) == [0, *(sum(map(nbytes, short[:n])) for n in (1, 2))]
    data = zarr.open_group(one, mode="r")["data"]
    assert len(data[:]) == data.shape[0] == 16 * MIB + size
    assert not np.asarray(data[size : 16 * MIB]).any()
    assert same(tier, [*long, *short])


@pytest.mark.parametrize("gaps", [zarr_writer._GAPS, 2**40])
def test_a_pack_is_repaired_as_it_was_cut(
    tier: ZarrTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gaps: int
) -> None:
    """Also one without gaps, as they were made before."""
    world, size = World(), 15 * MIB + MIB // 2
    sources = [world.delta(step, {"set/s0/param": ("U8", noise(size))}) for step in (1, 2)]
    with monkeypatch.context() as patch:
        patch.setattr(zarr_writer, "_GAPS", gaps)
        tier.put([*world.roots(), *sources])
    pack = next(tmp_path.rglob("pack/*"))
    assert offsets(pack)[1] == (16 * MIB if gaps < 2**40 else size)
    for chunk in sorted(pack.glob("data/c/*"))[1:3]:
        chunk.unlink()
    tier.put(sources)
    assert same(tier, sources)
    assert len(packs(tmp_path)) == 1


def nbytes(source: RecordSource) -> int:
    """Bytes of a record's arrays."""
    return sum(len(data) for data in source.record.arrays.values())


def test_packs_may_overlap(tier: ZarrTier, tmp_path: Path) -> None:
    """What one pack has lost another gives; listing names each record once."""
    world = World()
    sources = {step: world.delta(step, grads(MIB)) for step in range(1, 7)}
    tier.put([*world.roots(), *(sources[step] for step in (1, 2, 3, 4))])
    tier.put([sources[step] for step in (3, 4, 5, 6)])
    assert len(packs(tmp_path)) == 2
    keys = [source.key for source in sources.values()]
    assert list(tier.list(f"{world.run}/{world.term}/{world.part}/")) == keys
    first = next(iter(tmp_path.rglob("pack/*0001-*0004-*")))
    for damage in ("data/c/0", "zarr.json"):
        (first / damage).write_bytes(b"{}")
        fresh = ZarrTier(LocalObjects(tmp_path))
        assert same(fresh, [sources[3], sources[4], sources[6]])
        with pytest.raises(AdaCheckError):
            fetch(fresh, sources[1].key)
    assert list(tier.forks("")) == []


def test_forks_are_found(tier: ZarrTier) -> None:
    """Two writers of one step: neither is believed, and the listing for fsck names both ids."""
    world = World()
    one = [world.delta(step, grads(500)) for step in (1, 2, 3)]
    other = world.delta(2, grads(500))
    tier.put([*world.roots(), *one])
    tier.put([other])
    with pytest.raises(ForkError) as caught:
        tier.head(other.key)
    assert caught.value.place["part"] == world.part
    assert same(tier, [one[0], one[2]])
    assert list(tier.forks("")) == [(other.key, frozenset({one[1].expected_id, other.expected_id}))]


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a["records"].pop(), lambda a: a.update(chunk_bytes=0),
        lambda a: a.update(chunk_bytes=2**60), lambda a: a.update(nbytes=-1),
        lambda a: a["records"][0].update(offset=-5), lambda a: a["records"][1].update(offset=10**9),
        lambda a: a["records"].append(a["records"][0]), lambda a: a.update(records=7),
        lambda a: a["records"][0].update(key="x"), lambda a: a.update(adacheck_pack=9),
        lambda a: a.clear(),
    ],
)  # fmt: skip
def test_documents_that_lie(tier: ZarrTier, tmp_path: Path, change: object) -> None:
    """A pack's document is checked before anything is believed."""
    world = World()
    sources = [world.delta(step, grads(500)) for step in (1, 2)]
    tier.put([*world.roots(), *sources])
    file = next(iter(tmp_path.rglob("pack/*/zarr.json")))
    document = json.loads(file.read_text())
    change(document["attributes"])  # type: ignore[operator]
    file.write_text(json.dumps(document))
    fresh = ZarrTier(LocalObjects(tmp_path))
    with pytest.raises(MalformedError):
        fresh.head(sources[0].key)


def test_offsets_that_lie(tier: ZarrTier, tmp_path: Path) -> None:
    """An offset within the pack but wrong gives bytes that do not verify."""
    world = World()
    sources = [world.delta(step, grads(500)) for step in (1, 2)]
    tier.put([*world.roots(), *sources])
    file = next(iter(tmp_path.rglob("pack/*/zarr.json")))
    document = json.loads(file.read_text())
    document["attributes"]["records"][1]["offset"] = 8
    file.write_text(json.dumps(document))
    with pytest.raises(DigestMismatchError):
        fetch(ZarrTier(LocalObjects(tmp_path)), sources[1].key)


def test_listing_reads_no_object(tier: ZarrTier) -> None:
    """Keys in packs come from the packs' names."""
    world = World()
    tier.put([*world.roots(), *(world.delta(step) for step in range(1, 100)), world.base(1, {})])
    read: list[str] = []
    objects = tier.objects
    real = objects.get
    objects.get = lambda name, *rest: read.append(name) or real(name, *rest)  # type: ignore
    assert len(list(tier.list(""))) == 102
    assert not read


def test_heads_after_a_listing_list_nothing_again(tier: ZarrTier, tmp_path: Path) -> None:
    """What a listing saw of all of a place serves those who read the records' heads next.

    What it saw of a part of one, or before a later listing, does not.
    """
    world = World()
    tier.put([*world.roots(), *(world.delta(step) for step in range(1, 5))])
    tier = ZarrTier(tier.objects, listing_s=600)
    listed: list[str] = []
    objects, real = tier.objects, tier.objects.list
    objects.list = lambda prefix, *rest: listed.append(prefix) or real(prefix, *rest)  # type: ignore
    keys = [key for key in tier.list("") if "/delta/" in key]
    assert [tier.head(key).head.step for key in keys] == [1, 2, 3, 4]
    assert listed == [""]

    (name,) = packs(tmp_path)
    place = keys[0].rpartition("/delta/")[0]
    other = ZarrTier(tier.objects, listing_s=600)
    list(other.list(f"{place}/pack/{name}"))
    assert not other._shelf._listings
    before_s = time.monotonic()
    tier.objects.delete([f"{place}/pack/{name}/zarr.json"])
    assert not tier._shelf.listing(place, fresh=True).packs
    tier._shelf.learn(place, [parse_key(f"{place}/pack/{name}")], before_s)  # by one who is slow
    assert not tier._shelf.listing(place).packs


def test_the_log_is_taken_once(tmp_path: Path) -> None:
    """Several processes claim entries at once: each entry has one owner."""
    code = (
        "import sys; from tests.conformance.records import *; "
        "from adacheck_store.format.errors import ForkError; "
        "from adacheck_store.tiers.zarr import ZarrTier; "
        "from adacheck_store.tiers.object_local import LocalObjects\n"
        "t = ZarrTier(LocalObjects(sys.argv[1])); won = []\n"
        "for i in range(40):\n"
        "    try: t.put([World().claim(i)]); won.append(i)\n"
        "    except ForkError: pass\n"
        "print(*won)"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    won: list[int] = []
    for process in processes:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        won += [int(word) for word in output.split()]
    assert sorted(won) == list(range(40))


def test_damaged_log_entry_is_never_replaced(tier: ZarrTier, tmp_path: Path) -> None:
    """What it said cannot be known, so it stays taken."""
    world = World()
    claim = world.claim(3)
    tier.put([claim])
    file = tmp_path / claim.key / "zarr.json"
    file.write_bytes(file.read_bytes()[:-40])
    for source in (claim, World().claim(3)):
        with pytest.raises((MalformedError, ForkError)):
            tier.put([source])
    assert tier.list("") is not None


@pytest.mark.parametrize(
    "point", ["local.file.fsync.before:3", "local.rename.before:2", "local.folder.fsync.before"]
)
def test_failing_medium(tier: ZarrTier, tmp_path: Path, point: str) -> None:
    """An error of the system is typed, leaves no chunk behind, and the put can be done again."""
    world = World()
    tier.put(world.roots())
    tier.sync()
    source = world.base(1, state())
    failpoints.arm(f"{point}=raise")
    with pytest.raises(TierFullError) as caught:
        tier.put([source])
    failpoints.disarm()
    assert caught.value.place["tier"] == "zarr"
    assert not list(tmp_path.rglob("c/*"))
    assert not list((tmp_path / ".tmp").iterdir())
    tier.put([source, world.delta(1, {"0/a/grad.raw": ("U8", noise(10))})])
    assert same(tier, [source])


def test_orphans_are_told(tier: ZarrTier, tmp_path: Path) -> None:
    """Chunks without a document, and things of others."""
    world = World()
    base, delta = world.base(1, state()), world.delta(1, grads())
    tier.put([*world.roots(), base, delta, world.claim(1)])
    (tmp_path / "adacheck.json").write_text("{}")
    assert list(tier.orphans("")) == []
    (tmp_path / base.key / "zarr.json").unlink()
    (tmp_path / "gpt-small" / "notes").write_text("x")
    orphans = list(tier.orphans(""))
    assert "gpt-small/notes" in orphans
    assert f"{base.key}/layers/param/c/0" in orphans
    assert len(orphans) == len(set(orphans)) == 1 + sum(1 for n in orphans if base.key in n)
    assert base.key not in list(tier.list(""))
    tier.put([base])
    assert list(tier.orphans("")) == ["gpt-small/notes"]


@pytest.mark.parametrize("late", [False, True])
def test_what_another_writer_has_finished_is_not_withdrawn(tmp_path: Path, late: bool) -> None:
    """Two copy the same base; one fails, after the other's document was written."""
    world = World()
    base = world.base(1, state())
    other = ZarrTier(LocalObjects(tmp_path))
    other.put(world.roots())

    class Failing(LocalObjects):
        def put(self, name: str, *more: Any, **named: Any) -> bool:
            if name == (f"{base.key}/zarr.json" if late else f"{base.key}/layers/param/zarr.json"):
                other.put([base])
                raise TierFullError("no room")
            return super().put(name, *more, **named)

    with pytest.raises(TierFullError):
        ZarrTier(Failing(tmp_path)).put([base])
    assert same(ZarrTier(LocalObjects(tmp_path)), [base])


def test_a_stream_with_wrong_sizes(tier: ZarrTier, tmp_path: Path) -> None:
    """Sizes a source announces are a help, never the truth."""
    world = World()
    tier.put(world.roots())
    for factor, fits in ((1, True), (0, True), (4, True), (0.5, False)):
        step = int(factor * 2)
        for inner in (world.base(step, state()), world.delta(step, grads(9 * MIB))):
            source = StreamSource(inner)
            sizes = {name: int(len(v) * factor) for name, v in inner.record.arrays.items()}
            source.sizes = sizes  # type: ignore[attr-defined]
            if not fits:
                with pytest.raises(MalformedError):
                    tier.put([source])
                assert source.key not in list(tier.list(""))
                continue
            tier.put([source])
            assert same(tier, [source])
        for file in tmp_path.rglob(f"*{step:012d}*/zarr.json"):
            for _, item in zarr.open_group(file.parent, mode="r").members(max_depth=None):
                assert not hasattr(item, "shape") or len(item[:]) == item.shape[0]
