"""Look at a place and this host before a run relies on them: what is there, and what to mend.

The place may be a store or one to be. Unless told not to, a scratch object is written, read back
and deleted: that alone shows permissions, conditional writes, the clock and the speed.
"""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import resource
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from adacheck_store import __version__, kernels
from adacheck_store.agent.places import place_of
from adacheck_store.config import memory_available, node_name, runtime_folder
from adacheck_store.format.errors import (
    AdaCheckError,
    NotOursError,
    TierReadOnlyError,
)
from adacheck_store.location import Location, locate
from adacheck_store.tiers import durable
from adacheck_store.tiers.object_local import DRAFTS
from adacheck_store.tiers.object_s3 import S3Objects
from adacheck_store.tiers.objects import Objects, open_marked

from .rows import size

OK, WARNING, BAD, UNKNOWN = "ok", "warning", "bad", "unknown"
SCRATCH = "_doctor"
"""Scratch objects lie below this name, and are gone when the doctor is."""

SAMPLE_BYTES = 32 << 20
SKEW_S = (60.0, 600.0)
"""Difference of clocks, seconds, that is worth a word, and that S3 soon refuses (at 900)."""

DISK_LEAST, MEMORY_LEAST, FILES_LEAST = 10 << 30, 2 << 30, 1024
FLUSH_S = 0.05
_NETWORK_DISKS = ("nfs", "cifs", "smb", "fuse.sshfs", "9p", "lustre", "gpfs", "ceph", "beegfs")
_LIBRARIES = ("torch", "safetensors", "zarr", "lmdb", "boto3", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """What one look has shown: ``verdict`` is ok, warning, bad, or unknown where it could not be
    had; ``remedy`` says what to do, empty where nothing is."""

    area: str
    check: str
    verdict: str
    found: str
    remedy: str = ""


def doctor(
    url: str, cache: str | None = None, *, write: bool = True, sample: int = SAMPLE_BYTES
) -> Iterator[CheckRow]:
    """All looks at a place and this host; ``write`` permits a scratch object of ``sample`` bytes.

    Raises `UsageError` for what is no store URL; whatever else goes wrong is a row.
    """
    location = locate(url)
    yield from _versions()
    yield from _place(location, write, sample)
    yield from _disk(location.lmdb_folder(cache), write)
    yield from _memory(location.url)


def exit_code(rows: list[CheckRow]) -> int:
    """0 if a run can rely on all of it, 1 if something is bad, 3 if something could not be seen."""
    verdicts = {row.verdict for row in rows}
    return 1 if BAD in verdicts else 3 if UNKNOWN in verdicts else 0


def _versions() -> Iterator[CheckRow]:
    named = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _LIBRARIES)
    yield CheckRow(
        area="versions", check="libraries", verdict=OK,
        found=f"adacheck-store {__version__}, Python {platform.python_version()}, {named}",
    )  # fmt: skip
    fast = kernels.in_use()
    yield CheckRow(
        area="versions", check="compiled fold", verdict=OK if fast else WARNING,
        found="in use" if fast else "not there: folds take two to three times as long",
        remedy="" if fast else "install with a C compiler, on a processor with AVX-512",
    )  # fmt: skip
    cuda = torch.cuda.is_available()
    yield CheckRow(
        area="versions", check="devices", verdict=OK,
        found=f"{torch.cuda.device_count()} CUDA devices" if cuda else "no CUDA device",
    )  # fmt: skip


def _place(location: Location, write: bool, sample: int) -> Iterator[CheckRow]:
    """The far tier's place: whose it is, and what may be done there."""
    try:
        objects = location.objects()
        began = time.monotonic()
        try:
            ours = open_marked(objects, create=False)
            found, verdict, remedy = ("a store" if ours else "nothing yet"), OK, ""
        except NotOursError as error:
            if "bucket" in error.message:
                raise
            found, verdict, remedy = error.message, BAD, error.hint
        took = time.monotonic() - began
        yield CheckRow(
            area="store", check="place", verdict=verdict, remedy=remedy,
            found=f"{location.path}: {found}; answers in {took * 1e3:.0f} ms",
        )  # fmt: skip
        yield _unfinished(objects)
        if write and verdict == OK:
            with _left_as_found(location):
                yield from _scratch(objects, sample)
    except AdaCheckError as error:
        yield _failed("store", "access", error)


