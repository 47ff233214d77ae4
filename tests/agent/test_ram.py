"""One agent: what a trainer puts is in its memory, folded, drained, and restored from each."""

import time

from adacheck_store.restore import restore_state
from adacheck_store.store import open_store
from tests.agent.kit import Node, Trainer
from tests.agent.trainer import RUN, open_session, reference
from tests.core.kit import Journal, begin, make_toy, train
from tests.waits import until


def test_killed_trainer_restores_from_the_agents_memory(here: Node) -> None:
    journal = reference(60)
    trainer = Trainer(here, 30)
    trainer.reach(30)
    trainer.kill()
    session, toy = open_session(here.url), make_toy()
    found = begin(session, toy, journal)
    assert found is not None
    journal.assert_same(found)
    assert found.step == 30
    assert set(found.tiers) == {"agent a"}
    train(session, toy, journal, 12)
    session.flush(30.0)
    status = session.status()
    assert (status.stored, status.drained, status.last_error) == (42, 42, "")
    session.close()
    with open_store(here.url) as store:  # drained: the far tier alone gives it
        journal.assert_same(restore_state([store.far], RUN))


def test_agent_folds_up_to_the_watermark(here: Node) -> None:
    trainer = Trainer(here, 40)
    trainer.reach(40)

    def folded():
        status = here.status()
        part = status["chains"]["p000000"]
        assert part["replica_step"] <= status["watermark"] <= 40
        return part["replica_step"] >= 24 and part

    part = until(folded, "the replica follows")
    assert part["newest_step"] == 40
    trainer.kill()
    journal = reference(40)
    session, toy = open_session(here.url), make_toy()
    found = begin(session, toy, journal)
    journal.assert_same(found)
    assert found.certificate.base_origin == "replayed"
    assert found.certificate.base_step >= 24
    session.close()


def test_lower_tiers_give_what_a_dead_agent_held(here: Node) -> None:
    journal = reference(80)
    trainer = Trainer(here, 30)
    trainer.reach(30)
    until(lambda: not here.status()["drains"]["lmdb"]["waiting_records"], "all is in the LMDB")
    trainer.kill()
    here.kill()
    session, toy = open_session(here.url), make_toy()
    found = begin(session, toy, journal)
    journal.assert_same(found)
    assert found.step == 30
    train(session, toy, journal, 10)
    session.flush(30.0)
    session.close()
    here.kill()
    here.burn_disk()
    session, toy = open_session(here.url), make_toy()
    found = begin(session, toy, journal)
    journal.assert_same(found)
    assert (found.step, set(found.tiers)) == (40, {"zarr"})
    train(session, toy, journal, 5)
    session.flush(30.0, far=False)
    assert session.status().stored == 45
    session.close()


def test_agent_that_dies_is_started_again(here: Node) -> None:
    journal = Journal()
    session, toy = open_session(here.url), make_toy()
    begin(session, toy, journal)
    train(session, toy, journal, 10)
    session.flush(30.0, far=False)
    here.kill()

    def held() -> bool:
        train(session, toy, journal, 1)
        time.sleep(0.1)
        return session.status().stored == toy.step

    train(session, toy, journal, 1)
    until(held, "another agent holds it")
    session.flush(30.0)
    last = toy.step
    assert session.status().stored == last
    assert not session.status().exposed
    session.close()
    session, toy = open_session(here.url), make_toy()
    found = begin(session, toy, journal)
    journal.assert_same(found)
    assert found.step == last
    session.close()
