"""Objects in a local folder, each a file: written aside, flushed, then named."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice

from adacheck_store.format.errors import NameRefusedError, RecordNotFoundError, TierDamagedError
from adacheck_store.format.ids import Buffer

from . import durable
from .medium import translate
from .objects import check_name

DRAFTS = ".tmp"
_DRAFT_AGE_S = 86_400.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ATTEMPTS = 8

Parts = list[str]
Views = list[memoryview]


class LocalObjects:
    """An object store in a folder.

    An object's bytes are flushed before it gets its name; `sync` flushes the names. Links, pipes
    and devices found in the folder are never followed or opened. Any number of processes may use
    it at once.
    """

    parallel = 1

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.path = os.path.realpath(root)
        self._lock = threading.Lock()
        self._unsynced: set[tuple[str, ...]] = set()
        self._root_is_new = False
        self._swept = False

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.path,)

    def put(self, name: str, buffers: Sequence[Buffer], if_absent: bool = False) -> bool:
        """Store an object, whole or not at all; False if ``if_absent`` and the name is taken."""
        parts = self._parts(name)
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        if not self._swept:
            self._swept = True
            self.sweep()
        with self._errors(name, sum(view.nbytes for view in views)):
            for attempt in range(_ATTEMPTS):
                try:
                    return self._put(parts, views, if_absent)
                except FileNotFoundError:
                    # A folder that another process found empty and removed meanwhile.
                    if attempt == _ATTEMPTS - 1:
                        raise
        return False

    def _put(self, parts: Parts, views: Views, if_absent: bool) -> bool:
        drafts = self._folder([DRAFTS], create=True)
        draft = secrets.token_hex(12)
        try:
            self._write_draft(drafts, draft, views)
            folder = self._folder(parts[:-1], create=True)
            try:
                self._refuse_folder(folder, parts[-1])
                if if_absent:
                    done = durable.link(
                        draft, parts[-1], "local.link", source_dir=drafts, target_dir=folder
                    )
                    os.unlink(draft, dir_fd=drafts)
                else:
                    done = True
                    durable.rename(
                        draft, parts[-1], "local.rename", source_dir=drafts, target_dir=folder
                    )
            finally:
                os.close(folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft, dir_fd=drafts)
            raise
        finally:
            os.close(drafts)
        with self._lock:
            self._unsynced.add(tuple(parts[:-1]))
        return done

    def _write_draft(self, drafts: int, draft: str, views: Views) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
        file = os.open(draft, flags, 0o644, dir_fd=drafts)
        try:
            durable.write_all(file, views)
            durable.fsync(file, "local.file.fsync")
        finally:
            os.close(file)

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of an object, fewer where it ends before; raises `RecordNotFoundError`."""
        parts = self._parts(name)
        with self._errors(name, None):
            folder = self._folder(parts[:-1])
            try:
                file = os.open(parts[-1], os.O_RDONLY | _FILE, dir_fd=folder)
            finally:
                os.close(folder)
            try:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode):
                    raise TierDamagedError("not a regular file", path=f"{self.path}/{name}")
                left = max(0, status.st_size - start)
                return _read(file, start, left if length is None else min(length, left))
            finally:
                os.close(file)

    def written_at(self, name: str) -> float:
        """When an object was put, by the file system's clock, in seconds since 1970."""
        parts = self._parts(name)
        with self._errors(name, None):
            folder = self._folder(parts[:-1])
            try:
                return os.stat(parts[-1], dir_fd=folder, follow_symlinks=False).st_mtime
            finally:
                os.close(folder)

    def list(self, prefix: str, most: int | None = None) -> Iterator[str]:
        """Names that begin with a prefix (empty, or ending in ``/``), sorted; at most so many."""
        parts = self._parts(prefix.rstrip("/")) if prefix else []
        yield from islice(self._walk(parts), most)

    def dated(self, prefix: str) -> Iterator[tuple[str, float]]:
        """What `list` gives, each with the file system's time (s) at which it was put."""
        for name in self.list(prefix):
            with suppress(FileNotFoundError):
                path = os.path.join(self.path, *self._parts(name))
                yield name, os.lstat(path).st_mtime

    def now(self) -> float:
        """The file system's clock, as a new file without a name has it; where none can be made
        this machine's."""
        try:
            with tempfile.TemporaryFile(dir=self.path) as file:
                return os.fstat(file.fileno()).st_mtime
        except OSError:
            return time.time()

    def _walk(self, parts: Parts) -> Iterator[str]:
        lead = "".join(f"{part}/" for part in parts)
        with self._errors(lead, None):
            try:
                found = self._scan(parts)
            except FileNotFoundError:
                return
        for name in found:
            if name.endswith("/"):
                yield from self._walk([*parts, name[:-1]])
            else:
                yield lead + name

    def _scan(self, parts: Parts) -> Parts:
        """A folder's files and folders (these with a slash), in the order of full names."""
        folder = self._folder(parts)
        try:
            with os.scandir(folder) as entries:
                found = [
                    entry.name + "/" * entry.is_dir(follow_symlinks=False)
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False)
                ]
        finally:
            os.close(folder)
        return sorted(name for name in found if parts or name != f"{DRAFTS}/")

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; missing ones are passed over, folders left empty are removed."""
        for name in names:
            parts = self._parts(name)
            with self._errors(name), suppress(FileNotFoundError):
                folder = self._folder(parts[:-1])
                try:
                    durable.unlink(parts[-1], "local.unlink", folder=folder)
                finally:
                    os.close(folder)
                with self._lock:
                    self._unsynced.add(tuple(parts[:-1]))
                self._prune(parts[:-1])

    def _prune(self, parts: Parts) -> None:
        while parts:
            folder = self._folder(parts[:-1])
            try:
                os.rmdir(parts[-1], dir_fd=folder)
            except OSError as exc:
                if exc.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    return
                raise
            finally:
                os.close(folder)
            parts = parts[:-1]

    def sync(self) -> None:
        """Return when all names that were given are on the disk."""
        with self._lock:
            folders, self._unsynced = self._unsynced, set()
        if self._root_is_new:
            with self._errors(""):
                durable.fsync_path(os.path.dirname(self.path), "local.folder.fsync")
            self._root_is_new = False
        lineage = {folder[:n] for folder in folders for n in range(len(folder) + 1)}
        try:
            for parts in sorted(lineage, key=len, reverse=True):
                self._sync_folder(list(parts))
        except BaseException:
            with self._lock:
                self._unsynced |= folders
            raise

    def _sync_folder(self, parts: Parts) -> None:
        with self._errors("/".join(parts)):
            try:
                folder = self._folder(parts)
            except FileNotFoundError:
                return
            try:
                durable.fsync(folder, "local.folder.fsync")
            finally:
                os.close(folder)

    def probe(self, name: str) -> None:
        """A link to a name that is taken fails on every file system."""

    def requests(self) -> Mapping[str, int]:
        """None are counted."""
        return {}

    def unfinished(self, age_s: float = 0.0) -> int:
        """How many objects were begun that long ago and never named."""
        with self._drafts() as folder:
            return sum(1 for _ in self._old(folder, age_s))

    def sweep(self, age_s: float = _DRAFT_AGE_S) -> int:
        """Remove what writers that died have left half-written; returns how many."""
        count = 0
        with self._drafts() as folder:
            for name in self._old(folder, age_s):
                with suppress(FileNotFoundError):
                    durable.unlink(name, "local.unlink", folder=folder)
                    count += 1
        return count

    @contextmanager
    def _drafts(self) -> Iterator[int]:
        """The folder of drafts, opened; a folder that is not there is as an empty one."""
        with self._errors(DRAFTS):
            try:
                folder = self._folder([DRAFTS])
            except FileNotFoundError:
                folder = -1
            try:
                yield folder
            finally:
                if folder >= 0:
                    os.close(folder)

    def _old(self, folder: int, age_s: float) -> Iterator[str]:
        """Names of drafts that are that old by the file system's clock."""
        now = self.now() if folder >= 0 else 0.0
        for name in os.listdir(folder) if folder >= 0 else ():
            with suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if now - status.st_mtime >= age_s:
                    yield name

    def _folder(self, parts: Parts, *, create: bool = False) -> int:
        """Open a folder of the store part by part, so that no link on the way is followed."""
        if create and not os.path.isdir(self.path):
            os.makedirs(self.path, exist_ok=True)
            self._root_is_new = True
        fd = os.open(self.path, _FOLDER)
        for part in parts:
            try:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=fd)
                deeper = os.open(part, _FOLDER, dir_fd=fd)
            except NotADirectoryError:
                # Below an object lies nothing; a link, though, is damage.
                if not create and stat.S_ISREG(os.lstat(part, dir_fd=fd).st_mode):
                    raise FileNotFoundError(errno.ENOENT, "below an object", part) from None
                raise
            finally:
                os.close(fd)
            fd = deeper
        return fd

    def _refuse_folder(self, folder: int, name: str) -> None:
        with suppress(FileNotFoundError):
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            if not stat.S_ISREG(mode):
                raise TierDamagedError(f"no regular file stands at the name {name!r}")

    def _parts(self, name: str) -> Parts:
        parts = check_name(name)
        if parts[0] == DRAFTS:
            raise NameRefusedError(f"a name kept for drafts: {name[:100]!r}", path=self.path)
        return parts

    @contextmanager
    def _errors(self, name: str, needed: int | None = 0) -> Iterator[None]:
        place = f"{self.path}/{name}"
        try:
            yield
        except TierDamagedError as exc:
            exc.at(path=place)
            raise
        except FileNotFoundError as exc:
            raise RecordNotFoundError("no such object", path=place) from exc
        except OSError as exc:
            raise translate(exc, "", place, needed) from exc


def _read(file: int, start: int, length: int) -> bytes:
    pieces = []
    while length > 0:
        piece = os.pread(file, min(length, 1 << 30), start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
        length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
