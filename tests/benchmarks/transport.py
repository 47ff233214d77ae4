"""What goes through an agent's transport, against the same bytes through a plain socket.

The agent is another process. Its tier takes blocks without keeping or checking them, and gives
bytes that lie ready: what is left is the transport.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import cast

import numpy as np

from adacheck_store.format.head import ArrayInfo, Head, SealedHead
from adacheck_store.format.ids import BLOCK_BYTES, block_digests
from adacheck_store.format.keys import delta_key, new_term
from adacheck_store.format.record import Record
from adacheck_store.tiers import credentials
from adacheck_store.tiers.base import RecordSource, Source, Tier, TierTraits
from adacheck_store.tiers.credentials import Credentials
from adacheck_store.tiers.endpoint import Endpoint
from adacheck_store.tiers.peer import PeerTier
from adacheck_store.tiers.pool import Peer
from adacheck_store.tiers.serve import Server

from .rows import Row, paired

BYTES = 64 << 20
RUN = "bench"


class Sink(Tier):
    """Takes everything, keeps nothing; of the array ``data`` it always has `BYTES`."""

    traits = TierTraits(name="sink")

    def __init__(self) -> None:
        self._data = memoryview(bytearray(os.urandom(BYTES)))

    def put(self, sources: Sequence[Source]) -> None:
        """Count the blocks."""
        for source in sources:
            size = sum(block.data.nbytes for block in source.blocks())
            assert size == BYTES, size
            source.seal()

    def head(self, key: str) -> SealedHead:
        """As much of a head as a long read asks for."""
        info = SimpleNamespace(nbytes=BYTES)
        return cast(SealedHead, SimpleNamespace(head=SimpleNamespace(array=lambda name: info)))

    def read(self, key: str, array: str, first: int, count: int) -> memoryview:
        """A view of what lies ready."""
        return self._data[first * BLOCK_BYTES : (first + count) * BLOCK_BYTES]

    def list(self, prefix: str) -> Iterator[str]:
        """Nothing."""
        return iter(())

    def delete(self, keys: Iterable[str]) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def source() -> RecordSource:
    """A delta of one array."""
    data = memoryview(os.urandom(BYTES))
    info = ArrayInfo(name="data", dtype="U8", elements=BYTES, digests=block_digests(data))
    term, link = str(new_term(1)), "0" * 64
    head = Head(
        kind="delta", run=RUN, term=term, part="p000000", step=1, arrays=(info,), body={},
        layout=link, manifest=link, parent=link,
    )  # fmt: skip
    key = str(delta_key(RUN, term, "p000000", 1))
    return RecordSource(key, Record(SealedHead.seal(head), {"data": data}))


def plain_server(listener: socket.socket, key: Credentials | None) -> None:
    """Answer ``p`` by taking `BYTES` and one byte, ``g`` by giving `BYTES`; by TLS with a key."""
    data = memoryview(bytearray(os.urandom(BYTES)))
    sock, _ = listener.accept()
    if key:
        sock = credentials.server_context(key).wrap_socket(sock, server_side=True)
    while (what := sock.recv(1)) != b"":
        if what == b"p":
            fill(sock, data)
            sock.sendall(b".")
        else:
            sock.sendall(data)


def fill(sock: socket.socket, view: memoryview) -> None:
    """Receive until a view is full."""
    while len(view):
        view = view[sock.recv_into(view) :]


def serve(folder: str) -> None:
    """The other process: an agent and two plain sockets, until its standard input ends."""
    import threading

    key, _ = credentials.read_or_make(f"{folder}/keys", RUN)
    server = Server(
        [f"unix:{folder}/agent.sock", "tls://127.0.0.1:0"], {"sink": Sink()}, credentials=[key]
    )
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(f"{folder}/plain.sock")
    unix.listen()
    tcp, tls = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    for pair in ((unix, None), (tcp, None), (tls, key)):
        threading.Thread(target=plain_server, args=pair, daemon=True).start()
    print(server.endpoints[1], tcp.getsockname()[1], tls.getsockname()[1], flush=True)
    sys.stdin.read()


@contextmanager
def other_process(folder: str) -> Iterator[list[str]]:
    """Start it; gives the agent's TLS endpoint and the plain TCP port."""
    command = [sys.executable, "-m", "tests.benchmarks.transport", folder]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()


def rows() -> Iterator[Row]:
    """Puts and gets by a unix socket and by TLS."""
    record = source()
    with tempfile.TemporaryDirectory(prefix="adacheck-") as folder, other_process(folder) as said:
        Path(folder).chmod(0o700)
        unix = socket.socket(socket.AF_UNIX)
        unix.connect(f"{folder}/plain.sock")
        key = credentials.read(f"{folder}/keys", RUN)
        tcp, raw = (socket.create_connection(("127.0.0.1", int(port))) for port in said[1:])
        tls = credentials.client_context(key).wrap_socket(raw, server_hostname=key.server_name)
        here = PeerTier(Peer(f"unix:{folder}/agent.sock"), "sink")
        there = PeerTier(Peer(Endpoint.parse(said[0]), credentials=key), "sink")
        yield from _both("unix socket", "plain socket", unix, here, 0.85, record)
        yield from _both("mutual TLS 1.3", "plain socket", tcp, there, 0.4, record)
        yield from _both("mutual TLS 1.3", "TLS socket", tls, there, None, record)
        for end in (unix, tcp, tls, here, there):
            end.close()


def _both(
    name: str, than: str, plain: socket.socket, tier: PeerTier, bar: float | None,
    record: RecordSource,
) -> Iterator[Row]:  # fmt: skip
    data = record.record.arrays["data"]

    def plain_put() -> None:
        plain.sendall(b"p")
        plain.sendall(data)
        assert plain.recv(1) == b"."

    def plain_get() -> None:
        plain.sendall(b"g")
        fill(plain, memoryview(np.empty(BYTES, np.uint8)))

    def get() -> None:
        assert len(tier.read("key", "data", 0, BYTES // BLOCK_BYTES)) == BYTES

    pairs = {"put": (plain_put, lambda: tier.put([record])), "get": (plain_get, get)}
    for what, (first, second) in pairs.items():
        plain_s, ours_s, ratio = paired(first, second, 9)
        yield Row(
            f"{name}: {what} of 64 MiB / {than}", f"{ratio:.2f}",
            f">= {bar}" if bar else "", ratio >= bar if bar else None,
            f"{BYTES / ours_s / 2**20:.0f} against {BYTES / plain_s / 2**20:.0f} MiB/s",
        )  # fmt: skip


if __name__ == "__main__":
    serve(sys.argv[1])
