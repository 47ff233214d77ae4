"""Repair: damage of every kind is rebuilt or set aside; killed anywhere, done again, the same."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adacheck_store.store import open_for_reading
from adacheck_store.tiers import failpoints
from adacheck_store.tools.findings import Provable
from adacheck_store.tools.fsck import fsck
from adacheck_store.tools.repair import repair
from tests.core.toy import Toy
from tests.forked import run
from tests.tools.stores import (
    LAST,
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

SECOND = "*/t000002-*/p000000"


def rows_of(store: Path, *more: str) -> tuple[int, list[dict[str, Any]], list[dict[str, Any]]]:
    """Exit code, repairs and findings above notes of a repair."""
    code, document = cli_json("fsck", store, "--repair", *more)
    repairs = [row for row in document["rows"] if row["row"] == "RepairRow"]
    found = [row for row in document["rows"] if row["row"] == "Finding"]
    return code, repairs, [row for row in found if row["severity"] != "info"]


def chunk(store: Path) -> Path:
    """A chunk of the second term's newest base in the objects."""
    return objects(store, f"{SECOND}/base/*/s0/exp_avg/c/0")[-1]


def flip_block(store: Path) -> None:
    """A bit of a base."""
    flip(chunk(store), 100)


def lose_chunk(store: Path) -> None:
    """A chunk of a base."""
    chunk(store).unlink()


def flip_head(store: Path) -> None:
    """A base's document is no document."""
    document = objects(store, f"{SECOND}/base/*/zarr.json")[-1]
    document.write_bytes(document.read_bytes()[:200])


def flip_document(store: Path) -> None:
    """What plain zarr reads of an array."""
    flip(objects(store, f"{SECOND}/base/*/s0/zarr.json")[-1], 5)


def flip_packed(store: Path) -> None:
    """A bit of a delta."""
    flip(objects(store, f"{SECOND}/pack/*/data/c/0")[-1], 50)


def cut_pack(store: Path) -> None:
    """The document of a pack of extras."""
    document = objects(store, "*/t000002-*/r000000/pack/*/zarr.json")[-1]
    document.write_bytes(document.read_bytes()[:500])


def lose_pack(store: Path) -> None:
    """A hole in the chain."""
    shutil.rmtree(objects(store, f"{SECOND}/pack/*")[0])


def lose_bases(store: Path) -> None:
    """Every base of the objects."""
    for base in objects(store, "*/t*/p000000/base/*"):
        shutil.rmtree(base)


def lose_documents(store: Path) -> None:
    """A layout, and the second term's manifest."""
    for pattern in ("*/layout/*", "*/t000002-*/manifest/*"):
        for path in objects(store, pattern):
            shutil.rmtree(path)


