"""What may be done to an agent's sockets: each a bounded error, and the agent goes on."""

import os
import secrets
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from adacheck_store.format.errors import PeerRefusedError, TierError, TierUnavailableError
from adacheck_store.tiers import credentials, serve, wire
from adacheck_store.tiers.memory import MemoryTier
from adacheck_store.tiers.peer import PeerTier
from adacheck_store.tiers.pool import Peer
from adacheck_store.tiers.serve import Server
from adacheck_store.tiers.wire import Kind
from tests.conformance.records import MIB, World, grads, noise, same
from tests.peers.host import BOUNDS, LIMITS, RUN, Host, hosted
from tests.peers.raw import Raw, Session, hostile_context, plain

KEY = credentials.make(RUN)
WORLD = World(run=RUN)
WAYS = ["unix", "tls"]
NOTICE_S = 3.0
BUSY_S = 5.0
"""What a busy machine may take beyond that."""


class Agent:
    """A host with what a test asks of it."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.unix, self.tls = host.endpoints
        self.peer = Peer(self.unix)
        self.tier = PeerTier(self.peer, "ram")
        self.steps = iter(range(1, 10**6))

    def endpoint(self, way: str) -> str:
        """Where it is reached, by unix or TLS."""
        return self.unix if way == "unix" else self.tls

    def stats(self) -> dict[str, int]:
        """What the agent has open."""
        return dict(self.peer.call("stats")[0])

    def serves(self) -> None:
        """A good client, new and old, is served within its time limit."""
        peer = Peer(self.tls, credentials=KEY)
        fresh = PeerTier(peer, "ram")
        for tier in (fresh, self.tier):
            began = time.monotonic()
            source = WORLD.delta(next(self.steps), grads(100_000))
            tier.put([source])
            assert same(tier, [source])
            tier.delete([source.key])
            assert time.monotonic() - began < peer.limits.connect_s + BUSY_S
        fresh.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """One agent for all of this: each test leaves it as it was."""
    folder = tmp_path_factory.mktemp("agent")
    credentials.write(str(folder / "keys"), KEY)
    with hosted(folder, f"unix:{folder}/a.sock", "tls://127.0.0.1:0") as host:
        agent = Agent(host)
        agent.tier.put([*WORLD.roots(), WORLD.delta(10**6, {"0/a/g": ("U8", noise(32 * MIB))})])
        agent.serves()
        yield agent
        agent.tier.close()


@pytest.fixture
def agent(running: Agent) -> Iterator[Agent]:
    """The agent; afterwards it serves, and has no more open than before."""
    before = running.stats()
    yield running
    assert running.host.process.poll() is None
    running.serves()
    end = time.monotonic() + 10
    while grew := grown(before, running.stats()):
        assert time.monotonic() < end, grew
        time.sleep(0.2)


def grown(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    """What is more than it was: a worker or two come and go, and memory is not given back."""
    slack = {"threads": 3, "fds": 1, "rss": 64 << 20, "connections": 1}
    names = ("connections", "pending", "sessions", "fds", "threads", "rss")
    return {n: now[n] for n in names if now[n] > before[n] + slack.get(n, 0)}


def wait_until(true: Callable[[], bool], seconds: float) -> float:
    """Wait for something; returns how long it took (s)."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, "it never came"
        time.sleep(0.02)
    return time.monotonic() - began


GARBAGE = {
    "nothing of anything": b"\0" * 100,
    "noise": secrets.token_bytes(5000),
    "http": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "pickle": b"\x80\x04cos\nsystem\n(S'touch /tmp/owned'\ntR.",
    "a TLS hello": bytes.fromhex("16030100c8010000c40303") + secrets.token_bytes(193),
    "half a header": b"AdaW\1\1\0",
    "2^60 bytes": struct.pack("<4sBBHIIQ", b"AdaW", 1, 1, 0, 0, 2, 1 << 60) + b"{}",
    "4 GiB of head": struct.pack("<4sBBHIIQ", b"AdaW", 1, 1, 0, 0, (1 << 32) - 1, 0),
    "newer frames": struct.pack("<4sBBHIIQ", b"AdaW", 9, 1, 0, 0, 2, 0) + b"{}",
    "deep JSON": struct.pack("<4sBBHIIQ", b"AdaW", 1, 1, 0, 0, 9000, 0) + b"[" * 9000,
}


