"""Starting an agent: by exec, in its own session, so that it outlives whoever started it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from adacheck_store import __version__
from adacheck_store.config import environment
from adacheck_store.format.errors import (
    PeerRefusedError,
    TierUnavailableError,
    UnsupportedError,
)
from adacheck_store.tiers.pool import Peer

from . import places
from .messages import read_json
from .options import AgentOptions
from .places import Place

START_S = 60.0
"""How long an agent may take until its socket answers: a busy node imports slowly."""

_POLL_S = 0.05
_children: list[int] = []
"""Agents that this process has started: waited for now and then, lest they stay zombies."""


def ensure_agent(options: AgentOptions, timeout_s: float = START_S) -> tuple[Peer, dict[str, Any]]:
    """The agent of a node for a run, started if there is none; and what it says of itself.

    Of several processes that call this at once one starts it. Raises `TierUnavailableError`, with
    the last line of the agent's log, where none answers in time.
    """
    place = places.place_of(options.store, options.run, options.node)
    end = time.monotonic() + timeout_s
    peer = Peer(place.socket, run=options.run)
    started: int | None = None
    starting: int | None = None
    try:
        while True:
            about = _about(peer)
            if about is None and starting is None:
                starting = places.take(place, place.starting)
                about = _about(peer) if starting is not None else None
            if about is not None:
                check_version(about)
                return peer, about
            if starting is not None and started is None and not places.alive(place):
                started = _spawn(options, place)
            ended = _ended(started) if started is not None else None
            if (ended is not None and not places.alive(place)) or time.monotonic() > end:
                raise _no_start(place, ended, timeout_s)
            time.sleep(_POLL_S)
    except BaseException:
        peer.close()
        raise
    finally:
        if starting is not None:
            os.close(starting)


def check_version(about: Mapping[str, Any]) -> None:
    """Raise `UnsupportedError` for an agent of another version than this program's.

    What both say to each other of a run is the same within a version, and promised no further.
    """
    if about.get("version") != __version__:
        raise UnsupportedError(
            f"the agent of {about['node']} (pid {about['pid']}) is adacheck-store "
            f"{about.get('version')}, this process {__version__}", run=str(about["run"]),
            hint="stop that agent once it has drained, adacheck-store agent STORE --run RUN "
            "--stop, and run one version everywhere",
        )  # fmt: skip


def find_agent(store: str, run: str, node: str) -> tuple[Peer, dict[str, Any]] | None:
    """The agent of a node for a run, if one lives."""
    place = places.place_of(store, run, node)
    if not places.alive(place):
        return None
    peer = Peer(place.socket, run=run)
    try:
        about = _about(peer)
    except BaseException:
        peer.close()
        raise
    if about is None:
        peer.close()
        return None
    return peer, about


def _about(peer: Peer) -> dict[str, Any] | None:
    """What the agent says of itself; None where nobody answers (yet)."""
    try:
        return read_json(peer.call("who", timeout_s=5.0)[1])
    except PeerRefusedError:
        raise
    except TierUnavailableError:
        return None


def _ended(pid: int) -> int | None:
    """The exit code of a child that has ended."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return -1
    return os.waitstatus_to_exitcode(status) if found else None


def _spawn(options: AgentOptions, place: Place) -> int:
    """Start the process: own session, no descriptors of ours, no CUDA device, our CPU's ways."""
    _children[:] = [pid for pid in _children if _ended(pid) is None]
    command = [sys.executable, "-m", "adacheck_store", "agent", options.store]
    for name, value in _arguments(options).items():
        command += [f"--{name}", value]
    env = dict(environment())
    env["CUDA_VISIBLE_DEVICES"] = ""
    env["ATEN_CPU_CAPABILITY"] = torch.backends.cpu.get_cpu_capability().lower()
    for name in ("ADACHECK_FAILPOINT", "LOCAL_RANK", "RANK", "WORLD_SIZE"):
        env.pop(name, None)  # the trainer's own
    places.make(place)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    log = os.open(place.log, flags, 0o600)
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, close_fds=True,
            start_new_session=True, cwd="/",
        )  # fmt: skip
    finally:
        os.close(log)
    child.returncode = 0  # it is to outlive us, and no object of ours stands for it
    _children.append(child.pid)
    return child.pid


def _arguments(options: AgentOptions) -> dict[str, str]:
    found = {
        "run": options.run, "node": options.node, "cache": options.cache,
        "listen": options.listen, "metrics": options.metrics, "domain": options.domain,
        "memory": str(options.memory or ""), "drain-rate": str(options.drain_rate or ""),
        "idle-s": f"{options.idle_s:g}" if options.idle_s else "",
        "grace": f"{options.grace_s:g}" if options.grace_s else "",
    }  # fmt: skip
    return {name: value for name, value in found.items() if value}


def _no_start(place: Place, ended: int | None, timeout_s: float) -> TierUnavailableError:
    what = f"ended with {ended}" if ended is not None else f"does not answer for {timeout_s:g} s"
    words = place.last_words()
    return TierUnavailableError(
        f"the agent {what}" + (f"; its last words: {words}" if words else ""),
        path=str(place.log), hint="see its log",
    )  # fmt: skip
