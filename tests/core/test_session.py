"""Sessions: terms, branches, fencing, gaps, stalls, and which tier can stand for which."""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from adacheck_store import duty as duty_module
from adacheck_store import writer as writer_module
from adacheck_store.catalog import read_catalog
from adacheck_store.config import Settings
from adacheck_store.drift import Drift
from adacheck_store.format.errors import (
    NotProvableError,
    OrderError,
    RestoreError,
    TermError,
    TierError,
    TierFullError,
    TierUnavailableError,
)
from adacheck_store.format.keys import parse_key
from adacheck_store.recovery import plan_restore
from adacheck_store.restore import restore_state
from adacheck_store.session import RunSession
from adacheck_store.store import open_store
from adacheck_store.terms import claim_term, put_floor, read_log
from adacheck_store.tiers.base import Tier
from tests.core.kit import (
    QUICK,
    BrokenTier,
    GateTier,
    Journal,
    KeptTier,
    begin,
    make_toy,
    session_on,
    train,
)
from tests.core.toy import Toy

WAIT_S = 120.0
KEEP = dataclasses.replace(QUICK, keep_bases=100)
"""Nothing is pruned."""


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "BACKOFF_S", (0.02, 0.2))


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh store of each kind."""
    return f"memory://{tmp_path}" if request.param == "memory" else f"file://{tmp_path}/store"


def reference(steps: int, **how: object) -> Journal:
    """An uninterrupted run."""
    toy, journal = make_toy(**how), Journal()
    journal.note(toy)
    for _ in range(steps):
        toy.train()
        journal.note(toy)
    return journal


def stored_state(url: str, **how: object):
    """What a reader restores."""
    with open_store(url) as store:
        return restore_state(store.tiers, "run", **how)


def until(condition, timeout_s: float = WAIT_S) -> None:
    """Wait for a condition of the background threads."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


# Terms and branches --------------------------------------------------------------------------


def test_three_terms_equal_an_uninterrupted_run(url: str) -> None:
    truth, journal = reference(31), Journal()
    for end in (13, 20, 31):
        toy = make_toy(seed=0 if end == 13 else 99)
        session = RunSession.open(url, "run", settings=KEEP)
        restored = begin(session, toy, journal)
        assert (restored is None) == (end == 13)
        if restored is not None:
            truth.assert_same(restored)
            assert restored.lost == 0
            assert restored.certificate.exactness == "exact"
        train(session, toy, journal, end - toy.step)
        session.close()
    last = stored_state(url)
    assert last.step == 31
    truth.assert_same(last)
    assert [entry.term[:7] for entry in read_log_of(url)] == ["t000001", "t000002", "t000003"]
    for step in range(32):
        truth.assert_same(stored_state(url, step=step))


def read_log_of(url: str) -> list:
    """Claims of the store."""
    with open_store(url) as store:
        return [claim for claim in read_catalog(store.tiers, "run").claims if not claim.excuse]


def test_a_restored_step_opens_a_branch_and_the_old_one_is_reached_by_name(url: str) -> None:
    settings = dataclasses.replace(QUICK, base_every=100)
    toy, old = make_toy(), Journal()
    session = RunSession.open(url, "run", settings=settings)
    begin(session, toy, old)
    train(session, toy, old, 20)
    first = session.status().term
    session.close()
    toy, new = make_toy(), Journal()
    session = RunSession.open(url, "run", settings=settings)
    restored = begin(session, toy, old, seed=5, step=12)
    assert restored is not None
    assert restored.step == 12
    new.at = dict(old.at)
    train(session, toy, new, 5)
    session.close()
    assert new.at[17][0] != old.at[17][0]
    for step in (17, 13, 12, 3):
        new.assert_same(stored_state(url, step=step))
    assert stored_state(url).step == 17
    with pytest.raises(NotProvableError, match="nearest provable steps: 16 and 17"):
        stored_state(url, step=20)
    for step in (20, 17, 12):
        old.assert_same(stored_state(url, step=step, term=first))
    session = RunSession.open(url, "run", settings=settings)
    toy = make_toy()
    restored = begin(session, toy, old, term=first)
    assert restored is not None
    assert restored.step == 20
    train(session, toy, old, 2)
    session.close()
    old.assert_same(stored_state(url))


