"""The server of an agent: takes connections, knows who is alive, hands calls to workers.

One thread, the loop, owns all connections that wait: it accepts, shakes hands, reads hellos and
answers pings, and never waits for any single one. A connection with a call is lent to a worker,
and comes back when the answer is sent.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import adacheck_store
from adacheck_store.format.errors import (
    AdaCheckError,
    PeerRefusedError,
    TierBusyError,
    TierUnavailableError,
)

from .channel import LIMITS, ChannelError, Limits
from .credentials import Credentials, RunContexts
from .endpoint import Endpoint, Listener, peer_user, widen
from .serve_calls import Calls, Control, PeerInfo, Tiers, no_control
from .serve_connection import Connection, Hello, Session, Stage, read_hello
from .wire import VERSION, Frame, Kind, error_head
from .workers import Workers

_TICK_S = 0.2
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much a server takes on.

    ``connections`` in all; ``pending`` ones among them that have not yet said who they are, and
    for how many seconds (``pending_s``) they may; ``per_session`` connections of one client;
    ``workers``, threads that answer calls, and how many of them one host, or one process on
    this node, may have at a time (``per_origin``).
    """

    connections: int = 1024
    pending: int = 128
    pending_s: float = 5.0
    per_session: int = 8
    workers: int = 64
    per_origin: int = 48


BOUNDS = Bounds()


