"""A run goes on while fsck reads it: what goes and comes beneath is no damage, and damage is."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adacheck_store.drain import TierSource
from adacheck_store.format.errors import DigestMismatchError, TierUnavailableError
from adacheck_store.format.head import SealedHead
from adacheck_store.store import open_for_reading
from adacheck_store.tiers.lmdb import LmdbTier
from adacheck_store.tiers.object_local import LocalObjects
from adacheck_store.tiers.zarr import ZarrTier
from adacheck_store.tools import fsck_again, fsck_objects
from adacheck_store.tools.findings import Finding, Provable, finding
from adacheck_store.tools.fsck import Row, fsck
from adacheck_store.tools.fsck_again import READINGS_MAX, settled
from adacheck_store.tools.fsck_records import Layouts, RecordCheck
from adacheck_store.tools.rows import silent
from tests.tools.stores import RUN, cli, cli_json, flip, keys_of, lmdb_file, objects, train

END = 11
PLACES = 9
"""Moments of a check at which something happens, by default; all of them are slow."""


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both tiers with bases at 0, 4 and 8, of which nothing was pruned."""
    folder = tmp_path_factory.mktemp("grown") / "store"
    train(str(folder), END, even=True, base_every=4, keep_bases=100)
    return folder


class Moments:
    """Counts what fsck asks of tiers and objects, and has something done before some of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.wanted = 0, dict[int, Callable[[], None]]()
        self.errors: list[BaseException] = []
        self._lock, self._busy = threading.Lock(), False
        for where, names in (
            (LmdbTier, ("head", "read", "list")), (ZarrTier, ("head", "list")),
            (LocalObjects, ("get", "list")),
        ):  # fmt: skip
            for name in names:
                monkeypatch.setattr(where, name, self._watched(getattr(where, name)))

    def _watched(self, call: Any) -> Any:
        def watched(*arguments: Any, **named: Any) -> Any:
            self._moment()
            found = call(*arguments, **named)
            return self._each(found) if isinstance(found, Iterator) else found

        return watched

    def _each(self, found: Iterator[str]) -> Iterator[str]:
        for name in found:
            yield name
            self._moment()

    def _moment(self) -> None:
        """What is done here is itself not counted, in whatever threads it is done."""
        with self._lock:
            if self._busy:
                return
            self.count += 1
            act = self.wanted.pop(self.count, None)
            self._busy = act is not None
        if act is not None:
            try:
                act()
            except BaseException as error:
                self.errors.append(error)
            finally:
                self._busy = False


def checked(store: Path, **options: Any) -> list[Row]:
    """All that fsck says, run by run."""
    with open_for_reading(str(store)) as opened:
        return list(fsck(opened, RUN, **options))


def told(rows: list[Row]) -> list[tuple[str, str, str]]:
    """Damage, and what could not be told from it."""
    found = [row for row in rows if isinstance(row, Finding)]
    return [(row.kind, row.tier, row.what) for row in found
            if row.severity == "damage" or row.unchecked]  # fmt: skip


def prune(store: Path) -> None:
    """Floors rise to the newest base in all tiers, and what lies below is deleted."""
    code, document = cli_json("gc", store, "--last", 1, "--grace", 0, "--apply")
    assert code == 0, document


def rise(store: Path, step: int) -> None:
    """A base comes at a step of each tier, and all before it goes."""
    assert cli("compact", store, "--to", step).exit_code == 0
    prune(store)


def go_on(store: Path) -> None:
    """A new term trains on, folds, drains and prunes."""
    train(str(store), END + 10, even=True, base_every=4, keep_bases=1)


ACTS: dict[str, Callable[[Path], None]] = {
    "pruned": prune,
    "based and pruned": lambda store: rise(store, 10),
    "a new term": go_on,
}


def moments_of(store: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    """How many moments an undisturbed check has."""
    with monkeypatch.context() as patch:
        moments = Moments(patch)
        assert told(checked(store, **options)) == []
        return moments.count


def play(
    grown: Path, folder: Path, monkeypatch: pytest.MonkeyPatch,
    acts: dict[int, Callable[..., None]], **options: Any,
) -> list[Row]:  # fmt: skip
    """What fsck says of a copy to which something happens meanwhile."""
    store = shutil.copytree(grown, folder)
    try:
        with monkeypatch.context() as patch:
            moments = Moments(patch)
            moments.wanted = {at: lambda act=act: act(store) for at, act in acts.items()}
            rows = checked(store, **options)
            assert not moments.errors
            assert not moments.wanted
    finally:
        shutil.rmtree(store)
    return rows


def places(count: int) -> list[int]:
    """Some moments of so many, from the first to nearly the last."""
    return sorted({1 + i * (count - 1) * 95 // (PLACES - 1) // 100 for i in range(PLACES)})


@pytest.mark.parametrize("act", ACTS)
def test_no_race_is_damage(
    grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    """Wherever it happens, once."""
    for at in places(moments_of(grown, monkeypatch, deep=3)):
        rows = play(grown, tmp_path / str(at), monkeypatch, {at: ACTS[act]}, deep=3)
        assert told(rows) == [], at


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("act", ACTS)
def test_no_race_is_damage_anywhere(
    grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    """At every third moment."""
    for at in range(1, moments_of(grown, monkeypatch, deep=3) * 95 // 100, 3):
        rows = play(grown, tmp_path / str(at), monkeypatch, {at: ACTS[act]}, deep=3)
        assert told(rows) == [], at


def test_floors_that_rise_again_and_again(
    grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thrice, also while a suspicion is read anew."""
    count = moments_of(grown, monkeypatch)
    for at in (count // 20, count // 3, count // 2, count * 9 // 10):
        acts = {at + i * 9: (lambda store, step=9 + i: rise(store, step)) for i in range(3)}
        assert told(play(grown, tmp_path / str(at), monkeypatch, acts)) == [], at


def lose_delta(store: Path) -> None:
    """A hole in the LMDB, above all floors to come."""
    (key,) = (key for key in keys_of(store, "lmdb", "delta") if key.endswith(f"{END - 1:012d}"))
    tier = LmdbTier(lmdb_file(store).parent)
    tier.delete([key])
    tier.close()


def flip_delta(store: Path) -> None:
    """A bit of what the newest steps need."""
    flip(objects(store, "*/*/p000000/pack/*/data/c/0")[-1], 50)


@pytest.mark.parametrize("harm", [lose_delta, flip_delta])
def test_damage_beside_a_floor_that_rises_is_found(
    grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None]
) -> None:
    """The same as where nothing moves."""
    store = shutil.copytree(grown, tmp_path / "harmed")
    count = moments_of(store, monkeypatch)
    harm(store)
    still = {(kind, tier) for kind, tier, _ in told(checked(store))}
    assert still
    for at in places(count):
        rows = play(store, tmp_path / str(at), monkeypatch, {at: prune})
        assert {(kind, tier) for kind, tier, _ in told(rows)} >= still, at
        assert not [kind for kind, *_ in told(rows) if kind == "unsettled"], at


