"""A check that is killed goes on with its journal: the same findings, and nothing is read twice."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from adacheck_store.drain import TierSource
from adacheck_store.format.errors import TierUnavailableError, UsageError
from adacheck_store.store import open_for_reading
from adacheck_store.tiers.lmdb import LmdbTier
from adacheck_store.tiers.zarr import ZarrTier
from adacheck_store.tools import fsck_journal
from adacheck_store.tools.fsck import fsck
from adacheck_store.tools.fsck_journal import name_of, open_journal
from adacheck_store.tools.repair import repair
from tests.forked import run
from tests.tools.stores import (
    RUN,
    cli,
    cli_json,
    flip,
    flip_where,
    keys_of,
    lmdb_file,
    objects,
    tiers_of,
    tree_digest,
)

SLOW = pytest.param(range(1, 12), marks=[pytest.mark.slow, pytest.mark.timeout(1200)])
"""Seeds of histories of kills at random places."""


@pytest.fixture
def harmed(store: Path) -> Path:
    """A store with damage in both tiers, and something to warn of."""
    flip(objects(store, "*/t000002-*/p000000/pack/*/data/c/0")[-1], 50)
    flip(objects(store, "*/t000001-*/p000000/base/*/s0/exp_avg/c/0")[0], 100)
    tier = tiers_of(store)["lmdb"]
    data = bytes(tier.read(keys_of(store, "lmdb", "base")[-1], "s0/param", 0, 1))
    tier.close()
    flip_where(lmdb_file(store), data[:64])
    (store / "objects" / RUN / "a strange file").write_text("x")
    return store


def check(
    store: Path, journal: Path, verb: str = "fsck", kill_at: int = 0
) -> dict[str, Any] | None:
    """One attempt; None if it was killed."""
    words = ["tests.tools.resumed", str(store), str(journal), verb, str(kill_at)]
    code, said = run(words)
    assert code in (0, -signal.SIGKILL), said
    return json.loads(said.splitlines()[-1]) if code == 0 else None


def verified(journal: Path) -> int:
    """How many whole entries a journal has."""
    return journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0


def attempts(store: Path, journal: Path, verb: str, seed: int, total: int) -> dict[str, Any]:
    """Killed again and again at random, until it ends; what the last attempt says."""
    draw, known = random.Random(seed), 0
    for _ in range(100):
        found = check(store, journal, verb, draw.randrange(1, total // 2))
        if found is not None:
            return found
        assert verified(journal) >= known, "what was verified was lost"
        known = verified(journal)
        if draw.random() < 0.5:  # cut off in the middle of a line
            with journal.open("ab") as file:
                file.write(b"0123456789abcdef0123"[: draw.randrange(1, 20)])
    raise AssertionError("it does not get on")


@pytest.mark.parametrize("seeds", [range(1), SLOW], ids=["one", "many"])
@pytest.mark.parametrize("verb", ["fsck", "deep"])
def test_killed_again_and_again(
    harmed: Path, tmp_path: Path, verb: str, seeds: range
) -> None:  # fmt: skip
    """The findings, and the folds, are those of a check that nobody disturbs."""
    whole = check(harmed, tmp_path / "whole", verb)
    assert whole is not None
    assert "block" in whole["kinds"]
    assert "foreign" in whole["kinds"]
    total = sum(whole["read"].values())
    before = tree_digest(harmed)
    for seed in seeds:
        found = attempts(harmed, tmp_path / f"j{seed}", verb, seed, total)
        assert found["found"] == whole["found"], seed
        assert found["folds"] == whole["folds"]
        assert not (tmp_path / f"j{seed}").exists(), "a check that is whole ends its journal"
    assert tree_digest(harmed) == before


def test_only_what_is_not_verified_is_read(harmed: Path, tmp_path: Path) -> None:
    """Byte by byte: what was taken and what was read are together what there is."""
    whole = check(harmed, tmp_path / "whole")
    assert whole is not None
    total = sum(whole["read"].values())
    for kill_at in (total // 5, total // 2, total * 9 // 10):
        journal = tmp_path / str(kill_at)
        assert check(harmed, journal, kill_at=kill_at) is None
        count = verified(journal)
        with open_for_reading(str(harmed)) as opened:
            names = {f"{tier.traits.name} {key}": (tier, key) for tier in opened.tiers
                     for key in tier.list(f"{RUN}/")}  # fmt: skip
            with open_journal(journal, opened) as noted:
                held = {name for name, (tier, key) in names.items()
                        if noted.holds(noted.name(tier, key, tier.head(key).id), 0)}  # fmt: skip
        assert len(held) == count > 0
        found = check(harmed, shutil.copy(journal, tmp_path / "copy"))
        assert found is not None
        assert found["read"] == {n: size for n, size in whole["read"].items() if n not in held}
        (row,) = found["resumed"]
        assert row["records"] == count
        assert row["nbytes"] == sum(whole["read"][name] for name in held)
        assert row["nbytes"] + sum(found["read"].values()) == total
        assert row["age_s"] >= 0


def test_a_repair_goes_on(harmed: Path, tmp_path: Path) -> None:
    """Killed while it looks for what is wrong: it looks at the rest, and repairs the same."""
    journal = tmp_path / "journal"
    copy = shutil.copytree(harmed, tmp_path / "copy")
    with open_for_reading(str(copy)) as opened:
        rows = sorted((row.tier, row.key.split("/", 2)[2], row.was, row.done)
                      for row in repair(opened))  # fmt: skip
    total = sum((check(harmed, tmp_path / "whole") or {})["read"].values())
    assert check(harmed, journal, "repair", total * 9 // 10) is None
    count = verified(journal)
    assert count > 0
    with open_for_reading(str(harmed)) as opened, open_journal(journal, opened) as noted:
        again = sorted((row.tier, row.key.split("/", 2)[2], row.was, row.done)
                       for row in repair(opened, journal=noted))  # fmt: skip
        assert again == rows
        assert noted.row().records == count
    code, document = cli_json("fsck", harmed, "--repair", "--resume", journal)
    assert (code, [row for row in document["rows"] if row["row"] == "RepairRow"]) == (0, [])
    assert not journal.exists()


def begun(store: Path, journal: Path) -> int:
    """A journal of a check that was cut off near its end; how many entries it has."""
    with open_for_reading(str(store)) as opened, open_journal(journal, opened) as noted:
        for row in fsck(opened, RUN, journal=noted):
            if getattr(row, "tier", "") == "all":
                break
    return verified(journal)


def resumed(store: Path, journal: Path) -> dict[str, Any]:
    """The row that says what was taken; the journal is left as it was."""
    copy = shutil.copy(journal, journal.with_suffix(".copy"))
    code, document = cli_json("fsck", store, "--run", RUN, "--resume", copy)
    assert code == 0
    (row,) = (row for row in document["rows"] if row["row"] == "ResumedRow")
    return row


def test_what_was_put_anew_is_looked_at_again(store: Path, tmp_path: Path) -> None:
    """Its key and id are the same; where it lies, or when it was put, is not."""
    journal = tmp_path / "journal"
    count = begun(store, journal)
    assert count == resumed(store, journal)["records"]
    (chunk, *_) = objects(store, "*/*/p000000/base/*/s0/param/c/0")
    chunk.write_bytes(chunk.read_bytes())
    assert resumed(store, journal)["records"] == count - 1
    pack = objects(store, "*/t000002-*/p000000/pack/*")[-1]
    steps = int(pack.name[13:25]) - int(pack.name[:12]) + 1
    os.utime(pack / "data" / "c" / "0", (1e9, 1e9))
    assert resumed(store, journal)["records"] == count - 1 - steps
    key = keys_of(store, "lmdb", "base")[-1]
    writer = LmdbTier(lmdb_file(store).parent)
    with open_for_reading(str(store)) as opened:
        before = writer.stamp(key)
        source = TierSource(opened.far, next(k for k in keys_of(store, "zarr", "base")
                                             if k[:-17] == key[:-17]))  # fmt: skip
        writer.delete([key])
        writer.put([source])
        assert writer.stamp(source.key) != before
    writer.close()
    # What was flipped since it was verified has another time, too; it is found.
    flip(chunk, 30)
    copy = shutil.copy(journal, tmp_path / "copy")
    code, document = cli_json("fsck", store, "--resume", copy)
    assert code == 1
    assert "block" in {row.get("kind") for row in document["rows"]}


def test_lines_that_are_damaged_cost_reading_again(store: Path, tmp_path: Path) -> None:
    """A torn last line, a flipped one, noise in the middle."""
    journal = tmp_path / "journal"
    count = begun(store, journal)
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(lines[2][:1], b"g")
    lines[4:4] = [b"\x00\xff noise\n", b"\n", b"zz 00000000\n"]
    journal.write_bytes(b"".join(lines) + lines[1][:17])
    assert resumed(store, journal)["records"] == count - 1
    assert journal.read_bytes() == b"".join(lines) + lines[1][:17]
    with open_for_reading(str(store)) as opened:  # what comes after a torn line is whole
        with open_journal(journal, opened) as noted:
            noted.add(name_of("later"))
        with open_journal(journal, opened) as noted:
            assert noted.holds(name_of("later"), 0)
    for begun_of in (b"", lines[0][:10], lines[0][:-1]):  # killed before its first line was whole
        journal.write_bytes(begun_of)
        assert resumed(store, journal)["records"] == 0


def test_refusals(store: Path, tmp_path: Path) -> None:
    """Another store's, no journal, one that is in use: said, and left as it is."""
    journal = tmp_path / "journal"
    begun(store, journal)
    other = shutil.copytree(store, tmp_path / "other")
    text = journal.read_bytes()
    result = cli("fsck", other, "--resume", journal)
    assert (result.exit_code, journal.read_bytes()) == (2, text)
    assert "another store" in result.output
    assert str(store) in result.output
    notes = tmp_path / "notes.txt"
    for content in (b"my notes\n", b"my notes", b'{"adacheck-store": 1}\n'):
        notes.write_bytes(content)
        result = cli("fsck", store, "--resume", notes)
        assert (result.exit_code, notes.read_bytes()) == (2, content)
        assert "no journal" in result.output
    with (
        open_for_reading(str(store)) as opened, open_journal(journal, opened),
        pytest.raises(UsageError, match="another check"), open_journal(journal, opened),
    ):  # fmt: skip
        pass
    assert cli("fsck", store, "--resume", tmp_path / "no folder" / "x").exit_code != 0


