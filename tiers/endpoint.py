"""Endpoints: where an agent is reached, and the sockets there.

``unix:/path`` is a socket inside a node: 0600 in a 0700 folder, and both sides ask the kernel for
the other's user. ``tls://host:port`` goes between nodes: mutual TLS 1.3 with the run's key.
"""

from __future__ import annotations

import os
import socket
import ssl
import stat
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from adacheck_store.format.errors import (
    PeerRefusedError,
    TierBusyError,
    TierError,
    TierUnavailableError,
    UsageError,
)

from . import lock_file
from .credentials import Credentials, client_context, is_pinned
from .medium import translate
from .tls import TlsSocket

UNIX_PATH_BYTES_MAX = 107
_BACKLOG = 512
_BUFFER_BYTES = 1 << 20
_UCRED = struct.Struct("3i")


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """Where an agent is reached: ``path`` of a unix socket, or ``host`` and ``port``."""

    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Read ``unix:/path`` or ``tls://host:port``; raises `UsageError`."""
        if text.startswith("unix:"):
            path = text[len("unix:") :]
            if not path.startswith("/") or "\0" in path:
                raise UsageError(f"no absolute path: {text[:200]!r}", hint="write unix:/path")
            if len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX:
                raise UsageError(
                    f"a socket's path of {len(os.fsencode(path))} bytes, at most "
                    f"{UNIX_PATH_BYTES_MAX} are possible",
                    hint="name a shorter folder, such as one in /run or /tmp", path=path,
                )  # fmt: skip
            return cls(path=path)
        host, colon, port = text.removeprefix("tls://").rpartition(":")
        host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
        good = text.startswith("tls://") and colon and host and not set("/@ []") & set(host)
        if not good or not (port.isascii() and port.isdigit()) or int(port) > 65535:
            raise UsageError(
                f"not an endpoint: {text[:200]!r}", hint="write unix:/path or tls://host:port"
            )
        return cls(host=host, port=int(port))

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"tls://[{self.host}]:{self.port}" if ":" in self.host else (
            f"tls://{self.host}:{self.port}"
        )  # fmt: skip


# -- connecting --


def connect(
    endpoint: Endpoint, timeout_s: float, credentials: Credentials | None = None
) -> socket.socket | TlsSocket:
    """A connection, proven to lead to our own user or to the run's key.

    Raises `TierUnavailableError` where nobody answers in time, `PeerRefusedError` where the other
    side is not who it should be or does not let us in, `UsageError` without credentials for TLS.
    """
    end = time.monotonic() + timeout_s
    try:
        if endpoint.path:
            return _connect_unix(endpoint, end)
        if credentials is None:
            raise UsageError("a TLS endpoint needs the run's key", path=str(endpoint))
        return _connect_tls(endpoint, end, credentials)
    except ssl.SSLError as exc:
        raise refused(endpoint, exc) from exc
    except OSError as exc:
        text = "not within the time limit" if isinstance(exc, TimeoutError) else str(exc)
        raise TierUnavailableError(
            f"no agent answers: {text}", hint="see whether the agent runs there",
            path=str(endpoint),
        ) from exc  # fmt: skip


def refused(endpoint: Endpoint, exc: Exception) -> PeerRefusedError:
    """The error of a TLS handshake that failed."""
    return PeerRefusedError(
        f"no proof of the run's key: {exc}",
        hint="both sides need the same key of this run; the agent there may serve other runs",
        path=str(endpoint),
    )