def test_resume_must_and_never(url: str) -> None:
    session = RunSession.open(url, "run", settings=dataclasses.replace(QUICK, resume="must"))
    with pytest.raises(RestoreError, match="no history") as caught:
        session.restore()
    assert url in str(caught.value)
    session.close()
    assert read_log_of(url) == []
    toy, journal = make_toy(), Journal()
    session = RunSession.open(url, "run", settings=QUICK)
    begin(session, toy, journal)
    train(session, toy, journal, 9)
    first = session.status().term
    session.close()
    session = RunSession.open(url, "run", settings=dataclasses.replace(QUICK, resume="never"))
    toy, fresh = make_toy(seed=8), Journal()
    assert begin(session, toy, fresh) is None
    train(session, toy, fresh, 3)
    session.close()
    fresh.assert_same(stored_state(url))
    assert stored_state(url).step == 3
    journal.assert_same(stored_state(url, term=first))


def test_calls_out_of_order_are_refused(url: str) -> None:
    toy, journal = make_toy(), Journal()
    session = RunSession.open(url, "run", settings=QUICK)
    for call in (session.check, session.status, session.wants_base, session.flush):
        with pytest.raises(OrderError, match="has not started"):
            call()
    begin(session, toy, journal)
    with pytest.raises(OrderError, match="already restored"):
        session.restore()
    with pytest.raises(OrderError, match="already started"):
        session.start(toy.layout, start_step=0, base=toy.base, extra=toy.extra)
    train(session, toy, journal, 3)
    session.close()
    session = RunSession.open(url, "run", settings=QUICK)
    with pytest.raises(OrderError, match=r"restore\(\) was not called"):
        session.start(toy.layout, start_step=0, base=toy.base, extra=toy.extra)
    session.close()


def test_a_restore_that_failed_hides_no_history_and_may_be_tried_again(url: str) -> None:
    toy, journal = make_toy(), Journal()
    session = RunSession.open(url, "run", settings=QUICK)
    begin(session, toy, journal)
    train(session, toy, journal, 6)
    session.close()
    session = RunSession.open(url, "run", settings=QUICK)
    with pytest.raises(NotProvableError):
        session.restore(step=44)
    with pytest.raises(OrderError):
        session.start(toy.layout, start_step=0, base=toy.base, extra=toy.extra)
    restored = begin(session, toy, journal)
    assert restored is not None
    assert restored.step == 6
    train(session, toy, journal, 2)
    session.close()
    assert [claim.term[:7] for claim in read_log_of(url)] == ["t000001", "t000002"]
    journal.assert_same(stored_state(url))


# Fencing and claims --------------------------------------------------------------------------


def test_a_newer_term_on_another_node_fences_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/store"
    toy_a, a = make_toy(), Journal()
    monkeypatch.setenv("ADACHECK_NODE", "alpha")
    first = RunSession.open(url, "run", settings=QUICK)
    begin(first, toy_a, a)
    train(first, toy_a, a, 10)
    first.flush(WAIT_S)
    monkeypatch.setenv("ADACHECK_NODE", "beta")
    second = RunSession.open(url, "run", settings=QUICK)
    toy_b, b = make_toy(), Journal()
    b.at = dict(a.at)
    restored = begin(second, toy_b, b, seed=3)
    assert restored is not None
    assert restored.step == 10
    train(second, toy_b, b, 4)
    train(first, toy_a, a, 4)
    until(lambda: first._upkeep is not None and first._upkeep.fenced is not None)
    with pytest.raises(TermError, match="has taken over") as caught:
        train(first, toy_a, a, 1)
    assert "restore() in a new one" in str(caught.value)
    with pytest.raises(TermError):
        first.flush(WAIT_S)
    assert second.status().term in str(caught.value)
    second.check()
    second.flush(WAIT_S)
    first.close()
    second.close()
    last = stored_state(url)
    assert last.step == 14
    b.assert_same(last)
    beta = stored_state(url, step=12)
    b.assert_same(beta)


CHILD = """
import sys
from adacheck_store.session import RunSession
from adacheck_store.format.errors import AdaCheckError
try:
    RunSession.open(sys.argv[1], "run")
except AdaCheckError as error:
    print(type(error).__name__, error)
"""