@pytest.mark.parametrize("what", GARBAGE)
@pytest.mark.parametrize("way", [*WAYS, "tls inside"])
def test_garbage(agent: Agent, way: str, what: str) -> None:
    """Before a hello, on the bare socket and within TLS: the connection ends, within its limit."""
    raw = Raw(agent.endpoint(way), KEY if way == "tls inside" else None)
    began = time.monotonic()
    with suppress(OSError):
        raw.sock.sendall(GARBAGE[what])
    assert raw.ended()
    assert time.monotonic() - began < NOTICE_S + BUSY_S
    raw.sock.close()


@pytest.mark.parametrize("what", [w for w in GARBAGE if w != "half a header"])
@pytest.mark.parametrize("way", WAYS)
def test_garbage_where_a_call_comes_next(agent: Agent, way: str, what: str) -> None:
    """From one who was let in, the same."""
    session = Session(agent.endpoint(way), 1, KEY)
    garbage = bytearray(GARBAGE[what])
    if garbage.startswith(b"AdaW"):
        garbage[8] = 1  # the right sequence number
    session.calls[0].sock.sendall(garbage)
    assert session.calls[0].ended()
    session.beat()
    session.close()


@pytest.mark.parametrize("way", WAYS)
def test_half_open_connections(agent: Agent, way: str) -> None:
    """Three hundred that connect and say nothing, or half of something: ended, others served."""
    socks, seen = [], []
    for number in range(300):
        socks.append(plain(agent.endpoint(way)))
        if number % 2 == 0:
            with suppress(OSError):
                socks[-1].sendall(wire.encode(Kind.CALL, 0, {"verb": "hello"})[:-5])
        if number % 20 == 19:  # on a busy machine the first are ended before the last come
            seen.append(agent.stats()["pending"])
    assert 0 < max(seen) <= BOUNDS.pending
    agent.serves()
    wait_until(lambda: agent.stats()["pending"] == 0, 20)
    for sock in socks:
        sock.close()


