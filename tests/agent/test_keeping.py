"""gc, fsck and repair beside living agents and a trainer that goes on; then all are lost."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from adacheck_store.cli_kit import open_url
from adacheck_store.format.errors import RestoreError, TierBusyError
from adacheck_store.policy import Retention
from adacheck_store.restore import restore_state
from adacheck_store.store import open_for_reading
from adacheck_store.tools import agents, tag
from adacheck_store.tools.compact import compact
from adacheck_store.tools.findings import DAMAGE, Finding
from adacheck_store.tools.fsck import fsck
from adacheck_store.tools.gc import Ages, gc
from adacheck_store.tools.repair import repair
from tests.agent.kit import Node, Trainer, two
from tests.agent.trainer import RUN, open_session, reference
from tests.core.kit import begin, make_toy, train
from tests.tools.stores import flip, objects
from tests.waits import until

pytestmark = pytest.mark.fault
STEPS = 64


def damage(url: str) -> list[Finding]:
    """What fsck finds wrong, while all goes on."""
    with open_url(url, None) as store:
        return [row for row in fsck(store) if isinstance(row, Finding) and row.severity == DAMAGE]


def test_gc_beside_agents_and_a_trainer(pair: tuple[Node, Node]) -> None:
    """Floors never pass what agents acknowledge; what is left alone in the far tier is right."""
    here, other = pair
    journal, floors = reference(STEPS), set()
    session, toy = two(here, other), make_toy()
    begin(session, toy, journal)
    while toy.step < STEPS:
        train(session, toy, journal, 4)
        with open_url(here.url, None) as store:
            if toy.step > 16 and not list(tag.tags(store, RUN)):
                until(lambda: tagged(here), "the step is where a tool can read it")
            mark = here.status()["watermark"]
            rows = list(gc(store, rules=Retention(last=1, every=24), apply=True,
                           ages=Ages(grace_s=0.0)))  # fmt: skip
        for row in rows:
            if row.what == "floor" and row.tier == "zarr" and row.done == "raised":
                floors.add(row.step)
                assert row.step is not None
                assert row.step <= max(mark, here.status()["watermark"])
        assert not damage(here.url)
    session.flush(60.0)
    session.close()
    assert floors
    for node in pair:
        node.kill()
        node.burn_disk()
    shutil.rmtree(here.store / "lmdb", ignore_errors=True)
    assert not damage(here.url)
    with open_for_reading(here.url) as store:
        newest = restore_state(store.tiers, RUN)
        assert newest.step == STEPS
        journal.assert_same(newest)
        journal.assert_same(restore_state(store.tiers, RUN, step=9))


def test_a_tag_whose_base_is_damaged_does_not_fill_the_disk(here: Node) -> None:
    """The disk's floor goes on as if the far one had; agent and trainer say what is to be done."""
    journal, toy = reference(12), make_toy()
    here.agent()
    session = open_session(here.url)
    begin(session, toy, journal)
    train(session, toy, journal, 12)
    session.flush(60.0)
    until(lambda: tagged(here), "the step is where a tool can read it")
    (path,) = objects(here.store, "*/*/p000000/base/*000000000009*/**/c/0")[:1]
    flip(path, path.stat().st_size - 40)

    train(session, toy, journal, 12)

    def goes_on() -> bool:
        train(session, toy, journal, 4)
        session.flush(60.0)
        return here.status()["floors"]["lmdb"] >= 24

    until(goes_on, "the disk is pruned")
    assert here.status()["floors"]["far"] <= 8
    assert "compact --to 9" in here.status()["last_errors"]["floor"]["error"]
    until(lambda: "compact --to 9" in session.status().last_error, "the trainer says it")
    session.flush()  # what is to be done about a tag is no failure
    with open_url(here.url, None) as store:
        for row in compact(store, RUN, to=9):
            assert row.step == 9
    until(lambda: here.status()["floors"]["far"] >= 16, "the far tier is pruned")
    assert "floor" not in here.status()["last_errors"]
    until(lambda: not session.status().last_error, "nothing is to be done")
    session.close()