def test_another_process_on_this_node_is_told_who_holds_the_tier(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    session = RunSession.open(url, "run", settings=QUICK)
    done = subprocess.run([sys.executable, "-c", CHILD, url], check=True, capture_output=True,
                          text=True, timeout=120)  # fmt: skip
    session.close()
    assert done.stdout.startswith("TierBusyError")
    assert str(os.getpid()) in done.stdout


def race(tiers: list[Tier], each: int) -> list[str]:
    """Claim from one thread per tier at once."""
    found: list[str] = []
    start = threading.Barrier(len(tiers))

    def work(tier: Tier) -> None:
        start.wait(10)
        for _ in range(each):
            found.append(str(claim_term(tier, "run")))

    threads = [threading.Thread(target=work, args=(tier,)) for tier in tiers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_claims_of_many_threads_are_all_different(url: str) -> None:
    with open_store(url, write=True) as store:
        found = race([store.far] * 4, 6)
        numbers = sorted(int(term[1:7]) for term in found)
        assert len(found) == 24
        assert len(set(numbers)) == 24
        claims = [entry.term for entry in read_log(store.far, "run")]
        assert sorted(claims) == sorted(found)
        assert [int(c[1:7]) for c in claims] == sorted(int(c[1:7]) for c in claims)


RACER = """
import json, sys
from adacheck_store.store import open_store
from adacheck_store.terms import claim_term
import os
os.environ["ADACHECK_NODE"] = sys.argv[2]
with open_store(sys.argv[1], write=True) as store:
    print(json.dumps([str(claim_term(store.far, "run")) for _ in range(8)]))
"""


def test_claims_of_two_processes_are_all_different(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    open_store(url, write=True).close()
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, url, node], stdout=subprocess.PIPE)
        for node in ("one", "two")
    ]
    found = [term for racer in racers for term in json.loads(racer.communicate(timeout=120)[0])]
    assert len({int(term[1:7]) for term in found}) == 16


def test_a_damaged_claim_stops_nobody_and_its_number_is_not_used_again() -> None:
    far = KeptTier("far")
    for _ in range(3):
        claim_term(far, "run")
    key = sorted(far.list("run/log/"))[-1]
    sealed, blocks = far._records[key]
    bad = dataclasses.replace(sealed.head, kind="delta")
    far._records[key] = (dataclasses.replace(sealed, head=bad), blocks)
    term = claim_term(far, "run")
    assert term.number >= 4
    assert len(read_log(far, "run")) == 3


# Gaps and stalls -----------------------------------------------------------------------------


@pytest.fixture
def pair() -> tuple[BrokenTier, KeptTier]:
    """A near tier that can fail, and a far one."""
    return BrokenTier(KeptTier("near")), KeptTier("far")


def settle(session: RunSession) -> None:
    """Wait until all that was handed over is stored or given up."""
    assert session._writer is not None
    assert session._writer.wait_stored(WAIT_S)


def test_a_failed_put_is_a_gap_that_a_captured_base_closes(
    pair: tuple[BrokenTier, KeptTier],
) -> None:
    near, far = pair
    session = session_on(near, far, KEEP)
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    train(session, toy, journal, 5)
    settle(session)
    near.fault = lambda keys: (
        TierFullError("no space") if any("/delta/" in k for k in keys) else None
    )
    train(session, toy, journal, 1)
    settle(session)
    status = session.status()
    assert status.exposed
    assert "no space" in status.gap
    assert "no space" in status.last_error
    assert "step=6" in status.last_error
    near.fault = lambda keys: None
    until(lambda: session.wants_base() is not None)
    assert session.wants_base() == {"reason": "no space", "from": 6}
    train(session, toy, journal, 1)
    settle(session)
    assert not session.status().exposed
    train(session, toy, journal, 12)
    session.flush(WAIT_S)
    session.close()
    for tiers in ([near, far], [near], [far]):
        done = restore_state(tiers, "run")
        assert done.step == 19
        journal.assert_same(done)
        assert done.plan.parts[0].base.step == 16
    with pytest.raises(NotProvableError, match="nearest provable steps: 5 and 7") as caught:
        restore_state([near, far], "run", step=6)
    assert "gap" in str(caught.value)
    journal.assert_same(restore_state([far], "run", step=7))


