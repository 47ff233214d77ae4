"""Two agents: what one is given the other has too, before the trainer hears that it is held."""

import shutil

import pytest

from adacheck_store.format.errors import TermError, UsageError
from adacheck_store.session import RunSession
from tests.agent.kit import Node, two
from tests.agent.trainer import RUN, open_session, reference
from tests.core.kit import Journal, begin, make_toy, train
from tests.core.toy import Toy
from tests.waits import until


def train_refused(session: RunSession, toy: Toy) -> str:
    """One step; what refuses it, empty if nothing does."""
    try:
        train(session, toy, Journal(), 1)
    except TermError as error:
        return str(error)
    return ""


def newest(node: Node) -> int:
    """The newest step of the part that a node can produce."""
    return node.status()["chains"]["p000000"]["newest_step"]


def test_what_is_stored_survives_a_node(pair: tuple[Node, Node]) -> None:
    here, other = pair
    journal = reference(60)
    session, toy = two(here, other), make_toy()
    begin(session, toy, journal)
    for _ in range(30):
        train(session, toy, journal, 1)
        stored = session.status().stored
        assert newest(other) >= stored
    session.flush(30.0, far=False)
    assert session.status().stored == newest(other) == 30
    until(lambda: here.status()["watermark"] == other.status()["watermark"] == 29, "the watermark")
    chains = here.status()["chains"]
    assert all(set(chain["holders"]) == {"a", "b"} for chain in chains.values())
    assert not any(chain["exposed"] for chain in chains.values())
    session.close()
    here.kill()  # with everything on its node, and the far tier
    here.burn_disk()
    shutil.rmtree(here.store / "objects" / RUN)
    session, toy = two(here, other), make_toy()
    found = begin(session, toy, journal)
    assert found is not None
    journal.assert_same(found)
    assert found.step == 30
    assert set(found.tiers) == {"agent b"}
    train(session, toy, journal, 10)
    session.flush(30.0, far=False)
    assert session.status().stored == newest(other) == newest(here) == 40
    session.close()


def test_lost_holder_is_said_and_seeded_anew(pair: tuple[Node, Node]) -> None:
    here, other = pair
    journal = reference(0)
    session, toy = two(here, other), make_toy()
    begin(session, toy, journal)
    train(session, toy, journal, 12)
    session.flush(30.0, far=False)
    other.kill()
    other.burn_disk()
    train(session, toy, journal, 4)  # the first of them waits until the holder counts as dead
    session.flush(30.0, far=False)
    assert session.status().stored == 16
    status = here.status()
    assert all(chain["exposed"] for chain in status["chains"].values())
    until(lambda: session.status().degraded, "the trainer is told")
    assert not status["chains"]["p000000"]["holders"]["b"]["live"]
    assert status["watermark"] <= 12  # what the holder may come back for stays
    other.agent()
    until(lambda: other.status()["chains"].get("p000000", {}).get("newest_step") == 16, "seeded")
    until(lambda: not any(c["exposed"] for c in here.status()["chains"].values()), "two again")
    until(lambda: not session.status().degraded, "the trainer is told of that too")
    train(session, toy, journal, 10)
    session.flush(30.0, far=False)
    session.close()
    here.kill()
    here.burn_disk()
    shutil.rmtree(here.store / "objects" / RUN)
    session, toy = two(here, other), make_toy()
    found = begin(session, toy, journal)
    assert found is not None
    journal.assert_same(found)
    assert (found.step, set(found.tiers)) == (26, {"agent b"})
    session.close()


def test_too_few_domains_are_refused(here: Node) -> None:
    few = r"k=1 needs 2 failure domains, and there are 1: a \(host .*Agents\(allow_degraded=True\)"
    with pytest.raises(UsageError, match=few):
        open_session(here.url, k=1)
    session, toy = open_session(here.url, k=1, allow_degraded=True), make_toy()
    begin(session, toy, reference(0))
    train(session, toy, reference(0), 3)
    session.flush(30.0, far=False)
    assert here.status()["chains"]["p000000"]["exposed"]
    session.close()


def test_older_term_is_fenced(pair: tuple[Node, Node]) -> None:
    here, other = pair
    journal = reference(60)
    old, toy = two(here, other), make_toy()
    begin(old, toy, journal)
    train(old, toy, journal, 5)
    old.flush(30.0, far=False)
    new, second = two(here, other), make_toy()
    found = begin(new, second, journal)
    assert found is not None
    assert found.step == 5
    train(new, second, journal, 3)
    new.flush(30.0, far=False)
    refused = until(lambda: train_refused(old, toy), "the older term is refused")
    assert "t000002" in refused
    old.close()
    assert new.status().stored == 8
    new.close()
