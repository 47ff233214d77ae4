"""A client of an agent: what it notices, in what time, and what it makes of a lost answer."""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from adacheck_store.format.errors import (
    ForkError,
    OrderError,
    PeerRefusedError,
    TierBusyError,
    TierError,
    TierUnavailableError,
    UsageError,
)
from adacheck_store.format.record import Block
from adacheck_store.tiers import credentials
from adacheck_store.tiers.base import TierTraits
from adacheck_store.tiers.channel import LIMITS, Limits
from adacheck_store.tiers.endpoint import Endpoint
from adacheck_store.tiers.memory import MemoryTier
from adacheck_store.tiers.peer import PeerTier
from adacheck_store.tiers.pool import Peer, _Session
from adacheck_store.tiers.serve import Bounds, Server
from adacheck_store.tiers.wrappers import FaultyTier, SlowTier
from tests.conformance.hosted import key_of
from tests.conformance.records import MIB, StreamSource, World, grads, same, state
from tests.peers.host import RUN, Host, hosted
from tests.peers.proxy import Proxy

NOTICE_S = 3.0
BUSY_S = 5.0
"""What a busy machine may take beyond that to tell it, or to end a call that has its own limit."""

QUICK = Limits(connect_s=0.8, beat_s=0.2, silence_s=0.6)
"""As in life, but sooner: for all that is not about the three seconds themselves."""


