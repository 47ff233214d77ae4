"""Trainers lent to torchrun: forked from a process that has imported torch, and not started anew.

A trainer imports for two seconds of processor time, and a story has some twenty. So torchrun starts
a small program (this module) that asks the test for a trainer, with its own environment; the test
has one forked, which moves to the node's network and is a trainer like any other, to be killed by
its own number. The small program lives as long as it does, and ends as it ends; if torchrun ends
the program, the trainer is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


class Lender:
    """Answers at a socket; ``at`` tells for a node's name the process whose namespaces it is in."""

    def __init__(self, path: str, at) -> None:
        import threading

        self.path, self._at = path, at
        self.lent: dict[str, list] = {}
        """Trainers, by node."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, name="lender", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        import threading

        while True:
            try:
                asked, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._lend, args=(asked,), daemon=True).start()

    def _lend(self, asked: socket.socket) -> None:
        from multiprocessing.connection import wait

        from tests.ranks.worker import _context

        with asked, contextlib.suppress(OSError):
            wish = json.loads(asked.makefile().readline())
            node = wish["env"]["ADACHECK_NODE"]
            process = _context.Process(target=be, args=(wish, self._at(node)), daemon=True)
            process.start()
            self.lent.setdefault(node, []).append(process)
            if asked in wait([process.sentinel, asked]):
                process.kill()
            process.join()
            asked.sendall(f"{process.exitcode}\n".encode())

    def pids(self, node: str) -> list[int]:
        """Trainers that live on a node."""
        return [process.pid for process in self.lent.get(node, ()) if process.is_alive()]

    def end(self) -> None:
        """Lend no more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


def enter(at: tuple[int, bool] | None) -> None:
    """Move this process to the namespaces of process ``at`` (a user's too, if so)."""
    import ctypes

    if at is None:
        return
    libc, (pid, user) = ctypes.CDLL(None, use_errno=True), at
    kinds = [("user", CLONE_NEWUSER)] * user + [("net", CLONE_NEWNET)]
    opened = [(os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY), kind) for name, kind in kinds]
    for fd, kind in opened:
        if libc.setns(fd, kind):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(fd)


def be(wish: dict, at: tuple[int, bool] | None) -> None:
    """A trainer's life, in a fork, in the namespaces of process ``at``."""
    from pathlib import Path

    from tests.cluster import worker

    enter(at)
    log = os.open(wish["log"], os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(wish["env"])
    worker.main(Path(wish["folder"]))


def main(path: str, folder: str) -> None:
    """Ask for a trainer, and end as it does."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        log = os.path.join(folder, f"log{os.environ['GROUP_RANK']}")
        wish = {"env": dict(os.environ), "folder": folder, "log": log}
        sock.sendall(json.dumps(wish).encode() + b"\n")
        code = int(sock.makefile().readline() or 1)
    if code < 0:
        os.kill(os.getpid(), -code)
        signal.pause()
    sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
