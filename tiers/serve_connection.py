"""One connection at the server while it waits: handshake, hello, pings. Nothing here blocks."""

from __future__ import annotations

import enum
import selectors
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adacheck_store.format import strict
from adacheck_store.format.errors import MalformedError, PeerRefusedError

from .channel import Channel, ChannelError, Limits
from .credentials import RunContexts
from .serve_calls import PeerInfo
from .tls import TlsSocket
from .wire import VERSION, Frame, Inbox, Kind

_RECV_BYTES = 4096


class Stage(enum.Enum):
    """What a connection waits for: the TLS handshake, the hello, a ping, a call, its turn; or it
    is lent to a worker."""

    HANDSHAKE = 1
    HELLO = 2
    PULSE = 3
    IDLE = 4
    QUEUED = 5
    LENT = 6


@dataclass(frozen=True, slots=True)
class Hello:
    """The first call on a connection: who calls, and whether to beat or to make calls."""

    session: str
    client: str
    run: str
    pulse: bool
    software: str


def read_hello(frame: Frame, mine: str) -> Hello:
    """Read a hello; raises `PeerRefusedError` for other versions, `MalformedError`."""
    head = frame.head
    if frame.kind is not Kind.CALL or head.get("verb") != "hello":
        raise MalformedError("no hello", rule="hello")
    try:
        software = strict.text(head.get("software"), empty=True)
        low, high = (strict.integer(item) for item in strict.items(head.get("speaks"), 2))
        if not low <= VERSION <= high:
            raise PeerRefusedError(
                f"this agent ({mine}) speaks version {VERSION}, the caller ({software[:100]}) "
                f"{low} to {high}",
                hint="run the same version of adacheck-store on both sides",
            )
        role = strict.text(head.get("role"))
        if role not in ("pulse", "calls"):
            raise ValueError(f"role {role[:80]!r}")
        session, client = strict.text(head.get("session")), strict.text(head.get("client"))
        run = strict.text(head.get("run"), empty=True)
    except ValueError as exc:
        raise MalformedError(f"hello: {exc}"[:200], rule="hello") from exc
    return Hello(session, client, run, role == "pulse", software)


@dataclass(slots=True)
class Session:
    """What one client has open: its pulse and connections, and when it was last heard (s)."""

    peer: PeerInfo
    heard: float
    members: set[Connection] = field(default_factory=set)


class Connection:
    """A connection, owned by the server's loop unless its stage is LENT."""

    def __init__(
        self, sock: socket.socket | TlsSocket, where: str, born: float, limits: Limits
    ) -> None:
        tls = isinstance(sock, TlsSocket)
        self.channel = Channel(sock, limits)
        self.where = where
        self.born = born
        self.stage = Stage.HANDSHAKE if tls else Stage.HELLO
        self.events = selectors.EVENT_READ
        self.run: str | None = None
        """The run whose key was proven; None on a unix socket."""
        self.session: Session | None = None
        self._inbox = Inbox()

    @property
    def origin(self) -> str:
        """The host that it comes from, or the process on this node."""
        return self.where.rpartition(":")[0] or self.where

    def shake(self, runs: RunContexts) -> bool:
        """Go on with the handshake; True when it is done. Raises `ChannelError`."""
        sock = self.channel.sock
        assert isinstance(sock, TlsSocket)
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            self.events = selectors.EVENT_READ
            return False
        except ssl.SSLWantWriteError:
            self.events = selectors.EVENT_WRITE
            return False
        except OSError as exc:
            raise ChannelError(f"handshake: {exc}") from exc
        self.events = selectors.EVENT_READ
        self.run = runs.proven_run(sock)
        if self.run is None:
            raise ChannelError("handshake: another key than the run's")
        self.stage = Stage.HELLO
        return True

    def frames(self) -> list[Frame]:
        """The small frames that are complete. Raises `ChannelError` and `FormatError`."""
        found: list[Frame] = []
        while True:
            try:
                data = self.channel.sock.recv(_RECV_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return found
            except OSError as exc:
                raise ChannelError(str(exc)) from exc
            if not data:
                raise ChannelError("closed", lost=True)
            for sequence, frame in self._inbox.feed(data):
                self.channel.follow(sequence)
                found.append(frame)
            if not self.channel.pending():
                return found

    def check_silent(self) -> None:
        """Raise `ChannelError` if part of a call came before the hello was answered."""
        if self.stage is Stage.IDLE and len(self._inbox):
            raise ChannelError("a call before the hello was answered")

    def reply(self, kind: Kind, head: Mapping[str, Any]) -> None:
        """Send a small frame, or raise `ChannelError`: who reads no answers gets none."""
        data = self.channel.encode(kind, head)
        try:
            sent = self.channel.sock.send(data)
        except OSError as exc:
            raise ChannelError(f"takes no answer: {exc}") from exc
        if sent != len(data):
            raise ChannelError("takes no answer")
