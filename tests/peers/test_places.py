"""Records read out of the agent's memory by descriptor: verified, bounded, and believed nothing."""

import dataclasses
import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from adacheck_store.catalog import make_ref
from adacheck_store.fetch import BlocksLostError, Fetcher
from adacheck_store.format.errors import RecordNotFoundError, TierUnavailableError, UnsupportedError
from adacheck_store.format.keys import parse_key
from adacheck_store.tiers import wire
from adacheck_store.tiers.base import RecordSource, TierTraits
from adacheck_store.tiers.memory import MemoryTier
from adacheck_store.tiers.peer import PeerTier
from adacheck_store.tiers.pool import Peer
from adacheck_store.tiers.serve_calls import _Call
from adacheck_store.tiers.shared import PAGE, SharedTier
from adacheck_store.tiers.wire import Kind
from tests.conformance.hosted import Hosted, socket_of
from tests.conformance.records import MIB, World, grads, noise, same
from tests.peers.host import hosted
from tests.peers.raw import Session

DATA = noise(3 * MIB + 5000)
ARRAY = "0/a/g"


class Rig:
    """A shared tier served over a unix socket, with one delta in it."""

    def __init__(self, folder: Path, endpoint: str = "") -> None:
        self.world = World()
        self.memory = SharedTier()
        self.tier = Hosted(self.memory, endpoint or socket_of(folder / "x"))
        self.delta = self.world.delta(1, {ARRAY: ("U8", DATA)})
        self.tier.put([*self.world.roots(), self.delta])
        self.sent: list[str] = []
        answer = self.tier.server._calls._verbs["read"]

        def noted(call: _Call) -> None:
            self.sent.append(call.own_key())
            answer(call)

        self.tier.server._calls._verbs["read"] = noted

    def read(self) -> bytes:
        """The delta's array, not verified."""
        into = bytearray(len(DATA))
        self.tier.read_into(self.delta.key, ARRAY, 0, 4, memoryview(into))
        return bytes(into)

    def pages(self) -> int:
        """Pages of the memory that exist."""
        return os.fstat(self.memory._store.fd).st_blocks * 512 // PAGE

    def place(self, index: int) -> int:
        """Where a block of the array lies."""
        stored = self.memory._records[self.delta.key][1][ARRAY, index]
        return int(stored.at)  # type: ignore[attr-defined]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Closed in the end, with no descriptor left over."""
    before = psutil.Process().num_fds()
    found = Rig(tmp_path)
    yield found
    found.tier.close()
    del found.memory._store, found.memory._reader
    until(lambda: psutil.Process().num_fds() <= before)


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def test_nothing_is_sent_but_what_has_no_place(rig: Rig) -> None:
    """All goes by descriptor; an array of a few bytes is sent."""
    assert rig.read() == DATA
    assert not rig.sent
    few = DATA[:1000]
    small = rig.world.delta(2, {ARRAY: ("U8", few)})
    rig.tier.put([small])
    into = bytearray(len(few))
    rig.tier.read_into(small.key, ARRAY, 0, 1, memoryview(into))
    assert into == few
    assert rig.sent == [small.key]


def test_bytes_from_a_descriptor_are_verified(rig: Rig) -> None:
    """A bit flips in the agent's memory: the block comes from elsewhere, or is lost, aloud."""
    other = MemoryTier("other")
    other.put([*rig.world.roots(), rig.delta])
    blocks = other._records[rig.delta.key][1]
    blocks[ARRAY, 0] = bytes(MIB)
    key = parse_key(rig.delta.key)
    name = rig.tier.traits.name
    ref = make_ref(key, rig.tier.head(rig.delta.key), (name, "other"))
    info = rig.delta.record.sealed.head.array(ARRAY)
    os.pwrite(rig.memory._store.fd, bytes([DATA[2 * MIB] ^ 1]), rig.place(2))
    into = bytearray(len(DATA))
    fetcher = Fetcher([rig.tier, other])
    fetcher.read_into(ref, info, 0, 4, memoryview(into))
    assert into == DATA
    assert fetcher.used == {name: len(DATA) - MIB, "other": MIB}
    alone = Fetcher([rig.tier])
    with pytest.raises(BlocksLostError) as caught:
        alone.read_into(dataclasses.replace(ref, tiers=(name,)), info, 0, 4, memoryview(into))
    assert "digest" in str(caught.value)
    assert not rig.sent


