"""A channel: frames over one connected socket, every call of it with a time limit."""

from __future__ import annotations

import array
import select
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from adacheck_store.format.errors import FormatError
from adacheck_store.format.ids import Buffer

from . import wire
from .tls import TlsSocket
from .wire import Frame, Kind

_JOIN_BYTES = 16 << 10
_VIEWS_MAX = 512

_Passing = tuple[int, int, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long is waited for what, in seconds, and how much is taken at most.

    ``connect_s``: connection, handshake and hello. ``beat_s`` and ``silence_s``: how often a
    client pings, and after how long without an answer the other side counts as dead; their sum is
    the bound on noticing it. ``stall_s``: a frame that does not move, beyond the time it takes at
    ``slowest`` bytes a second. ``answer_s``: from a call to its answer, unless the call says.
    """

    connect_s: float = 2.5
    beat_s: float = 0.5
    silence_s: float = 2.0
    stall_s: float = 30.0
    slowest: float = 1 << 20
    answer_s: float = 60.0


LIMITS = Limits()


class ChannelError(Exception):
    """A connection is of no further use. ``lost``: it ended, and nobody was waited for."""

    def __init__(self, message: str, *, lost: bool = False) -> None:
        self.lost = lost
        super().__init__(message)


class Channel:
    """Frames over a socket. One thread at a time uses it; any thread may `abort` it.

    Every failure is a `ChannelError`: the end of the connection, a time limit, bytes that are no
    frame, a sequence number that is not the next one.
    """

    def __init__(self, sock: socket.socket | TlsSocket, limits: Limits = LIMITS) -> None:
        self.sock = sock
        self.limits = limits
        self.broken = False
        """Said by who could not leave it between two calls."""
        self._sent = 0
        self._received = 0
        self._timeout = sock.gettimeout()

    # -- sending --

    def encode(self, kind: Kind, head: Mapping[str, Any], payload_bytes: int = 0) -> bytes:
        """The next frame's header and head."""
        data = wire.encode(kind, self._sent, head, payload_bytes)
        self._sent += 1
        return data

    @property
    def passes(self) -> bool:
        """Whether descriptors may go along with a frame: inside a node."""
        return not isinstance(self.sock, TlsSocket)

    def send(
        self, kind: Kind, head: Mapping[str, Any], payload: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Send a frame; ``payload`` is sent as it lies, without a copy of large buffers.

        ``descriptors`` go along where the channel `passes` any, and stay the caller's.
        """
        views = [view for view in map(flat, payload) if len(view)]
        size = sum(map(len, views))
        views.insert(0, memoryview(self.encode(kind, head, size)))
        end = self._deadline(self.limits.stall_s + size / self.limits.slowest)
        try:
            if isinstance(self.sock, TlsSocket):
                for view in joined(views):
                    self._send_all(view, end)
            else:
                self._send_views(self.sock, views, end, [_passing(descriptors)] * bool(descriptors))
        except OSError as exc:
            raise self._broken(exc, "sending") from exc

    def _send_all(self, view: memoryview, end: float) -> None:
        while len(view):
            view = view[self.sock.send(view) :]
            self._check(end, len(view))

    def _send_views(
        self, sock: socket.socket, views: list[memoryview], end: float, passing: list[_Passing]
    ) -> None:  # fmt: skip
        while views:
            sent = sock.sendmsg(views[:_VIEWS_MAX], passing)
            passing = []
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if views:
                views[0] = views[0][sent:]
            self._check(end, len(views))

    # -- receiving --

    def receive(
        self, timeout_s: float | None = None, descriptors: list[int] | None = None
    ) -> Frame:
        """Header and head of the next frame, waited for ``timeout_s`` (default ``answer_s``).

        The payload is still to be taken: by `payload_into`, once or in pieces, or `payload`.
        Descriptors that come along are closed by the kernel, unless there is a list for them,
        which takes up to two: they are the caller's to close, also where this raises.
        """
        end = self._deadline(self.limits.answer_s if timeout_s is None else timeout_s)
        header = wire.HEADER.size
        try:
            start = b""
            if descriptors is not None and not isinstance(self.sock, TlsSocket):
                start = self._take_with(self.sock, header, descriptors)
            start += self._take(header - len(start), end)
            parsed = wire.decode_header(start)
            self.follow(parsed.sequence)
            end = self._deadline(self.limits.stall_s)
            head = wire.decode_head(self._take(parsed.head_bytes, end))
        except FormatError as exc:
            raise ChannelError(str(exc)) from exc
        return Frame(parsed.kind, head, parsed.payload_bytes)

    def follow(self, sequence: int) -> None:
        """Count a frame received; raises `ChannelError` for one said before, or one left out."""
        if sequence != self._received & 0xFFFFFFFF:
            raise ChannelError(f"frame {sequence} where {self._received} comes next")
        self._received += 1

    def payload_into(self, view: memoryview) -> None:
        """Fill a view with the next bytes of the payload."""
        end = self._deadline(self.limits.stall_s + len(view) / self.limits.slowest)
        self._fill(view, end)

    def payload(self, frame: Frame) -> bytes:
        """The whole payload of a frame, at most `wire.MAX_PAYLOAD_BYTES`."""
        if not frame.payload_bytes:
            return b""
        end = self._deadline(self.limits.stall_s + frame.payload_bytes / self.limits.slowest)
        return self._take(frame.payload_bytes, end)

    def skip(self, frame: Frame) -> None:
        """Pass a payload over."""
        scrap = memoryview(bytearray(min(frame.payload_bytes, 1 << 20)))
        left = frame.payload_bytes
        while left:
            step = min(left, len(scrap))
            self.payload_into(scrap[:step])
            left -= step

    def readable(self) -> bool:
        """Whether something of a frame, or the end of the connection, is there."""
        if self.pending():
            return True
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(0))

    def pending(self) -> int:
        """Bytes received and decrypted that `select` does not know of."""
        return self.sock.pending() if isinstance(self.sock, TlsSocket) else 0

    def _take(self, size: int, end: float) -> bytes:
        data = bytearray(size)
        self._fill(memoryview(data), end)
        return bytes(data)

    def _take_with(self, sock: socket.socket, size: int, descriptors: list[int]) -> bytes:
        """The first bytes of a frame, at most ``size``, and descriptors that came with them."""
        try:
            data, found, _, _ = socket.recv_fds(sock, size, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as exc:
            raise self._broken(exc, "receiving") from exc
        descriptors += found
        return data

    def _fill(self, view: memoryview, end: float) -> None:
        try:
            while len(view):
                got = self.sock.recv_into(view)
                if not got:
                    raise ChannelError("the other side closed the connection", lost=True)
                view = view[got:]
                self._check(end, len(view))
        except OSError as exc:
            raise self._broken(exc, "receiving") from exc

    # -- time, and the end --

    def _deadline(self, timeout_s: float) -> float:
        """When to give up. The socket's own time-out bounds a call of it that does not move."""
        if timeout_s != self._timeout:
            try:
                self.sock.settimeout(max(timeout_s, 1e-3))
            except OSError as exc:
                raise self._broken(exc, "using") from exc
            self._timeout = timeout_s
        return time.monotonic() + timeout_s

    @staticmethod
    def _check(end: float, left: int) -> None:
        if left and time.monotonic() > end:
            raise ChannelError("too slow: the time for a frame is over")

    def _broken(self, exc: OSError, doing: str) -> ChannelError:
        lost = isinstance(exc, ConnectionError | ssl.SSLEOFError | ssl.SSLZeroReturnError)
        what = "nothing came in time" if isinstance(exc, TimeoutError) else str(exc)
        return ChannelError(f"{what} ({doing})", lost=lost)

    def unblock(self) -> None:
        """Make calls of the socket return at once, as the server's loop wants it."""
        self._timeout = 0.0
        self.sock.setblocking(False)

    def abort(self) -> None:
        """End the connection under whoever waits on it; he gets a `ChannelError`."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; idempotent."""
        with suppress(OSError):
            self.sock.close()


def _passing(descriptors: Sequence[int]) -> _Passing:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes()


def flat(data: Buffer) -> memoryview:
    """A flat byte view."""
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def joined(views: Sequence[memoryview]) -> list[memoryview]:
    """The same bytes in fewer buffers: small ones are copied together, large ones stay."""
    out: list[memoryview] = []
    small = bytearray()
    for view in views:
        if len(view) < _JOIN_BYTES:
            small += view
            continue
        if small:
            out.append(memoryview(bytes(small)))
            small.clear()
        out.append(view)
    if small:
        out.append(memoryview(bytes(small)))
    return out