def flip_manifest(store: Path) -> None:
    """The second term's manifest."""
    document = objects(store, "*/t000002-*/manifest/*/zarr.json")[-1]
    flip(document, len(document.read_bytes()) // 2)


def flip_lmdb(store: Path) -> None:
    """A bit of a base's parameters in LMDB: another block than `flip_block` harms."""
    tier = tiers_of(store)["lmdb"]
    data = bytes(tier.read(keys_of(store, "lmdb", "base")[-1], "s0/param", 0, 1))
    tier.close()
    flip_where(lmdb_file(store), data[:64])


DAMAGES: list[Callable[[Path], None]] = [
    flip_block, lose_chunk, flip_head, flip_document, flip_packed, cut_pack, lose_pack, lose_bases,
    lose_documents, flip_manifest, flip_lmdb,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_rebuilt_from_another_tier(
    store: Path, toy: Toy, damage: Callable[[Path], None]
) -> None:  # fmt: skip
    """A dry run changes nothing; a repair ends with 4 and a clean store; again: nothing to do."""
    damage(store)
    assert findings(store)[0] == 1
    before = tree_digest(store)
    code, planned, _ = rows_of(store, "--dry-run")
    assert code == 1
    assert planned
    assert not any(row["applied"] for row in planned)
    assert tree_digest(store) == before
    code, done, found = rows_of(store)
    assert (code, found) == (4, [])
    assert {row["done"] for row in done} == {"rebuilt"}
    assert [(r["key"], r["done"]) for r in done] == [(r["key"], r["done"]) for r in planned]
    assert rows_of(store) == (0, [], [])
    state = restored(store)
    assert state.step == LAST
    assert toy.same_as(state.parts["p000000"])


def test_what_none_has_is_set_aside(store: Path) -> None:
    """Without LMDB a flipped delta is moved away with its pack; its neighbours stay readable."""
    shutil.rmtree(store / "lmdb")
    packs = [(*map(int, path.name.split("-")[:2]), path)
             for path in objects(store, "*/t*/p000000/pack/*")]  # fmt: skip
    first, last, pack = [entry for entry in packs if entry[1] > entry[0]][-1]
    bad = pack / "data" / "c" / "0"
    was = bad.read_bytes()
    flip(bad, len(was) - 40)
    proven = restored(store).step
    code, rows, _ = rows_of(store)
    assert code == 1  # the step is lost, and fsck goes on saying so
    assert [row["done"] for row in rows] == ["set aside"]
    kept = {int(key[-12:]) for key in keys_of(store, "zarr", "delta")}
    assert set(range(first, last)) <= kept
    assert last not in kept
    aside = store / "objects" / "_aside" / pack.relative_to(store / "objects")
    assert (aside / "data" / "c" / "0").read_bytes() != was
    assert restored(store).step == proven
    _, document = cli_json("fsck", store)
    assert "quarantined" in {row.get("kind") for row in document["rows"]}
    assert rows_of(store)[1] == []


def test_nothing_is_given_up_while_a_tier_is_unread(store: Path) -> None:
    """What a tier that cannot be opened holds is unknown: the record stays where it is."""
    lmdb_file(store).write_bytes(b"no LMDB" * 1000)
    flip_block(store)
    code, rows, _ = rows_of(store)
    assert code == 1
    assert [row["done"] for row in rows] == ["left"]
    assert "not all could be read: lmdb" in rows[0]["why"]
    assert not (store / "objects" / "_aside").exists()


HOLD = """
import sys
from adacheck_store.tiers.lmdb import LmdbTier
tier = LmdbTier(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_beside_a_writer_its_lmdb_is_left(store: Path) -> None:
    """Another process writes this LMDB: objects are rebuilt, LMDB is not touched."""
    flip_packed(store)
    flip_lmdb(store)
    command = [sys.executable, "-c", HOLD, str(lmdb_file(store).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        code, rows, _ = rows_of(store)
        holder.kill()
    assert code == 1
    assert {row["tier"]: row["done"] for row in rows} == {"lmdb": "left", "zarr": "rebuilt"}
    assert str(holder.pid) in next(row["why"] for row in rows if row["tier"] == "lmdb")
    assert rows_of(store)[0] == 4


def mend(store: Path) -> None:
    """A repair, in this process."""
    with open_for_reading(str(store)) as opened:
        list(repair(opened))


def killed(store: Path, spec: str) -> bool:
    """A repair in a process that a failpoint may kill; whether it did."""
    code, said = run(["adacheck_store", "fsck", "--repair", str(store)], fail=spec)
    assert code in (4, -signal.SIGKILL), (spec, said)
    return code == -signal.SIGKILL


def steps(store: Path) -> set[tuple[str, str]]:
    """What can be proven, as fsck says after reading everything."""
    with open_for_reading(str(store)) as opened:
        found = list(fsck(opened))
    return {(row.tier, row.steps) for row in found if isinstance(row, Provable)}


def test_killed_anywhere_and_done_again(store: Path, tmp_path: Path) -> None:
    """SIGKILL at every failpoint a repair passes: nothing provable is lost, and the end is one."""
    killed_and_done_again(store, tmp_path, lambda count: {1})


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_anywhere_later(store: Path, tmp_path: Path) -> None:
    """The same in the middle of what passes a failpoint, and at the last of it."""
    killed_and_done_again(store, tmp_path, lambda count: {(count + 1) // 2, count})


def killed_and_done_again(
    store: Path, tmp_path: Path, hits: Callable[[int], set[int]]
) -> None:  # fmt: skip
    """Killed at some of the hits of each failpoint."""
    for damage in (flip_block, flip_packed, cut_pack, lose_pack, flip_lmdb):
        damage(store)
    whole = tmp_path / "whole"
    shutil.copytree(store, whole)
    counts = Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failpoints, "hit", lambda name: counts.update([name]))
        mend(whole)
    assert {"local.rename.before", "lmdb.sync.after"} <= counts.keys()
    end = steps(whole)
    proven = dict(steps(store))["all"]
    copy = tmp_path / "copy"
    for name, count in sorted(counts.items()):
        for hit in sorted(hits(count)):
            shutil.copytree(store, copy)
            assert killed(copy, f"{name}:{hit}"), (name, hit)
            assert dict(steps(copy))["all"] == proven, (name, hit)
            mend(copy)
            assert steps(copy) == end, (name, hit)
            shutil.rmtree(copy)


def test_usage(store: Path) -> None:
    """A dry run of nothing; a table for people."""
    assert cli("fsck", store, "--dry-run").exit_code == 2
    flip_block(store)
    result = cli("fsck", store, "--repair", "--dry-run")
    assert "to be rebuilt" in result.stdout
    assert cli("fsck", store, "--repair").exit_code == 4
