"""The local object store: names, links, markers, conditional creates."""

import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adacheck_store.format.errors import (
    AdaCheckError,
    MalformedError,
    NameRefusedError,
    NotOursError,
    RecordNotFoundError,
    TierDamagedError,
    TooNewError,
)
from adacheck_store.tiers.object_local import LocalObjects
from adacheck_store.tiers.objects import check_name, open_marked


@pytest.fixture
def objects(tmp_path: Path) -> LocalObjects:
    """A store in a folder that does not exist yet."""
    return LocalObjects(tmp_path / "deep" / "store")


def test_put_and_get(objects: LocalObjects) -> None:
    """Whole, in ranges, beyond the end, replaced, gone."""
    assert objects.put("a/b/c", [b"0123", bytearray(b"45"), memoryview(b"6789")])
    assert objects.get("a/b/c") == b"0123456789"
    assert objects.get("a/b/c", 3, 4) == b"3456"
    assert objects.get("a/b/c", 8, 40) == b"89"
    assert objects.get("a/b/c", 40) == b""
    objects.put("a/b/c", [])
    assert objects.get("a/b/c") == b""
    objects.sync()
    objects.delete(["a/b/c", "a/b/c", "x/y"])
    for name in ("a/b/c", "a/b", "x"):
        with pytest.raises(RecordNotFoundError):
            objects.get(name)
    assert list(objects.list("")) == []


def test_many_buffers(objects: LocalObjects) -> None:
    """More buffers than one system call takes."""
    pieces = [bytes([i % 251]) * (i % 7) for i in range(5000)]
    objects.put("n", pieces)
    assert objects.get("n") == b"".join(pieces)


@settings(max_examples=40)
@given(st.lists(st.text("ab-./0", min_size=1, max_size=6), max_size=12))
def test_listing_is_sorted_by_whole_names(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    """As strings sort, not as folders do."""
    objects = LocalObjects(tmp_path_factory.mktemp("list"))
    kept: set[str] = set()
    for name in names:
        try:
            objects.put(name, [b"x"])
            kept.add(name)
        except AdaCheckError:
            continue
    assert list(objects.list("")) == sorted(kept)
    assert list(objects.list("a/")) == sorted(name for name in kept if name.startswith("a/"))


@pytest.mark.parametrize(
    "name",
    ["", "/", "a//b", "/a", "a/", "..", "a/../b", ".", "a/./b", "a\0b", "a\nb", "x" * 256,
     "/".join(["x" * 200] * 6), "ü" * 128, ".tmp/x", ".tmp", "\ud800"],
)  # fmt: skip
def test_names_are_refused(objects: LocalObjects, name: str) -> None:
    """Names that leave the store, or that a file system cannot hold."""
    for act in (
        lambda: objects.put(name, [b"x"]), lambda: objects.get(name),
        lambda: objects.delete([name]),
    ):  # fmt: skip
        with pytest.raises(NameRefusedError):
            act()


def test_check_name_accepts() -> None:
    """Ordinary names, in any script."""
    assert check_name("a/ü/…/zarr.json") == ["a", "ü", "…", "zarr.json"]


def test_links_and_devices_are_not_followed(objects: LocalObjects, tmp_path: Path) -> None:
    """A link or pipe in the store is neither read, nor written through, nor waited for."""
    root = Path(objects.path)
    objects.put("in/file", [b"in"])
    secret = tmp_path / "outside"
    secret.mkdir()
    (secret / "file").write_bytes(b"out")
    (root / "link").symlink_to(secret / "file")
    (root / "folder").symlink_to(secret)
    os.mkfifo(root / "pipe")
    (root / "in" / "loop").symlink_to(root / "in")
    for name in ("link", "folder/file", "pipe", "in/loop/file"):
        with pytest.raises(TierDamagedError) as caught:
            objects.get(name)
        assert caught.value.place["path"].endswith(name)
    for name in ("link", "folder/file", "folder/new", "pipe", "in"):
        with pytest.raises(TierDamagedError):
            objects.put(name, [b"x"])
    assert list(objects.list("")) == ["in/file"]
    assert [file.name for file in secret.iterdir()] == ["file"]
    assert (secret / "file").read_bytes() == b"out"
    assert not list((root / ".tmp").iterdir())


def test_conditional_create(objects: LocalObjects) -> None:
    """Of many threads one wins, and its bytes stay."""
    won: list[int] = []

    def work(number: int) -> None:
        for index in range(20):
            if objects.put(f"log/{index}", [str(number).encode()], if_absent=True):
                won.append(index)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(won) == list(range(20))
    assert not list((Path(objects.path) / ".tmp").iterdir())


def test_drafts_of_the_dead_are_swept(objects: LocalObjects) -> None:
    """Old drafts go, those of living writers stay, and none is ever listed."""
    objects.put("a", [b"x"])
    drafts = Path(objects.path) / ".tmp"
    (drafts / "old").write_bytes(b"half")
    (drafts / "new").write_bytes(b"half")
    os.utime(drafts / "old", (time.time() - 1e6,) * 2)
    assert list(objects.list("")) == ["a"]
    LocalObjects(objects.path).put("a", [b"y"])
    assert objects.sweep(age_s=2e6) == 0
    assert [file.name for file in drafts.iterdir()] == ["new"]


def test_putting_while_folders_are_pruned(objects: LocalObjects) -> None:
    """Deleting the last object of a folder does not disturb who puts the next one into it."""
    troubles: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(100):
                objects.put(f"deep/er/{number}", [b"x"])
                objects.delete([f"deep/er/{number}"])
        except BaseException as exc:
            troubles.append(exc)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not troubles


def test_marker(objects: LocalObjects) -> None:
    """A store is ours, empty, of something else, newer, or damaged."""
    assert not open_marked(objects, create=False)
    assert open_marked(objects, create=True)
    assert open_marked(objects, create=True)
    assert open_marked(objects, create=False)
    objects.put("adacheck.json", [b'{"format": "adacheck-store", "version": 2}'])
    with pytest.raises(TooNewError):
        open_marked(objects, create=False)
    objects.put("adacheck.json", [b'{"format": "other"}'])
    with pytest.raises(NotOursError):
        open_marked(objects, create=True)
    objects.put("adacheck.json", [b"\xff\xfe{"])
    with pytest.raises(MalformedError):
        open_marked(objects, create=True)
    objects.delete(["adacheck.json"])
    objects.put("photos/cat.jpg", [b"meow"])
    for create in (True, False):
        with pytest.raises(NotOursError) as caught:
            open_marked(objects, create=create)
        assert caught.value.place["path"] == objects.path
    assert list(objects.list("")) == ["photos/cat.jpg"]


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    """Named, and left alone."""
    (tmp_path / "file").write_bytes(b"mine")
    objects = LocalObjects(tmp_path / "file")
    for act in (lambda: objects.put("a", [b"x"]), lambda: list(objects.list(""))):
        with pytest.raises(TierDamagedError):
            act()
    assert (tmp_path / "file").read_bytes() == b"mine"
