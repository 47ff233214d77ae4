"""Grace: what a trainer does with the time between SIGTERM and the SIGKILL that follows it.

Nothing is taken over unless it is asked for, and a handler that exists is called first. The signal
is noticed by a thread, through the descriptor that the interpreter's own handler writes to: the
training thread may be in a collective that does not return.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from adacheck_store.format.errors import AdaCheckError, UsageError
from adacheck_store.group import Group

from . import background
from .ranks import Board, find_board

log = logging.getLogger(__name__)

EXIT_CODE = 128 + signal.SIGTERM
"""What a shell reports of a process that SIGTERM has ended."""

POLL_S = 0.5
"""How often a rank looks whether another one is to stop."""

SPARE = (0.1, 1.0)
"""Kept free before the end for closing, and again for ending: a share of the grace, and at most
so many seconds."""

AGREE_SHARE = 0.25
"""What of the time left the ranks may take to agree; a rank that hangs does not answer at all."""

_begun: list[Grace] = []


class Stopped(SystemExit):
    """Raised at the boundary where a run stops for SIGTERM; the process ends with 143."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class Grace:
    """Watches for SIGTERM from `begin` to `end`, and ends the process within ``grace_s`` of it.

    0: nothing is watched. At the boundary that all ranks agree on `reached` raises `Stopped`: each
    says up to where it goes by itself, and waits there until it knows the last of these.
    ``hurry`` is called when the signal comes, on another thread. Whatever hangs, the process is
    ended when the time is over. Raises `UsageError` where signals cannot be handled.
    """

    def __init__(self, grace_s: float, group: Group, hurry: Callable[[], None]) -> None:
        self._grace_s, self._group, self._hurry = grace_s, group, hurry
        self._spare_s = min(SPARE[0] * grace_s, SPARE[1])
        self._board: Board | None = None
        self._before: Any = None
        self._step = -1
        self._free: int | None = None
        self._agreed: int | None = None
        self._until: float | None = None
        self._changed = threading.Condition()
        self._ended = threading.Event()
        if grace_s:
            if threading.current_thread() is not threading.main_thread():
                raise UsageError(
                    "sigterm_grace_s outside of the main thread",
                    hint="attach there: only the main thread may handle signals",
                )
            if signal.getsignal(signal.SIGTERM) is None:
                raise UsageError("SIGTERM has a handler that was not installed from Python")

    def begin(self, step: int) -> None:
        """From now on there is something to save: the run is at ``step``."""
        self._step = step
        if not self._grace_s:
            return
        if self._group.size > 1:
            self._board = find_board(self._group)
        self._hears, self._tells = socket.socketpair()
        self._hears.setblocking(False)
        self._tells.setblocking(False)
        self._handler = self._on_signal  # one object, so that `end` can tell whether it is there
        self._before = signal.signal(signal.SIGTERM, self._handler)
        self._fd_before = signal.set_wakeup_fd(self._tells.fileno(), warn_on_full_buffer=False)
        _begun.append(self)
        background.start("adacheck-grace", self._watch)

    def reached(self, step: int) -> None:
        """A boundary is closed. Raises `Stopped` where all ranks have agreed to stop."""
        with self._changed:
            self._step = step
            if self._free is None or step < self._free:
                return
            self._changed.wait_for(lambda: self._agreed is not None, timeout=self.left())
            stop = self._agreed is None or step >= self._agreed
        if stop:
            raise Stopped

    def left(self) -> float | None:
        """Seconds that may still be used for storing; None while nobody has asked to stop."""
        return self._left(2)

    def to_close(self) -> float | None:
        """The same for closing."""
        return self._left(1)

    def _left(self, spared: int) -> float | None:
        if self._until is None:
            return None
        return max(0.0, self._until - spared * self._spare_s - time.monotonic())

    def end(self) -> None:
        """Give the signal back; what was to be stopped still ends in time."""
        if self not in _begun:
            return
        _begun.remove(self)
        self._ended.set()
        self._give_back()

    def _give_back(self) -> None:
        if signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, self._before)
        now = signal.set_wakeup_fd(-1)
        ours = now == self._tells.fileno()
        with contextlib.suppress(ValueError, OSError):  # theirs may be closed by now
            signal.set_wakeup_fd(self._fd_before if ours else now)
        self._tells.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler: what was there before is called; the rest is the watching thread's."""
        if self._until is None and not self._ended.is_set():  # theirs may raise, and leave at once
            self._until = time.monotonic() + self._grace_s - self._spare_s
        if callable(self._before):
            self._before(number, frame)
        elif self._ended.is_set() and self._before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)  # somebody has put us back after the end
            os.kill(os.getpid(), number)

    # The watching thread ----------------------------------------------------------------------

    def _watch(self) -> None:
        while (left_s := self._noticed()) is None:
            if self._ended.is_set() or background.ending():
                self._hears.close()
                return
        if self._until is None:
            self._until = time.monotonic() + left_s
        left_s = max(0.0, self._until - time.monotonic())
        last = threading.Timer(left_s, os._exit, (EXIT_CODE,))
        last.daemon = True
        last.start()
        log.warning("SIGTERM: the run stops at the next boundary, within %.1f s", left_s)
        threading.Thread(target=self._drain, name="adacheck-hurry", daemon=True).start()
        self._agree()

    def _drain(self) -> None:
        try:
            self._hurry()
        except Exception as error:
            log.warning("after SIGTERM: %s", error)

    def _noticed(self) -> float | None:
        """Seconds until the end, once this rank or another one is to stop."""
        ready = select.select([self._hears], [], [], POLL_S)[0]
        heard = self._hears.recv(4096) if ready else b""
        if heard and self._fd_before >= 0:
            with contextlib.suppress(OSError):
                os.write(self._fd_before, heard)
        if signal.SIGTERM in heard:
            left_s = self._grace_s - self._spare_s
            if self._board is not None:
                with _told("SIGTERM is not passed on"):
                    self._board.post("stop", str(left_s))
            return left_s
        if self._board is not None:
            with _told("other ranks cannot be heard"):
                said = self._board.look("stop")
                return None if said is None else max(0.0, float(said) - POLL_S)
        return None

    def _agree(self) -> None:
        """Say how far this rank goes by itself, and learn where all stop."""
        with self._changed:
            self._free = agreed = self._step + 1
        if self._board is not None:
            try:
                found = self._board.exchange("free", str(agreed), AGREE_SHARE * (self.left() or 0))
                agreed = max(int(text) for text in found)
            except (AdaCheckError, RuntimeError, OSError, ValueError) as error:
                log.warning("the ranks do not agree where to stop: %s", error)
        with self._changed:
            self._agreed = agreed
            self._changed.notify_all()


@contextlib.contextmanager
def _told(what: str) -> Any:
    """Log an error of the ranks' store: training goes on."""
    try:
        yield
    except (AdaCheckError, RuntimeError, OSError, ValueError) as error:
        log.warning("%s: %s", what, error)
        time.sleep(POLL_S)


def _forked() -> None:
    """A forked child is no trainer: SIGTERM to it is not one to us."""
    for grace in reversed(_begun):
        grace._give_back()
    _begun.clear()


os.register_at_fork(after_in_child=_forked)
