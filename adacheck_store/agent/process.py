"""The process of an agent: from its lock to its end."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

from adacheck_store import __version__
from adacheck_store.config import (
    Settings,
    arm_failpoints,
    boot_id,
    environment,
    memory_available,
    node_name,
)
from adacheck_store.format.errors import AdaCheckError, TierBusyError, UsageError
from adacheck_store.format.ids import new_nonce
from adacheck_store.store import agent_tiers
from adacheck_store.tiers import credentials as keys
from adacheck_store.tiers.credentials import Credentials
from adacheck_store.tiers.endpoint import Endpoint
from adacheck_store.tiers.serve import Server
from adacheck_store.tiers.serve_calls import PeerInfo
from adacheck_store.tiers.shared import memory_tier

from . import places, reach
from .budget import LEAST_BYTES, room_of
from .control import Answer, Control
from .door import NAME, Doors
from .news import status
from .options import AgentOptions, listening
from .replica import FAR, LMDB, RAM
from .shell import Shell
from .signals import heed

REACHED_S = 5.0
"""How long a call waits for the agent to learn where it is reached itself."""

SPARE = (0.1, 0.25, 2.0)
"""Of a grace this share stays unused, for a busy machine to end the process in; or so large a
share, up to so many seconds, if that is more."""

AGAIN_S = 1.0
"""Within so long of the first a signal is the same one, told twice: to the group and to us."""

SAY_S = 10.0
"""How often an agent that is to stop says what it waits for."""


MALLOC = {-8: 2, -3: 256 << 10, -1: 1 << 20}
"""glibc's M_ARENA_MAX, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD: what is dropped goes back to the
system at once. By default each thread's arena keeps it: 70 MiB more were seen, of 386."""


