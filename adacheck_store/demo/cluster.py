"""Nodes by name on this host, and the ranks on them: real processes that a SIGKILL really kills."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from adacheck_store.agent.messages import read_json
from adacheck_store.agent.places import Place, alive
from adacheck_store.format.errors import AdaCheckError, TierError
from adacheck_store.tiers.pool import Peer

from . import trainer
from .trainer import Beat, Job, rendezvous

WAIT_S = 900.0
"""Longest time that the demo waits for anything."""

TERM_S = 30.0
"""How long ranks have to end by SIGTERM, as torchrun gives them."""

POLL_S = 0.002

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(  # what all ranks import; torchrun's would each do so anew
    ["torch._dynamo", "torch.distributed.tensor", "adacheck_store.demo.trainer"]
)


class DemoError(AdaCheckError):
    """A process of the demo failed, or a restored state differs from the reference."""

    exit_code = 1


class Node:
    """A node: a folder with its runtime files and its LMDB. Its name is the folder's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        folder.mkdir(parents=True)

    def _agent(self) -> Place | None:
        """The place of the node's agent, if one lives."""
        found = (self.folder / "run").glob("*/agent.json")
        return next((place for path in found if alive(place := Place(path.parent))), None)

    def watermark(self, run: str) -> int:
        """The newest step that all holders have, as the agent knows it; -1 if nobody says."""
        place = self._agent()
        if place is None:
            return -1
        peer = Peer(place.socket, run=run)
        try:
            return int(read_json(peer.call("status")[1])["watermark"])
        except TierError:
            return -1
        finally:
            peer.close()

    def _processes(self) -> Iterator[int]:
        """The agent's process, found by what it was told: one that has just begun has no place."""
        cache = os.fsencode(self.folder / "lmdb")
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if cache in path.read_bytes().split(b"\0"):
                    yield int(path.parent.name)

    def kill_agent(self) -> None:
        """SIGKILL, and with it goes all that is in its memory."""
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(self._processes()), "the agent is dead")

    def lose(self) -> None:
        """Lose the node's memory and its disk: an empty one of its name takes its place."""
        self.kill_agent()
        shutil.rmtree(self.folder)
        self.folder.mkdir()


def wait_until(condition: Callable[[], bool], what: str, pause_s: float = 0.01) -> None:
    """Wait for something to be so; raises `DemoError` after `WAIT_S`."""
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            raise DemoError(f"not in {WAIT_S:g} s: {what}")
        time.sleep(pause_s)


class Start:
    """The processes of all ranks, started together; their rendezvous is hosted here."""

    def __init__(self, job: Job, nodes: Sequence[Node]) -> None:
        self._server = rendezvous()
        self._job = job
        self._beats: list[Beat] = []
        self._processes = []
        for rank in range(job.size):
            folder = job.folder / str(rank)
            folder.mkdir(parents=True)
            self._beats.append(Beat(folder / "beat", create=True))
            arguments = (job, self._server.port, rank, nodes[rank // job.ranks_per_node].folder)
            self._processes.append(
                _processes.Process(target=trainer.main, args=arguments, daemon=True)
            )
        for process in self._processes:
            process.start()

    def finished(self) -> int:
        """The last step that all ranks have finished; 0 if none."""
        return max(0, min(beat.read()[0] for beat in self._beats))

    def phase(self, rank: int) -> str:
        """What a rank is at."""
        return self._beats[rank].read()[1]

    def drained(self) -> int:
        """The last step that all ranks know to be in the far tier; -1 if none."""
        return min(beat.read()[2] for beat in self._beats)

    def until(self, reached: Callable[[], bool], what: str, tell: Callable[[int], None]) -> None:
        """Wait for something; raises `DemoError` if a rank ends with an error before that."""

        def done() -> bool:
            tell(self.finished())
            for rank, code in enumerate(self._codes()):
                if code:
                    raise self._failure(rank, code)
            return reached()

        wait_until(done, what, POLL_S)

    def finish(self, tell: Callable[[int], None]) -> None:
        """Let the ranks end when they are done, and wait for it."""
        (self._job.folder / "leave").touch()
        self.until(lambda: None not in self._codes(), "the end of all ranks", tell)

    def _codes(self) -> list[int | None]:
        return [process.exitcode for process in self._processes]

    def kill(self, ranks: Sequence[int]) -> None:
        """SIGKILL to some ranks at once; the others are ended as torchrun does it, by SIGTERM."""
        for rank in ranks:
            self._processes[rank].kill()
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + TERM_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join(WAIT_S)

    def _failure(self, rank: int, code: int) -> DemoError:
        """That a rank has failed; all that it printed goes to our stderr."""
        output = self._job.folder / str(rank) / "output.txt"
        text = output.read_text(errors="replace") if output.exists() else ""
        sys.stderr.write(text)
        return DemoError(f"rank {rank} ended with {code}: {text.strip().rpartition(chr(10))[2]}")

    def journals(self) -> list[list[dict[str, Any]]]:
        """What each rank has noted; a line cut off by a kill is left out."""
        return [list(self._rows(rank)) for rank in range(self._job.size)]

    def _rows(self, rank: int) -> Iterator[dict[str, Any]]:
        path = self._job.folder / str(rank) / "journal.jsonl"
        for line in (path.read_text() if path.exists() else "").splitlines():
            with suppress(ValueError):
                yield json.loads(line)