def test_flush_says_what_was_not_saved(pair: tuple[BrokenTier, KeptTier]) -> None:
    """A near tier that refuses to the end: flush must not look like success."""
    near, far = pair
    session = session_on(near, far, KEEP)
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    train(session, toy, journal, 5)
    settle(session)
    near.fault = lambda keys: TierFullError("no space")
    train(session, toy, journal, 3)
    with pytest.raises(TierFullError, match="no space"):
        session.flush(WAIT_S)
    near.fault = lambda keys: None
    session.close()


def test_a_base_for_a_step_that_is_stored_comes_without_its_extra(
    pair: tuple[BrokenTier, KeptTier],
) -> None:
    """The chain is mistrusted from a stored step on: the base closes the gap at that step."""
    near, far = pair
    session = session_on(near, far, KEEP)
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    train(session, toy, journal, 5)
    settle(session)
    assert session._writer is not None
    session._writer.ask_for_base("mistrusted", 4)
    session.append(toy.boundary(session.wants_base(now=True)))
    session.flush(WAIT_S)
    session.close()
    done = restore_state([near, far], "run")
    assert done.step == 5
    journal.assert_same(done)


def test_drained_is_what_the_far_tier_can_prove(pair: tuple[BrokenTier, KeptTier]) -> None:
    """A far tier that takes bases alone has drained nothing, and the near tier keeps it all."""
    _, far = pair
    near, broken = KeptTier("near"), BrokenTier(far)
    broken.fault = lambda keys: (
        TierFullError("no space") if any("/delta/" in k or "/extra/" in k for k in keys) else None
    )
    session = session_on(near, broken, dataclasses.replace(KEEP, keep_bases=1))
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    train(session, toy, journal, 20)
    settle(session)
    until(lambda: session.status().base == 16)
    time.sleep(0.2)
    assert session.status().drained < 1
    assert [s for s in range(1, 21) if provable_at(read_catalog([near], "run"), s)] == [
        *range(1, 21)
    ]
    broken.fault = lambda keys: None
    session.close()


def test_nothing_is_drained_that_the_far_tier_has_not_synced(
    pair: tuple[BrokenTier, KeptTier],
) -> None:
    """What was put and not synced may be gone with the power: it does not count."""
    near, far = pair
    session = session_on(near, far, KEEP)
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    session.flush(WAIT_S)
    sync = far.sync

    def fail() -> None:
        raise TierUnavailableError("the disk is gone")

    far.sync = fail
    before = session.status().drained
    train(session, toy, journal, 5)
    with pytest.raises(TierUnavailableError, match="the disk is gone"):
        session.flush(1.0)
    assert session.status().drained == before
    far.sync = sync
    session.flush(WAIT_S)
    assert session.status().drained == 5
    session.close()


def test_a_sync_that_fails_is_no_acknowledgement(pair: tuple[BrokenTier, KeptTier]) -> None:
    near, far = pair
    session = session_on(near, far)
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    sync = near.inner.sync

    def fail() -> None:
        near.inner.sync = sync
        raise TierUnavailableError("the disk is gone")

    near.inner.sync = fail
    train(session, toy, journal, 1)
    settle(session)
    assert session.status().stored < 1
    assert session.status().exposed
    until(lambda: session.wants_base() is not None)
    train(session, toy, journal, 4)
    session.flush(WAIT_S)
    session.close()
    done = restore_state([near, far], "run")
    assert done.step == 5
    journal.assert_same(done)
    with pytest.raises(NotProvableError):
        restore_state([near, far], "run", step=1)


def test_strict_raises_at_the_next_boundary(pair: tuple[BrokenTier, KeptTier]) -> None:
    near, far = pair
    session = session_on(near, far, dataclasses.replace(QUICK, strict=True))
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    near.fault = lambda keys: TierFullError("no space")
    train(session, toy, journal, 1)
    settle(session)
    with pytest.raises(TierFullError):
        session.check()
    session.close()


