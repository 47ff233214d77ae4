"""TLS in memory: the bytes that were sent, however the socket below cuts them."""

import os
import random
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from adacheck_store.tiers import credentials
from adacheck_store.tiers.tls import TlsSocket

KEY = credentials.make("gpt-small")


def relay(one: socket.socket, other: socket.socket, piece: int) -> None:
    """Hand bytes on in pieces of random size."""
    cut = random.Random(piece)
    with suppress(OSError):
        while data := one.recv(cut.randint(1, piece)):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    """A client and a server, their handshake made, with a relay between them."""
    ends = [socket.socketpair() for _ in range(2)]
    inner = [end[1] for end in ends]
    for one, other in (inner, inner[::-1]):
        threading.Thread(target=relay, args=(one, other, request.param), daemon=True).start()
    client = TlsSocket(ends[0][0], credentials.client_context(KEY), server_hostname=KEY.server_name)
    server = TlsSocket(ends[1][0], credentials.server_context(KEY), server_side=True)
    shaking = threading.Thread(target=client.do_handshake)
    shaking.start()
    server.do_handshake()
    shaking.join(timeout=30)
    yield client, server
    for sock in (client, server, *inner):
        sock.close()


def fill(sock: TlsSocket, size: int) -> bytes:
    """Receive so many bytes."""
    data = memoryview(bytearray(size))
    view = data
    while view:
        got = sock.recv_into(view)
        assert got
        view = view[got:]
    return bytes(data)


@pytest.mark.parametrize("pair", [7, 5000, 1 << 20], indirect=True)
def test_bytes_come_as_they_were_sent(pair: tuple[TlsSocket, TlsSocket]) -> None:
    """Both ways at once, across records and pieces; then the end, which is no error."""
    client, server = pair
    sizes = [1, 16 << 10, 3, (256 << 10) + 1]
    texts = [os.urandom(size) for size in sizes]

    def send() -> None:
        for text in texts:
            view = memoryview(text)
            while view:
                view = view[client.send(view) :]

    sending = threading.Thread(target=send)
    sending.start()
    assert fill(server, sum(sizes)) == b"".join(texts)
    sending.join(timeout=30)
    server.send(b"thanks")
    assert fill(client, 6) == b"thanks"
    client.shutdown(socket.SHUT_WR)
    assert server.recv(1) == b""
    assert server.recv_into(memoryview(bytearray(8))) == 0


@pytest.mark.parametrize("pair", [1 << 20], indirect=True)
def test_pending_is_what_can_be_had(pair: tuple[TlsSocket, TlsSocket]) -> None:
    """What was read along with other bytes counts; part of a record does not."""
    client, server = pair
    client.send(b"a" * 10)
    client.send(b"b" * 5)
    assert server.recv(1) == b"a"
    assert server.pending() >= 9
    assert fill(server, 14) == b"a" * 9 + b"b" * 5
    assert server.pending() == 0
    server._in.write(b"\x17\x03\x03\x00\x40" + b"x" * 20)
    assert server.pending() == 0


@pytest.mark.parametrize("pair", [1 << 20], indirect=True)
def test_a_flipped_bit_is_an_error(pair: tuple[TlsSocket, TlsSocket]) -> None:
    """What was changed on the way is never given out."""
    client, server = pair
    client.send(b"a" * 100)
    below = server._sock.recv(1000)
    server._in.write(below[:50] + bytes([below[50] ^ 1]) + below[51:])
    with pytest.raises(ssl.SSLError):
        server.recv(100)


@pytest.mark.parametrize("pair", [1 << 20], indirect=True)
def test_without_waiting(pair: tuple[TlsSocket, TlsSocket]) -> None:
    """It says what to wait for, and no byte is lost when the call is made again."""
    client, server = pair
    client.setblocking(False)
    with pytest.raises(ssl.SSLWantReadError):
        client.recv(1)
    text = os.urandom(8 << 20)
    view = memoryview(text)
    stuck = 0
    received = bytearray()
    while view or len(received) < len(text):
        if view:
            try:
                view = view[client.send(view) :]
                continue
            except ssl.SSLWantWriteError:
                stuck += 1
        with suppress(ssl.SSLWantWriteError):
            client._flush()
        received += server.recv(1 << 20)
    assert stuck
    assert bytes(received) == text
