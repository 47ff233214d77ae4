"""Excuses: which ends are no deaths, said once, in the log, and never at the cost of an end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from adacheck_store.boundary import Link
from adacheck_store.catalog import read_catalog
from adacheck_store.config import Settings
from adacheck_store.excuse import Excuse
from adacheck_store.format.errors import (
    GroupError,
    ModelMismatchError,
    NotProvableError,
    TierError,
    TierFullError,
    TierUnavailableError,
)
from adacheck_store.format.record import Record
from adacheck_store.session import RunSession
from adacheck_store.store import open_store
from adacheck_store.terms import claim_term, read_log
from adacheck_store.tiers.memory import MemoryTier
from tests.core.kit import QUICK, BrokenTier, GateTier, Journal, begin, make_toy, train

ENDS: dict[str, tuple[BaseException | None, bool]] = {
    "no exception": (None, True),
    "exit 0": (SystemExit(0), True),
    "exit without a number": (SystemExit(), True),
    "exit 1": (SystemExit(1), False),
    "SIGTERM": (SystemExit(143), False),
    "Ctrl-C": (KeyboardInterrupt(), True),
    "a tier": (TierError("no room"), True),
    "another rank": (GroupError("rank 1: RuntimeError: CUDA out of memory"), False),
    "NaN": (AssertionError("loss is NaN"), False),
    "out of memory": (MemoryError(), False),
}


def excuses(tier: MemoryTier) -> list[str]:
    """All that are in a tier's log."""
    return [entry.excuse for entry in read_log(tier, "run") if getattr(entry, "excuse", "")]


@pytest.mark.parametrize("end", ENDS)
def test_what_ends_well(end: str) -> None:
    """The exception that is leaving decides; without a term nothing is said."""
    error, well = ENDS[end]
    tier = MemoryTier()
    nobody, excuse = Excuse(tier, "run"), Excuse(tier, "run")
    excuse.term = claim_term(tier, "run")
    for one in (nobody, excuse, excuse):
        try:
            if error is not None:
                raise error
        except BaseException:
            assert one.at_end(30)
        else:
            assert one.at_end(30)
    assert excuses(tier) == ["ended"] * well
    assert len(read_log(tier, "run")) == 1 + well


def test_a_tier_that_hangs_or_fails_keeps_nobody() -> None:
    """It is waited for no longer than was said; an error is logged."""
    gate, broken = GateTier(MemoryTier()), BrokenTier(MemoryTier())
    excuse = Excuse(gate, "run")
    excuse.term = claim_term(gate, "run")
    gate.gate.clear()
    assert not excuse.at_end(0.05)
    gate.gate.set()
    excuse = Excuse(broken, "run")
    excuse.term = claim_term(broken, "run")
    broken.fault = lambda keys: TierUnavailableError("gone")
    assert excuse.at_end(30)


@pytest.fixture
def url(tmp_path) -> str:
    """A store with a run of nine steps, whose trainer died."""
    found = f"file://{tmp_path}/store"
    toy, journal = make_toy(), Journal()
    session = RunSession.open(found, "run", settings=QUICK)
    begin(session, toy, journal)
    train(session, toy, journal, 9)
    session.flush(60)
    _die(session.close)
    return found


def _die(close: Callable[[], None]) -> None:
    """Close as a ``with`` does that an exception leaves."""
    try:
        raise AssertionError("loss is NaN")
    except AssertionError:
        close()


def _attempt(url: str, do: Callable[[RunSession], None] | None = None, **how: object) -> int:
    """An attempt that ends by an exception after ``do``; the step it began at."""
    session = RunSession.open(url, "run", settings=Settings(grace_s=0.0, max_deaths=2))
    try:
        toy = make_toy()
        restored = session.restore(**how)
        assert restored is not None
        if do is not None:
            do(session)
        session.start(toy.layout, start_step=0, base=toy.base, extra=toy.extra)
        return restored.step
    finally:
        _die(session.close)


def _excused(url: str) -> list[str]:
    with open_store(url) as store:
        return [claim.excuse for claim in read_catalog(store.tiers, "run").claims if claim.excuse]


def test_deaths_are_counted_and_the_rest_is_not(url: str) -> None:
    """A refusal is no death; a step that was asked for begins the count anew."""

    def refuse(session: RunSession) -> None:
        def wrong() -> None:
            raise ModelMismatchError("another model")

        session.together("load", wrong)

    def crash(session: RunSession) -> None:
        raise MemoryError

    def lose(session: RunSession) -> None:
        def gone() -> None:
            raise GroupError("rank 1 did not come")

        session.together("load", gone)

    assert _attempt(url) == 9
    with pytest.raises(GroupError):
        _attempt(url, lose)
    for _ in range(3):
        with pytest.raises(ModelMismatchError):
            _attempt(url, refuse)
    assert _attempt(url) == 8
    with pytest.raises(MemoryError):
        _attempt(url, crash)
    assert _attempt(url) == 2
    with pytest.raises(NotProvableError):
        _attempt(url, step=40)
    assert _attempt(url, step=2) == 2
    assert [_attempt(url), _attempt(url), _attempt(url)] == [2, 2, 1]
    assert [_attempt(url), _attempt(url)] == [0, 0]  # the oldest there is
    found = _excused(url)
    assert found[:3] == ["ModelMismatchError: another model"] * 3
    assert found[3:] == ["a step or term was asked for"] * 2


def test_a_session_that_ends_well_clears_the_count(url: str) -> None:
    """As a run that is finished, and started again."""
    assert _attempt(url) == 9
    session = RunSession.open(url, "run", settings=QUICK)
    assert session.restore() is not None
    session.close()
    assert _attempt(url) == 9
    assert _attempt(url) == 8
    assert _excused(url) == ["ended"]


def test_a_term_that_is_asked_for_has_no_ceiling(url: str) -> None:
    """It is the newest step of that branch."""
    with open_store(url) as store:
        (claim,) = read_catalog(store.tiers, "run").claims
    assert [_attempt(url), _attempt(url)] == [9, 9]
    assert _attempt(url, term=claim.term) == 9


def test_a_start_that_is_refused_is_no_death(url: str) -> None:
    """Also where nobody closes the session properly."""

    def refuse(session: RunSession) -> None:
        def full(link: Link) -> Record:
            raise TierFullError("no room for the first base")

        session.start(make_toy([(3,)]).layout, start_step=9, base=full, extra=full)

    for _ in range(3):
        with pytest.raises(TierFullError):
            _attempt(url, refuse)
    assert _attempt(url) == 9
    assert _excused(url) == ["TierFullError: no room for the first base"] * 3


def test_a_first_attempt_needs_no_excuse(url: str) -> None:
    """Its first step is exempt, so its log is as short as can be."""
    session = RunSession.open(url, "other", settings=QUICK)
    toy, journal = make_toy(), Journal()
    assert begin(session, toy, journal) is None
    train(session, toy, journal, 2)
    session.close()
    with open_store(url) as store:
        assert len(read_catalog(store.tiers, "other").claims) == 1