def test_a_base_made_for_a_smaller_gap_does_not_close_a_larger_one(
    pair: tuple[BrokenTier, KeptTier],
) -> None:
    near, far = pair
    session = session_on(near, far, dataclasses.replace(KEEP, base_every=50))
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    train(session, toy, journal, 9)
    settle(session)
    assert session._writer is not None
    session._writer.ask_for_base("first", 9)
    gap = session.wants_base()
    toy.train()
    journal.note(toy)
    boundary = toy.boundary(gap)
    session._writer.ask_for_base("the fold differs", 4)
    session.append(boundary)
    settle(session)
    wanted = session.wants_base()
    assert wanted is not None
    assert wanted["from"] == 4
    train(session, toy, journal, 3)
    session.flush(WAIT_S)
    session.close()
    done = restore_state([near, far], "run")
    assert done.step == 13
    catalog = read_catalog([near, far], "run")
    provable = [s for s in range(14) if provable_at(catalog, s)]
    assert provable == [0, 1, 2, 3, 11, 12, 13]


def provable_at(catalog, step: int) -> bool:
    """Whether the planner proves a step."""
    try:
        plan_restore(catalog, step)
    except NotProvableError:
        return False
    return True


def test_a_hanging_tier_delays_one_step_by_the_stall_timeout() -> None:
    near, far = GateTier(KeptTier("near")), KeptTier("far")
    settings = dataclasses.replace(KEEP, stall_timeout_s=0.4)
    session = session_on(near, far, settings)
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    train(session, toy, journal, 3)
    settle(session)
    near.gate.clear()
    waits = []
    for _ in range(8):
        before = time.monotonic()
        train(session, toy, journal, 1)
        waits.append(time.monotonic() - before)
    assert 0.35 <= max(waits) < 1.5
    assert sum(wait > 0.2 for wait in waits) == 1
    status = session.status()
    assert status.exposed
    assert status.in_flight == settings.window
    assert "did not answer in time" in status.gap
    assert "training goes on" in status.last_error
    assert session.wants_base() is None
    near.gate.set()
    settle(session)
    until(lambda: session.wants_base() is not None)
    train(session, toy, journal, 6)
    session.flush(WAIT_S)
    assert not session.status().exposed
    session.close()
    done = restore_state([near, far], "run")
    assert done.step == 17
    journal.assert_same(done)
    catalog = read_catalog([near, far], "run")
    assert [s for s in range(18) if provable_at(catalog, s)] == [*range(6), *range(12, 18)]


def test_a_fold_that_differs_ends_in_a_captured_base() -> None:
    """The trainer's fingerprints disagree with the chain: no base is published, a gap is told."""
    near, far = KeptTier("near"), KeptTier("far")
    session = session_on(near, far)
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    train(session, toy, journal, 10)
    session.flush(WAIT_S)
    until(lambda: session.status().base == 8)
    for step in range(11, 17):
        toy.train()
        journal.note(toy)
        session.append(toy.boundary(None, twist=int(step == 16)))
    until(lambda: session.wants_base() is not None)
    wanted = session.wants_base()
    assert wanted is not None
    assert "is not what the trainer had" in wanted["reason"]
    assert wanted["from"] == 16
    assert "is not what the trainer had" in session.status().gap
    train(session, toy, journal, 8)
    until(lambda: session.status().base == 24)
    session.flush(WAIT_S)
    session.close()
    for tiers in ([near, far], [far]):
        done = restore_state(tiers, "run")
        assert done.step == 24
        journal.assert_same(done)
        with pytest.raises(NotProvableError):
            restore_state(tiers, "run", step=16)
        assert all(b.step != 16 for b in bases(tiers))


def bases(tiers: list[Tier]) -> list:
    """All bases."""
    return [ref for refs in read_catalog(tiers, "run").bases.values() for ref in refs]


def test_a_mismatch_before_its_base_came_ends_the_chain_aloud() -> None:
    """Killed before the captured base: restore stops at the last match and says so."""
    near, far = KeptTier("near"), KeptTier("far")
    session = session_on(near, far, dataclasses.replace(QUICK, base_every=64))
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    train(session, toy, journal, 20)
    for step in range(21, 36):
        toy.train()
        journal.note(toy)
        session.append(toy.boundary(None, twist=int(step == 32)))
    session.close()
    done = restore_state([near, far], "run")
    assert done.step == 31  # so small an array is fingerprinted whole at every step
    assert done.lost == 4
    assert any("is not what the trainer had" in reason for reason in done.reasons)
    journal.assert_same(done)
    with pytest.raises(NotProvableError, match="is not what the trainer had"):
        restore_state([near, far], "run", step=33)


# Which tier stands for which -----------------------------------------------------------------


