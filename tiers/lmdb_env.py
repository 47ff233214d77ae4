"""The LMDB environment of a folder: one a process, shared by all tiers opened on it.

It owns the writer's lock, the size of the map, the mapping of LMDB's errors to ours, and the
short transactions. What the entries mean is the business of `lmdb`.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import lmdb

from adacheck_store.format.errors import (
    NotOursError,
    OrderError,
    RecordNotFoundError,
    TierDamagedError,
    TierError,
    TierReadOnlyError,
    TierUnavailableError,
    TooNewError,
)

from . import durable, failpoints, lock_file
from .gate import Gate
from .lmdb_check import DATA_FILE, check
from .medium import free_bytes, full, refuse_network, translate

MARKER_KEY = b"m"
FORMAT = "adacheck-lmdb"
VERSION = 1

_MAP_SLACK_BYTES = 64 << 20
_READ_MAP_BYTES_MIN = 1 << 30
_ATTEMPTS = 16
_MAX_READERS = 510

T = TypeVar("T")


class LmdbEnv:
    """An open environment. Any thread may call any method; never use it across a fork."""

    def __init__(self, path: str, tier: str, capacity_bytes: int, *, readonly: bool) -> None:
        self.path = path
        self.tier = tier
        self.capacity_bytes = capacity_bytes
        self.readonly = readonly
        self.forked = False
        self.write_lock = threading.RLock()
        self._gate = Gate()
        self._lock_fd = -1 if readonly else self._become_writer()
        try:
            self._env = self._open()
        except BaseException:
            self._drop_lock()
            raise

    def _become_writer(self) -> int:
        refuse_network(self.path, self.tier)
        try:
            os.makedirs(self.path, exist_ok=True)
        except OSError as exc:
            raise translate(exc, self.tier, self.path) from exc
        fd = lock_file.acquire(self.path, self.tier)
        try:
            self._create()
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _create(self) -> None:
        """Make the data file, whole and marked, unless there is one."""
        target = os.path.join(self.path, DATA_FILE)
        if os.path.lexists(target):
            return
        strange = [n for n in os.listdir(self.path) if not n.startswith((".new-", "writer.lock"))]
        if any(name != "lock.mdb" for name in strange):
            raise NotOursError(
                f"a folder of something else: it holds {sorted(strange)[:3]}",
                hint="name an empty or new folder", tier=self.tier, path=self.path,
            )  # fmt: skip
        for name in os.listdir(self.path):
            if name.startswith(".new-"):
                shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)
        draft = os.path.join(self.path, f".new-{secrets.token_hex(4)}")
        try:
            env = lmdb.open(draft, map_size=1 << 20, metasync=True, lock=False)
            failpoints.hit("lmdb.marker.before")
            with env.begin(write=True) as txn:
                marker = {"format": FORMAT, "version": VERSION}
                txn.put(MARKER_KEY, json.dumps(marker, sort_keys=True).encode())
            failpoints.hit("lmdb.marker.after")
            env.close()
            durable.rename(os.path.join(draft, DATA_FILE), target, "lmdb.create")
            durable.fsync_path(self.path, "local.folder.fsync")
        except (OSError, lmdb.Error) as exc:
            raise self.error(exc, 1 << 20) from exc
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _open(self) -> lmdb.Environment:
        data = os.path.join(self.path, DATA_FILE)
        if not os.path.isfile(data):
            raise RecordNotFoundError("no LMDB tier here", tier=self.tier, path=self.path)
        check(self.path, self.tier, live=self.readonly and bool(lock_file.holder(self.path)))
        size = max(_READ_MAP_BYTES_MIN, 2 * os.path.getsize(data))
        if not self.readonly:
            size = max(2 * self.capacity_bytes + _MAP_SLACK_BYTES, size)
        env = self._engine(size)
        try:
            env.reader_check()
            self._check_marker(env)
        except BaseException:
            env.close()
            raise
        return env

    def _engine(self, map_bytes: int) -> lmdb.Environment:
        options: dict[str, Any] = {
            "map_size": map_bytes, "readonly": self.readonly, "create": False, "metasync": False,
            "writemap": False, "meminit": False, "readahead": False, "max_readers": _MAX_READERS,
            "max_dbs": 0, "max_spare_txns": 8,
        }  # fmt: skip
        try:
            return lmdb.open(self.path, **options)
        except lmdb.Error as exc:
            if not (self.readonly and getattr(exc, "code", 0) in (errno.EACCES, errno.EROFS)):
                raise self.error(exc) from exc
        # A medium nobody can write to needs no lock, and cannot hold one.
        try:
            return lmdb.open(self.path, lock=False, **options)
        except lmdb.Error as exc:
            raise self.error(exc) from exc

    def _check_marker(self, env: lmdb.Environment) -> None:
        with env.begin() as txn:
            text = txn.get(MARKER_KEY)
        try:
            marker = json.loads(text) if text else None
        except ValueError:
            marker = None
        if not isinstance(marker, dict) or marker.get("format") != FORMAT:
            raise NotOursError(
                "an LMDB file of something else", hint="name an empty or new folder",
                tier=self.tier, path=self.path,
            )  # fmt: skip
        if marker.get("version") != VERSION:
            raise TooNewError(
                f"an LMDB tier of version {marker.get('version')}, this program knows {VERSION}",
                hint="upgrade adacheck-store", tier=self.tier, path=self.path,
            )  # fmt: skip

    # -- transactions --

    @contextmanager
    def reading(self) -> Iterator[lmdb.Transaction]:
        """A short read transaction whose values are views, to be copied before it ends."""
        txn = self._begin_read()
        try:
            yield txn
        except lmdb.Error as exc:
            raise self.error(exc) from exc
        finally:
            txn.abort()
            self._gate.leave()

    def _begin_read(self) -> lmdb.Transaction:
        for _ in range(_ATTEMPTS):
            self._gate.enter()
            try:
                self._check_usable()
                return self._env.begin(buffers=True)
            except lmdb.MapResizedError:
                self._gate.leave()
                self._resize(0)
            except lmdb.Error as exc:
                self._gate.leave()
                raise self.error(exc) from exc
            except BaseException:
                self._gate.leave()
                raise
        raise TierUnavailableError("the map keeps growing", tier=self.tier, path=self.path)

    def write(self, point: str, body: Callable[[lmdb.Transaction], T], needed: int = 0) -> T:
        """Run ``body`` in one write transaction; it may be called again if the map must grow.

        ``needed`` is what the transaction takes, for the error of a full medium.
        """
        with self.write_lock:
            if self.readonly:
                raise TierReadOnlyError(
                    "opened for reading only", tier=self.tier, path=self.path,
                    hint="open it without readonly",
                )  # fmt: skip
            for _ in range(_ATTEMPTS):
                self._check_usable()
                try:
                    return self._transact(point, body)
                except lmdb.MapFullError:
                    self._grow(needed)
                except lmdb.MapResizedError:
                    self._resize(0)
                except (lmdb.Error, OSError) as exc:
                    raise self._failed(exc, needed) from exc
        raise full(self.tier, self.path, needed, free_bytes(self.path))

    def _transact(self, point: str, body: Callable[[lmdb.Transaction], T]) -> T:
        txn = self._env.begin(write=True, buffers=True)
        try:
            result = body(txn)
            failpoints.hit(f"{point}.before")
        except BaseException:
            txn.abort()
            raise
        txn.commit()
        failpoints.hit(f"{point}.after")
        return result

    def sync(self) -> None:
        """Make all that was written durable."""
        with self.write_lock:
            self._check_usable()
            try:
                failpoints.hit("lmdb.sync.before")
                self._env.sync(True)
                failpoints.hit("lmdb.sync.after")
            except (lmdb.Error, OSError) as exc:
                raise self._failed(exc, 0) from exc

    # -- the map --

    def map_bytes(self) -> int:
        """Present size of the map."""
        return int(self._env.info()["map_size"])

    def _grow(self, needed: int) -> None:
        """Make room in the map: clear what dead readers pin, then enlarge it."""
        self._env.reader_check()
        self._resize(self.map_bytes() * 3 // 2 + needed + _MAP_SLACK_BYTES)

    def _resize(self, size: int) -> None:
        """Set the map's size; 0 adopts what another process made of it."""
        with self._gate.alone():
            try:
                self._env.set_mapsize(size)
            except lmdb.Error as exc:
                raise self.error(exc) from exc

    # -- errors --

    def _failed(self, exc: Exception, needed: int) -> TierError:
        """The error of a failed transaction. The environment is opened anew: LMDB may refuse
        further writes after one that did not reach the medium."""
        error = self.error(exc, needed)
        if isinstance(exc, lmdb.Error):
            with self._gate.alone():
                self._env.close()
                try:
                    self._env = self._open()
                except TierError as again:
                    error.hint = f"{error.hint}; opening it again failed: {again.message}"
        return error

    def error(self, exc: Exception, needed: int = 0) -> TierError:
        """The error of our tree that an error of LMDB or of the system amounts to."""
        code = getattr(exc, "code", 0) or getattr(exc, "errno", 0) or 0
        free = free_bytes(self.path)
        # LMDB reports a short write as EIO, which is how a full disk shows.
        if code == errno.EIO and free < needed + (1 << 20):
            code = errno.ENOSPC
        if isinstance(exc, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.InvalidError):
            return TierDamagedError(
                f"LMDB found damage: {exc}", tier=self.tier, path=self.path,
                hint="restore goes on with other tiers; set the folder aside to write here again",
            )  # fmt: skip
        if isinstance(exc, lmdb.ReadonlyError):
            code = errno.EROFS
        if code > 0:
            text = f"{os.strerror(code)} ({exc})"
            return translate(OSError(code, text), self.tier, self.path, needed)
        return TierUnavailableError(
            f"LMDB: {exc}", hint="open the tier again", tier=self.tier, path=self.path
        )

    def _check_usable(self) -> None:
        if self.forked:
            raise OrderError(
                "an LMDB tier opened before a fork", tier=self.tier, path=self.path,
                hint="open the tier in the process that uses it",
            )  # fmt: skip

    def promote(self, capacity_bytes: int) -> None:
        """Become the writer, where this was opened for reading only."""
        with self.write_lock:
            if not self.readonly:
                return
            fd = self._become_writer()
            with self._gate.alone():
                self._env.close()
                self._lock_fd, self.readonly, self.capacity_bytes = fd, False, capacity_bytes
                self._env = self._open()

    # -- the end --

    def close(self) -> None:
        """Close the environment and give up the writer's lock."""
        with self.write_lock, self._gate.alone():
            self._env.close()
            self._drop_lock()

    def after_fork(self) -> None:
        """In a child: forget the parent's environment, without touching its locks."""
        self.forked = True
        self._drop_lock()

    def _drop_lock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