@contextmanager
def _left_as_found(location: Location) -> Iterator[None]:
    """Folders that a scratch object makes are removed again, unless somebody else uses them."""
    root = location.folder
    made = root is not None and [
        path for path in (root / "objects" / DRAFTS, root / "objects", root, *root.parents)
        if not path.exists()
    ]  # fmt: skip
    try:
        yield
    finally:
        for path in made or ():
            with suppress(OSError):
                path.rmdir()


def _failed(area: str, check: str, error: AdaCheckError) -> CheckRow:
    return CheckRow(area=area, check=check, verdict=BAD, found=error.message, remedy=error.hint)


def _unfinished(objects: Objects) -> CheckRow:
    """Uploads and drafts that nobody has ended."""
    try:
        count = objects.unfinished()
    except AdaCheckError as error:
        return CheckRow(area="store", check="leftovers", verdict=UNKNOWN, found=error.message,
                        remedy=error.hint)  # fmt: skip
    return CheckRow(
        area="store", check="leftovers", verdict=OK if not count else WARNING,
        found=f"{count} uploads begun and not ended" if count else "none",
        remedy="a writer removes those older than a day; gc does at once" if count else "",
    )  # fmt: skip


def _scratch(objects: Objects, sample: int) -> Iterator[CheckRow]:
    """Write, read back and delete a scratch object."""
    name = f"{SCRATCH}/{secrets.token_hex(8)}"
    data = os.urandom(min(sample, 1 << 20)) * max(1, sample >> 20)
    try:
        began = time.monotonic()
        objects.put(name, [data], if_absent=True)
        objects.sync()
        put_s = time.monotonic() - began
        yield CheckRow(area="store", check="write", verdict=OK, found="allowed")
        yield _conditions(objects, name)
        began = time.monotonic()
        same = objects.get(name) == data
        get_s = time.monotonic() - began
        yield CheckRow(
            area="store", check="read back", verdict=OK if same else BAD,
            found="the same bytes" if same else "OTHER BYTES than were written",
            remedy="" if same else "use another medium; nothing may rely on this one",
        )  # fmt: skip
        yield CheckRow(
            area="store", check="bandwidth", verdict=OK,
            found=f"put {_rate(len(data), put_s)}, get {_rate(len(data), get_s)}, one object of "
            f"{size(len(data))}",
        )  # fmt: skip
        yield _clock(objects, name)
    except TierReadOnlyError as error:
        yield CheckRow(area="store", check="write", verdict=BAD, found=error.message,
                       remedy=error.hint)  # fmt: skip
    finally:
        with suppress(AdaCheckError):
            objects.delete([name])


def _conditions(objects: Objects, name: str) -> CheckRow:
    """Whether a name that is taken is refused, and only one of two writers can so have a run."""
    try:
        objects.probe(name)
    except AdaCheckError as error:
        return _failed("store", "conditional writes", error)
    loose = isinstance(objects, S3Objects) and objects.place.unsafe_no_conditional_writes
    return CheckRow(
        area="store", check="conditional writes", verdict=WARNING if loose else OK,
        found="not asked for (unsafe_no_conditional_writes)" if loose else "heeded",
        remedy="see to it that no two writers of a run start at once" if loose else "",
    )  # fmt: skip


def _clock(objects: Objects, name: str) -> CheckRow:
    """This host's clock beside that of the place."""
    there = objects.written_at(name)
    skew = there - time.time()
    verdict = OK if abs(skew) < SKEW_S[0] else WARNING if abs(skew) < SKEW_S[1] else BAD
    return CheckRow(
        area="store", check="clock", verdict=verdict,
        found=f"within {max(1.0, abs(skew)):.0f} s of the place's",
        remedy="" if verdict == OK else "set the clock (chronyc makestep, or timedatectl)",
    )  # fmt: skip


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / max(seconds, 1e-6) / 1e6:.0f} MB/s"