class Beating:
    """Sessions whose pulses are kept, and closed in the end."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat)
        self._error: BaseException | None = None

    def _beat(self) -> None:
        try:
            while not self._stop.wait(LIMITS.beat_s):
                # All are asked before one is heard: a busy machine takes long for each by itself.
                beating = list(self.sessions)
                for session in beating:
                    session.pulse.say({"verb": "ping"})
                for session in beating:
                    assert session.pulse.hear().kind is Kind.ANSWER
        except BaseException as error:
            self._error = error

    def __enter__(self) -> "Beating":
        self._thread.start()
        return self

    def stop(self) -> None:
        """Let them fall silent; none of them was ended before."""
        self._stop.set()
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()
        assert self._error is None, repr(self._error)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for session in self.sessions:
            session.close()


@pytest.mark.parametrize(("way", "count"), [("unix", 500), ("tls", 40)])
def test_idle_clients(agent: Agent, way: str, count: int) -> None:
    """Many that live and ask for nothing: no thread for any, and others are served."""
    before = agent.stats()
    with Beating() as beating:
        for _ in range(count):
            beating.sessions.append(Session(agent.endpoint(way), 0, KEY))
        stats = agent.stats()
        assert stats["sessions"] >= count
        assert stats["threads"] <= before["threads"] + 2
        assert stats["rss"] < before["rss"] + (100 << 20)
        agent.serves()
        if way == "unix":
            time.sleep(LIMITS.beat_s + LIMITS.silence_s + 0.2)
            assert agent.stats()["sessions"] >= count
        beating.stop()
        if way == "unix":
            # Silent ones are ended, though their sockets stay open.
            wait_until(lambda: agent.stats()["sessions"] <= before["sessions"], 20)


@pytest.mark.parametrize(("way", "drip"), [("unix", False), ("unix", True), ("tls", False)])
def test_slow_readers(agent: Agent, way: str, drip: bool) -> None:
    """Who asks for much and does not read it, or a byte now and then, is ended; others go on."""
    sessions = [Session(agent.endpoint(way), 5, KEY) for _ in range(3)]
    calls = [call for session in sessions for call in session.calls]
    key = WORLD.delta(10**6).key
    head = {"verb": "read", "tier": "ram", "key": key, "array": "0/a/g", "first": 0, "count": 32}
    began = time.monotonic()
    for call in calls:
        call.say(head)
    agent.serves()
    while agent.stats()["calls"] > 1:
        assert time.monotonic() - began < 12
        for session in sessions:
            session.beat()
        for call in calls if drip else ():
            with suppress(OSError):
                call.sock.recv(1)
        time.sleep(0.2)
    for session in sessions:
        session.beat()
        session.close()


def test_slow_writers(agent: Agent) -> None:
    """A put that drips in does not hold a worker for ever."""
    session = Session(agent.unix, 4)
    for call in session.calls:
        call.say({"verb": "put", "tier": "ram"}, b"[]")
        call.sock.sendall(wire.encode(Kind.PART, 2, {"items": []}, 1 << 20))
    began = time.monotonic()
    while agent.stats()["calls"] > 1:
        assert time.monotonic() - began < 8
        session.beat()
        for call in session.calls:
            with suppress(OSError):
                call.sock.sendall(b"x")
        time.sleep(0.1)
    session.close()


def test_workers_for_others(agent: Agent) -> None:
    """One host that keeps as many workers as it gets leaves some to everybody else."""
    sessions = [Session(agent.tls, 7, KEY) for _ in range(6)]
    for session in sessions:
        for call in session.calls:
            call.say({"verb": "sleep", "seconds": 3.0})
    wait_until(lambda: agent.stats()["calls"] >= 16, 5)
    for _ in range(10):
        began = time.monotonic()
        # And this call itself; the one before may have been answered, and not yet counted off.
        assert agent.stats()["calls"] <= 18
        assert time.monotonic() - began < 2.0
        for session in sessions:
            session.beat()
    for session in sessions:
        session.close()
    wait_until(lambda: agent.stats()["calls"] <= 1, 10)


@pytest.mark.parametrize("way", WAYS)
def test_a_message_said_twice(agent: Agent, way: str) -> None:
    """The same frame again, or one left out, ends the connection before it is answered."""
    session = Session(agent.endpoint(way), 2, KEY)
    for call, skip in zip(session.calls, (-1, 1), strict=True):
        call.say({"verb": "echo"})
        assert call.hear().kind is Kind.ANSWER
        call.sequence += skip
        call.say({"verb": "echo"})
        with pytest.raises((EOFError, OSError)):
            call.hear()
    session.close()


def test_a_recorded_conversation(agent: Agent) -> None:
    """The bytes of a put by TLS, sent once more, do nothing."""
    target = plain(agent.tls)
    door = socket.create_server(("127.0.0.1", 0))
    said: list[bytes] = []

    def record(one: socket.socket, other: socket.socket, keep: bool) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                if keep:
                    said.append(data)
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def relay(target: socket.socket) -> None:
        client, _ = door.accept()
        threading.Thread(target=record, args=(target, client, False), daemon=True).start()
        record(client, target, True)
        client.close()

    relaying = threading.Thread(target=relay, args=(target,))
    relaying.start()
    raw = Raw(f"tls://127.0.0.1:{door.getsockname()[1]}", KEY)
    session = raw.hello("pulse", run=RUN)
    assert raw.hear().kind is Kind.ANSWER
    raw.sock.close()
    relaying.join(timeout=10)
    assert session
    assert sum(map(len, said)) > 500
    before = agent.stats()["welcomed"]
    again = plain(agent.tls)
    with suppress(OSError):
        for data in said:
            again.sendall(data)
    while data := silent(again):  # the handshake's answer, and an alert
        assert b"speaks" not in data
    assert agent.stats()["welcomed"] == before
    again.close()
    target.close()
    door.close()


def silent(sock: socket.socket) -> bytes:
    """What comes next, nothing at the end."""
    try:
        return sock.recv(1 << 16)
    except OSError:
        return b""


def test_a_wrong_key_is_noticed_by_the_client(agent: Agent) -> None:
    """An agent that has not the run's key is nobody's agent; nor does it know other runs."""
    for key in (credentials.make(RUN), credentials.make("gpt-other")):
        peer = Peer(agent.tls, credentials=key)
        with pytest.raises(PeerRefusedError) as caught:
            peer.call("echo")
        assert caught.value.place["path"] == agent.tls
        assert "same key" in caught.value.hint
        peer.close()


@pytest.mark.parametrize("shown", ["none", "another", "another run's"])
def test_a_wrong_key_is_noticed_by_the_agent(agent: Agent, shown: str) -> None:
    """A client that does not care whom it talks to is not let in without the run's key."""
    key = {"none": None, "another": credentials.make(RUN),
           "another run's": credentials.make("gpt-other")}[shown]  # fmt: skip
    welcomed = agent.stats()["welcomed"]
    raw = Raw(agent.tls)
    context = hostile_context(key)

    def get_in() -> None:
        # In TLS 1.3 the client learns from its first read what the agent thinks of its key.
        raw.sock = context.wrap_socket(raw.sock, server_hostname=KEY.server_name)
        raw.hello("pulse", run=RUN)
        raw.hear()

    with pytest.raises((ssl.SSLError, EOFError, ConnectionError)):
        get_in()
    assert agent.stats()["welcomed"] == welcomed
    raw.sock.close()


