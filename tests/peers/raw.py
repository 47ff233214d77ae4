"""A client that says what it likes: bytes and frames over a socket, without the product's pool."""

from __future__ import annotations

import secrets
import socket
import ssl
import struct
from contextlib import suppress
from typing import Any

from adacheck_store.tiers import wire
from adacheck_store.tiers.credentials import Credentials, client_context
from adacheck_store.tiers.endpoint import Endpoint
from adacheck_store.tiers.wire import Frame, Kind


def plain(endpoint: str) -> socket.socket:
    """A connected socket, no handshake made."""
    place = Endpoint.parse(endpoint)
    sock = socket.socket(socket.AF_UNIX if place.path else socket.AF_INET)
    sock.settimeout(10)
    sock.connect(place.path or (place.host, place.port))
    return sock


class Raw:
    """Frames over a connection; the sequence number counts by itself unless it is set."""

    def __init__(self, endpoint: str, key: Credentials | None = None) -> None:
        self.sock = plain(endpoint)
        if endpoint.startswith("tls") and key is not None:
            context = client_context(key)
            self.sock = context.wrap_socket(self.sock, server_hostname=key.server_name)
        self.sequence = 0

    def say(self, head: dict[str, Any], payload: bytes = b"", kind: Kind = Kind.CALL) -> None:
        """Send a frame."""
        self.sock.sendall(wire.encode(kind, self.sequence, head, len(payload)) + payload)
        self.sequence += 1

    def hear(self) -> Frame:
        """Receive a frame; raises `EOFError` when the other side has closed."""
        header = wire.decode_header(self.take(wire.HEADER.size))
        head = wire.decode_head(self.take(header.head_bytes))
        return Frame(header.kind, head, header.payload_bytes, self.take(header.payload_bytes))

    def take(self, size: int) -> bytes:
        """Receive so many bytes."""
        data = b""
        while len(data) < size:
            more = self.sock.recv(size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def ended(self) -> bool:
        """Whether the other side closes within the time limit, whatever it says before."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except OSError:
            return True
        return True

    def hello(
        self, role: str, session: str = "", run: str = "", changes: dict[str, object] | None = None
    ) -> str:
        """Say hello, with some fields changed, and no more; returns the session's name."""
        session = session or secrets.token_hex(8)
        head = {"verb": "hello", "speaks": [1, 1], "session": session, "client": "tests",
                "role": role, "run": run, "software": "tests"}  # fmt: skip
        self.say({**head, **(changes or {})})
        return session

    def close(self) -> None:
        """Close at once, without a word."""
        with suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


class Session:
    """A pulse and some connections for calls, all welcomed."""

    def __init__(self, endpoint: str, calls: int, key: Credentials | None = None) -> None:
        run = key.run if key and endpoint.startswith("tls") else ""
        self.pulse = Raw(endpoint, key)
        self.name = self.pulse.hello("pulse", run=run)
        assert self.pulse.hear().kind is Kind.ANSWER
        self.calls = [Raw(endpoint, key) for _ in range(calls)]
        for call in self.calls:
            call.hello("calls", self.name, run)
            assert call.hear().kind is Kind.ANSWER

    def beat(self) -> None:
        """Ping."""
        self.pulse.say({"verb": "ping"})
        assert self.pulse.hear().kind is Kind.ANSWER

    def close(self) -> None:
        """Close all."""
        for raw in (self.pulse, *self.calls):
            raw.close()


def hostile_context(certificate: Credentials | None) -> ssl.SSLContext:
    """A client that believes anybody, and shows a key of its own or none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if certificate:
        context = client_context.__wrapped__(certificate)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