def settle_memory() -> None:
    """Tell the C library how to keep memory, where it is one that can be told."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for parameter, value in MALLOC.items():
            library.mallopt(parameter, value)


def run_agent(options: AgentOptions) -> int:
    """Be the agent until told to stop; the exit code.

    Raises `TierBusyError` where one lives already, `UsageError` for options that cannot be.
    """
    arm_failpoints()
    settle_memory()
    node = options.node or node_name()
    place = places.place_of(options.store, options.run, node)
    endpoints = [place.socket]
    if options.listen:
        endpoints.append(listening("listen", options.listen))
    memory = options.memory or max(LEAST_BYTES, memory_available() // 2)
    places.reclaim(skip=place)
    fd = places.take(place, place.lock)
    if fd is None:
        raise TierBusyError(
            f"the agent of {node} for this run lives (pid {place.read_info().get('pid', '?')})",
            run=options.run, path=str(place.folder), hint="use it, or stop it with --stop",
        )  # fmt: skip
    try:
        with ExitStack() as stack:
            return _Agent(options, node, place, endpoints, memory, stack).serve()
    finally:
        os.close(fd)


class _Agent:
    """The agent's parts, held together; the stack closes them."""

    def __init__(
        self, options: AgentOptions, node: str, place: places.Place, endpoints: list[Endpoint],
        memory: int, stack: ExitStack,
    ) -> None:  # fmt: skip
        self._options, self._node, self._place = options, node, place
        self._boot, self._metrics = new_nonce(), ""
        self._memory = memory
        self._asked, self._at_once = threading.Event(), threading.Event()
        self._signal_at: float | None = None
        self._wake = threading.Event()
        self._reached = threading.Event()
        self._endpoints: list[str] = []
        key, _ = keys.read_or_make(places.keys_folder(), options.run)
        lmdb, far = agent_tiers(options.store, options.run, node, cache=options.cache or None)
        stack.callback(far.close)
        stack.callback(lmdb.close)
        tiers = {RAM: memory_tier(NAME), LMDB: lmdb, FAR: far}
        self._shell = Shell(options.run, node, self._boot, tiers, room_of(memory), Settings())
        stack.callback(self._shell.end)
        self._shell.credentials = key
        self._shell.drainers[FAR].bytes_per_s = options.drain_rate
        if options.metrics:  # before anybody is answered: what fails here fails the start
            self._serve_metrics(listening("metrics", options.metrics), stack)
        control = Control(self._shell, self._about, self._status, self._trust, self._stop)

        def answer(verb: str, head: Mapping[str, Any], payload: bytes, peer: PeerInfo) -> Answer:
            self._reached.wait(REACHED_S)  # the server answers before it has been returned
            return control(verb, head, payload, peer)

        def listen(at: list[Endpoint]) -> Server:
            return Server(at, Doors(self._shell), answer, credentials=[key])

        try:
            self._server = listen([reach.again(endpoint, place) for endpoint in endpoints])
        except TierBusyError:  # somebody else has the port by now
            self._server = listen(endpoints)
        stack.callback(self._close_server)
        meeting = environment().get("MASTER_ADDR", "")
        for endpoint in self._server.endpoints:
            said = reach.told(endpoint, meeting)
            self._endpoints.append(str(said))
            if endpoint.port:
                reach.remember(endpoint, place)
                self._shell.reached_at = str(said)
        self._reached.set()
        place.write_info(self._about())

    def _serve_metrics(self, at: Endpoint, stack: ExitStack) -> None:
        from .metrics import MetricsServer  # its library is loaded where it is asked for

        served = MetricsServer(at, self._status)
        stack.callback(served.close)
        self._metrics = served.url

    def _status(self) -> dict[str, Any]:
        return {**self._about(), **status(self._shell, self._memory)}

    def _about(self) -> dict[str, Any]:
        return {
            "node": self._node, "store": places.store_name(self._options.store),
            "run": self._options.run, "pid": os.getpid(), "boot": self._boot,
            "boot_id": boot_id(), "domain": self._options.domain, "memory": self._memory,
            "version": __version__, "metrics": self._metrics, "endpoints": self._endpoints,
        }  # fmt: skip

    def _trust(self, key: Credentials) -> None:
        """Take the run's key, as the trainers have agreed on it."""
        if key.run != self._options.run:
            raise UsageError(f"the key of run {key.run!r}", run=self._options.run)
        if key != self._shell.credentials:
            keys.write(places.keys_folder(), key, replace=True)
            self._server.trust(key)
            with self._shell.lock:
                self._shell.credentials = key

    def _stop(self, now: bool) -> None:
        if now:
            self._at_once.set()
        self._asked.set()
        self._wake.set()

    def _signalled(self) -> None:
        now = time.monotonic()
        if self._signal_at is not None:
            self._stop(now - self._signal_at > AGAIN_S)
            return
        self._signal_at, grace_s = now, self._options.grace_s
        if grace_s:  # also after a stop command; a tier that hangs holds up no timer
            spare_s = max(SPARE[0] * grace_s, min(SPARE[1] * grace_s, SPARE[2]))
            last = threading.Timer(grace_s - spare_s, self._cut_off)
            last.daemon = True
            last.start()
        self._stop(False)

    def _cut_off(self) -> None:
        """The grace is over: end, whatever hangs. What a kill cuts off, the tiers can bear."""
        self._say(f"ended with the grace, {self._shell.behind} records undrained")
        os._exit(3)

    def _close_server(self) -> None:
        with suppress(AdaCheckError):
            self._server.close()
        with suppress(OSError):
            self._place.info.unlink()

    def serve(self) -> int:
        """Serve until told to stop, or idle."""
        heed(self._signalled)
        self._say(
            f"agent of {self._node} for run {self._options.run}, pid {os.getpid()}, at "
            f"{', '.join([*self._endpoints, *filter(None, [self._metrics])])}"
        )
        said = 0.0
        while not self._asked.is_set():
            self._wake.wait(0.5)
            self._shell.heartbeat(self._server.sessions)
            if self._idle():
                self._say(f"idle for {self._options.idle_s:g} s, and all is drained: ending")
                return 0
        self._shell.hurry()
        while not self._at_once.is_set() and (self._awaits_trainers() or self._shell.behind):
            if time.monotonic() - said > SAY_S:
                said = time.monotonic()
                behind = self._shell.behind
                self._say(f"stopping when {behind} records are drained; at once at a second signal")
            self._wake.clear()
            self._wake.wait(0.1)
        behind = self._shell.behind
        self._say(f"ended, {behind} records undrained" if behind else "ended, all is drained")
        return 3 if behind else 0

    def _awaits_trainers(self) -> bool:
        """Within a grace: true while trainers live, whose last steps are still to come.

        It begins with the signal: a stop command alone sets no time that would end the wait.
        """
        if not self._options.grace_s or self._signal_at is None:
            return False
        self._shell.heartbeat(self._server.sessions)
        self._shell.hurry()  # a trainer that opens its term takes it back
        return self._shell.awaited()

    def _idle(self) -> bool:
        quiet = time.monotonic() - self._shell.active_at
        idle_s = self._options.idle_s
        if not idle_s or quiet < idle_s or self._shell.trainers:
            return False
        if self._shell.behind:
            self._shell.hurry()
            return False
        return True

    def _say(self, text: str) -> None:
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main_of(options: AgentOptions) -> int:
    """As `run_agent`, with a log on stderr; an error ends in one line there."""
    logging.basicConfig(
        format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr, level=logging.WARNING
    )
    try:
        return run_agent(options)
    except AdaCheckError as error:
        print(f"adacheck-store: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return error.exit_code
