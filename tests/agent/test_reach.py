"""Where agents are reached: over lost connections, after deaths, at all addresses of a host."""

import os
import signal
import socket
from contextlib import suppress

import pytest

from adacheck_store.agent import places, reach
from adacheck_store.agent.places import Place
from adacheck_store.tiers.endpoint import Endpoint
from tests.agent.kit import Node, two
from tests.agent.trainer import RUN, open_session, reference
from tests.core.kit import begin, make_toy, train
from tests.waits import until


def exposed(node: Node) -> bool:
    """Whether the node's agent finds any chain in fewer hands than it should be.

    So does one that has not been told of a term yet: it knows nothing of hands.
    """
    status = node.status()
    return not status["term"] or any(chain["exposed"] for chain in status["chains"].values())


def reached(node: Node) -> str:
    """Where other nodes reach the node's agent."""
    return str(node.ask("who")["endpoints"][1])


def test_agents_that_both_die_meet_again(pair: tuple[Node, Node]) -> None:
    """Neither is told anything by the other meanwhile, and both may take any port."""
    here, other = pair
    other.kill()
    other.agent("--listen", "127.0.0.1:0")
    journal, toy = reference(0), make_toy()
    session = open_session(here.url, k=1, listen="127.0.0.1:0", domain="a", peers=(reached(other),))
    begin(session, toy, journal)
    train(session, toy, journal, 3)
    session.flush(30.0, far=False)
    assert not exposed(here)
    before = here.pid(), other.pid()
    here.kill()
    other.kill()
    other.agent("--listen", "127.0.0.1:0")

    def whole() -> bool:
        train(session, toy, journal, 1)
        with suppress(AssertionError):  # no agent of it answers yet
            return not exposed(here)
        return False

    until(whole, "what is trained is in two hands again")
    assert not {here.pid(), other.pid()} & set(before)
    session.flush(30.0, far=False)
    session.close()


def test_connection_that_is_lost_is_no_trainer_that_has_gone(pair: tuple[Node, Node]) -> None:
    """Who waits for an acknowledgement over a new one gets it, and no gap is left."""
    here, other = pair
    journal, toy = reference(0), make_toy()
    session = two(here, other)
    begin(session, toy, journal)
    train(session, toy, journal, 3)
    session.flush(30.0, far=False)
    os.kill(other.pid(), signal.SIGSTOP)
    pool = session.store.near.peer
    pool._session.end("cut")
    train(session, toy, journal, 1)  # waits until the stopped holder counts as dead
    session.flush(60.0, far=False)
    status = session.status()
    assert (status.stored, status.gap) == (4, "")
    session.close()


def test_port_of_the_one_before(tmp_path) -> None:
    place, any_port = Place(tmp_path), Endpoint.parse("tls://127.0.0.1:0")
    assert reach.again(any_port, place) == any_port
    for text in ("", "x", "0", "65536", "-1", "99999999999999999999"):
        place.port.write_text(text)
        assert reach.again(any_port, place) == any_port
    reach.remember(Endpoint.parse("tls://127.0.0.1:7070"), place)
    assert reach.again(any_port, place).port == 7070
    assert reach.again(Endpoint.parse("tls://127.0.0.1:8080"), place).port == 8080
    assert reach.again(place.socket, place) == place.socket


def test_port_that_somebody_else_has_by_now(here: Node) -> None:
    agent = here.agent("--listen", "127.0.0.1:0")
    port = Endpoint.parse(reached(here)).port
    agent.kill()
    agent.wait(30)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        here.agent("--listen", "127.0.0.1:0")
        assert Endpoint.parse(reached(here)).port not in (0, port)
    assert places.place_of(here.url, RUN, here.name).port.read_text() != str(port)


@pytest.mark.parametrize("meeting", ["", "127.0.0.1", "no.such.host.invalid"])
def test_all_addresses_are_told_as_one(meeting: str) -> None:
    """Others must reach it: 0.0.0.0 is to each of them its own host."""
    here = reach.told(Endpoint.parse("tls://0.0.0.0:7070"), meeting)
    assert (here.host, here.port) != ("0.0.0.0", 7070)
    with socket.create_server((here.host, 0)):
        pass  # it is an address of this host
    named = Endpoint.parse("tls://localhost:7070")
    assert reach.told(named, meeting) == named


def test_agent_at_all_addresses_says_where(here: Node) -> None:
    here.agent("--listen", "0.0.0.0:0")
    endpoint = Endpoint.parse(reached(here))
    assert endpoint.host != "0.0.0.0"
    socket.create_connection((endpoint.host, endpoint.port), 10.0).close()
