"""A client's connections to one agent: a bounded pool, and a pulse that notices its death."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import adacheck_store
from adacheck_store.format.errors import (
    AdaCheckError,
    OrderError,
    TierBusyError,
    TierUnavailableError,
)
from adacheck_store.format.ids import new_nonce

from .channel import LIMITS, Channel, ChannelError, Limits
from .credentials import Credentials
from .endpoint import Endpoint, connect, refused
from .places import KnownPlaces
from .wire import VERSION, Frame, Kind, open_error

T = TypeVar("T")


class Peer:
    """An agent as a client sees it. Any thread may call any method.

    Connections are made when needed, at most ``connections`` at a time, of which one is kept from
    streams: a stream's source may read from the same agent. While there is a connection a thread
    pings: an agent that died, is stopped, or is cut off is noticed within ``limits.beat_s +
    limits.silence_s``, and whoever waits for it then gets a `TierUnavailableError`. The next call
    connects anew. ``run`` is the run the client works for; TLS proves it by ``credentials``.
    """

    def __init__(
        self, endpoint: Endpoint | str, *, run: str = "", credentials: Credentials | None = None,
        limits: Limits = LIMITS, connections: int = 4,
    ) -> None:  # fmt: skip
        """Connects to nothing yet. Raises what `Endpoint.parse` raises."""
        self.endpoint = Endpoint.parse(endpoint) if isinstance(endpoint, str) else endpoint
        self.run = credentials.run if credentials else run
        self.limits = limits
        self.client = new_nonce()
        """Name of this client to the agent, whatever happens to its connections."""
        self._credentials = credentials
        self._most = max(2, connections)
        self._streams = threading.BoundedSemaphore(self._most - 1)
        self._changed = threading.Condition()
        self._session: _Session | None = None
        self._closed = False
        self._pid = os.getpid()

    # -- calls --

    def call(
        self, verb: str, head: Mapping[str, Any] | None = None, payload: bytes = b"",
        timeout_s: float | None = None,
    ) -> tuple[Mapping[str, Any], bytes]:  # fmt: skip
        """A control call: returns the answer's head and payload.

        One whose connection is lost is made a second time, so a call must be idempotent. Raises
        the agent's error as it is there, `TierUnavailableError`, `PeerRefusedError`.
        """

        def act(channel: Channel) -> tuple[Mapping[str, Any], bytes]:
            channel.send(Kind.CALL, {**(head or {}), "verb": verb}, [payload])
            answer = expect(channel, timeout_s)
            return answer.head, channel.payload(answer)

        return self.exchange(act)

    def exchange(self, act: Callable[[Channel], T], *, again: bool = True) -> T:
        """Let ``act`` use a connection, and with ``again`` a second one if the first is lost.

        An `AdaCheckError` of ``act`` must leave the connection between two calls; after anything
        else it is given up.
        """
        for attempt in (1, 2):
            with self._lent() as (session, channel):
                try:
                    return act(channel)
                except ChannelError as exc:
                    session.discard(channel)
                    if exc.lost:  # the agent has ended, or this session there
                        session.end(str(exc))
                    if not (exc.lost and again and attempt == 1 and not session.silent):
                        raise self._unavailable(session.dead or str(exc)) from exc
                except AdaCheckError:
                    raise  # the agent's answer, or a stream's source, said when all was over
                except BaseException:
                    session.discard(channel)
                    raise
        raise AssertionError  # pragma: no cover

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Wait for the right to keep a connection while a source is read."""
        if not self._streams.acquire(timeout=self.limits.answer_s):
            raise TierBusyError(
                f"{self._most - 1} streams are under way for {self.limits.answer_s} s",
                path=str(self.endpoint),
            )
        try:
            yield
        finally:
            self._streams.release()

    def alive(self) -> bool:
        """Whether the agent answered a moment ago; False while a connection is still being made."""
        session = self._session
        return session is not None and session.ready and not session.dead

    @property
    def places(self) -> KnownPlaces | None:
        """Where blocks lie in the agent's memory, kept as long as it lives; None between nodes."""
        session = self._session
        return session.places if self.endpoint.path and session and not session.dead else None

    def close(self) -> None:
        """Close all connections; calls under way fail. Idempotent."""
        with self._changed:
            self._closed = True
            session, self._session = self._session, None
            self._changed.notify_all()
        if session is not None and self._pid == os.getpid():
            session.end("the client was closed")

    # -- connections --

    @contextmanager
    def _lent(self) -> Iterator[tuple[_Session, Channel]]:
        """A connection of the present session; it goes back unless it was discarded."""
        session, channel = self._lend()
        try:
            yield session, channel
        finally:
            session.give(channel)
            self._one_less(session)

    def _lend(self) -> tuple[_Session, Channel]:
        """A connection, counted as lent; of a new session if the present one ends meanwhile.

        So it does where the agent was started anew since, or has not heard this client for long.
        """
        end = time.monotonic() + self.limits.answer_s
        for attempt in (1, 2):
            session = self._live(time.monotonic() + self.limits.connect_s)
            with self._changed:
                while session.lent >= self._most and not session.dead:
                    if not self._changed.wait(max(0.0, end - time.monotonic())):
                        raise TierBusyError(
                            f"all {self._most} connections are in use", path=str(self.endpoint)
                        )
                session.lent += 1
            try:
                return session, session.take() or self._connected(session, "calls")
            except BaseException as exc:
                self._one_less(session)
                gone = isinstance(exc, TierUnavailableError) and session.dead
                if not gone or attempt == 2:
                    raise
        raise AssertionError  # pragma: no cover

    def _one_less(self, session: _Session) -> None:
        with self._changed:
            session.lent -= 1
            self._changed.notify()

    def _live(self, end: float) -> _Session:
        """The session, begun anew if it has died; one thread connects, the others wait for it."""
        if self._pid != os.getpid():
            raise OrderError(
                "a connection made before a fork", path=str(self.endpoint),
                hint="make it in the process that uses it",
            )  # fmt: skip
        with self._changed:
            self._check_open()
            if self._session is None or self._session.dead:
                self._session = _Session(self.limits)
            session = self._session
            mine = not session.begun
            session.begun = True
            while not mine and not session.ready and not session.dead:
                if not self._changed.wait(max(0.0, end - time.monotonic())):
                    raise self._unavailable("another thread has waited for it as long")
        if mine:
            try:
                session.start(self._connected(session, "pulse"))
            except BaseException as exc:
                session.failure = exc if isinstance(exc, AdaCheckError) else None
                session.end(str(exc))
                raise
            finally:
                with self._changed:
                    self._changed.notify_all()
        elif session.dead:
            if session.failure is not None:
                raise type(session.failure)(
                    session.failure.message, hint=session.failure.hint, **session.failure.place
                )
            raise self._unavailable(session.dead)
        return session

    def _connected(self, session: _Session, role: str) -> Channel:
        """A new connection of a session, its hello answered."""
        end = time.monotonic() + self.limits.connect_s
        sock = connect(self.endpoint, self.limits.connect_s, self._credentials)
        channel = Channel(sock, self.limits)
        hello = {
            "verb": "hello", "speaks": [VERSION, VERSION], "session": session.name,
            "client": self.client, "role": role, "run": self.run,
            "software": f"adacheck-store {adacheck_store.__version__}",
        }  # fmt: skip
        try:
            channel.send(Kind.CALL, hello)
            expect(channel, max(0.01, end - time.monotonic()))
            session.keep(channel)
        except BaseException as exc:
            channel.close()
            if isinstance(exc, ChannelError):
                if isinstance(exc.__cause__, OSError) and "alert" in str(exc).lower():
                    raise refused(self.endpoint, exc) from exc
                raise self._unavailable(f"no hello: {exc}") from exc
            if isinstance(exc, AdaCheckError):
                exc.at(path=str(self.endpoint))
            if isinstance(exc, TierUnavailableError):  # the session is not known there any more
                session.end(str(exc))
            raise
        return channel

    def _check_open(self) -> None:
        if self._closed:
            raise OrderError("the connection is closed", path=str(self.endpoint))

    def _unavailable(self, why: str) -> TierUnavailableError:
        return TierUnavailableError(
            f"the agent does not answer: {why}", hint="see whether the agent runs there",
            path=str(self.endpoint),
        )  # fmt: skip