def tagged(node: Node) -> bool:
    """Give step 9 a tag, once the disk or the far tier has it."""
    try:
        with open_url(node.url, None) as store:
            return tag.add(store, "good", RUN, step=9).base
    except RestoreError:
        return False


def test_repair_from_an_agents_memory(here: Node) -> None:
    """The only right copy of a step is in the memory of an agent: it is put back, beside it."""
    trainer = Trainer(here, 12)
    trainer.reach(12)
    until(lambda: far_has(here, 12), "all is drained")
    shutil.rmtree(here.store / "lmdb")  # the agent goes on with what it has open
    (path,) = objects(here.store, "*/*/p000000/pack/*-000000000012-*/data/c/0")
    flip(path, path.stat().st_size - 40)
    assert not far_has(here, 12)
    with open_url(here.url, None) as store:
        rows = list(repair(store))
    assert {(row.tier, row.done) for row in rows} == {("zarr", "rebuilt")}
    trainer.kill()
    here.kill()
    shutil.rmtree(here.store / "lmdb", ignore_errors=True)
    assert far_has(here, 12), rows
    with open_for_reading(here.url) as store:
        found = restore_state(store.tiers, RUN)
    reference(12).assert_same(found)
    assert found.step == 12


def test_a_base_in_an_agents_lmdb(here: Node) -> None:
    """While the agent lives it is left to it; then it is written, and the next agent goes on."""
    trainer = Trainer(here, 13)
    trainer.reach(13)
    until(lambda: far_has(here, 13), "all is drained")
    with open_for_reading(here.url) as store:
        (tier,) = (tier.traits.name for tier in store.uppers)
        with pytest.raises(TierBusyError, match="pid"):
            list(compact(store, RUN, to=11, tier=tier))
    trainer.kill()
    here.kill()
    with open_for_reading(here.url) as store:
        (row,) = compact(store, RUN, to=11, tier=tier)
        assert (row.done, row.tier, row.step) == ("folded", tier, 11)
    assert not damage(here.url)
    trainer = Trainer(here, 40)
    trainer.reach(40)
    until(lambda: far_has(here, 40), "all is drained")
    assert not damage(here.url)
    with open_for_reading(here.url) as store:
        found = restore_state(store.tiers, RUN)
    reference(40).assert_same(found)
    trainer.kill()
    here.kill()
    assert not damage(here.url)


def test_repair_from_an_agent_of_another_node(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only right copy is with an agent that the one of this node knows of."""
    here, other = pair
    journal, toy = reference(12), make_toy()
    session = two(here, other)
    begin(session, toy, journal)
    train(session, toy, journal, 12)
    session.flush(60.0)
    assert far_has(here, 12)
    shutil.rmtree(here.store / "lmdb")  # the agents go on with what they have open
    (path,) = objects(here.store, "*/*/p000000/pack/*-000000000012-*/data/c/0")
    flip(path, path.stat().st_size - 40)
    assert not far_has(here, 12)
    real = agents.meet

    @contextmanager
    def meet(url: str, run: str) -> Iterator[agents.Met]:
        with real(url, run) as met:
            met.memories.clear()  # as if the own one had begun anew, empty
            yield met

    monkeypatch.setattr(agents, "meet", meet)
    with open_url(here.url, None) as store:
        rows = list(repair(store))
    session.close()
    assert {(row.tier, row.done) for row in rows} == {("zarr", "rebuilt")}
    assert far_has(here, 12), rows


def far_has(node: Node, step: int) -> bool:
    """Whether the far tier alone can produce a step."""
    with open_for_reading(node.url) as store:
        try:
            return restore_state([store.far], RUN).step >= step
        except RestoreError:
            return False
