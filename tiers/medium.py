"""What lies under a path: the kind of file system, its free space, and what its errors mean."""

from __future__ import annotations

import errno
import os

from adacheck_store.format.errors import (
    TierBusyError,
    TierDamagedError,
    TierError,
    TierFullError,
    TierReadOnlyError,
    TierUnavailableError,
    UnsupportedError,
)

NETWORK_FILE_SYSTEMS = frozenset(
    (
        "nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "9p", "ceph", "lustre",
        "glusterfs", "fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.rclone", "fuse.ceph",
        "fuse.gcsfuse", "fuse.goofys", "fuse.mount-s3", "gpfs", "beegfs", "ocfs2", "gfs2", "pvfs2",
        "orangefs", "coda",
    )
)  # fmt: skip
"""Types of mounts on which a memory map or a lock of another machine cannot be trusted."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_DAMAGED = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EEXIST)


def file_system(path: str, mountinfo: str = "/proc/self/mountinfo") -> str:
    """Type of the file system a path lies on; empty where the system does not say."""
    path = os.path.realpath(path)
    found = ("", "")
    try:
        with open(mountinfo, encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                left, _, right = line.partition(" - ")
                point = left.split()[4].encode().decode("unicode_escape")
                inside = path == point or path.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(found[0]):
                    found = (point, right.split()[0])
    except (OSError, IndexError, ValueError):
        return ""
    return found[1]


def refuse_network(path: str, tier: str) -> None:
    """Raise `UnsupportedError` if a path lies on a network file system."""
    kind = file_system(path)
    if kind in NETWORK_FILE_SYSTEMS:
        raise UnsupportedError(
            f"an LMDB tier cannot lie on a network file system ({kind})",
            hint="put it on a local disk of this node (cache=...)", tier=tier, path=path,
        )  # fmt: skip


def free_bytes(path: str) -> int:
    """Bytes an unprivileged writer may still take at a path's file system."""
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    stats = os.statvfs(path)
    return stats.f_bavail * stats.f_frsize


def full(tier: str, path: str, needed: int, free: int, key: str = "") -> TierFullError:
    """The error of a tier that has no room."""
    return TierFullError(
        f"no room: {needed} bytes needed, {max(0, free)} free",
        hint="free space, raise the tier's capacity, or let retention delete older steps",
        tier=tier, path=path, key=key,
    )  # fmt: skip


def translate(
    exc: OSError, tier: str, path: str, needed: int | None = 0, key: str = ""
) -> TierError:  # fmt: skip
    """The error of our tree that an error of the operating system amounts to.

    ``needed`` are the bytes that were to be written, None where nothing was.
    """
    text = exc.strerror or str(exc)
    if exc.errno in _FULL:
        return full(tier, path, needed or 0, free_bytes(path), key)
    if exc.errno in _READ_ONLY and needed is not None:
        return TierReadOnlyError(
            f"cannot be written: {text}", hint="check permissions and mount options",
            tier=tier, path=path, key=key,
        )  # fmt: skip
    if exc.errno in _DAMAGED:
        return TierDamagedError(
            f"no regular file or folder where one should be: {text}",
            hint="see what was put there; links and devices are not followed",
            tier=tier, path=path, key=key,
        )  # fmt: skip
    return TierUnavailableError(
        f"does not answer: {text}", hint="check the medium and the system's log",
        tier=tier, path=path, key=key,
    )  # fmt: skip


def busy(tier: str, path: str, holder: str) -> TierBusyError:
    """The error of a tier that another process holds."""
    return TierBusyError(
        f"held by another process: {holder or 'unknown'}",
        hint="wait for it, stop it, or open the tier for reading only", tier=tier, path=path,
    )  # fmt: skip