class _Session:
    """What a client has open to an agent that has not died since: a pulse and connections."""

    def __init__(self, limits: Limits) -> None:
        self.name = new_nonce()
        self.begun = False
        self.ready = False
        self.dead = ""
        """Why it ended; empty while it lives."""
        self.silent = False
        self.heard_at = 0.0
        """When the pulse was answered last, by this process's monotonic clock."""
        self.failure: AdaCheckError | None = None
        self.lent = 0
        self.places = KnownPlaces()
        self._idle: list[Channel] = []
        self._channels: set[Channel] = set()
        self._limits = limits
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def keep(self, channel: Channel) -> None:
        """Count a connection to the session; raises `ChannelError` if it has ended meanwhile."""
        with self._lock:
            if self.dead:
                raise ChannelError(self.dead)
            self._channels.add(channel)

    def take(self) -> Channel | None:
        """A connection that nobody uses."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def give(self, channel: Channel) -> None:
        """Have a connection back that may be used again, unless it was discarded."""
        with self._lock:
            if channel in self._channels and not (self.dead or channel.broken):
                self._idle.append(channel)
                return
        self.discard(channel)

    def discard(self, channel: Channel) -> None:
        """Close a connection that is of no further use; its user calls this."""
        with self._lock:
            self._channels.discard(channel)
        channel.close()

    def start(self, pulse: Channel) -> None:
        """Begin to ping."""
        self.heard_at, self.ready = time.monotonic(), True
        threading.Thread(
            target=self._beat, args=(pulse,), name="adacheck-pulse", daemon=True
        ).start()

    def _beat(self, pulse: Channel) -> None:
        try:
            while not self._ended.wait(self._limits.beat_s):
                pulse.send(Kind.CALL, {"verb": "ping"})
                expect(pulse, self._limits.silence_s)
                self.heard_at = time.monotonic()
        except (ChannelError, AdaCheckError) as exc:
            self.silent = not (isinstance(exc, ChannelError) and exc.lost)
            self.end(f"its pulse ended: {exc}")
        finally:
            pulse.close()

    def end(self, why: str) -> None:
        """End the session: whoever waits on one of its connections gets a `ChannelError`."""
        with self._lock:
            if self.dead:
                return
            since_s = time.monotonic() - self.heard_at
            last = f", {since_s:.2f} s after it was last heard" if self.ready else ""
            self.dead = (why or "ended") + last
            for channel in self._channels:
                channel.abort()  # who uses it closes it
            idle = list(self._idle)
            self._idle.clear()
        self.places.close()
        self._ended.set()
        for channel in idle:
            self.discard(channel)


def expect(
    channel: Channel, timeout_s: float | None = None, descriptors: list[int] | None = None
) -> Frame:
    """The next frame of an answer, its payload still to be taken; raises the error it may be.

    ``descriptors`` as in `Channel.receive`.
    """
    frame = channel.receive(timeout_s, descriptors)
    if frame.kind is Kind.ERROR:
        channel.skip(frame)
        raise open_error(frame.head)
    if frame.kind not in (Kind.ANSWER, Kind.PART):
        raise ChannelError(f"a frame of kind {frame.kind.name} where an answer comes next")
    return frame
