"""TLS over a connected socket, encrypted in memory.

Python's own TLS socket reads and writes the system one record of 16 KiB at a time, which costs the
receiver more than decryption does. Here 256 KiB pass at once.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress

_PIECE_BYTES = 256 << 10


class TlsSocket:
    """As much of a socket as a `Channel` needs; time-outs are those of the socket below.

    Where that does not block, ``ssl.SSLWantReadError`` and ``ssl.SSLWantWriteError`` say what to
    wait for; the call is then made again.
    """

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool = False,
        server_hostname: str | None = None,
    ) -> None:  # fmt: skip
        """The handshake is still to be made."""
        self._sock = sock
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._in, self._out, server_side=server_side, server_hostname=server_hostname
        )
        self._received = memoryview(bytearray(_PIECE_BYTES))
        self._unsent = memoryview(b"")
        self._early = memoryview(b"")
        """Decrypted by `pending`, and not taken yet."""

    def do_handshake(self) -> None:
        """Make the handshake, or go on with it."""
        while True:
            try:
                self._tls.do_handshake()
                self._flush()
                return
            except ssl.SSLWantReadError:
                self._flush()
                self._feed()
            except ssl.SSLWantWriteError:
                raise
            except ssl.SSLError:
                self._say_why()
                raise

    def send(self, data: memoryview | bytes) -> int:
        """Send the first bytes of some data; returns how many were taken."""
        self._flush()
        sent = self._tls.write(memoryview(data)[:_PIECE_BYTES])
        with suppress(ssl.SSLWantWriteError):
            self._flush()  # what does not go now goes before the next
        return sent

    def recv_into(self, view: memoryview) -> int:
        """Receive what is there, at least a byte; 0 at the end."""
        taken = min(len(view), len(self._early))
        view[:taken], self._early = self._early[:taken], self._early[taken:]
        while taken < len(view):
            try:
                got = int(self._tls.read(len(view) - taken, view[taken:]))
                if not got:
                    break
                taken += got
            except ssl.SSLWantReadError:
                if taken:
                    break
                self._flush()
                self._feed()
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                break
            except ssl.SSLError:
                self._say_why()
                raise
        return taken

    def recv(self, size: int) -> bytes:
        """Receive up to so many bytes."""
        data = bytearray(size)
        return bytes(data[: self.recv_into(memoryview(data))])

    def pending(self) -> int:
        """Bytes that can be received without waiting for the socket below."""
        if not self._early and self._in.pending:
            # It may be part of a record, of which nothing can be had yet.
            with suppress(ssl.SSLError):
                self._early = memoryview(self._tls.read(_PIECE_BYTES))
        return len(self._early) + self._tls.pending()

    def _feed(self) -> None:
        try:
            got = self._sock.recv_into(self._received)
        except BlockingIOError as exc:
            raise ssl.SSLWantReadError from exc
        if got:
            self._in.write(self._received[:got])
        else:
            self._in.write_eof()

    def _flush(self) -> None:
        while self._unsent or self._out.pending:
            if not self._unsent:
                self._unsent = memoryview(self._out.read())
            try:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]
            except BlockingIOError as exc:
                raise ssl.SSLWantWriteError from exc

    def _say_why(self) -> None:
        """Send the alert that names what is wrong, if the other side takes it."""
        with suppress(OSError):
            self._flush()

    @property
    def context(self) -> ssl.SSLContext:
        """The context in use: that of the run, once the client has named it."""
        return self._tls.context

    def getpeercert(self, binary_form: bool) -> bytes | None:
        """The other side's certificate in DER form."""
        assert binary_form
        return self._tls.getpeercert(True)

    def settimeout(self, seconds: float | None) -> None:
        """How long a call of the socket below may take."""
        self._sock.settimeout(seconds)

    def gettimeout(self) -> float | None:
        """How long a call of the socket below may take."""
        return self._sock.gettimeout()

    def setblocking(self, blocking: bool) -> None:
        """Whether calls wait."""
        self._sock.setblocking(blocking)

    def fileno(self) -> int:
        """Descriptor of the socket below."""
        return self._sock.fileno()

    def shutdown(self, how: int) -> None:
        """End the connection; any thread may call this."""
        self._sock.shutdown(how)

    def close(self) -> None:
        """Close the socket below."""
        self._sock.close()