@pytest.mark.parametrize("wrong", [False, True])
def test_a_captured_base_is_compared_with_the_fold_that_leads_to_it(wrong: bool) -> None:
    """In class exact any difference, here of one bit, ends the chain at the base before."""
    near = KeptTier("near")
    session = session_on(near, near, dataclasses.replace(KEEP, base_every=100))
    toy, journal = make_toy(absent=0.0), Journal()
    toy.fingerprints = lambda twist=0: ()  # they would tell it too
    begin(session, toy, journal)
    train(session, toy, journal, 4)
    toy.train()
    if wrong:
        with torch.no_grad():
            toy.params[0].view(-1)[:1].view(torch.int32).bitwise_xor_(1)
    journal.note(toy)
    session.append(toy.boundary(based=True))
    if wrong:
        until(lambda: session.wants_base() is not None)
    else:
        session.flush(WAIT_S)
    status = session.status()
    if wrong:
        assert "the fold of the chain is not the captured base" in status.mismatch
    else:
        assert status.mismatch == ""
        assert status.drift == Drift(steps=5, absolute=0.0, ulps=0, equal=True)
    train(session, toy, journal, 1)
    session.flush(WAIT_S)
    session.close()
    steps = []
    for step in range(7):
        with contextlib.suppress(NotProvableError):
            journal.assert_same(restore_state([near], "run", step=step))
            steps.append(step)
    assert steps == ([0, 5, 6] if wrong else list(range(7)))


def test_each_tier_alone_restores_what_was_flushed(tmp_path: Path) -> None:
    url, journal = f"file://{tmp_path}/store", Journal()
    toy = make_toy()
    session = RunSession.open(url, "run", settings=QUICK)
    begin(session, toy, journal)
    train(session, toy, journal, 21)
    session.flush(WAIT_S)
    session.close()
    shutil.copytree(tmp_path / "store", tmp_path / "far")
    shutil.rmtree(tmp_path / "far" / "lmdb")
    far = stored_state(f"file://{tmp_path}/far")
    assert far.step == 21
    assert set(far.tiers) == {"zarr"}
    journal.assert_same(far)
    with open_store(url) as store:
        assert [tier.traits.name for tier in store.tiers] == ["lmdb", "zarr"]
        journal.assert_same(restore_state([store.tiers[0]], "run"))
    shutil.rmtree(tmp_path / "store" / "lmdb")
    session = RunSession.open(url, "run", settings=QUICK)
    toy = make_toy()
    restored = begin(session, toy, journal)
    assert restored is not None
    assert restored.step == 21
    train(session, toy, journal, 11)
    session.flush(WAIT_S)
    session.close()
    journal.assert_same(stored_state(url))
    shutil.rmtree(tmp_path / "store" / "lmdb")
    last = stored_state(url)
    assert last.step == 32
    journal.assert_same(last)


def test_what_a_term_left_undrained_the_next_one_drains() -> None:
    near, far, journal = KeptTier("near"), BrokenTier(KeptTier("far")), Journal()
    away = TierUnavailableError("the far tier is away")
    for end in (7, 12):
        toy = make_toy()
        session = session_on(near, far, KEEP)
        begin(session, toy, journal)
        far.fault = lambda keys: away
        train(session, toy, journal, end - toy.step)
        settle(session)
        session.close()
        far.fault = lambda keys: None
    assert not any(parse_key(key).step > 7 for key in far.list("run/") if "/delta/" in key)
    session = session_on(near, far, KEEP)
    toy = make_toy()
    begin(session, toy, journal)
    session.flush(WAIT_S)
    session.close()
    assert restore_state([far], "run").step == 12
    for step in range(13):
        journal.assert_same(restore_state([far], "run", step=step))


def test_another_layout_opens_with_a_captured_base(url: str) -> None:
    old, new = Journal(), Journal()
    toy = make_toy()
    session = RunSession.open(url, "run", settings=QUICK)
    begin(session, toy, old)
    train(session, toy, old, 10)
    first = session.status().term
    session.close()
    bigger = make_toy([*[tuple(p.shape) for p in toy.params], (9,)], seed=4)
    session = RunSession.open(url, "run", settings=QUICK)
    restored = session.restore()
    assert restored is not None
    bigger.step = restored.step
    session.start(bigger.layout, start_step=10, base=bigger.base, extra=bigger.extra)
    new.note(bigger)
    train(session, bigger, new, 3)
    session.close()
    for step in (13, 12, 11):
        new.assert_same(stored_state(url, step=step))
    old.assert_same(stored_state(url, step=10))
    old.assert_same(stored_state(url, term=first))