def hole(low: int, high: int) -> Finding:
    """A finding about steps."""
    key = f"{RUN}/t/p/delta/{low:012d}"
    return finding("hole", f"{low}..{high}", tier="lmdb", key=key, span=(low, high))


def test_what_is_settled_and_how_often_it_is_read() -> None:
    """Damage counts as soon as two readings in a row tell it; no more is read than that takes."""
    clean = Provable(run=RUN, tier="all", steps="", newest=None, count=0)

    def play_readings(*readings: list[Row]) -> tuple[list[Row], int]:
        left = list(readings)
        rows = settled(left.pop(0), lambda: left.pop(0))
        return rows, len(readings) - len(left)

    assert play_readings([clean]) == ([clean], 1)
    assert play_readings([clean, hole(5, 7)], [clean]) == ([clean], 2)
    assert play_readings([hole(5, 7)], [hole(6, 7)]) == ([hole(6, 7)], 2)
    assert play_readings([hole(5, 5)], [hole(7, 7)], [hole(7, 7)]) == ([hole(7, 7)], 3)
    apart = [[hole(step, step)] for step in range(READINGS_MAX)]
    rows, count = play_readings(*apart)
    assert count == READINGS_MAX
    (row,) = rows
    assert isinstance(row, Finding)
    assert (row.kind, row.severity, row.unchecked) == ("unsettled", "warning", True)
    # Two kinds, tiers or places are two findings.
    other = finding("hole", "5..7", tier="lmdb", key=f"{RUN}/t/q/delta/{5:012d}", span=(5, 7))
    assert play_readings([hole(5, 7)], [other], [other])[1] == 3


