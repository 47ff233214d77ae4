"""Every kind of damage: fsck finds it, names it, ends with 1; restore gives what is left."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from adacheck_store.catalog import read_catalog
from adacheck_store.format.head import SealedHead
from adacheck_store.format.keys import parse_key
from adacheck_store.format.record import Record
from adacheck_store.store import open_for_reading
from adacheck_store.tiers.base import RecordSource
from adacheck_store.tiers.object_local import LocalObjects
from adacheck_store.tiers.zarr import ZarrTier
from tests.core.toy import Toy
from tests.tools.stores import (
    FIRST,
    LAST,
    RUN,
    cli,
    cli_json,
    findings,
    flip,
    flip_where,
    keys_of,
    lmdb_file,
    objects,
    restored,
    tiers_of,
    tree_digest,
)

pytestmark = pytest.mark.fault


def damages(store: Path) -> dict[str, dict[str, object]]:
    """Kinds of damage that fsck finds, the first of each; it changes nothing and ends with 1."""
    before = tree_digest(store)
    code, found = findings(store)
    assert tree_digest(store) == before
    kinds: dict[str, dict[str, object]] = {}
    for row in found:
        if row["severity"] == "damage":
            assert row["what"]
            assert row["consequence"]
            assert row["remedy"]
            assert row["invariant"].startswith("INV-")
            kinds.setdefault(row["kind"], row)
    assert code == (1 if kinds else 0)
    return kinds


def still_restores(store: Path, toy: Toy | None = None) -> int:
    """Restore gives a step, the trainer's own bits where it is the last one."""
    state = restored(store)
    if toy is not None and state.step == LAST:
        assert toy.same_as(state.parts["p000000"])
    return state.step


def without_lmdb(store: Path) -> Path:
    """The store after its machine was lost."""
    shutil.rmtree(store / "lmdb")
    return store


def newest(store: Path, tier: str, kind: str) -> str:
    """Key of the newest record of a kind."""
    return max(keys_of(store, tier, kind), key=lambda key: key.split("/")[-1][:12])


def lmdb_value(store: Path, key: str) -> bytes:
    """Bytes of a record's first array, as LMDB has them."""
    tier = tiers_of(store)["lmdb"]
    info = tier.head(key).head.arrays[0]
    data = bytes(tier.read(key, info.name, 0, 1))
    tier.close()
    return data