def test_what_is_dropped_leaves_no_memory_behind(rig: Rig) -> None:
    """Its memory is given back though a client has the descriptor; what it reads is not found."""
    assert rig.read() == DATA
    assert rig.pages() == 1 + -(-len(DATA) // PAGE)
    rig.tier.delete([rig.delta.key])
    assert rig.pages() == 1
    with pytest.raises(RecordNotFoundError):
        rig.read()
    assert rig.pages() == 1  # what was read there was not made by reading
    rig.tier.put([rig.delta])
    assert rig.read() == DATA
    rig.tier.delete([rig.world.roots()[0].key])  # something else: asked anew, and read again
    assert rig.read() == rig.read() == DATA


def test_readers_of_what_is_dropped(rig: Rig) -> None:
    """Never other bytes than the record's, while it is dropped and put again."""
    wrong: list[str] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                if rig.read() != DATA:
                    wrong.append("other bytes")
            except RecordNotFoundError:
                pass
            except BaseException as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(40):
        rig.tier.delete([rig.delta.key])
        rig.tier.put([rig.delta])
    done.set()
    for thread in threads:
        thread.join(timeout=30)
    assert not wrong
    assert rig.pages() == 1 + -(-len(DATA) // PAGE)


def test_a_put_that_fails_leaves_no_memory_behind(rig: Rig) -> None:
    """Its blocks had places already."""
    before = rig.pages()
    false = rig.world.delta(2, {ARRAY: ("U8", noise(2 * MIB))})
    head = rig.delta.record.sealed
    wrong = RecordSource(false.key, dataclasses.replace(false.record, sealed=head))
    with pytest.raises(Exception):  # noqa: B017, PT011  # whichever rule finds it first
        rig.memory.put([wrong])
    assert rig.pages() == before


def test_one_descriptor_for_all(rig: Rig) -> None:
    """However many records are read."""
    deltas = [rig.world.delta(step, grads(MIB // 4)) for step in range(2, 40)]
    rig.tier.put(deltas)
    assert same(rig.tier, deltas[:2])
    before = psutil.Process().num_fds()
    assert same(rig.tier, deltas)
    assert psutil.Process().num_fds() <= before


def test_not_between_nodes(tmp_path: Path) -> None:
    """Over TLS nothing is asked, and who asks all the same is told of no place."""
    rig = Rig(tmp_path, "tls://127.0.0.1:0")
    assert rig.read() == DATA
    assert rig.sent
    call = {"tier": "inner", "key": rig.delta.key}
    head, payload = rig.tier.peer.call("places", call)
    assert not head
    assert not payload
    rig.tier.close()


def test_an_agent_that_does_not_know_the_call(rig: Rig) -> None:
    """An older one: it sends, as ever."""
    del rig.tier.server._calls._verbs["places"]
    with pytest.raises(UnsupportedError):
        rig.tier.peer.call("places", {"tier": "inner", "key": rig.delta.key})
    assert rig.read() == DATA
    assert rig.sent


def empty() -> int:
    """Memory with nothing in it, not even an epoch."""
    return os.memfd_create("empty")


def disk() -> int:
    """All of it right, but on a medium that might let its reader wait."""
    with tempfile.NamedTemporaryFile(dir=Path(__file__).parent, suffix=".tmp") as file:
        file.write(bytes(PAGE) + DATA)
        file.flush()
        return os.open(file.name, os.O_RDONLY)


HOSTILE: dict[str, Callable[[bytes], tuple[bytes, Callable[[], int], object]]] = {
    "empty memory": lambda data: (data, empty, 0),
    "a pipe": lambda data: (data, lambda: os.dup(_PIPE[0]), 0),
    "a file on a disk": lambda data: (
        json.dumps({ARRAY: [len(DATA), [PAGE + at * MIB for at in range(4)]]}).encode(), disk, 0,
    ),
    "no JSON": lambda data: (b"[" * 100, empty, 0),
    "no object": lambda data: (b"[]", empty, 0),
    "places below all": lambda data: (
        json.dumps({ARRAY: [len(DATA), [-2] * 4]}).encode(), empty, 0,
    ),
    "places beyond all": lambda data: (
        json.dumps({ARRAY: [len(DATA), [1 << 63] * 4]}).encode(), empty, 0,
    ),
    "places that are none": lambda data: (
        json.dumps({ARRAY: [len(DATA), ["0", None, 1.5, {}]]}).encode(), empty, 0,
    ),
    "another size": lambda data: (json.dumps({ARRAY: [1 << 60, [0] * 4]}).encode(), empty, 0),
    "no epoch": lambda data: (data, empty, None),
    "an epoch of long ago": lambda data: (data, empty, -1),
}  # fmt: skip
_PIPE = os.pipe()
"""A read of it would wait for ever."""


@pytest.mark.parametrize("what", HOSTILE)
def test_places_that_are_none(rig: Rig, what: str) -> None:
    """Whatever an agent says of places, and passes along: the bytes are sent then, in time."""
    calls = rig.tier.server._calls
    known = rig.memory.places(rig.delta.key)
    assert known is not None
    true = json.dumps({name: [size, [*at]] for name, (size, at) in known.arrays.items()}).encode()
    payload, make, epoch = HOSTILE[what](true)

    def answer(call: _Call) -> None:
        descriptor = make()
        try:
            passed = [descriptor, descriptor, descriptor]
            call.channel.send(Kind.ANSWER, {"epoch": epoch}, [payload], passed)
        finally:
            os.close(descriptor)

    calls._verbs["places"] = answer
    before = psutil.Process().num_fds()
    for _ in range(20):
        began = time.monotonic()
        assert rig.read() == DATA
        assert time.monotonic() - began < 10
    assert rig.sent
    until(lambda: psutil.Process().num_fds() <= before + 2)


def test_memory_that_is_cut_short(rig: Rig) -> None:
    """A file that shrinks under the reader is no death by signal: it is never mapped."""
    short = os.memfd_create("short")
    os.pwrite(short, bytes(8), 0)
    os.pwrite(short, DATA[:MIB], PAGE)
    places = [PAGE + index * MIB for index in range(4)]

    def answer(call: _Call) -> None:
        data = json.dumps({ARRAY: [len(DATA), places]}).encode()
        call.channel.send(Kind.ANSWER, {"epoch": 0}, [data], [short])

    rig.tier.server._calls._verbs["places"] = answer
    assert rig.read() == DATA
    assert rig.sent
    os.close(short)


def test_descriptors_that_nobody_asked_for(tmp_path: Path) -> None:
    """A client that passes descriptors with every frame fills no table of the agent's."""
    with hosted(tmp_path, f"unix:{tmp_path}/a.sock") as host:
        session = Session(host.endpoints[0], 1)
        process, raw = psutil.Process(host.process.pid), session.calls[0]
        before = process.num_fds()
        for _ in range(50):
            frame = wire.encode(Kind.CALL, raw.sequence, {"verb": "echo"})
            socket.send_fds(raw.sock, [frame], [0, 1, 2])
            raw.sequence += 1
            assert raw.hear().kind is Kind.ANSWER
        assert process.num_fds() <= before + 1
        session.close()


@pytest.mark.fault
def test_the_memory_of_a_dead_agent(tmp_path: Path) -> None:
    """When an agent dies its client lets go of its memory, and so does the system."""
    with hosted(tmp_path, f"unix:{tmp_path}/a.sock") as host:
        tier = PeerTier(Peer(host.endpoints[0]), "ram", TierTraits(name="ram"))
        world = World()
        delta = world.delta(1, {ARRAY: ("U8", DATA)})
        tier.put([*world.roots(), delta])
        into = bytearray(len(DATA))
        tier.read_into(delta.key, ARRAY, 0, 4, memoryview(into))
        assert into == DATA
        assert held()
        host.signal(signal.SIGKILL)
        until(lambda: not held(), 5.0)
        with pytest.raises(TierUnavailableError):
            tier.read_into(delta.key, ARRAY, 0, 4, memoryview(into))
        tier.close()


def held() -> list[str]:
    """Memory of agents that this process has a descriptor of."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    return [link for link in links if "adacheck-ram" in link]


def test_sealed(rig: Rig) -> None:
    """Who is passed the memory can neither write to it nor change its size."""
    known = rig.memory.places(rig.delta.key)
    assert known is not None
    for act in (
        lambda: os.pwrite(known.memory.fd, b"x", PAGE),
        lambda: os.ftruncate(known.memory.fd, 0),
        lambda: os.ftruncate(rig.memory._store.fd, 0),
        lambda: os.ftruncate(rig.memory._store.fd, 1 << 61),
    ):
        with pytest.raises(OSError):  # noqa: PT011  # EBADF, EINVAL or EPERM
            act()
    assert rig.read() == DATA