def test_keys_of_other_runs(agent: Agent) -> None:
    """The key of a run opens that run alone."""
    other = World(run="gpt-other")
    agent.tier.put(other.roots())
    key = other.roots()[0].key
    tier = PeerTier(Peer(agent.tls, credentials=KEY), "ram")
    acts: list[Callable[[], object]] = [
        lambda: tier.head(key), lambda: tier.read(key, "a", 0, 1), lambda: tier.delete([key]),
        lambda: tier.put(other.roots()), lambda: list(tier.list("gpt-other/")),
        lambda: list(tier.list("gpt-")),
    ]  # fmt: skip
    for act in acts:
        with pytest.raises(PeerRefusedError, match=RUN):
            act()
    assert all(name.startswith(f"{RUN}/") for name in tier.list(""))
    assert key in list(agent.tier.list(""))
    tier.close()
    for role in ("pulse", "calls"):
        raw = Raw(agent.tls, KEY)
        raw.hello(role, run="gpt-other")
        assert type(wire.open_error(raw.hear().head)) is PeerRefusedError
        assert raw.ended()
        raw.sock.close()


def test_mixed_versions(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent of another version is refused by a message that names both."""
    raw = Raw(agent.unix)
    raw.hello("pulse", changes={"speaks": [2, 3], "software": "adacheck-store 9.9"})
    error = wire.open_error(raw.hear().head)
    assert isinstance(error, PeerRefusedError)
    assert "9.9" in str(error)
    assert "0." in str(error)
    assert raw.ended()
    raw.sock.close()
    monkeypatch.setattr("adacheck_store.tiers.pool.VERSION", 2)
    peer = Peer(agent.unix)
    with pytest.raises(PeerRefusedError, match="version 1"):
        peer.call("echo")
    peer.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"verb": "ping"}, {"speaks": 1}, {"speaks": [1]}, {"speaks": ["1", "1"]}, {"role": "king"},
        {"role": "calls"}, {"session": None}, {"client": None}, {"session": "x" * 5000}, {"run": 7},
        {"software": None},
    ],
)  # fmt: skip
def test_hellos_that_are_none(agent: Agent, changes: dict[str, object]) -> None:
    """Anything else than a hello, and a session nobody began."""
    raw = Raw(agent.unix)
    raw.hello("pulse", changes=changes)
    assert raw.hear().kind is Kind.ERROR
    assert raw.ended()
    raw.sock.close()


def test_out_of_turn(agent: Agent) -> None:
    """Two hellos, a session taken twice, a call before its time, an answer as a question."""
    session = Session(agent.unix, 1)
    twice, taken, early = Raw(agent.unix), Raw(agent.unix), Raw(agent.unix)
    twice.hello("calls", session.name)
    twice.hello("calls", session.name)
    taken.hello("pulse", session.name)
    frame = wire.encode(Kind.CALL, 1, {"verb": "echo"})
    hello = {"verb": "hello", "speaks": [1, 1], "session": session.name, "client": "c",
             "role": "calls", "run": "", "software": ""}  # fmt: skip
    early.sock.sendall(wire.encode(Kind.CALL, 0, hello) + frame[:-3])
    session.calls[0].say({"verb": "echo"}, kind=Kind.ANSWER)
    for raw in (twice, taken, early, session.calls[0]):
        assert raw.ended()
        raw.sock.close()
    many = [Raw(agent.unix) for _ in range(12)]
    kinds = []
    for raw in many:
        raw.hello("calls", session.name)
        kinds.append(raw.hear().kind)
        session.beat()
    assert kinds[-1] is Kind.ERROR
    assert 4 <= kinds.count(Kind.ANSWER) <= 8
    session.close()
    for raw in many:
        assert raw.ended()  # with its pulse a session has ended
        raw.sock.close()


def test_calls_that_make_no_sense(agent: Agent) -> None:
    """Wrong fields are the caller's errors, and the connection goes on; so it does after a bug."""
    session = Session(agent.unix, 1)
    call = session.calls[0]
    read = {"verb": "read", "tier": "ram", "key": "a", "array": "b", "first": 0, "count": 1}
    for head, payload in [
        ({}, b""), ({"verb": 7}, b"x" * 1000), ({"verb": "head"}, b""),
        ({"verb": "head", "tier": "none", "key": "a"}, b""),
        ({"verb": "head", "tier": "ram", "key": ["a"]}, b""),
        ({**read, "first": True}, b""), ({**read, "count": 2**60}, b""), ({**read, "key": 1}, b""),
        ({"verb": "list", "tier": "ram", "prefix": 1}, b""), ({"verb": "raise"}, b""),
    ]:  # fmt: skip
        call.say(head, payload)
        assert call.hear().kind is Kind.ERROR
    for announced in (b"", b"{}", b"[[1,2,3]]", b'[["a",null]]', b'[["a",null,{"b":-1}]]', b"\xff"):
        call.say({"verb": "put", "tier": "ram"}, announced)
        call.say({}, kind=Kind.END)
        assert call.hear().kind is Kind.ERROR
    call.say({"verb": "put", "tier": "ram"}, b'[["gpt-small/log/000000000001",null,null]]')
    for items in (7, [["b", "a"]], [["b", "a", 0, 99]], [["z", "a", 0, 1]], [["s", "", 0, 1]]):
        call.say({"items": items}, b"x", kind=Kind.PART)
    call.say({}, kind=Kind.END)
    assert call.hear().kind is Kind.ERROR
    call.say({"verb": "echo", "a": 1}, b"still here")
    assert call.hear().payload == b"still here"
    with pytest.raises(TierError, match="ZeroDivisionError"):
        agent.peer.call("raise")
    session.close()


def test_a_client_stopped_amid_a_put(agent: Agent) -> None:
    """Its session ends, what came is withdrawn, and others are served meanwhile."""
    code = (
        "import sys, time\nfrom tests.conformance.records import *\n"
        "from adacheck_store.tiers.peer import PeerTier\n"
        "from adacheck_store.tiers.pool import Peer\n"
        "def halt(blocks):\n for n, b in enumerate(blocks):\n  yield b\n"
        "  if n == 5: print('amid', flush=True); time.sleep(60)\n"
        "w = World(run='gpt-small', term='t000007-' + 'a' * 16)\n"
        "tier = PeerTier(Peer(sys.argv[1]), 'lmdb')\n"
        "tier.put([*w.roots(), StreamSource(w.base(1, state()), change=halt)])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, agent.unix], stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "amid\n"
        sessions = agent.stats()["sessions"]
        os.kill(client.pid, signal.SIGSTOP)
        agent.serves()
        wait_until(lambda: agent.stats()["sessions"] < sessions, NOTICE_S + BUSY_S)
        wait_until(lambda: agent.stats()["calls"] <= 1, 20)
        client.kill()
    lmdb = PeerTier(agent.peer, "lmdb", shared=True)
    assert not list(lmdb.list("gpt-small/t000007-aaaaaaaaaaaaaaaa/"))


def test_no_descriptors_left(agent: Agent) -> None:
    """An agent that can accept no more goes on when it can."""
    process = psutil.Process(agent.host.process.pid)
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 5, before[1]))
    try:
        socks = [plain(agent.unix) for _ in range(40)]
        busy = sum(process.cpu_times()[:2])
        time.sleep(1)
        assert sum(process.cpu_times()[:2]) - busy < 0.3  # it does not try all the time
        assert agent.peer.call("echo", payload=b"still here")[1] == b"still here"
        for sock in socks:
            sock.close()
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, before)


def test_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not the agent's user is not let in, and does not talk to it."""
    endpoint = f"unix:{tmp_path}/b.sock"
    server = Server([endpoint], {"ram": MemoryTier()})
    uid = os.geteuid()
    monkeypatch.setattr("adacheck_store.tiers.endpoint.peer_user", lambda sock: (uid + 1, 4711))
    peer = Peer(endpoint)
    with pytest.raises(PeerRefusedError, match=f"4711.*user {uid + 1}"):
        peer.call("echo")
    monkeypatch.undo()
    monkeypatch.setattr(serve, "peer_user", lambda sock: (uid + 1, 4711))
    with pytest.raises(TierUnavailableError):
        peer.call("echo")
    assert server.stats()["refused"] >= 1
    assert server.stats().get("welcomed", 0) == 0
    peer.close()
    server.close()
