"""A relay between a client and an agent that can be told to lose, cut and swallow."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from pathlib import Path


class Proxy:
    """Listens beside an agent's unix socket and relays to it.

    ``cut_answer``: the next answer on a connection for calls is kept from the client, and the
    connection ended. ``cut_call``: so it is with the next bytes from the client, once
    ``cut_after`` bytes have passed. ``deaf``: nothing is relayed any more, and nothing ended.
    """

    def __init__(self, path: Path, target: Path) -> None:
        self.endpoint = f"unix:{path}"
        self.cut_answer = False
        self.cut_call = False
        self.cut_after = 0
        self.deaf = threading.Event()
        self.cuts = 0
        self._target = str(target)
        self._open: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                agent = socket.socket(socket.AF_UNIX)
                agent.connect(self._target)
                self._open += [client, agent]
                hello = client.recv(1 << 16)
                calls = b'"role":"calls"' in hello
                agent.sendall(hello)
                client.sendall(agent.recv(1 << 16))
                for one, other, up in ((client, agent, True), (agent, client, False)):
                    threading.Thread(
                        target=self._relay, args=(one, other, calls, up), daemon=True
                    ).start()

    def _relay(self, one: socket.socket, other: socket.socket, calls: bool, up: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := one.recv(1 << 16):
                while self.deaf.is_set():
                    time.sleep(0.05)
                passed += len(data)
                cut = self.cut_call and passed > self.cut_after if up else self.cut_answer
                if calls and cut:
                    self.cut_answer = self.cut_call = False
                    self.cuts += 1
                    break
                other.sendall(data)
        for sock in (one, other):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End everything."""
        self.deaf.clear()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for sock in (self._listener, *self._open):
            sock.close()
