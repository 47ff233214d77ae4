"""A process that serves a memory and an LMDB tier, to be killed and stopped.

Called as ``python -m tests.peers.host FOLDER [ENDPOINT...]``; prints its endpoints on one line,
then serves until its standard input ends. Control calls: ``echo`` gives back what came, ``sleep``
waits ``seconds``, ``stats`` counts, ``raise`` fails in a way nobody thought of.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from adacheck_store.tiers import credentials
from adacheck_store.tiers.channel import Limits
from adacheck_store.tiers.lmdb import LmdbTier
from adacheck_store.tiers.serve import Bounds, Server
from adacheck_store.tiers.serve_calls import PeerInfo
from adacheck_store.tiers.shared import SharedTier

RUN = "gpt-small"
LIMITS = Limits(stall_s=1.2, slowest=16 << 20, answer_s=20.0)
"""As in life, but for how long a frame may stall."""

BOUNDS = Bounds(pending_s=0.7, workers=24, per_origin=16)


def serve(folder: str, endpoints: list[str]) -> None:
    """Serve until standard input ends."""
    tiers = {"ram": SharedTier("ram"), "lmdb": LmdbTier(f"{folder}/lmdb")}

    def control(
        verb: str, head: Mapping[str, Any], payload: bytes, peer: PeerInfo
    ) -> tuple[Mapping[str, Any], bytes]:
        if verb == "echo":
            return {**head, "run": peer.run, "proven": peer.proven}, payload
        if verb == "sleep":
            time.sleep(head["seconds"])
            return {}, b""
        if verb == "stats":
            process = psutil.Process()
            return {
                **server.stats(), "fds": process.num_fds(), "threads": threading.active_count(),
                "rss": process.memory_info().rss,
            }, b""  # fmt: skip
        raise ZeroDivisionError(verb)

    keys = [credentials.read(f"{folder}/keys", RUN)] if "tls" in str(endpoints) else []
    server = Server(endpoints, tiers, control, credentials=keys, limits=LIMITS, bounds=BOUNDS)
    print(*server.endpoints, flush=True)
    sys.stdin.read()
    server.close()
    tiers["lmdb"].close()


class Host:
    """The process as a test sees it."""

    def __init__(self, folder: Path, *endpoints: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.peers.host", str(folder), *endpoints],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.endpoints = self.process.stdout.readline().split()
        assert len(self.endpoints) == len(endpoints)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; SIGSTOP has stopped every thread when this returns."""
        os.kill(self.process.pid, number)
        tasks = Path(f"/proc/{self.process.pid}/task")
        while number == signal.SIGSTOP and not all(map(_stopped, tasks.iterdir())):
            time.sleep(0.001)

    def end(self) -> None:
        """Kill it, stopped or not."""
        self.process.kill()
        self.process.communicate(timeout=20)


@contextmanager
def hosted(folder: Path, *endpoints: str) -> Iterator[Host]:
    """A host, killed in the end."""
    host = Host(folder, *endpoints)
    try:
        yield host
    finally:
        host.end()


def _stopped(task: Path) -> bool:
    """Whether a thread is stopped, or gone."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except OSError:
        return True


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