def test_a_term_opened_in_another_layout_and_killed_at_once_loses_nothing(url: str) -> None:
    """The fork step is the parent's; the next term must not hang on the child's opening base."""
    old, new = Journal(), Journal()
    toy = make_toy()
    session = RunSession.open(url, "run", settings=QUICK)
    begin(session, toy, old)
    train(session, toy, old, 10)
    session.close()
    bigger = make_toy([*[tuple(p.shape) for p in toy.params], (9,)], seed=4)
    session = RunSession.open(url, "run", settings=QUICK)
    session.restore()
    bigger.step = 10
    session.start(bigger.layout, start_step=10, base=bigger.base, extra=bigger.extra)
    session.close()
    session = RunSession.open(url, "run", settings=QUICK)
    restored = session.restore()
    assert restored is not None
    assert restored.step == 10
    old.assert_same(restored)
    session.start(bigger.layout, start_step=10, base=bigger.base, extra=bigger.extra)
    new.note(bigger)
    train(session, bigger, new, 5)
    session.close()
    last = stored_state(url)
    assert last.step == 15
    new.assert_same(last)


# Flush and upkeep ----------------------------------------------------------------------------


def test_flush_never_returns_before_the_far_tier_has_it() -> None:
    near, far = KeptTier("near"), KeptTier("far")
    session = session_on(near, far, Settings(base_every=1000, object_lag=1000, grace_s=0.0))
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    for _ in range(150):
        train(session, toy, journal, 1)
        session.flush(WAIT_S)
        kinds = {k.split("/")[-2] for k in far.list("run/") if parse_key(k).step == toy.step}
        assert {"delta", "extra"} <= kinds
        assert session.status().drained == toy.step
    session.close()


def test_flush_says_what_keeps_it() -> None:
    near, far = KeptTier("near"), BrokenTier(KeptTier("far"))
    session = session_on(near, far)
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    far.fault = lambda keys: TierUnavailableError("the far tier is away")
    train(session, toy, journal, 3)
    before = time.monotonic()
    for timeout_s in (0.3, None):
        with pytest.raises(TierUnavailableError, match="away"):
            session.flush(timeout_s)
    session.flush(WAIT_S, far=False)
    assert time.monotonic() - before < 20
    assert "away" in session.status().last_error
    far.fault = lambda keys: None
    session.flush(WAIT_S)
    session.close()
    journal.assert_same(restore_state([far], "run"))


def test_a_base_that_cannot_be_stored_does_not_stop_draining_and_pruning() -> None:
    near, far = BrokenTier(KeptTier("near")), KeptTier("far")
    session = session_on(near, far)
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    near.fault = lambda keys: TierFullError("full") if any("/base/" in k for k in keys) else None
    train(session, toy, journal, 30)
    until(lambda: session.status().drained >= 27)
    until(lambda: "full" in session.status().last_error)
    session.close()
    journal.assert_same(restore_state([far], "run"))


def test_a_hanging_far_tier_does_not_hold_up_close_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from adacheck_store import session as session_module

    monkeypatch.setattr(session_module, "CLOSE_S", 0.3)
    near, far = KeptTier("near"), GateTier(KeptTier("far"))
    session = session_on(near, far)
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    far.gate.clear()
    train(session, toy, journal, 12)
    with pytest.raises(TierError, match=r"near has those up to 12, .*drain busy"):
        session.flush(0.2)
    before = time.monotonic()
    session.close()
    assert time.monotonic() - before < 20
    far.gate.set()
    done = restore_state([near], "run")
    assert done.step == 12
    journal.assert_same(done)