@pytest.fixture(params=["unix", "tls"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    """An agent of its own for each test, to be killed and stopped."""
    credentials.write(str(tmp_path / "keys"), key_of(RUN))
    endpoint = f"unix:{tmp_path}/a.sock" if request.param == "unix" else "tls://127.0.0.1:0"
    with hosted(tmp_path, endpoint) as host:
        yield host


def peer_of(host: Host, limits: Limits = QUICK) -> Peer:
    """A client of it."""
    return Peer(host.endpoints[0], credentials=key_of(RUN), limits=limits)


def session_of(peer: Peer) -> _Session:
    """What the client has open now; a call has begun it."""
    peer.call("echo")
    assert peer._session is not None
    return peer._session


def noticed(session: _Session) -> None:
    """See that a death was noticed in time by the client's own clock: since the last answer."""
    (after,) = re.findall(r"([0-9.]+) s after it was last heard", session.dead)
    assert float(after) < NOTICE_S, session.dead


def unavailable(act: Callable[[], object], *, within: float = NOTICE_S) -> str:
    """Do what must fail in time because nobody answers; returns the message."""
    began = time.monotonic()
    with pytest.raises(TierUnavailableError) as caught:
        act()
    assert time.monotonic() - began < within + BUSY_S
    assert caught.value.hint
    return str(caught.value)


@pytest.mark.fault
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_death_while_a_call_is_answered(host: Host, how: signal.Signals) -> None:
    """Whoever waits for an answer hears within 3 s that none will come."""
    peer = peer_of(host, LIMITS)
    session = session_of(peer)
    threading.Timer(0.3, host.signal, [how]).start()
    text = unavailable(lambda: peer.call("sleep", {"seconds": 60}), within=NOTICE_S + 0.3)
    noticed(session)
    assert host.endpoints[0] in text
    assert not peer.alive()
    peer.close()


@pytest.mark.fault
def test_a_stopped_agent_that_goes_on(host: Host) -> None:
    """Noticed amid a put; when it goes on, so does the client, with the same objects."""
    tier = PeerTier(peer_of(host), "ram")
    world = World(run=RUN)
    tier.put(world.roots())
    source = world.base(1, state(4 * MIB))

    def stop_amid(blocks: Any) -> Iterator[Block]:
        for number, block in enumerate(blocks):
            if number == 3:
                host.signal(signal.SIGSTOP)
            yield block

    session = session_of(tier.peer)
    unavailable(lambda: tier.put([StreamSource(source, change=stop_amid)]))
    noticed(session)
    # While a connection is being made nobody has answered yet: the kernel alone takes it.
    with ThreadPoolExecutor(1) as threads:
        again = threads.submit(lambda: unavailable(lambda: list(tier.list(""))))
        while not again.done():
            assert not tier.peer.alive()
            time.sleep(0.02)
        again.result()
    host.signal(signal.SIGCONT)
    tier.put([source])
    assert same(tier, [source])
    tier.close()


@pytest.mark.fault
def test_death_of_an_idle_agent(host: Host) -> None:
    """Seen though nobody asks; its successor at the same place is used without a word."""
    peer = peer_of(host)
    assert not peer.alive()
    session = session_of(peer)
    assert peer.alive()
    host.signal(signal.SIGSTOP)
    began = time.monotonic()
    while peer.alive():
        assert time.monotonic() - began < NOTICE_S + BUSY_S
        time.sleep(0.02)
    noticed(session)
    host.end()
    unavailable(lambda: peer.call("echo"))
    again = Host(host.folder, host.endpoints[0])
    assert peer.call("echo", payload=b"x")[1] == b"x"
    again.end()
    peer.close()


@pytest.mark.fault
def test_an_agent_restarted_between_calls(host: Host) -> None:
    """The connections that were kept are dead; the call is made on new ones."""
    peer = peer_of(host)
    peer.call("echo")
    host.end()
    again = Host(host.folder, host.endpoints[0])
    assert peer.call("echo", payload=b"x")[1] == b"x"
    again.end()
    peer.close()


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[tuple[Proxy, Server, MemoryTier]]:
    """A server of this process behind a relay."""
    inner = MemoryTier()
    server = Server(
        [f"unix:{tmp_path}/a.sock"], {"ram": inner}, lambda *call: ({}, call[2]), limits=QUICK
    )
    proxy = Proxy(tmp_path / "p.sock", tmp_path / "a.sock")
    yield proxy, server, inner
    proxy.close()
    server.close()


def test_a_cut_link(proxied: tuple[Proxy, Server, MemoryTier]) -> None:
    """No packet comes and none is refused: noticed by both ends, and over when it is over."""
    proxy, server, _ = proxied
    peer = Peer(proxy.endpoint, limits=QUICK)
    session = session_of(peer)
    proxy.deaf.set()
    began = time.monotonic()
    unavailable(lambda: peer.call("echo"))
    noticed(session)
    while server.stats()["sessions"]:
        assert time.monotonic() - began < NOTICE_S + BUSY_S
        time.sleep(0.02)
    proxy.deaf.clear()
    assert peer.call("echo", payload=b"x")[1] == b"x"
    peer.close()


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_lost_after_success(
    proxied: tuple[Proxy, Server, MemoryTier], streamed: bool
) -> None:
    """The put has succeeded, and so it is said: by a second put, or by what the agent has."""
    proxy, _, inner = proxied
    tier, world = PeerTier(Peer(proxy.endpoint), "ram"), World()
    tier.put(world.roots())
    sources = [world.base(1, state()), world.delta(1, grads())]
    proxy.cut_answer = True
    tier.put([StreamSource(source) for source in sources] if streamed else sources)
    assert proxy.cuts == 1
    assert same(inner, sources)
    tier.close()


@pytest.mark.parametrize("after", [0, 300, 5 * MIB])
def test_a_connection_lost_amid_a_put(
    proxied: tuple[Proxy, Server, MemoryTier], after: int
) -> None:
    """From memory it is put again; a stream cannot be, and nothing of it is there."""
    proxy, server, inner = proxied
    tier, world = PeerTier(Peer(proxy.endpoint), "ram"), World()
    tier.put(world.roots())
    source = world.base(1, state())
    proxy.cut_call, proxy.cut_after = True, after
    unavailable(lambda: tier.put([StreamSource(source)]))
    assert proxy.cuts == 1
    while server.stats()["calls"]:
        time.sleep(0.01)
    assert source.key not in list(inner.list(""))
    proxy.cut_call = True
    tier.put([source])
    assert proxy.cuts == 2
    assert same(inner, [source])
    tier.close()


def test_a_lost_fork_stays_a_fork(proxied: tuple[Proxy, Server, MemoryTier]) -> None:
    """Another record under the key is never taken for ours, whatever is lost."""
    proxy, _, inner = proxied
    tier, world = PeerTier(Peer(proxy.endpoint), "ram"), World()
    tier.put([*world.roots(), world.delta(1, grads(100))])
    other = world.delta(1, grads(100))  # so small that all is said before the answer comes
    for source in (other, StreamSource(other, announce=True)):
        proxy.cut_answer = True
        with pytest.raises((ForkError, TierUnavailableError)):
            tier.put([source])
    with pytest.raises(ForkError):
        tier.put([other])
    assert not same(inner, [other])
    tier.close()


def test_lost_calls_are_made_again(proxied: tuple[Proxy, Server, MemoryTier]) -> None:
    """Once, not for ever."""
    proxy, _, _ = proxied
    peer = Peer(proxy.endpoint)
    peer.call("echo")
    proxy.cut_answer = True
    assert peer.call("echo", payload=b"x")[1] == b"x"
    proxy.cut_call = True
    assert peer.call("echo", payload=b"x")[1] == b"x"
    assert proxy.cuts == 2
    peer.close()


@pytest.mark.parametrize("how", ["silent", "one byte", "full", "closes", "http", "nobody"])
def test_what_is_no_agent(tmp_path: Path, how: str) -> None:
    """Who accepts and says nothing, accepts no more, hangs up or speaks something else."""
    path = tmp_path / "x.sock"
    if how != "nobody":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(0)
    waiting: list[socket.socket] = []

    def play() -> None:
        sock, _ = listener.accept()
        waiting.append(sock)
        sock.recv(1 if how == "one byte" else 4096)
        if how == "http":
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        if how == "closes":
            sock.close()

    if how == "full":
        for _ in range(2):
            sock = socket.socket(socket.AF_UNIX)
            sock.setblocking(False)
            with suppress(BlockingIOError):
                sock.connect(str(path))
            waiting.append(sock)
    elif how != "nobody":
        threading.Thread(target=play, daemon=True).start()
    peer = Peer(f"unix:{path}", limits=QUICK)
    unavailable(lambda: peer.call("echo"), within=QUICK.connect_s + 0.5)
    peer.close()
    for sock in waiting:
        sock.close()
    if how != "nobody":
        listener.close()


def test_slow_tiers_and_sources_are_alive(tmp_path: Path) -> None:
    """Silence of a call is no silence of the agent: it may take longer than that."""
    longer_s = 1.5 * (QUICK.beat_s + QUICK.silence_s)
    inner = SlowTier(MemoryTier(), delay_s=longer_s)
    server = Server([f"unix:{tmp_path}/a.sock"], {"ram": inner}, limits=QUICK)
    tier, world = PeerTier(Peer(server.endpoints[0], limits=QUICK), "ram"), World()

    def pause(blocks: Any) -> Iterator[Block]:
        yield next(blocks := iter(blocks))
        time.sleep(longer_s)
        yield from blocks

    source = world.delta(1, grads())
    tier.put([*world.roots(), StreamSource(source, change=pause)])
    assert source.key in list(tier.list(""))
    tier.close()
    server.close()


def test_time_limits_of_calls(tmp_path: Path) -> None:
    """A call that takes longer than it may ends, though the agent lives; others go on."""
    began = threading.Event()

    def control(verb: str, *rest: Any) -> tuple[dict[str, Any], bytes]:
        if verb == "sleep":
            began.set()
            time.sleep(0.8)
        return {}, b""

    server = Server([f"unix:{tmp_path}/a.sock"], {}, control)
    peer = Peer(server.endpoints[0])
    unavailable(lambda: peer.call("sleep", timeout_s=0.3), within=1)
    assert began.is_set()
    assert peer.alive()
    peer.call("echo", timeout_s=30)
    peer.close()
    server.close()


def test_a_source_that_reads_from_the_same_agent(tmp_path: Path) -> None:
    """Folding a tier into itself: as many at once as there are threads, and none waits for ever."""
    server = Server([f"unix:{tmp_path}/a.sock"], {"ram": MemoryTier()})
    tier, world = PeerTier(Peer(server.endpoints[0]), "ram"), World()
    tier.put([*world.roots(), world.delta(1, grads())])
    key = world.delta(1).key
    troubles: list[BaseException] = []

    def copy(step: int) -> None:
        def reading(blocks: Any) -> Iterator[Block]:
            for block in blocks:
                assert len(tier.read(key, "0/norms/grad.raw", 0, 1)) == 4096
                yield block

        try:
            tier.put([StreamSource(world.base(step, state(2 * MIB)), change=reading)])
        except BaseException as exc:
            troubles.append(exc)

    threads = [threading.Thread(target=copy, args=(step,)) for step in range(2, 12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not troubles
    assert len(list(tier.list(f"{world.run}/{world.term}/p000000/base/"))) == 10
    assert server.stats()["connections"] <= 5
    tier.close()
    server.close()


def test_errors_come_with_the_place_they_have_here(tmp_path: Path) -> None:
    """The tier goes by the client's name for it; what happened and what to do is the agent's."""
    trouble = TierError("the disk is on fire", hint="call somebody", tier="lmdb", path="/mnt/x")
    server = Server(
        [f"unix:{tmp_path}/a.sock"], {"lmdb": FaultyTier(MemoryTier(), {"sync": [trouble]})}
    )
    tier = PeerTier(Peer(server.endpoints[0]), "lmdb", TierTraits(name="lmdb of n3", durable=True))
    with pytest.raises(TierError) as caught:
        tier.sync()
    assert str(caught.value) == (
        "the disk is on fire [tier=lmdb of n3 path=/mnt/x] -> call somebody"
    )
    tier.sync()
    tier.close()
    server.close()


def test_a_tier_may_depend_on_who_calls(tmp_path: Path) -> None:
    """As a sync that speaks of what this caller has put, and of nothing else."""
    mine: dict[str, MemoryTier] = {}
    server = Server(
        [f"unix:{tmp_path}/a.sock"],
        {"own": lambda peer: mine.setdefault(peer.client, MemoryTier())},
    )
    one, two = (PeerTier(Peer(server.endpoints[0]), "own") for _ in range(2))
    world = World()
    one.put(world.roots())
    for session in list(server._sessions.values()):
        for connection in list(session.members):
            connection.channel.abort()  # who comes again is the same
    assert len(list(one.list(""))) == 2
    assert not list(two.list(""))
    assert len(mine) == 2
    for tier in (one, two):
        tier.close()
    server.close()


def test_a_session_that_the_agent_does_not_know(tmp_path: Path) -> None:
    """It was silent for too long, or the agent is another: a new one is begun, and nobody hears."""
    server = Server([f"unix:{tmp_path}/a.sock"], {}, lambda *call: ({}, call[2]))
    peer = Peer(server.endpoints[0])
    peer.call("echo")
    first = peer._session
    assert first is not None
    lent = first.take()  # somebody uses the one connection, so a second is made
    assert lent is not None
    del server._sessions[first.name]
    assert peer.call("echo", payload=b"x")[1] == b"x"
    assert first.dead
    first.discard(lent)
    peer.close()
    server.close()


def test_a_forked_child_makes_its_own(tmp_path: Path) -> None:
    """A connection belongs to one process; the parent's goes on."""
    server = Server([f"unix:{tmp_path}/a.sock"], {}, lambda *call: ({}, call[2]))
    peer = Peer(server.endpoints[0])
    peer.call("echo")
    child = os.fork()
    if child == 0:
        try:
            peer.call("echo")
        except OrderError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert peer.call("echo", payload=b"x")[1] == b"x"
    peer.close()
    server.close()


def test_endpoints() -> None:
    """Both forms, and what is neither."""
    for text in ("unix:/run/a/b.sock", "tls://host.example:7000", "tls://[::1]:0"):
        assert str(Endpoint.parse(text)) == text
    for text in (
        "", "unix:", "unix:a.sock", "unix:/a\0b", "tls://", "tls://host", "tls://host:", "tls://:7",
        "tls://host:x", "tls://host:70000", "tls://a/b:7", "tls://u@h:7", "tcp://host:7", "host:7",
    ):  # fmt: skip
        with pytest.raises(UsageError):
            Endpoint.parse(text)
    with pytest.raises(UsageError, match="107"):
        Endpoint.parse("unix:/" + "x" * 107)


def test_places_that_are_taken(tmp_path: Path) -> None:
    """A live agent's socket and port stay its own; a dead one's socket is taken over."""
    endpoint = f"unix:{tmp_path}/a.sock"
    first = Server([endpoint, "tls://127.0.0.1:0"], {})
    with pytest.raises(TierBusyError, match=str(os.getpid())):
        Server([endpoint], {})
    with pytest.raises(TierBusyError, match="in use"):
        Server([first.endpoints[1]], {})
    Peer(endpoint).close()
    first.close()
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(f"{tmp_path}/a.sock")
    dead.close()
    Server([endpoint], {}).close()
    assert not (tmp_path / "a.sock").exists()
    (tmp_path / "a.sock").write_text("mine")
    with pytest.raises(TierError, match="something else"):
        Server([endpoint], {})
    assert (tmp_path / "a.sock").read_text() == "mine"
    tmp_path.chmod(0o755)
    with pytest.raises(TierError, match="open to others"):
        Server([f"unix:{tmp_path}/b.sock"], {})
    tmp_path.chmod(0o700)


def test_a_full_server(tmp_path: Path) -> None:
    """It takes no more than it may, hangs up on more, and takes the next when there is room."""
    server = Server(
        [f"unix:{tmp_path}/a.sock"], {}, lambda *call: ({}, call[2]), bounds=Bounds(connections=4)
    )
    peers = [Peer(server.endpoints[0], limits=QUICK) for _ in range(3)]
    for peer in peers[:2]:
        peer.call("echo")
    unavailable(lambda: peers[2].call("echo"))
    assert server.stats()["connections"] == 4
    peers[0].close()
    while server.stats()["connections"] > 2:
        time.sleep(0.01)
    assert peers[2].call("echo", payload=b"x")[1] == b"x"
    assert peers[1].call("echo", payload=b"x")[1] == b"x"
    for peer in peers:
        peer.close()
    server.close()


def test_keys_come_and_go(tmp_path: Path) -> None:
    """A server may learn a run later, and forget it."""
    server = Server(["tls://127.0.0.1:0"], {}, lambda *call: ({"run": call[3].run}, b""))
    peer = Peer(server.endpoints[0], credentials=key_of(RUN))
    with pytest.raises(PeerRefusedError):
        peer.call("echo")
    server.trust(key_of(RUN))
    server.trust(key_of("gpt-other"))
    assert peer.call("echo")[0] == {"run": RUN}
    other = Peer(server.endpoints[0], credentials=key_of("gpt-other"))
    assert other.call("echo")[0] == {"run": "gpt-other"}
    other.close()
    peer.close()
    server.distrust(RUN)
    again = Peer(server.endpoints[0], credentials=key_of(RUN))
    with pytest.raises(PeerRefusedError):
        again.call("echo")
    with pytest.raises(UsageError):
        Peer(server.endpoints[0]).call("echo")
    server.close()


def test_close(tmp_path: Path) -> None:
    """Closing either end ends what waits, and leaves nothing."""
    before = len(os.listdir("/proc/self/fd"))
    server = Server([f"unix:{tmp_path}/a.sock"], {}, lambda *_: (time.sleep(0.5), ({}, b""))[1])
    peer = Peer(server.endpoints[0])
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            peer.call("sleep")
        except BaseException as exc:
            ended.append(exc)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)
    peer.close()
    waiting.join(timeout=30)
    assert [type(exc) for exc in ended] == [OrderError]
    with pytest.raises(OrderError):
        peer.call("echo")
    server.close()
    server.close()
    end = time.monotonic() + 30
    while len(os.listdir("/proc/self/fd")) > before:
        assert time.monotonic() < end
        time.sleep(0.02)
