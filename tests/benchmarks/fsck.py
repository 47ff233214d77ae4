"""fsck of a whole store against the bandwidth of what it lies on, the same bytes in one run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from adacheck_store.ahead import Ahead
from adacheck_store.store import open_for_reading
from adacheck_store.tools.findings import Finding
from adacheck_store.tools.fsck import fsck
from tests.s3.server import Server, server

from .rows import Row, median, paired, seconds
from .s3 import MIB, PART_MIB, Download, train

DELTAS = 16
_BAR = 0.8
_ROUNDS = 5
_BUFFER = 8 * MIB


class Files:
    """The rival in a folder: every file of it read into memory that is used again, some at once."""

    def __init__(self, root: Path, parallel: int) -> None:
        self._files = sorted(path for path in root.rglob("*") if path.is_file())
        self._parallel = parallel
        self.nbytes = sum(path.stat().st_size for path in self._files)

    def run(self) -> None:
        """Read them all, and keep none."""
        with ThreadPoolExecutor(self._parallel) as pool:
            assert sum(pool.map(self._read, self._files)) == self.nbytes

    @staticmethod
    def _read(path: Path) -> int:
        memory, count = bytearray(_BUFFER), 0
        with path.open("rb", buffering=0) as file:
            while got := file.readinto(memory):
                count += got
        return count

    def forget(self) -> None:
        """Have the system drop what it has of them in memory."""
        for path in self._files:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rows() -> Iterator[Row]:
    """A local directory from the disk and from memory, and S3."""
    with tempfile.TemporaryDirectory(prefix="adacheck-bench-", dir=os.curdir) as folder:
        yield from _local(Path(folder))
        yield _s3(server(), Path(folder))


def _local(folder: Path) -> Iterator[Row]:
    root = folder / "store"
    train(str(root), DELTAS)
    shutil.rmtree(root / "lmdb")
    with Ahead() as ahead:
        threads = ahead.threads
    files = Files(root, threads)
    pairs = []
    for _ in range(_ROUNDS):
        pairs.append((_from_disk(files, files.run), _from_disk(files, lambda: _check(str(root)))))
    ratio = median([plain_s / our_s for plain_s, our_s in pairs])
    plain_s, our_s = (median(column) for column in zip(*pairs, strict=True))
    yield _row("a local directory, from the disk", ratio, plain_s, our_s, files.nbytes, bar=True)
    plain_s, our_s, ratio = paired(files.run, lambda: _check(str(root)), _ROUNDS)
    yield _row("a local directory, from memory", ratio, plain_s, our_s, files.nbytes, bar=False)


def _from_disk(files: Files, act: Callable[[], object]) -> float:
    files.forget()
    return seconds(act)


def _s3(real: Server, folder: Path) -> Row:
    url = real.url()
    os.environ["ADACHECK_CACHE"] = str(folder / "cache")
    train(url, DELTAS)
    shutil.rmtree(folder / "cache")
    raw = Download(real, url, _check(url))
    plain_s, our_s, ratio = paired(raw.run, lambda: _check(url), _ROUNDS)
    return _row("S3", ratio, plain_s, our_s, raw.nbytes, bar=True)


def _check(url: str) -> int:
    """Check the store, which is sound; returns what S3 has counted of bytes (0 in a folder)."""
    with open_for_reading(url) as store:
        assert not [row for row in fsck(store) if isinstance(row, Finding)]
        return store.far.requests().get("bytes in", 0)


def _row(where: str, ratio: float, plain_s: float, our_s: float, nbytes: int, *, bar: bool) -> Row:
    return Row(
        f"fsck of {where}: plain reads' time / ours", f"{ratio:.2f}", f">= {_BAR}" if bar else "",
        ratio >= _BAR if bar else None,
        f"{nbytes / MIB / our_s:.0f} against {nbytes / MIB / plain_s:.0f} MiB/s; a part of "
        f"{PART_MIB} MiB, {DELTAS} deltas",
    )  # fmt: skip
