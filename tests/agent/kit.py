"""Agents and trainers as processes of their own, on nodes that are names on this host."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adacheck_store.agent import places
from adacheck_store.agent.messages import read_json
from adacheck_store.agent.start import find_agent
from adacheck_store.session import RunSession
from adacheck_store.tiers.pool import Peer
from tests.agent.trainer import MEMORY, RUN, open_session
from tests.forked import Forked
from tests.waits import WAIT_S, until

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A port that nobody listens at, and that the system gives to no connection."""
    while True:
        port = random.randrange(15000, 32000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


class Node:
    """A node by name: its runtime folder, its environment, what runs on it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.runtime = folder / f"rt-{name}"
        self.url = f"file://{folder}/store"
        self.store = folder / "store"
        self.port = free_port()
        self.processes: list[subprocess.Popen[str] | Forked] = []
        self.prefix: list[str] = []
        """Words before a command that make it run on the node."""

    @property
    def env(self) -> dict[str, str]:
        """What its processes are started with."""
        found = dict(os.environ)
        found |= {"ADACHECK_NODE": self.name, "ADACHECK_RUNTIME": str(self.runtime)}
        return found | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def here(self, patch: pytest.MonkeyPatch) -> None:
        """Make this process one of the node's."""
        for name in ("ADACHECK_NODE", "ADACHECK_RUNTIME", "PYTHONPATH", "OMP_NUM_THREADS"):
            patch.setenv(name, self.env[name])

    def run(self, *words: str, fail: str = "", **how: Any) -> subprocess.Popen[str]:
        """Start a python module in a process on the node, with a failpoint armed there."""
        armed = {"ADACHECK_FAILPOINT": fail} if fail else {}
        process = subprocess.Popen(
            [*self.prefix, sys.executable, "-m", *words], env=self.env | armed, cwd=ROOT, text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **how},
        )  # fmt: skip
        self.processes.append(process)
        return process

    def fork(self, *words: str, fail: str = "") -> Forked:
        """The same in a fork, which is sooner there; not on a node of a network of its own."""
        process = Forked(words, self.env | ({"ADACHECK_FAILPOINT": fail} if fail else {}))
        self.processes.append(process)
        return process

    def agent(
        self, *options: str, fail: str = "", program: bool = False,
        module: tuple[str, ...] = ("adacheck_store",),
    ) -> Any:  # fmt: skip
        """Start an agent by hand, reached at the node's port; returns when it answers.

        ``program``: of its own, and not a fork, which shares pages of memory. ``module``: what
        is run, with words of its own before those of the command.
        """
        process = (self.run if program or self.prefix else self.fork)(
            *module, "agent", self.url, "--run", RUN, "--node", self.name,
            "--memory", str(MEMORY), "--listen", f"127.0.0.1:{self.port}", "--domain", self.name,
            *options, fail=fail,
        )  # fmt: skip
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "agent of" in line, line + process.stdout.read()
        return process

    def ask(self, verb: str, **head: Any) -> dict[str, Any]:
        """Call the node's agent over its socket."""
        with self._there():
            found = find_agent(self.url, RUN, self.name)
        assert found is not None, f"no agent of {self.name}"
        peer, _ = found
        try:
            _, payload = peer.call(verb, head)
            return read_json(payload) if payload else {}
        finally:
            peer.close()

    def status(self) -> dict[str, Any]:
        """What the node's agent tells."""
        return self.ask("status")

    def pid(self) -> int:
        """The process of the node's agent."""
        return int(self.ask("who")["pid"])

    def alive(self) -> bool:
        """True while the node's agent lives."""
        with self._there():
            return places.alive(places.place_of(self.url, RUN, self.name))

    def kill(self) -> None:
        """SIGKILL the node's agent."""
        os.kill(self.pid(), signal.SIGKILL)
        until(lambda: not self.alive(), "the agent is dead")

    def burn_disk(self) -> None:
        """Lose the node's disk."""
        shutil.rmtree(self.store / "lmdb" / f"{self.name}.{RUN}", ignore_errors=True)

    @contextlib.contextmanager
    def _there(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ADACHECK_RUNTIME", str(self.runtime))
            yield

    def end(self) -> None:
        """End everything."""
        with self._there():
            for place in places.places():
                pid = place.read_info().get("pid")
                if places.alive(place) and isinstance(pid, int):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.kill()
            process.wait(WAIT_S)
            if process.stdout is not None:
                process.stdout.close()


class Trainer:
    """A trainer's process, and what it has said."""

    def __init__(self, node: Node, steps: int, **how: Any) -> None:
        self.process = node.fork("tests.agent.trainer", node.url, str(steps), json.dumps(how))
        self.ready = int(self._line("ready").split()[1])
        self.stored = self.ready

    def _line(self, word: str) -> str:
        assert self.process.stdout is not None
        said = ""
        for line in self.process.stdout:
            if line.startswith(word):
                return line
            said += line
        raise AssertionError(f"the trainer has ended: {said}")

    def reach(self, step: int) -> None:
        """Wait until the trainer says that a step is held."""
        while self.stored < step:
            self.stored = int(self._line("stored").split()[1])

    def kill(self) -> None:
        """SIGKILL it."""
        self.process.kill()
        self.process.wait(WAIT_S)


def two(node: Node, other: Node, **how: Any) -> RunSession:
    """A session of a rank on one node, whose records the other holds too."""
    return open_session(
        node.url, k=1, listen="127.0.0.1:0", domain=node.name,
        peers=(f"tls://127.0.0.1:{other.port}",), **how,
    )  # fmt: skip


def call(endpoint: str, run: str, verb: str) -> dict[str, Any]:
    """One call at an endpoint."""
    peer = Peer(endpoint, run=run)
    try:
        return read_json(peer.call(verb)[1])
    finally:
        peer.close()
