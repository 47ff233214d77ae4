"""What can happen to LMDB and to nothing else."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from adacheck_store.format.errors import (
    AdaCheckError,
    NotOursError,
    OrderError,
    RecordNotFoundError,
    TierBusyError,
    TierDamagedError,
    TierFullError,
    TierReadOnlyError,
    TierUnavailableError,
    TooNewError,
    UnsupportedError,
)
from adacheck_store.format.head import SealedHead
from adacheck_store.format.record import Block
from adacheck_store.tiers import failpoints, lmdb_check, lmdb_entries, lmdb_env, medium
from adacheck_store.tiers.base import RecordSource
from adacheck_store.tiers.lmdb import LmdbTier
from tests.conformance.doors import LmdbDoor
from tests.conformance.records import MIB, World, fetch, grads, same, state


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the tier lies."""
    return tmp_path / "node"


@contextmanager
def holding(how: str, path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds the tier."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.conformance.holder", how, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def filled(path: Path, world: World, steps: int = 4) -> list[str]:
    """A closed tier with some deltas; returns their keys."""
    tier = LmdbTier(path)
    tier.put(world.roots())
    sources = [world.delta(step, grads()) for step in range(1, steps + 1)]
    tier.put(sources)
    tier.sync()
    tier.close()
    return [source.key for source in sources]


def test_second_writer_is_told_who_holds_it(path: Path) -> None:
    """One process writes; a second one learns its pid and command line; readers may come."""
    keys = filled(path, World())
    with holding("write", path) as process:
        with pytest.raises(TierBusyError) as caught:
            LmdbTier(path)
        assert f"pid {process.pid}" in str(caught.value)
        assert "tests.conformance.holder" in str(caught.value)
        reader = LmdbTier(path, readonly=True)
        fetch(reader, keys[0])
        for act in (lambda: LmdbTier(path), lambda: lmdb_check.quarantine(str(path))):
            with pytest.raises(TierBusyError):
                act()
        fetch(reader, keys[1])
        reader.close()
    # The lock dies with its process.
    LmdbTier(path).close()


def test_tiers_of_one_process_share_an_environment(path: Path) -> None:
    """Readers and a writer on one folder, by whatever name it is reached."""
    world = World()
    keys = filled(path, world)
    alias = path.with_name("alias")
    alias.symlink_to(path)
    reader = LmdbTier(alias, readonly=True)
    writer, second = LmdbTier(path), LmdbTier(path)
    source = world.delta(9, grads())
    second.put([source])
    assert same(reader, [source])
    with pytest.raises(TierReadOnlyError):
        reader.put([source])
    with pytest.raises(TierReadOnlyError):
        reader.delete(keys)
    writer.close()
    second.delete(keys)
    assert keys[0] not in list(reader.list(""))
    second.close()
    assert same(reader, [source])
    reader.close()


def test_fork(path: Path) -> None:
    """A forked child cannot use the parent's tier, and does not keep it locked."""
    world = World()
    tier = LmdbTier(path)
    tier.put(world.roots())
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            list(tier.list(""))
        except OrderError:
            status = 0
        tier.close()
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(status)
    os.read(ready[0], 1)
    tier.put([world.delta(1)])
    tier.close()
    with holding("write", path):
        os.write(go[1], b"x")
        assert os.waitpid(pid, 0)[1] == 0
    for end in (*ready, *go):
        os.close(end)
    reopened = LmdbTier(path)
    assert len(list(reopened.list(""))) == 3
    reopened.close()


@pytest.mark.parametrize("readonly", [True, False])
@pytest.mark.parametrize("size", [0, 1, 4096, 8192, 12_288, -1, -4096, -MIB, -5 * MIB])
def test_truncated_file(path: Path, size: int, readonly: bool) -> None:
    """A truncated file is a typed error; nothing is ever mapped that is not there."""
    filled(path, World())
    data = path / "data.mdb"
    os.truncate(data, size if size >= 0 else data.stat().st_size + size)
    with pytest.raises(TierDamagedError) as caught:
        LmdbTier(path, readonly=readonly)
    assert caught.value.place["path"] == str(data)
    assert "quarantine" in str(caught.value)
    # The folder stays as it is until it is set aside by hand; then a new tier may be made.
    aside = lmdb_check.quarantine(str(path))
    assert aside == f"{path}-damaged-1"
    assert (Path(aside) / "data.mdb").exists()
    LmdbTier(path).close()
    assert lmdb_check.quarantine(str(path)) == f"{path}-damaged-2"


def test_file_that_ends_in_free_pages(path: Path) -> None:
    """A tail that is only listed as free may be missing: that is no damage."""
    world = World()
    keys = filled(path, world)
    tier = LmdbTier(path)
    tier.delete(keys[1:])
    tier.close()
    data = path / "data.mdb"
    with lmdb.open(str(path), map_size=1 << 32) as env, env.begin() as txn:
        assert txn.get(b"m")
    cut = data.stat().st_size
    for size in range(cut, 0, -MIB):
        os.truncate(data, size)
        try:
            tier = LmdbTier(path, readonly=True)
        except TierDamagedError:
            break
        fetch(tier, keys[0])
        tier.close()
    assert size < cut


def test_capacity(path: Path) -> None:
    """The tier's own limit is kept, named, and lifted by deleting."""
    world = World()
    tier = LmdbTier(path, capacity_bytes=20 * MIB)
    tier.put(world.roots())
    sources = [world.delta(step, grads(5 * MIB)) for step in range(1, 5)]
    tier.put(sources[:3])
    assert 15 * MIB < tier.used_bytes() < 16 * MIB
    with pytest.raises(TierFullError, match=r"\d+ bytes needed, \d+ free"):
        tier.put(sources[3:])
    assert same(tier, sources[:3])
    assert 15 * MIB < tier.used_bytes() < 16 * MIB
    tier.delete([sources[0].key])
    tier.put(sources[3:])
    before = tier.used_bytes()
    tier.close()
    tier = LmdbTier(path, capacity_bytes=20 * MIB)
    assert tier.used_bytes() == before
    assert same(tier, sources[1:])
    tier.delete(list(tier.list("")))
    assert tier.used_bytes() < 1000
    tier.close()


def test_bounded_for_ever(path: Path) -> None:
    """Putting and deleting does not let the file grow."""
    world = World()
    tier = LmdbTier(path)
    tier.put(world.roots())
    sizes = []
    for step in range(1, 61):
        tier.put([world.delta(step, grads(MIB))])
        tier.delete([world.delta(max(0, step - 4)).key])
        sizes.append((path / "data.mdb").stat().st_size)
    assert sizes[-1] <= sizes[15] + 2 * MIB
    tier.close()


def test_map_grows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader elsewhere pins old pages, so the map is outgrown: it is enlarged, and adopted."""
    monkeypatch.setattr(lmdb_env, "_MAP_SLACK_BYTES", MIB)
    monkeypatch.setattr(lmdb_env, "_READ_MAP_BYTES_MIN", MIB)
    world = World()
    tier = LmdbTier(path, capacity_bytes=8 * MIB)
    tier.put(world.roots())
    before = tier._env().map_bytes()
    with holding("read", path):
        for step in range(1, 13):
            source = world.delta(step, grads(3 * MIB))
            tier.put([source])
            assert same(tier, [source])
            tier.delete([world.delta(step - 1).key])
        assert tier._env().map_bytes() > before
        grown = (path / "data.mdb").stat().st_size
    # The reader was killed; its slot is cleared, and what it pinned is used again.
    tier.close()
    tier = LmdbTier(path, capacity_bytes=8 * MIB)
    for step in range(20, 30):
        tier.put([world.delta(step, grads(3 * MIB))])
        tier.delete([world.delta(step - 1).key, world.delta(12).key])
    assert (path / "data.mdb").stat().st_size <= grown + 4 * MIB
    tier.close()


def test_another_process_outgrows_our_map(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader whose map became too small adopts the new size."""
    world = World()
    keys = filled(path, world)
    monkeypatch.setattr(lmdb_env, "_READ_MAP_BYTES_MIN", MIB)
    reader = LmdbTier(path, readonly=True)
    fetch(reader, keys[0])
    code = (
        "import sys; from tests.conformance.records import *; "
        "from adacheck_store.tiers.lmdb import LmdbTier; "
        f"w = World(term={world.term!r}); t = LmdbTier(sys.argv[1]); "
        "[t.put([w.delta(s, grads(9 * MIB))]) for s in range(10, 20)]; t.close()"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)
    assert len(list(reader.list(""))) == 16
    for key in reader.list(f"{world.run}/{world.term}/{world.part}/delta/"):
        fetch(reader, key)
    reader.close()


@pytest.mark.parametrize(
    ("action", "error"), [("raise", TierFullError), ("raise-eio", TierUnavailableError)]
)
@pytest.mark.parametrize("point", ["lmdb.page.before", "lmdb.head.before"])
def test_failing_medium(path: Path, point: str, action: str, error: type[AdaCheckError]) -> None:
    """An error of the system is typed, leaves nothing, and the tier goes on."""
    world = World()
    tier = LmdbTier(path)
    tier.put(world.roots())
    source = world.base(1, state())
    failpoints.arm(f"{point}={action}")
    with pytest.raises(error) as caught:
        tier.put([source])
    failpoints.disarm()
    assert caught.value.place["key" if "page" in point else "tier"]
    assert len(list(tier.list(""))) == 2
    tier.put([source])
    assert same(tier, [source])
    tier.close()


def test_what_is_not_ours(path: Path, tmp_path: Path) -> None:
    """Folders and LMDB files of others are left alone, newer ones too."""
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    with pytest.raises(NotOursError):
        LmdbTier(path)
    (path / "notes.txt").unlink()
    LmdbTier(path).close()

    other = tmp_path / "other"
    with lmdb.open(str(other)) as env, env.begin(write=True) as txn:
        txn.put(b"k", b"v")
    for readonly in (True, False):
        with pytest.raises(NotOursError):
            LmdbTier(other, readonly=readonly)
    with lmdb.open(str(path)) as env, env.begin(write=True) as txn:
        txn.put(b"m", b'{"format":"adacheck-lmdb","version":2}')
    with pytest.raises(TooNewError):
        LmdbTier(path)
    with pytest.raises(RecordNotFoundError):
        LmdbTier(tmp_path / "none", readonly=True)
    assert not (tmp_path / "none").exists()


def test_network_file_systems_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A map or lock on another machine's disk is not to be trusted."""
    table = path.with_name("mountinfo")
    lines = ["1 0 0:1 / / rw - ext4 /dev/vda rw", "2 1 0:2 / /home rw - ext4 /dev/vdb rw"]
    lines.append(f"3 1 0:3 / {path.parent.parent} rw shared:1 - nfs4 server:/x rw")
    table.write_text("\n".join(lines) + "\n")
    assert medium.file_system(str(path), str(table)) == "nfs4"
    assert medium.file_system("/home/x", str(table)) == "ext4"
    assert medium.file_system("/homes/x", str(table)) == "ext4"
    assert medium.file_system("/x", str(table.with_name("none"))) == ""
    monkeypatch.setattr(medium, "file_system", lambda _: "fuse.sshfs")
    with pytest.raises(UnsupportedError, match=r"fuse\.sshfs") as caught:
        LmdbTier(path)
    assert "cache" in caught.value.hint
    assert not path.exists()


def test_writer_dies_while_reader_lives(path: Path) -> None:
    """A reader in another process neither blocks nor breaks the next writer."""
    world = World()
    filled(path, world)
    with holding("read", path) as process:
        tier = LmdbTier(path)
        tier.put([world.delta(7, grads())])
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
        tier.put([world.delta(8, grads())])
        tier.close()
    LmdbTier(path).close()


def test_verifying_stays_fast(path: Path) -> None:
    """Opening reads tree pages only, not the gigabytes they point at."""
    world = World()
    tier = LmdbTier(path)
    tier.put(world.roots())
    tier.put([world.base(step, state(40 * MIB)) for step in range(1, 3)])
    tier.close()
    before = os.times()
    lmdb_check.check(str(path), "lmdb")
    after = os.times()
    assert after.user + after.system - before.user - before.system < 0.5


def test_a_commit_that_stands_and_fails_all_the_same_keeps_its_pages(path: Path) -> None:
    """The head is visible: what it names must not be taken back as the rest of a failed put."""
    world = World()
    tier = LmdbTier(path)
    tier.put(world.roots())
    source = world.delta(1, grads())
    failpoints.arm("lmdb.head.after=raise-eio")
    with pytest.raises(TierUnavailableError):
        tier.put([source])
    assert same(tier, [source])
    tier.put([source])
    tier.close()
    tier = LmdbTier(path)
    assert same(tier, [source])
    tier.close()


def test_heads_are_parsed_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many records read in turns, as a fold reads its deltas."""
    keys = filled(path, World(), 100)
    parsed: list[int] = []
    plain = lmdb_entries.decode_header

    def counting(data: memoryview) -> object:
        parsed.append(len(data))
        return plain(data)

    monkeypatch.setattr(lmdb_entries, "decode_header", counting)
    tier = LmdbTier(path, readonly=True)
    for _ in range(3):
        for key in keys:
            tier.head(key)
    tier.close()
    assert len(parsed) == len(keys)


def test_heads_of_deleted_records_are_not_kept(path: Path) -> None:
    """An agent's disk has few records at a time, and millions in a run."""
    keys = filled(path, World(), 100)
    tier = LmdbTier(path)
    ids = [tier.head(key).id for key in keys]

    def kept() -> list[bool]:
        gc.collect()
        found = {each.id for each in gc.get_objects() if type(each) is SealedHead}
        return [identity in found for identity in ids]

    assert all(kept())
    tier.delete(keys[:90])
    assert kept() == [False] * 90 + [True] * 10
    tier.close()


def test_one_record_by_three_writers_leaves_no_pages(path: Path) -> None:
    """One puts while a second has begun; a third that finds the first's record ends last."""
    tier, world = LmdbTier(path), World()
    tier.put(world.roots())
    source = world.base(1, state())
    second_is_done = threading.Event()

    def third() -> Iterator[Block]:
        assert second_is_done.wait(timeout=30)
        yield from ordered

    def second() -> Iterator[Block]:
        tier.put([source])
        late.start()
        while third_source.asked == 0:
            time.sleep(0.001)
        yield from ordered

    ordered = sorted(source.blocks(), key=lambda block: block.index)
    third_source = Slow(source, third)
    late = threading.Thread(target=lambda: tier.put([third_source]))
    tier.put([Slow(source, second)])
    second_is_done.set()
    late.join(timeout=30)
    assert same(tier, [source])
    tier.close()
    assert not LmdbDoor(path).leftovers()


class Slow:
    """A source whose blocks come by a generator of the test's own."""

    def __init__(self, inner: RecordSource, blocks: Callable[[], Iterator[Block]]) -> None:
        self.key, self.expected_id = inner.key, inner.expected_id
        self.seal = inner.seal
        self.asked = 0
        self._blocks = blocks

    def blocks(self) -> Iterator[Block]:
        """What the generator gives."""
        self.asked += 1
        return self._blocks()