def _connect_unix(endpoint: Endpoint, end: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        widen(sock)
        while True:
            sock.settimeout(_left(end))
            try:
                sock.connect(endpoint.path)
                break
            except BlockingIOError:  # as many wait there as may
                time.sleep(min(0.02, _left(end)))
        uid, pid = peer_user(sock)
        if uid != os.geteuid():
            raise PeerRefusedError(
                f"the agent there (pid {pid}) belongs to user {uid}, not {os.geteuid()}",
                hint="start an agent of your own, with a socket of its own", path=str(endpoint),
            )  # fmt: skip
    except BaseException:
        sock.close()
        raise
    return sock


def _connect_tls(endpoint: Endpoint, end: float, credentials: Credentials) -> TlsSocket:
    family, address = _resolve(endpoint, _left(end))
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(_left(end))
        sock.connect(address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(_left(end))
        context = client_context(credentials)
        tls = TlsSocket(sock, context, server_hostname=credentials.server_name)
        tls.do_handshake()
        if not is_pinned(tls, credentials.fingerprint):
            raise PeerRefusedError("another key than the run's", path=str(endpoint))
    except BaseException:
        sock.close()
        raise
    return tls


def _resolve(endpoint: Endpoint, timeout_s: float) -> tuple[int, Any]:
    """Family and address of a host; the system's resolver knows no time limit, so a thread asks."""
    found: list[tuple[int, Any]] = []
    errors: list[OSError] = []

    def ask() -> None:
        try:
            infos = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
            found.extend((info[0], info[4]) for info in infos)
        except OSError as exc:
            errors.append(exc)

    with suppress(OSError):
        numeric = socket.getaddrinfo(
            endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
        return numeric[0][0], numeric[0][4]
    thread = threading.Thread(target=ask, name="adacheck-resolve", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not found:
        raise TimeoutError(f"the name {endpoint.host!r} is not resolved in time")
    return found[0]


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("not within the time limit")
    return left


def widen(sock: socket.socket) -> None:
    """Let more lie in a unix socket, as far as the system allows: fewer turns between both ends."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)


def peer_user(sock: socket.socket) -> tuple[int, int]:
    """User and process at the other end of a unix socket, by the kernel's word."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(data)
    return uid, pid


# -- listening --


class Listener:
    """A listening socket of an endpoint; ``endpoint`` is where it can be reached."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Listen. Raises `TierBusyError` where another process does, `TierError`, `UsageError`."""
        self._lock_fd = -1
        self.endpoint = endpoint
        try:
            self.sock = self._unix() if endpoint.path else self._tcp()
        except BaseException:
            self._unlock()
            raise
        self.sock.setblocking(False)

    def _unix(self) -> socket.socket:
        path = self.endpoint.path
        folder, name = os.path.split(path)
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            self._check_folder(folder)
            # Who holds the lock may remove what a dead agent left, and nobody else's.
            self._lock_fd = lock_file.acquire(folder, str(self.endpoint), f"{name}.lock")
            with suppress(FileNotFoundError):
                if not stat.S_ISSOCK(os.lstat(path).st_mode):
                    raise TierError(
                        "something else than a socket is there", path=path,
                        hint="name another path, or remove it",
                    )  # fmt: skip
                os.unlink(path)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.bind(path)
                os.chmod(path, 0o600)
                sock.listen(_BACKLOG)
            except BaseException:
                sock.close()
                raise
        except OSError as exc:
            raise translate(exc, str(self.endpoint), path) from exc
        return sock

    def _check_folder(self, folder: str) -> None:
        found = os.stat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise TierError(
                f"the socket's folder is open to others: owner {found.st_uid}, "
                f"mode {stat.S_IMODE(found.st_mode):o}",
                hint="name a folder of your own with mode 700", path=folder,
            )  # fmt: skip

    def _tcp(self) -> socket.socket:
        host, port = self.endpoint.host, self.endpoint.port
        try:
            family, address = _resolve(self.endpoint, 5.0)
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(address)
                sock.listen(_BACKLOG)
            except BaseException:
                sock.close()
                raise
        except OSError as exc:
            raise TierBusyError(
                f"cannot listen there: {exc}", path=str(self.endpoint),
                hint="another process may have the port; name another one, or 0 for any",
            ) from exc  # fmt: skip
        self.endpoint = Endpoint(host=host, port=port or sock.getsockname()[1])
        return sock

    def close(self) -> None:
        """Stop listening, and remove the socket's file."""
        if self.endpoint.path and self.sock.fileno() >= 0:
            with suppress(OSError):
                os.unlink(self.endpoint.path)
        self.sock.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