def test_a_hanging_far_tier_holds_up_neither_compaction_nor_what_pruning_it_allows() -> None:
    near, far = KeptTier("near"), GateTier(KeptTier("far"))
    session = session_on(near, far, dataclasses.replace(QUICK, keep_bases=1))
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    train(session, toy, journal, 8)
    until(lambda: session.status().base == 8)
    session.flush(WAIT_S)
    until(lambda: deltas(near) == [8])
    train(session, toy, journal, 2)
    far.gate.clear()
    for base in (16, 24, 32):
        train(session, toy, journal, 8)
        until(lambda base=base: session.status().base == base)
    settle(session)
    assert session.status().drained < 16
    assert not session.status().exposed
    assert deltas(near) == list(range(8, 35)), "what the far tier lacks was pruned"
    far.gate.set()
    session.flush(WAIT_S)
    until(lambda: deltas(near) == [32, 33, 34])
    session.close()
    for tiers in ([near, far], [near], [far]):
        done = restore_state(tiers, "run")
        assert done.step == 34
        journal.assert_same(done)


def deltas(tier: Tier) -> list[int]:
    """Steps of the deltas that a tier holds."""
    return sorted(parse_key(key).step for key in tier.list("run/") if "/delta/" in key)


def test_a_prune_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duty_module, "BACKOFF_S", (0.01, 0.05))
    near, far = KeptTier("near"), KeptTier("far")
    delete, failures = near.delete, [TierUnavailableError("the disk is busy")] * 2

    def fail(keys) -> None:
        if failures:
            raise failures.pop()
        delete(keys)

    near.delete = fail
    session = session_on(near, far, dataclasses.replace(QUICK, keep_bases=1))
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    train(session, toy, journal, 10)
    session.flush(WAIT_S)
    until(lambda: deltas(near) == [8, 9, 10])
    until(lambda: not session.status().last_error)
    session.close()
    journal.assert_same(restore_state([near], "run"))


def test_floors_wait_for_a_newer_claim() -> None:
    """Between a claim and its manifest the older term must delete nothing the newer may need."""
    far = KeptTier("far")
    old = claim_term(far, "run")
    rival = claim_term(far, "run")
    floor = put_floor(far, "run", term=str(old), terms=(str(old),), step=5, kept=())
    assert floor is None
    own = put_floor(far, "run", term=str(rival), terms=(str(old), str(rival)), step=5, kept=())
    assert own is not None
    spared = put_floor(
        far, "run", term=str(old), terms=(str(old),), step=6, kept=(), ignore={str(rival)}
    )
    assert spared is not None


def test_a_toy_is_bit_stable() -> None:
    """The reference itself: the same seed gives the same run."""
    assert reference(5).at[5][0] == reference(5).at[5][0]
    assert isinstance(make_toy(), Toy)


def test_a_step_given_up_behind_the_base_that_closes_a_gap_opens_the_next() -> None:
    """Exposed, the base is on its way and hangs too: what is dropped behind it is not forgotten."""
    near, far = GateTier(KeptTier("near")), KeptTier("far")
    session = session_on(near, far, dataclasses.replace(KEEP, stall_timeout_s=0.2))
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    near.gate.clear()
    train(session, toy, journal, 4)
    near.gate.set()
    settle(session)
    until(lambda: session.wants_base() is not None)
    near.gate.clear()
    before = time.monotonic()
    train(session, toy, journal, 4)  # 5 is the base, 6 waits behind it, 7 and 8 are given up
    assert time.monotonic() - before < 20
    near.gate.set()
    settle(session)
    assert session.status().exposed
    assert session.wants_base() == {"reason": writer_module.UNANSWERED, "from": 7}
    train(session, toy, journal, 3)
    session.flush(WAIT_S)
    assert not session.status().exposed
    session.close()
    done = restore_state([near, far], "run")
    assert done.step == 11
    journal.assert_same(done)
    catalog = read_catalog([near, far], "run")
    assert [s for s in range(12) if provable_at(catalog, s)] == [0, 1, 2, 5, 6, 9, 10, 11]


def test_a_step_that_does_not_follow_the_last_is_never_linked_to_it(
    pair: tuple[BrokenTier, KeptTier],
) -> None:
    near, far = pair
    session = session_on(near, far, KEEP)
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    train(session, toy, journal, 3)
    toy.train()
    train(session, toy, journal, 1)
    settle(session)
    assert session.status().gap == "step 5 came after step 3"
    train(session, toy, journal, 4)
    session.flush(WAIT_S)
    session.close()
    done = restore_state([near, far], "run")
    assert done.step == 9
    journal.assert_same(done)
    catalog = read_catalog([near, far], "run")
    assert [s for s in range(10) if provable_at(catalog, s)] == [0, 1, 2, 3, 6, 7, 8, 9]
