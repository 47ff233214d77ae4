"""Folds whose base goes while they need it: others delete, a tier does not answer."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from adacheck_store import duty as duty_module
from adacheck_store.format.errors import NotProvableError, TierUnavailableError
from adacheck_store.format.head import SealedHead
from adacheck_store.format.keys import parse_key
from adacheck_store.restore import restore_state
from adacheck_store.session import RunSession
from adacheck_store.store import Store
from adacheck_store.tools.compact import compact
from adacheck_store.tools.gc import Ages, gc
from adacheck_store.upkeep import Upkeep
from tests.core.kit import QUICK, Journal, KeptTier, begin, make_toy, session_on, train
from tests.core.toy import Toy

WAIT_S = 30.0
KEEP = dataclasses.replace(QUICK, keep_bases=100)
"""Nothing is pruned."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duty_module, "BACKOFF_S", (0.01, 0.05))


def until(done: Callable[[], bool]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def settled(session: RunSession, base: int) -> None:
    """Wait until a base is there; the chain was never distrusted on the way."""
    until(lambda: session.status().base == base or bool(session.status().mismatch))
    assert session.status().mismatch == ""


@pytest.mark.parametrize("throttled", [False, True])
def test_what_gc_leaves_is_folded_from(monkeypatch: pytest.MonkeyPatch, throttled: bool) -> None:
    """A base that somebody else writes may be all that a floor leaves of those before it, also
    where it cannot be read at once."""
    tier = KeptTier("memory")
    session = session_on(tier, tier, KEEP)
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    train(session, toy, journal, 11)
    settled(session, 8)
    session.flush(WAIT_S)
    store = Store("memory://given", tier, tier)
    assert [row.done for row in compact(store, "run", to=10)] == ["folded"]
    list(gc(store, "run", last=1, apply=True, ages=Ages(grace_s=0.0)))
    bases = [key.step for key in map(parse_key, tier.list("run/")) if key.kind == "base"]
    assert bases == [10]
    head, failed = tier.head, [not throttled]

    def late(key: str) -> SealedHead:
        folds = threading.current_thread().name == "adacheck-compact"
        if folds and "/base/000000000010" in key and not failed[0]:
            failed[0] = True
            raise TierUnavailableError("slow down")
        return head(key)

    monkeypatch.setattr(tier, "head", late)
    train(session, toy, journal, 7)
    settled(session, 16)
    assert failed[0]
    session.flush(WAIT_S)
    session.close()
    for step in range(10, 19):
        journal.assert_same(restore_state([tier], "run", step=step))
    with pytest.raises(NotProvableError):
        restore_state([tier], "run", step=9)


def test_a_base_beyond_the_next_multiple_serves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `compact` wrote when all was there is not disowned for a delta that is lost later."""
    tier, real, gate = KeptTier("memory"), Upkeep._compact, threading.Event()

    def late(self: Upkeep, step: int) -> None:
        assert step < 16 or gate.wait(WAIT_S)
        real(self, step)

    monkeypatch.setattr(Upkeep, "_compact", late)
    session = session_on(tier, tier, KEEP)
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    train(session, toy, journal, 8)
    settled(session, 8)
    train(session, toy, journal, 11)
    until(lambda: session.status().stored == 19)
    list(compact(Store("memory://given", tier, tier), "run", to=18))
    tier.delete([key for key in tier.list("run/") if key.endswith("/delta/000000000012")])
    gate.set()
    train(session, toy, journal, 6)
    settled(session, 24)
    session.flush(WAIT_S)
    session.close()
    for step in (*range(12), *range(18, 26)):
        journal.assert_same(restore_state([tier], "run", step=step))
    with pytest.raises(NotProvableError):
        restore_state([tier], "run", step=12)


def late_base(far: KeptTier) -> tuple[RunSession, Toy, Journal]:
    """A new node, which begins at step 11 with a base that the far tier alone has."""
    session, toy, journal = session_on(KeptTier("old"), far, KEEP), make_toy(), Journal()
    begin(session, toy, journal)
    train(session, toy, journal, 11)
    session.flush(WAIT_S)
    session.close()
    session = session_on(KeptTier("new"), far, KEEP)
    begin(session, toy, journal)
    return session, toy, journal


def ended(session: RunSession, far: KeptTier, journal: Journal) -> None:
    """A base comes at step 16, and none of 17 steps was lost."""
    settled(session, 16)
    session.flush(WAIT_S)
    session.close()
    for step in range(18):
        journal.assert_same(restore_state([far], "run", step=step))


def test_a_tier_that_does_not_answer_has_lost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The far tier fails while its base is folded."""
    far = KeptTier("far")
    session, toy, journal = late_base(far)
    asked: list[str] = []

    def fail(name: str) -> Callable[..., None]:
        def call(*_: object) -> None:
            asked.append(name)
            raise TierUnavailableError("the store does not answer")

        return call

    with monkeypatch.context() as patch:
        for name in ("list", "head", "read", "read_into"):
            patch.setattr(far, name, fail(name))
        train(session, toy, journal, 6)
        until(lambda: asked.count("list") > 1 or bool(session.status().mismatch))
    ended(session, far, journal)


def test_a_read_that_fails_once_has_lost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The far tier answers again as soon as it is looked at."""
    far = KeptTier("far")
    session, toy, journal = late_base(far)
    failed: list[str] = []

    def once(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(key: str, *rest: Any) -> Any:
            if "/base/" in key and not failed:
                failed.append(key)
                raise TierUnavailableError("the store does not answer")
            return call(key, *rest)

        return called

    for name in ("read", "read_into"):
        monkeypatch.setattr(far, name, once(getattr(far, name)))
    train(session, toy, journal, 6)
    ended(session, far, journal)
    assert failed
