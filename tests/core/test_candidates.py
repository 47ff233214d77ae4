"""What a reader does without: damage, what went beneath it, and what merely does not answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from adacheck_store.candidates import _Planner
from adacheck_store.catalog import read_catalog
from adacheck_store.format.errors import TierUnavailableError
from adacheck_store.format.keys import parse_key
from adacheck_store.restore import restore_state
from adacheck_store.tiers.base import Tier
from tests.core.kit import Journal, KeptTier, begin, make_toy, session_on, train
from tests.core.test_based_anew import KEEP, WAIT_S, settled


def trained(near: Tier, far: Tier, journal: Journal, steps: int) -> None:
    """So many steps more, all of them in both tiers; bases at multiples of 8."""
    session, toy = session_on(near, far, KEEP), make_toy()
    begin(session, toy, journal)
    train(session, toy, journal, steps)
    settled(session, toy.step // 8 * 8)
    session.flush(WAIT_S)
    session.close()


def key_of(tier: Tier, kind: str, step: int) -> str:
    """The key of the newest record of a kind at a step."""
    keys = map(parse_key, tier.list("run/"))
    return max(str(key) for key in keys if (key.kind, key.step) == (kind, step))


def first(tier: Tier, name: str, work: Callable[[str], None]) -> Any:
    """A tier's call, before which something else happens."""
    call = getattr(tier, name)

    def called(key: str, *rest: Any) -> Any:
        work(key)
        return call(key, *rest)

    return called


def silence() -> None:
    """What a tier says that is down."""
    raise TierUnavailableError("the store does not answer")


@pytest.mark.parametrize("spoilt", ["list", "head"])
def test_what_does_not_answer_was_not_deleted(monkeypatch: pytest.MonkeyPatch, spoilt: str) -> None:
    """The far tier alone has the newest steps, and fails as a base of it goes and the tiers are
    looked at again: by its other base it gives the newest step when it answers."""
    near, far, journal = KeptTier("near"), KeptTier("far"), Journal()
    trained(near, far, journal, 5)
    trained(KeptTier("other"), far, journal, 6)
    base, delta, events = key_of(far, "base", 8), key_of(far, "delta", 9), list[str]()

    def read(key: str) -> None:
        if key == base and not events:
            events.append("read")
            far.delete([base])

    def look(key: str) -> None:
        if events == ["read"] and key in ("run/", delta):
            events.append("looked")
            silence()

    for name in ("read", "read_into"):
        monkeypatch.setattr(far, name, first(far, name, read))
    monkeypatch.setattr(far, spoilt, first(far, spoilt, look))
    restored = restore_state([near, far], "run")
    assert events == ["read", "looked"]
    assert not any("was deleted" in reason for reason in restored.reasons)
    assert restored.step == 11
    journal.assert_same(restored)


def test_a_tier_that_never_answered_hides_no_deletion(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead node's memory does not turn what went beneath a reader into damage."""
    dead, far, journal = KeptTier("dead"), KeptTier("far"), Journal()
    trained(far, far, journal, 11)
    base = key_of(far, "base", 8)
    monkeypatch.setattr(dead, "list", first(dead, "list", lambda _: silence()))
    for name in ("read", "read_into"):
        monkeypatch.setattr(far, name, first(far, name, lambda _: far.delete([base])))
    restored = restore_state([dead, far], "run")
    assert f"planned anew: {base} was deleted while this read it" in restored.reasons
    assert not any("no tier has" in reason for reason in restored.reasons)
    journal.assert_same(restored)


def test_what_other_ranks_met_counts_though_one_met_a_deletion() -> None:
    """What is gone is no damage; a damaged delta and a fold that differs are, after it too."""
    far, journal = KeptTier("far"), Journal()
    trained(far, far, journal, 21)
    read = partial(read_catalog, [far], "run")
    planner = _Planner(read(), None, "", read=read)
    plan = planner.plan()
    assert (plan.step, plan.parts[0].base.step) == (21, 16)
    gone, damaged = key_of(far, "base", 16), key_of(far, "delta", 20)
    far.delete([gone])
    harms = [{"why": "gone", "lost": [["far", gone]]}, {},
             {"why": "damaged", "lost": [["far", damaged]]}]  # fmt: skip
    planner.learn(plan, harms)
    plan = planner.plan()
    assert (plan.step, plan.parts[0].base.step) == (19, 8)
    assert {"gone", "damaged"} & set(plan.reasons) == {"damaged"}

    gone = key_of(far, "base", 8)
    far.delete([gone])
    harms = [{"why": "gone", "lost": [["far", gone]]}, {"why": "differs", "last_match": 17}]
    planner.learn(plan, harms)
    plan = planner.plan()
    assert (plan.step, plan.parts[0].base.step) == (17, 0)
    assert "differs" in plan.reasons
    assert sum("planned anew" in reason for reason in plan.reasons) == 2
