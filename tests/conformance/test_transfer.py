"""Moving many bytes: direct writes give the same files as others, and know when not to be."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from adacheck_store.format.errors import TierFullError
from adacheck_store.tiers import transfer
from adacheck_store.tiers.object_local import LocalObjects
from adacheck_store.tiers.transfer import ALIGNMENT, DIRECT_BYTES, aligned, copy_into, write_direct

SIZES = [DIRECT_BYTES - 1, DIRECT_BYTES, DIRECT_BYTES + 1, 3 * DIRECT_BYTES + ALIGNMENT + 7]


def filled(nbytes: int) -> memoryview:
    """Aligned memory with bytes in it that no shift leaves alike."""
    view = aligned(nbytes)
    copy_into(view, 0, (bytes(i * i % 251 for i in range(997)) * (nbytes // 997 + 1))[:nbytes])
    return view


def test_copy_into() -> None:
    """At any place, from and to any kind of buffer, and nothing beside it."""
    target = bytearray(b"........")
    copy_into(target, 2, b"abc")
    copy_into(memoryview(target), 5, memoryview(b"xyz")[1:2])
    copy_into(target, 8, b"")
    assert target == b"..abcy.."
    with pytest.raises(ValueError, match="smaller"):
        copy_into(target, 7, b"too long")


@pytest.mark.parametrize("nbytes", SIZES)
def test_files_are_the_same(tmp_path: Path, nbytes: int) -> None:
    """What is written directly reads as it was, whatever is left over for the usual way."""
    objects, view = LocalObjects(tmp_path / "store"), filled(nbytes)
    objects.put("a/large", [view])
    assert objects.get("a/large") == view
    objects.put("a/unaligned", [view[1:]])
    assert objects.get("a/unaligned") == view[1:]


def written(path: Path, view: memoryview) -> int:
    """How much of it goes directly."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        done = write_direct(file, view)
        assert not fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT
        assert os.lseek(file, 0, os.SEEK_CUR) == done
        return done
    finally:
        os.close(file)


def takes_direct(folder: Path) -> bool:
    """Whether the file system has direct writes."""
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_what_goes_directly(tmp_path: Path) -> None:
    """Whole pages of large memory."""
    view = filled(2 * DIRECT_BYTES + 5)
    expected = 2 * DIRECT_BYTES if takes_direct(tmp_path) else 0
    assert written(tmp_path / "a", view) == expected
    assert written(tmp_path / "c", view[: DIRECT_BYTES - 1]) == 0


@pytest.mark.parametrize("where", ["flags", "first", "second", "odd"])
def test_refusals_end_in_the_usual_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A file system that refuses at once, or at a write, or writes less, gets the bytes anyhow."""
    plain_fcntl, plain_write, calls = fcntl.fcntl, os.write, []

    def refusing_fcntl(file: int, what: int, value: int = 0) -> int:
        if where == "flags" and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return plain_fcntl(file, what, value) if where == "flags" else 0

    def refusing_write(file: int, data: Any) -> int:
        calls.append(len(data))
        if where == "first" or len(calls) == 2:
            raise OSError(errno.EOPNOTSUPP if where == "first" else errno.EINVAL, "no")
        return plain_write(file, data[: 100 if where == "odd" else ALIGNMENT])

    monkeypatch.setattr(transfer.fcntl, "fcntl", refusing_fcntl)
    monkeypatch.setattr(transfer.os, "write", refusing_write)
    objects, view = LocalObjects(tmp_path / "store"), filled(DIRECT_BYTES + 9)
    objects.put("a", [view])
    assert objects.get("a") == view
    assert len(calls) == {"flags": 0, "first": 1, "second": 2, "odd": 1}[where]


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other errors are not taken for a refusal, and leave no draft."""

    def full(file: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(transfer.os, "write", full)
    monkeypatch.setattr(transfer.fcntl, "fcntl", lambda *args: 0)
    objects = LocalObjects(tmp_path / "store")
    with pytest.raises(TierFullError):
        objects.put("a", [filled(DIRECT_BYTES)])
    assert list(objects.list("")) == []
    assert os.listdir(tmp_path / "store" / ".tmp") == []