# -- bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("kind", ["delta", "base"])
def test_flip_in_an_lmdb_value(store: Path, toy: Toy, kind: str, where: str) -> None:
    """Named with array and bytes; restore takes zarr's copy; alone, an older step or an error."""
    key = newest(store, "lmdb", kind)
    data = lmdb_value(store, key)
    offset = {"first": 0, "middle": len(data) // 2, "last": len(data) - 1}[where]
    if where == "last":
        data, offset = data[-200:], 199
    flip_where(lmdb_file(store), data, offset)
    found = damages(store)
    assert found["block"]["tier"] == "lmdb"
    assert found["block"]["key"] == key
    assert "bytes 0.." in str(found["block"]["what"])
    assert still_restores(store, toy) == LAST
    shutil.rmtree(store / "objects")
    assert "block" in damages(store)
    if kind == "delta":
        assert still_restores(store) == LAST - 1
    else:
        assert still_restores(store) <= LAST


def test_flip_in_an_lmdb_head(store: Path, toy: Toy) -> None:
    """A head that does not have its id."""
    key = newest(store, "lmdb", "delta")
    tier = tiers_of(store)["lmdb"]
    digest = tier.head(key).head.arrays[0].digests[0]
    tier.close()
    flip_where(lmdb_file(store), digest.encode(), 3)
    found = damages(store)
    assert found["head"]["key"] == key
    assert still_restores(store, toy) == LAST


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("kind", ["base", "pack"])
def test_flip_in_a_zarr_chunk(store: Path, toy: Toy, kind: str, where: str) -> None:
    """Named by the record, not by the chunk alone."""
    pattern = f"*/t000002-*/p000000/{kind}/*/**/c/0"
    chunk = objects(store, pattern)[-1]
    size = chunk.stat().st_size
    flip(chunk, {"first": 0, "middle": size // 2, "last": size - 1}[where], 7)
    found = damages(store)
    assert found["block"]["tier"] == "zarr"
    assert still_restores(store, toy) == LAST
    without_lmdb(store)
    assert "block" in damages(store)
    step = still_restores(store)
    assert step == LAST or (kind == "pack" and FIRST <= step < LAST)


@pytest.mark.parametrize("bit", [0, 5])
@pytest.mark.parametrize("place", ["start", "middle", "end"])
@pytest.mark.parametrize("kind", ["base", "pack", "manifest", "layout", "s0"])
def test_flip_in_a_zarr_document(store: Path, kind: str, place: str, bit: int) -> None:
    """Whatever byte it is, fsck says so: the document no longer follows from the head."""
    pattern = f"*/t*/p000000/base/*/{kind}/param/zarr.json" if kind == "s0" else f"*/**/{kind}/*/"
    document = objects(store, pattern)[-1]
    if kind != "s0":
        document = document / "zarr.json"
    size = document.stat().st_size
    flip(document, {"start": 0, "middle": size // 2, "end": size - 1}[place], bit)
    code, found = findings(store)
    assert code == 1
    assert "zarr" in {row["tier"] for row in found}
    if kind == "s0":
        assert {row["kind"] for row in found} == {"document"}
    assert still_restores(store) == LAST


def test_flip_in_the_marker(store: Path, toy: Toy) -> None:
    """The store stays readable, and fsck names the marker and what it should be."""
    flip(store / "objects" / "adacheck.json", 0)
    found = damages(store)
    assert set(found) == {"marker"}
    assert "version" in str(found["marker"]["remedy"])
    assert still_restores(store, toy) == LAST
    (store / "objects" / "adacheck.json").unlink()
    assert set(damages(store)) == {"marker"}


# -- things missing --------------------------------------------------------------------------------


def test_deleted_chunk(store: Path, toy: Toy) -> None:
    """A missing chunk is damage, never zeros."""
    objects(store, "*/t*/p000000/base/*/s0/exp_avg/c/0")[-1].unlink()
    found = damages(store)
    assert "missing" in str(found["block"]["what"])
    assert still_restores(store, toy) == LAST
    assert still_restores(without_lmdb(store)) <= LAST


def test_deleted_only_base(store: Path) -> None:
    """Without the bases at its floor a tier cannot prove it, and says so."""
    for base in objects(store, "*/t*/p000000/base/*"):
        shutil.rmtree(base)
    found = damages(store)
    assert found["floor"]["tier"] == "zarr"
    assert still_restores(store) == LAST
    without_lmdb(store)
    assert "gap" in damages(store)
    result = cli("restore", store, store / "out")
    assert result.exit_code == 3
    assert "no step of the line can be proven" in result.stderr
    assert not (store / "out").exists()


def test_deleted_pack(store: Path, toy: Toy) -> None:
    """A hole among a tier's steps is named though another tier fills it."""
    pack = objects(store, "*/t000002-*/p000000/pack/*")[0]
    first = int(pack.name[:12])
    shutil.rmtree(pack)
    found = damages(store)
    assert found["hole"]["tier"] == "zarr"
    assert str(first) in str(found["hole"]["what"])
    assert still_restores(store, toy) == LAST
    without_lmdb(store)
    assert still_restores(store) <= LAST


def test_truncated_pack(store: Path, toy: Toy) -> None:
    """Records behind the cut are named; those before it are whole."""
    chunk = objects(store, "*/t000002-*/p000000/pack/*/data/c/0")[-1]
    chunk.write_bytes(chunk.read_bytes()[:100])
    found = damages(store)
    assert found["block"]["tier"] == "zarr"
    assert still_restores(store, toy) == LAST
    assert still_restores(without_lmdb(store)) < LAST


def test_truncated_pack_document(store: Path, toy: Toy) -> None:
    """Every step of the pack is named."""
    document = objects(store, "*/t000002-*/r000000/pack/*/zarr.json")[-1]
    document.write_bytes(document.read_bytes()[:500])
    found = damages(store)
    assert found["head"]["tier"] == "zarr"
    assert still_restores(store, toy) == LAST
    assert still_restores(without_lmdb(store)) < LAST


def test_pack_of_other_steps(store: Path, toy: Toy) -> None:
    """A pack whose name tells other steps than it holds."""
    pack = objects(store, "*/t000002-*/p000000/pack/*")[-1]
    first, last, token = pack.name.split("-")
    pack.rename(pack.with_name(f"{int(first) - 1:012d}-{last}-{token}"))
    found = damages(store)
    assert found["pack"]["invariant"] == "INV-34"
    assert still_restores(store, toy) == LAST


@pytest.mark.parametrize("kind", ["manifest", "layout"])
def test_removed_document_of_the_term(store: Path, toy: Toy, kind: str) -> None:
    """Records of a tier that lacks their manifest or layout are named."""
    place = "*/t000002-*/manifest/*" if kind == "manifest" else "*/layout/*"
    shutil.rmtree(objects(store, place)[0])
    found = damages(store)
    assert found[f"{kind}-missing"]["tier"] == "zarr"
    assert still_restores(store, toy) == LAST
    without_lmdb(store)
    assert damages(store)
    if kind == "manifest":
        assert still_restores(store) <= FIRST
    else:
        assert cli("restore", store, store / "out").exit_code == 3


def test_removed_log(store: Path) -> None:
    """A term with a manifest and no claim."""
    shutil.rmtree(store / "objects" / RUN / "log")
    assert "claim" in damages(store)
    assert still_restores(store) == LAST


# -- things in the wrong place ---------------------------------------------------------------------


def test_swapped_records(store: Path, toy: Toy) -> None:
    """Each lies under the other's key."""
    first, second = objects(store, "*/t*/p000000/base/*")[-2:]
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    found = damages(store)
    assert found["swapped"]["tier"] == "zarr"
    assert found["swapped"]["invariant"] == "INV-14"
    assert still_restores(store, toy) == LAST


def another_delta(store: Path) -> tuple[Record, str]:
    """A delta that differs from the one at its key."""
    with open_for_reading(str(store)) as opened:
        key = newest(store, "zarr", "delta")
        sealed = opened.far.head(key)
        arrays = {
            info.name: memoryview(bytes(opened.far.read(key, info.name, 0, len(info.digests))))
            for info in sealed.head.arrays
        }
    body = dict(sealed.head.body)
    body["arithmetic"] = ["f" * 32]
    other = SealedHead.seal(dataclasses.replace(sealed.head, body=body))
    assert other.id != sealed.id
    return Record(other, arrays), key


def test_fork_between_packs(store: Path) -> None:
    """Two packs with another record of one step."""
    record, key = another_delta(store)
    tier = ZarrTier(LocalObjects(store / "objects"))
    tier.put([RecordSource(key, record)])
    tier.close()
    found = damages(store)
    assert found["fork"]["key"] == key
    assert found["fork"]["invariant"] == "INV-22"
    assert still_restores(without_lmdb(store)) == LAST - 1


def test_fork_between_tiers(store: Path) -> None:
    """The tiers hold another record of one step: neither is taken."""
    record, key = another_delta(store)
    for pack in objects(store, "*/t000002-*/p000000/pack/*"):
        if int(pack.name[:12]) <= LAST <= int(pack.name[13:25]):
            shutil.rmtree(pack)
    tier = ZarrTier(LocalObjects(store / "objects"))
    tier.put([RecordSource(key, record)])
    tier.close()
    found = damages(store)
    assert found["fork"]["key"] == key
    assert "lmdb" in str(found["fork"]["what"])
    assert "zarr" in str(found["fork"]["what"])
    assert still_restores(store) == LAST - 1
    assert cli("show", store, key).exit_code == 1


def test_foreign_things(store: Path, toy: Toy) -> None:
    """What is no record is a warning: named, and of no consequence."""
    (store / "objects" / "notes.txt").write_text("hello")
    (store / "objects" / RUN / "stray").write_text("hello")
    base = objects(store, "*/t*/p000000/base/*")[-1]
    (base / "more.bin").write_text("hello")
    code, found = findings(store)
    assert code == 0
    assert [row["kind"] for row in found] == ["foreign"] * 3
    assert {Path(row["path"]).name for row in found} == {"notes.txt", "stray", "more.bin"}
    assert still_restores(store, toy) == LAST


def test_head_of_a_base_deleted(store: Path, toy: Toy) -> None:
    """The chunks left behind are named; nothing of them is read."""
    (objects(store, "*/t000002-*/p000000/base/*")[-1] / "zarr.json").unlink()
    _, found = findings(store)
    assert "unfinished" in {row["kind"] for row in found}
    assert still_restores(store, toy) == LAST


# -- whole tiers -----------------------------------------------------------------------------------


def test_truncated_lmdb(store: Path, toy: Toy) -> None:
    """The tier is damaged, the process lives, the other tier gives the step."""
    path = lmdb_file(store)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 // 4096 * 4096])
    found = damages(store)
    assert found["tier-damaged"]["tier"] == "lmdb"
    assert still_restores(store, toy) == LAST
    _, document = cli_json("restore", store, store.parent / "out")
    assert any("tier=lmdb" in reason for reason in document["rows"][0]["reasons"])


def test_lmdb_set_aside(store: Path, toy: Toy) -> None:
    """A folder that was set aside is a note."""
    folder = lmdb_file(store).parent
    shutil.copytree(folder, folder.with_name(folder.name + "-damaged-1"))
    _, document = cli_json("fsck", store)
    kinds = {row["kind"]: row for row in document["rows"] if row["row"] == "Finding"}
    assert kinds["quarantined"]["path"].endswith("-damaged-1")
    assert document["exit_code"] == 0
    assert still_restores(store, toy) == LAST


def test_lmdb_of_something_else(store: Path, toy: Toy) -> None:
    """An LMDB folder whose marker is gone."""
    flip_where(lmdb_file(store), b"adacheck-lmdb")
    code, found = findings(store)
    assert code == 3
    assert found[0]["kind"] == "tier-unread"
    assert still_restores(store, toy) == LAST


def test_lost_objects(store: Path, toy: Toy) -> None:
    """The object tier is gone: damage, and LMDB still gives the step."""
    shutil.rmtree(store / "objects")
    found = damages(store)
    assert found["tier-damaged"]["tier"] == "zarr"
    assert still_restores(store, toy) == LAST


def test_only_copy_corrupted(store: Path) -> None:
    """Every base of the only tier is wrong: the error names run, tier, part and key."""
    without_lmdb(store)
    for chunk in objects(store, "*/t*/p000000/base/*/s0/param/c/0"):
        flip(chunk, 17)
    assert {"block", "gap"} <= set(damages(store))
    before = tree_digest(store)
    result = cli("restore", store, store.parent / "out")
    assert result.exit_code == 3
    for word in (f"run={RUN}", "tier=zarr", "part=p000000", "/base/", "->"):
        assert word in result.stderr
    code, document = cli_json("restore", store, store.parent / "out", "--step", LAST)
    assert code == 3
    assert document["place"]["step"] == LAST
    assert tree_digest(store) == before
    assert not list(store.parent.glob("*out*"))


def test_a_damaged_delta_is_gone_round(store: Path) -> None:
    """A step asked for is refused if its own record is wrong, and given where only others are."""
    without_lmdb(store)
    with open_for_reading(str(store)) as opened:
        catalog = read_catalog(opened.tiers, RUN)
        refs = [ref for refs in catalog.deltas.values() for ref in refs]
        bases = [ref.step for refs in catalog.bases.values() for ref in refs]
    step = max(ref.step for ref in refs)
    assert step > max(bases)
    chunk = objects(store, "*/t000002-*/p000000/pack/*/data/c/0")[-1]
    flip(chunk, chunk.stat().st_size - 1)
    assert cli("restore", store, store.parent / "out", "--step", step).exit_code == 3
    code, document = cli_json("restore", store, store.parent / "out")
    assert code == 0
    assert document["rows"][0]["step"] < step
    assert document["rows"][0]["lost"] >= 1
    assert document["rows"][0]["reasons"]


def test_damage_of_another_run_is_not_ours(store: Path) -> None:
    """--run limits the check."""
    from tests.tools.stores import train

    train(str(store), 3, run="other")
    for chunk in objects(store, "other/t*/p000000/base/*/s0/param/c/0"):
        flip(chunk, 3)
    assert findings(store, "--run", RUN) == (0, [])
    assert findings(store, "--run", "other")[0] == 1
    assert findings(store)[0] == 1


@pytest.mark.parametrize("which", [0, 1, 2])
def test_damaged_copy_in_an_overlapping_pack(store: Path, which: int) -> None:
    """A reader takes the first copy that reads; fsck reads every one."""
    place = "*/t000002-*/p000000/pack/*"
    with open_for_reading(str(store)) as opened:
        last = parse_key(newest(store, "zarr", "delta"))
        sources = []
        for step in (LAST - 1, LAST):
            key = str(dataclasses.replace(last, step=step))
            sealed = opened.far.head(key)
            data = {i.name: memoryview(bytes(opened.far.read(key, i.name, 0, len(i.digests))))
                    for i in sealed.head.arrays}  # fmt: skip
            sources.append(RecordSource(key, Record(sealed, data)))
    tier = ZarrTier(LocalObjects(store / "objects"))
    tier.put(sources)
    tier.put(sources[1:])
    tier.put(sources[:1])
    tier.close()
    holding = [p for p in objects(store, place) if p.name[13:25] == f"{LAST:012d}"]
    assert len(holding) >= 2
    assert findings(store) == (0, [])
    pack = [p for p in objects(store, place) if int(p.name[13:25]) >= LAST - 1][which]
    chunk = pack / "data" / "c" / "0"
    flip(chunk, chunk.stat().st_size - 1)
    assert damages(store)["block"]["tier"] == "zarr"


@pytest.mark.parametrize("array", ["s0/exp_avg_sq", "s0/param"])
def test_two_damaged_copies_that_make_up_for_each_other(store: Path, array: str) -> None:
    """A base's parameters are wrong in LMDB, and in the objects the same array, or another one.

    All bases but the first are so, and a restore takes each block from where it is right: fsck
    calls the same steps provable as restores can give."""
    tiers = tiers_of(store)
    for tier, name in (("lmdb", "s0/param"), ("zarr", array)):
        for key in keys_of(store, tier, "base"):
            data = bytes(tiers[tier].read(key, name, 0, 1))
            paths = [lmdb_file(store)] if tier == "lmdb" else objects(store, f"{key}/**/c/*")
            for path in paths:
                if data[:64] in path.read_bytes():
                    flip_where(path, data[:64])
    for tier in tiers.values():
        tier.close()
    code, document = cli_json("fsck", store)
    assert code == 1
    said = [row for row in document["rows"] if row["row"] == "Provable" and row["tier"] == "all"]
    if array == "s0/param":
        assert not said or said[0]["count"] == 0
    else:
        assert said[0]["newest"] == restored(store).step == LAST
