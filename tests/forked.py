"""Processes with the face of a `Popen`, forked from one that has imported torch already.

A python that imports torch anew takes two seconds of processor time, and tests start hundreds. The
fork runs the same module by the same words, in its own environment, and is killed by
its own number. What the product starts by itself, and what must have a memory of its own, is a
program of its own.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from adacheck_store.tiers import failpoints
from tests.ranks.worker import _context


def be(words: Sequence[str], env: Mapping[str, str], said: Connection, fail: str) -> None:
    """The life of a fork: ``said`` is for all that it prints.

    The first of the words is a module, or a file, which is run in its folder.
    """
    import torch

    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    said.close()
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    if fail:
        failpoints.arm(fail)
    sys.argv = list(words)
    if words[0].endswith(".py"):
        os.chdir(os.path.dirname(words[0]))
        runpy.run_path(words[0], run_name="__main__")
    else:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


class Forked:
    """A python module in such a process; its stdout and stderr are one text file."""

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str] | None = None, fail: str = ""
    ) -> None:
        env = {"OMP_NUM_THREADS": "1", **(os.environ if env is None else env)}
        hears, says = _context.Pipe(duplex=False)
        self._process: Any = _context.Process(target=be, args=(words, env, says, fail), daemon=True)
        self._process.start()
        says.close()
        self.stdout = os.fdopen(os.dup(hears.fileno()), encoding="utf-8")
        hears.close()

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, if it has ended; negative for a signal."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Wait for its end; the exit code."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"process {self.pid} has not ended"
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """A signal, if it lives."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)


def run(words: Sequence[str], fail: str = "") -> tuple[int, str]:
    """Run a module to its end; its exit code and all it has printed. ``fail``: a failpoint."""
    process = Forked(words, fail=fail)
    with process.stdout:
        said = process.stdout.read()
    return process.wait(60), said
