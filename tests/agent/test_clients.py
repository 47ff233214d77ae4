"""Many clients and slow ones at a real agent: it lives, and answers others meanwhile."""

import threading
import time
from contextlib import suppress

from adacheck_store.agent import places
from adacheck_store.tiers.peer import PeerTier
from adacheck_store.tiers.pool import Peer
from tests.agent.kit import Node
from tests.agent.trainer import RUN
from tests.benchmarks.resident import Flood
from tests.peers.raw import Session
from tests.waits import until

IDLE = 500


def test_idle_clients_and_slow_readers(here: Node) -> None:
    here.agent()
    flood = Flood(here, 1 << 20)
    flood.steps(3)
    flood.session.flush(60.0, far=False)
    socket = str(places.place_of(here.url, RUN, here.name).socket)
    tier = PeerTier(Peer(socket, run=RUN), "ram")
    key = next(key for key in tier.list(f"{RUN}/") if "/base/" in key)
    sessions = [Session(socket, 5) for _ in range(3)]
    head = {
        "verb": "read", "tier": "ram", "key": key, "array": "s0/param", "first": 0, "count": 4,
    }  # fmt: skip
    for session in sessions:
        for call in session.calls:
            call.say(head)  # and reads nothing of the answer
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.5):
            for session in list(sessions):
                with suppress(OSError):
                    session.beat()

    beating = threading.Thread(target=beat, daemon=True)
    beating.start()
    try:
        while len(sessions) < IDLE:
            sessions.append(Session(socket, 0))
        pid, stored = here.pid(), flood.session.status().stored
        flood.steps(5)
        until(lambda: flood.session.status().stored >= stored + 5, "steps are stored meanwhile")
        assert here.pid() == pid
        began = time.monotonic()
        here.status()
        assert time.monotonic() - began < 10.0
    finally:
        stop.set()
        beating.join(timeout=10.0)
        for session in sessions:
            session.close()
    flood.steps(3)
    until(lambda: flood.caught_up(), "and afterwards")
    flood.session.close()
    tier.peer.close()