def test_what_cannot_be_read_again_is_not_settled(
    grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tier that fails at the second reading: neither damage nor clean."""
    store = shutil.copytree(grown, tmp_path / "store")
    lose_delta(store)
    read, reads = fsck_again.read_catalog, []

    def failing(tiers: Any, run: str) -> Any:
        reads.append(run)
        broken = [tier for tier in tiers if tier.traits.name == "zarr"]
        with monkeypatch.context() as patch:
            patch.setattr(broken[0], "list", lambda prefix: refuse())
            return read(tiers, run)

    def refuse() -> Iterator[str]:
        raise TierUnavailableError("it does not answer")

    monkeypatch.setattr(fsck_again, "read_catalog", failing)
    kinds = {kind for kind, *_ in told(checked(store))}
    assert reads
    assert kinds == {"unsettled"}


@pytest.mark.parametrize("rotten", [True, False])
def test_a_head_that_is_read_wrong_once(
    grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rotten: bool
) -> None:
    """Its blocks are looked at all the same, and it is told: no run explains that."""
    store = shutil.copytree(grown, tmp_path / "store")
    key = keys_of(store, "zarr", "base")[-1]
    if rotten:
        flip(objects(store, f"*/*/*/base/{key.rpartition('/')[2]}*/*/param/c/0")[-1], 40)
    wrong: list[str] = []
    whole = ZarrTier.head

    def head(tier: ZarrTier, text: str) -> SealedHead:
        if text == key and wrong.count(text) == 1:
            wrong.append(text)
            raise DigestMismatchError("not its id")
        if text == key:
            wrong.append(text)
        return whole(tier, text)

    monkeypatch.setattr(ZarrTier, "head", head)  # the first is the catalog's
    kinds = {kind for kind, *_ in told(checked(store))}
    assert "block" in kinds if rotten else kinds == {"unsettled"}


def test_documents_that_come_behind_a_reader(
    grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layout and a manifest that are listed after what names them has come are not missing."""
    store = shutil.copytree(grown, tmp_path / "store")
    late = {key for word in ("layout", "manifest") for key in keys_of(store, "zarr", word)}
    listed: list[str] = []
    whole = ZarrTier.list

    def behind(tier: ZarrTier, prefix: str) -> Iterator[str]:
        first = not listed and prefix == f"{RUN}/"
        for key in whole(tier, prefix):
            if prefix == f"{RUN}/":
                listed.append(key)
            if not first or key not in late:
                yield key

    monkeypatch.setattr(ZarrTier, "list", behind)
    with open_for_reading(str(store)) as opened:
        check = RecordCheck(opened.far, RUN, Layouts(opened.tiers, RUN), silent, 0)
        assert [row for row in check.findings() if row.severity == "damage"] == []
    assert listed


@pytest.mark.parametrize("goes", [True, False])
def test_a_pack_that_goes_while_it_is_read(
    grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes: bool
) -> None:
    """One of two that hold a step: gone it is no damage, damaged it is."""
    store = shutil.copytree(grown, tmp_path / "store")
    key = keys_of(store, "zarr", "delta")[-1]
    with open_for_reading(str(store)) as opened:
        opened.far.put([TierSource(opened.far, key)])
    (alone,) = [path for path in objects(store, "*/*/p000000/pack/*") if path.is_dir()
                and path.name[:12] == path.name[13:25] == f"{END:012d}"]  # fmt: skip
    harmed: list[str] = []
    whole = fsck_objects.pack_blocks

    def behind(tier: str, objects: Any, pack: Any) -> Iterator[Finding]:
        if not harmed and str(pack.key).endswith(alone.name):
            harmed.append(alone.name)
            if goes:
                shutil.rmtree(alone)
            else:
                flip(alone / "data" / "c" / "0", 40)
        yield from whole(tier, objects, pack)

    monkeypatch.setattr(fsck_objects, "pack_blocks", behind)
    with open_for_reading(str(store)) as opened:
        found = list(fsck_objects.check_overlaps(opened.far, RUN))
    assert harmed
    assert [(row.kind, row.key) for row in found] == ([] if goes else [("block", key)])