def _disk(folder: Path, write: bool) -> Iterator[CheckRow]:
    """Where LMDBs lie: room, kind of file system, and what a flush takes."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    yield CheckRow(
        area="disk", check="room", verdict=OK if free >= DISK_LEAST else WARNING,
        found=f"{folder}: {size(free)} free",
        remedy="" if free >= DISK_LEAST else "a run keeps bases and deltas there: see plan",
    )  # fmt: skip
    kind = _file_system(there)
    remote = kind.startswith(_NETWORK_DISKS)
    yield CheckRow(
        area="disk", check="file system", verdict=BAD if remote else OK, found=kind or "not known",
        remedy="LMDB needs a local disk: name one by --cache or ADACHECK_CACHE" if remote else "",
    )  # fmt: skip
    if write:
        yield _flush(there)


def _flush(folder: Path) -> CheckRow:
    """How long it takes until a few bytes are on the disk."""
    file = folder / f".{SCRATCH}-{secrets.token_hex(8)}"
    times = []
    try:
        with file.open("xb", buffering=0) as out:
            for _ in range(5):
                out.write(bytes(4096))
                began = time.monotonic()
                durable.fsync(out.fileno(), "local.file.fsync")
                times.append(time.monotonic() - began)
    except OSError as error:
        return CheckRow(
            area="disk", check="flush", verdict=BAD, found=f"{folder}: {error.strerror}",
            remedy="give this user the right to write there, or name another by --cache",
        )  # fmt: skip
    finally:
        with suppress(OSError):
            file.unlink()
    middle = sorted(times)[len(times) // 2]
    slow = middle > FLUSH_S
    return CheckRow(
        area="disk", check="flush", verdict=WARNING if slow else OK,
        found=f"{middle * 1e3:.1f} ms",
        remedy="each step is flushed here: use a faster disk, or agents" if slow else "",
    )  # fmt: skip


def _file_system(folder: Path) -> str:
    """Kind of the file system that a folder lies in, as the kernel calls it; empty if unknown."""
    best, kind = -1, ""
    path = os.path.realpath(folder)
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
            _, point, name = line.split()[:3]
            point = point.encode().decode("unicode_escape")
            inside = path == point or path.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= best:
                best, kind = len(point), name
    return kind


def _memory(url: str) -> Iterator[CheckRow]:
    """What agents need of this host: memory, also without a name, sockets, open files."""
    free = memory_available()
    few = free < MEMORY_LEAST
    yield CheckRow(
        area="memory", check="available", verdict=WARNING if few else OK, found=size(free),
        remedy="agents keep a base and the newest deltas in memory: see plan" if few else "",
    )  # fmt: skip
    yield _shared()
    try:
        place_of(url, "run", node_name()).socket  # noqa: B018  # a path that is too long is refused
        yield CheckRow(area="memory", check="sockets", verdict=OK, found=str(runtime_folder()))
    except AdaCheckError as error:
        yield _failed("memory", "sockets", error)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    enough = files == resource.RLIM_INFINITY or files >= FILES_LEAST
    yield CheckRow(
        area="memory", check="open files", verdict=OK if enough else WARNING,
        found="no limit" if files == resource.RLIM_INFINITY else f"at most {files}",
        remedy="" if enough else f"ulimit -n {FILES_LEAST}",
    )  # fmt: skip


def _shared() -> CheckRow:
    """Memory that an agent shares with its trainers by descriptor, sealed."""
    try:
        file = os.memfd_create("adacheck-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, mmap.PAGESIZE)
            mmap.mmap(file, mmap.PAGESIZE).close()
        finally:
            os.close(file)
    except (OSError, AttributeError) as error:
        return CheckRow(
            area="memory", check="shared", verdict=WARNING, found=f"not to be had: {error}",
            remedy="restores from the own agent go through its socket, and take longer",
        )  # fmt: skip
    return CheckRow(area="memory", check="shared", verdict=OK, found="to be had by descriptor")