def test_a_check_that_could_not_see_everything_keeps_its_journal(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on when the tier answers again; age and what was taken are said."""
    journal = tmp_path / "journal"

    def refuse(*_: Any) -> None:
        raise TierUnavailableError("it does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(ZarrTier, "read_into", refuse)
        assert cli("fsck", store, "--resume", journal).exit_code == 3
    count = verified(journal)
    assert count > 0
    result = cli("fsck", store, "--resume", journal)
    assert result.exit_code == 0
    assert f"begun 0.0 h ago, and not read again: {count} records" in " ".join(
        result.output.split()
    )
    assert not journal.exists()


def test_what_can_never_be_looked_at_hides_no_rot(store: Path, tmp_path: Path) -> None:
    """Of two checks in a row one reads each byte, times that tell of nothing or not."""
    journal = tmp_path / "journal"
    (store / "objects" / "strange").symlink_to(tmp_path)
    assert cli("fsck", store, "--resume", journal).exit_code == 3
    assert verified(journal) > 0
    path = objects(store, "*/*/*/base/*/*/param/c/0")[-1]
    before = path.stat()
    flip(path, 5)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    codes = [cli("fsck", store, "--resume", journal).exit_code for _ in range(2)]
    assert codes == [3, 1]


def test_notes_that_cannot_be_written_end_no_check(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is worth more than its notes."""
    real = fsck_journal._write

    def full(path: str, fd: int, line: bytes) -> None:
        if b"journal of fsck" not in line:
            raise TierUnavailableError("No space left on device")
        real(path, fd, line)

    monkeypatch.setattr(fsck_journal, "_write", full)
    assert cli("fsck", store, "--resume", tmp_path / "journal").exit_code == 0


def test_memory_of_an_entry(store: Path, tmp_path: Path) -> None:
    """Bounded by the number of entries: bytes in memory, and in the file."""
    many = 50_000
    path = tmp_path / "journal"
    with open_for_reading(str(store)) as opened:
        with open_journal(path, opened) as noted:
            first = path.stat().st_size
            for number in range(many):
                noted.add(name_of(str(number)))
        assert (path.stat().st_size - first) / many == 42
        tracemalloc.start()
        with open_journal(path, opened) as noted:
            taken = tracemalloc.get_traced_memory()[0]
            assert noted.holds(name_of("7"), 100)
            assert not noted.holds(name_of("no"), 100)
        tracemalloc.stop()
    print(taken / many)
    assert taken / many < 150
    row = noted.row()
    assert (row.records, row.nbytes, row.folds) == (1, 100, 0)