class Server:
    """Serves named tiers, and control calls, at some endpoints until closed.

    ``tiers`` is looked up at each call, so it may change. Any thread may call any method.
    """

    def __init__(
        self, endpoints: Sequence[Endpoint | str], tiers: Tiers,
        control: Control = no_control, *, credentials: Iterable[Credentials] = (),
        limits: Limits = LIMITS, bounds: Bounds = BOUNDS,
    ) -> None:  # fmt: skip
        """Listen and begin to serve. Raises what `Endpoint.parse` and `Listener` raise."""
        self._limits = limits
        self._bounds = bounds
        self._calls = Calls(tiers, control)
        self._runs = RunContexts(credentials)
        self._workers = Workers("adacheck-serve", bounds.workers, bounds.connections)
        self._lent: Counter[str] = Counter()
        self._queued: dict[Connection, None] = {}
        self._counts: Counter[str] = Counter()
        self._connections: set[Connection] = set()
        self._pending: dict[Connection, None] = {}
        self._sessions: dict[str, Session] = {}
        self._done: deque[tuple[Connection, str]] = deque()
        self._listeners: list[Listener] = []
        self._resting: list[Listener] = []
        self._next_look = 0.0
        self._closing = threading.Event()
        try:
            for endpoint in endpoints:
                parsed = Endpoint.parse(endpoint) if isinstance(endpoint, str) else endpoint
                self._listeners.append(Listener(parsed))
        except BaseException:
            for listener in self._listeners:
                listener.close()
            raise
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        for sock in (self._wake_in, self._wake_out):
            sock.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        for listener in self._listeners:
            self._selector.register(listener.sock, selectors.EVENT_READ, listener)
        self._thread = threading.Thread(target=self._loop, name="adacheck-server", daemon=True)
        self._thread.start()

    @property
    def endpoints(self) -> list[Endpoint]:
        """Where the server is reached; a port 0 has become the one in use."""
        return [listener.endpoint for listener in self._listeners]

    def trust(self, credentials: Credentials) -> None:
        """Serve a run over TLS, by this key from now on."""
        self._runs.add(credentials)

    def distrust(self, run: str) -> None:
        """Let nobody of a run in by TLS any more; who is in stays."""
        self._runs.remove(run)

    def sessions(self) -> dict[str, PeerInfo]:
        """Who is there: clients that answer, by session."""
        return {name: session.peer for name, session in list(self._sessions.items())}

    def stats(self) -> dict[str, int]:
        """Connections, pending ones, sessions and calls under way; and counts since the start."""
        now = {
            "connections": len(self._connections), "pending": len(self._pending),
            "sessions": len(self._sessions), "calls": self._workers.busy(),
        }  # fmt: skip
        return {**dict(self._counts), **now}

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop serving: end all connections, wait for the calls under way, free the endpoints.

        Raises `TierUnavailableError` if a call has not ended in time; idempotent.
        """
        self._closing.set()
        self._wake()
        self._thread.join(timeout_s)
        if not self._workers.join(timeout_s):
            raise TierUnavailableError(
                f"a call has not ended {timeout_s} s after the server was closed",
                hint="see which tier it waits for",
            )

    # -- the loop --

    def _loop(self) -> None:
        while not self._closing.is_set():
            for key, _ in self._selector.select(_TICK_S):
                if isinstance(key.data, Listener):
                    self._guard(self._accept, key.data)
                elif key.data in self._connections:
                    self._guard(self._step, key.data)
                elif key.data is None:
                    with suppress(BlockingIOError):
                        self._wake_out.recv(4096)
            while self._done:
                connection, why = self._done.popleft()
                self._guard(self._take_back, connection, why)
            self._expire(time.monotonic())
        self._end_all()

    def _end_all(self) -> None:
        for listener in self._listeners:
            listener.close()
        for connection in [*self._connections]:
            connection.channel.abort()
            if connection.stage is not Stage.LENT:
                self._drop(connection, "closing")
        end = time.monotonic() + self._limits.stall_s
        while self._connections and time.monotonic() < end:
            self._selector.select(_TICK_S)
            while self._done:
                self._drop(self._done.popleft()[0], "closing")
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _guard(
        self, act: Callable[..., None], what: Listener | Connection, *rest: str
    ) -> None:  # fmt: skip
        """Do something with a connection; whatever comes of it ends that connection alone."""
        try:
            act(what, *rest)
        except Exception as exc:
            expected = isinstance(exc, ChannelError | AdaCheckError | OSError)
            if not expected:
                _log.error("the server's loop", exc_info=exc)
            if isinstance(what, Connection):
                self._drop(what, str(exc))

    def _wake(self) -> None:
        with suppress(OSError):
            self._wake_in.send(b"\0")

    def _accept(self, listener: Listener) -> None:
        try:
            sock, address = listener.sock.accept()
        except BlockingIOError:
            return
        except OSError as exc:  # no descriptors left, for one: try again at the next tick
            _log.warning("cannot accept at %s: %s", listener.endpoint, exc)
            self._selector.unregister(listener.sock)
            self._resting.append(listener)
            return
        try:
            connection = self._take(listener, sock, address)
        except (OSError, AdaCheckError) as exc:
            self._note("refused", str(listener.endpoint), str(exc))
            sock.close()
            return
        self._connections.add(connection)
        self._pending[connection] = None
        self._selector.register(connection.channel.sock, connection.events, connection)

    def _take(self, listener: Listener, sock: socket.socket, address: object) -> Connection:
        """A connection just accepted, if there is room; the oldest that says nothing makes it."""
        if len(self._pending) >= self._bounds.pending:
            self._drop(next(iter(self._pending)), "others wait to say hello")
        if len(self._connections) >= self._bounds.connections:
            raise TierBusyError(f"{len(self._connections)} connections are open")
        sock.setblocking(False)
        if listener.endpoint.path:
            uid, pid = peer_user(sock)
            if uid != os.geteuid():
                raise PeerRefusedError(f"user {uid} (pid {pid}) is not {os.geteuid()}")
            where = f"pid {pid}"
            widen(sock)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            where = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "?"
        end = sock if listener.endpoint.path else self._runs.wrap(sock)
        return Connection(end, where, time.monotonic(), self._limits)

    def _step(self, connection: Connection) -> None:
        if connection.stage is Stage.HANDSHAKE:
            before = connection.events
            if not connection.shake(self._runs):
                if connection.events != before:
                    sock = connection.channel.sock
                    self._selector.modify(sock, connection.events, connection)
                return
        if connection.stage is Stage.IDLE:
            self._lend(connection)
            return
        for frame in connection.frames():
            if connection.stage is Stage.PULSE:
                self._ping(connection, frame)
            else:
                self._welcome(connection, frame)
        connection.check_silent()

    # -- who is there --

    def _ping(self, connection: Connection, frame: Frame) -> None:
        if frame.kind is not Kind.CALL or frame.head.get("verb") != "ping":
            raise ChannelError("no ping")
        if connection.session is not None:
            connection.session.heard = time.monotonic()
        connection.reply(Kind.ANSWER, {})

    def _welcome(self, connection: Connection, frame: Frame) -> None:
        mine = f"adacheck-store {adacheck_store.__version__}"
        try:
            hello = read_hello(frame, mine)
            session = self._session(connection, hello)
        except AdaCheckError as exc:
            connection.reply(Kind.ERROR, error_head(exc))
            raise
        session.members.add(connection)
        connection.session = session
        self._pending.pop(connection, None)
        connection.stage = Stage.PULSE if hello.pulse else Stage.IDLE
        connection.reply(Kind.ANSWER, {"speaks": VERSION, "software": mine})
        self._counts["welcomed"] += 1

    def _session(self, connection: Connection, hello: Hello) -> Session:
        """The session a hello belongs to: a pulse begins one, all else joins it."""
        if connection.stage is not Stage.HELLO:
            raise PeerRefusedError("a second hello")
        proven = connection.run is not None
        if proven and hello.run != connection.run:
            raise PeerRefusedError(
                f"a hello of run {hello.run[:128]!r} under the key of {connection.run!r}"
            )
        peer = PeerInfo(
            hello.session, hello.client, hello.run, proven, connection.where, hello.software
        )
        session = self._sessions.get(hello.session)
        if hello.pulse and session is None:
            session = self._sessions[hello.session] = Session(peer, time.monotonic())
            return session
        if session is None:
            raise TierUnavailableError("no such session: it has ended, or this is another agent")
        if hello.pulse or (session.peer.run, session.peer.proven) != (hello.run, proven):
            raise PeerRefusedError("a session of another run, or a second pulse of one")
        if len(session.members) > self._bounds.per_session:
            raise TierBusyError(f"{len(session.members)} connections of one session")
        return session

    def _expire(self, now: float) -> None:
        """End what was given too long: hellos not said, sessions not heard of."""
        if now < self._next_look:
            return
        self._next_look = now + _TICK_S / 2
        for connection in [*self._pending]:
            if now - connection.born <= self._bounds.pending_s:
                break  # in the order in which they came
            self._drop(connection, "no hello in time")
        silence = self._limits.beat_s + self._limits.silence_s
        for session in [s for s in self._sessions.values() if now - s.heard > silence]:
            self._end(session, f"silent for {silence} s")
        for listener in self._resting:
            self._selector.register(listener.sock, selectors.EVENT_READ, listener)
        self._resting.clear()

    def _end(self, session: Session, why: str) -> None:
        self._sessions.pop(session.peer.session, None)
        self._note("sessions ended", session.peer.where, why)
        for connection in list(session.members):
            connection.channel.abort()
            if connection.stage is not Stage.LENT:  # a worker gives it back by itself
                self._drop(connection, why)

    def _drop(self, connection: Connection, why: str) -> None:
        """Forget a connection and close it; with a pulse its whole session ends."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._pending.pop(connection, None)
        self._queued.pop(connection, None)
        with suppress(KeyError, ValueError, OSError):
            self._selector.unregister(connection.channel.sock)
        connection.channel.close()
        self._note("refused" if connection.session is None else "closed", connection.where, why)
        session, connection.session = connection.session, None
        if session is not None:
            session.members.discard(connection)
            if connection.stage is Stage.PULSE:
                self._end(session, f"its pulse ended: {why}")

    def _note(self, what: str, where: str, why: str) -> None:
        self._counts[what] += 1
        _log.debug("%s: %s (%s)", what, where, why)

    # -- calls --

    def _lend(self, connection: Connection) -> None:
        """Give a connection that has something to say to a worker, when it is its turn."""
        self._selector.unregister(connection.channel.sock)
        connection.stage = Stage.QUEUED
        self._queued[connection] = None
        self._lend_queued()

    def _lend_queued(self) -> None:
        """Lend what waits, the oldest first, as far as its origin may have workers."""
        for connection in list(self._queued):
            if self._lent[connection.origin] < self._bounds.per_origin:
                del self._queued[connection]
                self._lent[connection.origin] += 1
                connection.stage = Stage.LENT
                self._workers.submit(partial(self._serve, connection))

    def _serve(self, connection: Connection) -> None:
        """On a worker: answer what comes, until nothing does."""
        why, channel = "", connection.channel
        try:
            session = connection.session
            while session is not None:
                frame = channel.receive(self._limits.stall_s)
                self._calls.answer(channel, frame, session.peer)
                if not channel.pending():
                    break
        except ChannelError as exc:
            why = str(exc)
        except BaseException:
            why = "a bug"
            raise
        finally:
            self._done.append((connection, why))
            self._wake()

    def _take_back(self, connection: Connection, why: str) -> None:
        ended = connection.session is None or connection.session.peer.session not in self._sessions
        connection.stage = Stage.IDLE
        self._lent[connection.origin] -= 1
        if not self._lent[connection.origin]:
            del self._lent[connection.origin]
        self._lend_queued()
        if why or ended:
            self._drop(connection, why or "its session has ended")
            return
        connection.channel.unblock()
        self._selector.register(connection.channel.sock, selectors.EVENT_READ, connection)
        if connection.channel.pending():
            self._lend(connection)
