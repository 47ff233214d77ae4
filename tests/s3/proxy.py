"""A proxy before an S3 server that goes wrong by a script, request by request.

It speaks HTTP/1.1 with one request a connection, as far as S3 needs it. A script is a function
that is given each request and says what happens to it.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

_SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>scripted</Message>%s</Error>"


@dataclass(frozen=True)
class Request:
    """What a script is told: ``kind`` is PUT, GET, ..., ``path`` has the query."""

    number: int
    kind: str
    path: str
    headers: bytes
    body: bytes


@dataclass(frozen=True)
class Fault:
    """What happens to a request.

    ``reset``: cut before the server has it. ``lost``: the server does it, the reply never comes.
    ``silent``: the server has it not, and nothing comes. ``flip out`` and ``flip in``: a byte of
    the body sent, or of the one received, is changed. ``cut``: the reply's body ends early.
    ``short``: so too, and its announced length is that. ``late``: after ``seconds``. ``error``:
    ``status`` and ``code`` as the reply. ``accept``: the server has it not, and success is told.
    """

    how: str
    status: int = 503
    code: str = "SlowDown"
    more: str = ""
    header: str = "X-Scripted: yes"
    seconds: float = 0.0


Script = Callable[[Request], Fault | None]


def once(fault: Fault, kind: str = "", part: str = "", times: int = 1) -> Script:
    """A script: the first ``times`` requests of a kind whose path has a part."""
    left = [times]

    def script(request: Request) -> Fault | None:
        fits = kind in ("", request.kind) and part in request.path
        if fits and left[0] > 0:
            left[0] -= 1
            return fault
        return None

    return script


def at(number: int, fault: Fault) -> Script:
    """A script: the request of a number, and no other."""
    return lambda request: fault if request.number == number else None


def sound(request: Request) -> None:
    """A script: nothing goes wrong."""


class Proxy:
    """Listens on 127.0.0.1; ``script`` may be replaced at any time. Requests count from 0."""

    def __init__(self, target: str, script: Script = sound) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self._target = (host, int(port))
        self.script = script
        self.requests: list[Request] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def restart(self, script: Script = sound) -> None:
        """Number from 0 again, by another script."""
        with self._lock:
            self.requests.clear()
            self.script = script

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError, ValueError):
            client.settimeout(60)
            head, rest = _read_head(client)
            if b"100-continue" in head.lower():
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = _read_body(client, head, rest)
            kind, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
            with self._lock:
                request = Request(len(self.requests), kind, path, head, body)
                self.requests.append(request)
                fault = self.script(request)
            self._answer(client, request, fault)

    def _answer(self, client: socket.socket, request: Request, fault: Fault | None) -> None:
        how = fault.how if fault else ""
        if fault and fault.seconds:
            time.sleep(fault.seconds)
        if how == "reset":
            _reset(client)
        elif how == "silent":
            with suppress(OSError):
                client.recv(1)  # until the other side gives up
        elif how == "accept":
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        elif how == "error":
            assert fault
            text = _SLOW_DOWN % (fault.code.encode(), fault.more.encode())
            text = b"" if request.kind == "HEAD" else text
            lines = [
                f"HTTP/1.1 {fault.status} Scripted", f"Content-Length: {len(text)}",
                "Connection: close", fault.header, "", "",
            ]  # fmt: skip
            client.sendall("\r\n".join(lines).encode() + text)
        else:
            body = _flipped(request.body) if how == "flip out" else request.body
            reply = self._forward(request.headers, body)
            if how == "lost":
                _reset(client)
            else:
                client.sendall(_spoilt(reply, how))

    def _forward(self, head: bytes, body: bytes) -> bytes:
        lines = [line for line in head.rstrip(b"\r\n").split(b"\r\n")
                 if not line.lower().startswith((b"connection:", b"expect:"))]  # fmt: skip
        with socket.create_connection(self._target, timeout=60) as server:
            server.sendall(b"\r\n".join(lines) + b"\r\nConnection: close\r\n\r\n" + body)
            return b"".join(iter(lambda: server.recv(1 << 20), b""))


def _read_head(client: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = client.recv(1 << 16)
        if not piece:
            raise ValueError("the client went away")
        data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n", rest


def _read_body(client: socket.socket, head: bytes, rest: bytes) -> bytes:
    size = 0
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            size = int(line.split(b":")[1])
    pieces, got = [rest], len(rest)
    while got < size:
        piece = client.recv(1 << 20)
        if not piece:
            raise ValueError("the client went away")
        pieces.append(piece)
        got += len(piece)
    return b"".join(pieces)


def _reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def _flipped(body: bytes) -> bytes:
    changed = bytearray(body)
    if changed:
        changed[len(changed) // 2] ^= 0x10
    return bytes(changed)


def _spoilt(reply: bytes, how: str) -> bytes:
    head, mark, body = reply.partition(b"\r\n\r\n")
    if how == "flip in":
        body = _flipped(body)
    elif how in ("cut", "short") and body:
        kept = body[: len(body) // 2]
        if how == "short":
            lines = [line for line in head.split(b"\r\n")
                     if not line.lower().startswith(b"content-length:")]  # fmt: skip
            head = b"\r\n".join([*lines, b"Content-Length: %d" % len(kept)])
        body = kept
    return head + mark + body
