"""Files torn, replaced by links and pipes; a store moved, copied; a clock that jumps."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adacheck_store.format.errors import AdaCheckError
from adacheck_store.restore import restore_state
from adacheck_store.session import RunSession
from adacheck_store.store import open_store
from adacheck_store.tiers import durable
from adacheck_store.tiers.object_local import LocalObjects
from adacheck_store.tools.findings import DAMAGE, Finding
from adacheck_store.tools.fsck import fsck
from tests.attack.forged import limited
from tests.core.kit import QUICK, Journal, begin, make_toy, train

pytestmark = pytest.mark.fault

LAST = 22


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Journal]:
    """A store with bases, deltas and packs in both tiers."""
    root, journal = tmp_path_factory.mktemp("written") / "store", Journal()
    toy = make_toy()
    session = RunSession.open(root.as_uri(), "run", settings=QUICK)
    begin(session, toy, journal)
    train(session, toy, journal, LAST)
    session.flush(30)
    session.close()
    return root, journal


def copy_of(written: Path, target: Path, *, lmdb: bool) -> Path:
    """The store again, with or without the tier of its node."""
    shutil.copytree(written, target)
    if not lmdb:
        shutil.rmtree(target / "lmdb")
    return target


def examine(root: Path, journal: Journal) -> tuple[int, set[str]]:
    """What restore gives (-1: nothing; it must be true), and the kinds of what fsck finds."""
    with limited():
        try:
            with open_store(root.as_uri()) as store:
                kinds = {r.kind for r in fsck(store) if isinstance(r, Finding)
                         and (r.severity == DAMAGE or r.unchecked or r.kind in _SAID)}  # fmt: skip
                try:
                    restored = restore_state(store.tiers, "run")
                except AdaCheckError:
                    return -1, kinds
        except AdaCheckError as error:
            return -1, {type(error).__name__}
        journal.assert_same(restored)
        return restored.step, kinds


_SAID = {"foreign", "unfinished", "loose-pieces", "tail"}


def packs(root: Path) -> list[Path]:
    """Every file of a pack."""
    found = [p for p in sorted((root / "objects").glob("*/*/*/pack/**/*")) if p.is_file()]
    assert found
    return found


@pytest.mark.parametrize("tail", ["short", "zeros", "other"])
@pytest.mark.parametrize("eighth", range(8))
def test_torn_packs(written: tuple[Path, Journal], tmp_path: Path, eighth: int, tail: str) -> None:
    """Files of the packs cut short, or with zeros or something else behind the cut."""
    files = packs(written[0])
    for number in range(0, len(files), max(1, len(files) // 4)):
        root = copy_of(written[0], tmp_path / str(number), lmdb=False)
        torn = root / files[number].relative_to(written[0])
        whole = torn.read_bytes()
        cut = len(whole) * eighth // 8
        rest = {"short": b"", "zeros": bytes(len(whole) - cut), "other": whole[cut:][::-1]}[tail]
        if whole == whole[:cut] + rest:
            continue
        torn.write_bytes(whole[:cut] + rest)
        step, kinds = examine(root, written[1])
        assert step >= 0
        assert kinds, f"{torn} was cut, and fsck says nothing"
        shutil.rmtree(root)


@pytest.mark.parametrize("what", ["symlink", "dangling", "loop", "fifo", "folder"])
@pytest.mark.parametrize("where", ["chunk", "document", "term", "marker", "lmdb", "data"])
def test_no_link_is_followed_and_no_pipe_waited_for(
    written: tuple[Path, Journal], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str,
    where: str,
) -> None:  # fmt: skip
    root = copy_of(written[0], tmp_path / "store", lmdb=where in ("lmdb", "data"))
    files = packs(root)
    victim = {
        "chunk": next(path for path in files if path.name != "zarr.json"),
        "document": next(path for path in files if path.name == "zarr.json"),
        "term": next((root / "objects" / "run").glob("t*")),
        "marker": root / "objects" / "adacheck.json",
        "lmdb": next((root / "lmdb").iterdir()) if (root / "lmdb").exists() else root,
        "data": next(iter((root / "lmdb").glob("*/data.mdb")), root),
    }[where]
    aside = tmp_path / "aside"
    victim.rename(aside)
    match what:
        case "symlink":
            victim.symlink_to(aside)
        case "dangling":
            victim.symlink_to(tmp_path / "nowhere")
        case "loop":
            victim.symlink_to(victim)
        case "fifo":
            os.mkfifo(victim)
        case _:
            victim.mkdir()
    opened = opening(monkeypatch)
    step, kinds = examine(root, written[1])
    assert len(opened) > 10
    if where in ("lmdb", "data"):
        assert step == LAST
        return
    assert not [path for path in opened if path.startswith(str(aside))]
    if where != "marker":
        assert kinds or (where, what) == ("term", "folder"), step  # that one is empty, no more
    assert aside.exists()


def opening(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where every file that is opened from now on really lies."""
    opened: list[str] = []
    plain = os.open

    def note(*arguments: Any, **more: Any) -> int:
        file = plain(*arguments, **more)
        opened.append(os.readlink(f"/proc/self/fd/{file}"))
        return file

    monkeypatch.setattr(os, "open", note)
    return opened


