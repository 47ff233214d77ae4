"""The structural check of an LMDB file by plain reads, before the engine may map it.

LMDB trusts its file: a truncated or damaged one would kill the process (SIGBUS, SIGSEGV). So the
file is first walked by lmdb's own offline verifier, which never maps it, and its overflow runs
are held against the file's size. Values are not looked at: records verify by their digests.
"""

from __future__ import annotations

import os
import struct
import time

from lmdb.verify import VerifyError, verify

from adacheck_store.format.errors import TierDamagedError

from . import durable, lock_file
from .medium import busy, translate

DATA_FILE = "data.mdb"
_META_BYTES = 152
_HEADER_BYTES = 16
_ATTEMPTS = 5
_PIECE_BYTES = 4 << 20
_BRANCH, _BIG_DATA = 0x01, 0x01


def check(path: str, tier: str, *, live: bool = False) -> None:
    """Raise `TierDamagedError` unless the data file of folder ``path`` is structurally sound.

    With ``live``, a process is writing to it: the check starts again whenever a transaction was
    made meanwhile, and is given up in favour of the writer's own check if that never ends.
    """
    findings: list[str] = []
    for attempt in range(_ATTEMPTS):
        before = _transactions(path)
        try:
            findings = _findings(path)
        except OSError as exc:  # it says nothing of the file: no descriptor left, a passing error
            raise translate(exc, tier, os.path.join(path, DATA_FILE), None) from exc
        if not findings:
            return
        if not live or _transactions(path) == before:
            break
        if attempt == _ATTEMPTS - 1:
            return
        time.sleep(0.01 * 2**attempt)
    raise TierDamagedError(
        f"the LMDB file does not verify: {'; '.join(findings[:3])}",
        hint="restore goes on with other tiers; to write here again set the folder aside "
        "(tiers.lmdb_check.quarantine)",
        tier=tier, path=os.path.join(path, DATA_FILE),
    )  # fmt: skip


def quarantine(path: str) -> str:
    """Set a damaged LMDB folder aside as ``<path>-damaged-<n>``; returns its new path.

    Raises `TierBusyError` while a process writes to it. What still verifies in it can be read
    from there by hand.
    """
    path = os.path.realpath(path)
    holder = lock_file.holder(path)
    if holder:
        raise busy("", path, holder)
    number = 1
    while os.path.lexists(f"{path}-damaged-{number}"):
        number += 1
    target = f"{path}-damaged-{number}"
    durable.rename(path, target, "lmdb.quarantine")
    durable.fsync_path(os.path.dirname(path), "local.folder.fsync")
    return target


def mentions(path: str, run: str) -> bool:
    """True if a folder's LMDB, whatever its structure, has the key of a record of a run in it."""
    wanted = b"h" + f"{run}/t".encode()  # how the entries of its heads begin
    rest = b""
    with open(os.path.join(path, DATA_FILE), "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            if wanted in rest + piece:
                return True
            rest = piece[-len(wanted) :]
    return False


def _findings(path: str) -> list[str]:
    """What is wrong with the file's structure; empty if nothing is."""
    try:
        # A leaked page is wasted, not wrong.
        found: list[str] = verify(path, subdir=True)  # type: ignore[no-untyped-call]
        problems = [text for text in found if " leak " not in text]
        return problems or _beyond_end(os.path.join(path, DATA_FILE))
    except VerifyError as exc:
        return [str(exc)]
    except (ValueError, IndexError, struct.error, OverflowError, RecursionError) as exc:
        return [f"the verifier failed: {exc!r}"]


def _meta(file: int) -> tuple[int, int, int, int]:
    """Page size, last page, transaction and main root by the newer of the two meta pages."""
    best = (0, 0, -1, 0)
    page_bytes = struct.unpack_from("<I", os.pread(file, _META_BYTES, 0), 40)[0]
    for number in (0, 1):
        meta = os.pread(file, _META_BYTES, number * page_bytes)
        root, last, transaction = struct.unpack_from("<QQQ", meta, 128)
        if transaction > best[2]:
            best = (page_bytes, last, transaction, root)
    return best


def _transactions(path: str) -> int:
    """Number of the newest transaction, -1 where there is none to be read."""
    try:
        file = os.open(os.path.join(path, DATA_FILE), os.O_RDONLY)
    except OSError:
        return -1
    try:
        return _meta(file)[2]
    except struct.error:
        return -1
    finally:
        os.close(file)


def _beyond_end(path: str) -> list[str]:
    """Overflow runs that reach beyond the end of a file whose tree is known to be sound.

    A file may end before its last page, where that one is free and never was written.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(file).st_size
        page_bytes, last, _, root = _meta(file)
        if size >= (last + 1) * page_bytes or root == 2**64 - 1:
            return []
        end = _tree_end(file, page_bytes, root)
        if size < end * page_bytes:
            return [f"truncated: {size} bytes of at least {end * page_bytes}"]
        return []
    finally:
        os.close(file)


def _tree_end(file: int, page_bytes: int, number: int) -> int:
    """First page number behind all pages of a tree."""
    page = os.pread(file, page_bytes, number * page_bytes)
    flags, lower = struct.unpack_from("<HH", page, 10)
    end = number + 1
    for i in range((lower - _HEADER_BYTES) // 2):
        (at,) = struct.unpack_from("<H", page, _HEADER_BYTES + 2 * i)
        low, high, node_flags, key_bytes = struct.unpack_from("<HHHH", page, at)
        if flags & _BRANCH:
            child = low | high << 16 | node_flags << 32
            end = max(end, _tree_end(file, page_bytes, child))
        elif node_flags & _BIG_DATA:
            (first,) = struct.unpack_from("<Q", page, at + 8 + key_bytes)
            value_bytes = low | high << 16
            end = max(end, first + (_HEADER_BYTES - 1 + value_bytes) // page_bytes + 1)
    return end