def test_a_store_moved_while_it_is_written_to(tmp_path: Path) -> None:
    """The writer goes on or says why not; what was flushed is where the store went."""
    toy, journal = make_toy(), Journal()
    session = RunSession.open((tmp_path / "store").as_uri(), "run", settings=QUICK)
    begin(session, toy, journal)
    train(session, toy, journal, 10)
    session.flush(30)
    (tmp_path / "store").rename(tmp_path / "moved")
    with limited(60.0):
        train(session, toy, journal, 6)
        try:
            session.flush(5)
        except AdaCheckError:
            pass
        else:
            assert session.status().drained == 16
        session.close()
    step, _ = examine(tmp_path / "moved", journal)
    assert step >= 10


def test_a_store_copied_while_it_is_written_to(tmp_path: Path) -> None:
    """Whatever moment each file was copied at: what the copy gives is true."""
    toy, journal = make_toy(), Journal()
    session = RunSession.open((tmp_path / "store").as_uri(), "run", settings=QUICK)
    begin(session, toy, journal)
    for number in range(5):
        train(session, toy, journal, 9)
        target = tmp_path / f"copy{number}"
        _copy_tree(tmp_path / "store", target)
        step, _ = examine(target, journal)
        assert step >= 0
    session.flush(30)
    _copy_tree(tmp_path / "store", tmp_path / "last")
    session.close()
    assert examine(tmp_path / "last", journal)[0] == 45
    assert examine(tmp_path / "store", journal)[0] == 45


def _copy_tree(source: Path, target: Path) -> None:
    """Copy what is there; files and folders that are pruned meanwhile are passed over."""
    try:
        shutil.copytree(source, target, ignore=_vanished, copy_function=_copy)
    except shutil.Error as error:
        if not all("No such file" in str(item[2]) for item in error.args[0]):
            raise


def _vanished(folder: str, names: list[str]) -> list[str]:
    """Drafts come and go."""
    return [name for name in names if not os.path.lexists(os.path.join(folder, name))]


def _copy(source: str, target: str) -> None:
    try:
        shutil.copy2(source, target)
    except FileNotFoundError:
        return


@pytest.mark.parametrize("jump_s", [-1e9, -3600.0, 3600.0, 1e9])
def test_a_clock_that_jumps_deletes_nothing_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """Grace is counted on the monotonic clock: what the wall clock says changes nothing."""
    settings = dataclasses.replace(QUICK, keep_bases=1, grace_s=600.0)
    toy, journal = make_toy(), Journal()
    url = (tmp_path / "store").as_uri()
    session = RunSession.open(url, "run", settings=settings)
    begin(session, toy, journal)
    real = time.time
    train(session, toy, journal, 20)
    session.flush(30)
    _until(lambda: session._upkeep.progress.far_floor >= 16)  # what lies below it waits
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    train(session, toy, journal, 20)
    session.flush(30)
    _until(lambda: session._upkeep.progress.far_floor >= 32)
    with open_store(url) as store:
        held = sorted(
            int(key.rsplit("/", 1)[1]) for key in store.far.list("run/") if "/delta/" in key
        )
        journal.assert_same(restore_state(store.tiers, "run"))
    assert held == list(range(1, 41))
    session.close()
    step, _ = examine(tmp_path / "store", journal)
    assert step == 40


def _until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_draft_that_is_swept_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process takes the draft of a put in flight for one of the dead; its own clock, that
    jumps, does not bring it to that."""
    mine, other = LocalObjects(tmp_path / "objects"), LocalObjects(tmp_path / "objects")
    swept: list[int] = []
    plain, real = durable.rename, time.time

    def late(*arguments: Any, **more: Any) -> None:
        if not swept:
            with monkeypatch.context() as patch:
                patch.setattr(time, "time", lambda: real() + 1e9)
                assert other.sweep() == 0
            swept.append(other.sweep(-1.0))
        plain(*arguments, **more)

    monkeypatch.setattr(durable, "rename", late)
    mine.put("run/x", [b"content"])
    assert swept == [1]
    assert other.get("run/x") == b"content"


def test_a_store_that_another_rank_makes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a look at whether there is one and a look at what there is instead."""
    root = tmp_path / "store"
    root.mkdir()
    plain = Path.iterdir

    def late(self: Path) -> Iterator[Path]:
        if self == root and not (root / "objects").exists():
            monkeypatch.setattr(Path, "iterdir", plain)
            with open_store(root.as_uri(), write=True):
                pass
        return plain(self)

    monkeypatch.setattr(Path, "iterdir", late)
    with open_store(root.as_uri(), write=True) as store:
        assert list(store.far.list("")) == []
    assert Path.iterdir is plain, "it came between"
