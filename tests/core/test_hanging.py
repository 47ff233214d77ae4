"""Tiers that hang: training waits once, goes on exposed, recovers; flush and leaving are bounded.

What hangs is real where it can be: LMDB's own write lock, held by another process that is stopped.
"""

import contextlib
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import adacheck_store as ada
from adacheck_store import session as session_module
from adacheck_store import writer as writer_module
from adacheck_store.config import Settings
from adacheck_store.format.errors import NotProvableError, TierError
from adacheck_store.restore import restore_state
from adacheck_store.session import RunSession
from adacheck_store.store import open_store
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.wrappers import WrapperTier
from adacheck_store.trainer_hooks import attach as attach_module
from adacheck_store.trainer_hooks import leaving
from tests.core.kit import QUICK, Journal, begin, make_toy, session_on
from tests.core.kit import train as train_toy
from tests.hooks.helpers import adamw, bits, mlp, same, train

STALL_S, STALL_LONG_S = 0.8, 10.0
HOLDER = """
import sys, time, lmdb
env = lmdb.open(sys.argv[1], max_dbs=0, map_size=0)
with env.begin(write=True):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "BACKOFF_S", (0.02, 0.2))
    settings = functools.partial(Settings, stall_timeout_s=STALL_S)
    monkeypatch.setattr(attach_module, "Settings", settings)


@contextlib.contextmanager
def write_lock_held(store: Path) -> Iterator[Callable[[], None]]:
    """LMDB's write lock is held by another process, stopped by SIGSTOP; gives its release."""
    (folder,) = (path.parent for path in (store / "lmdb").glob("*/data.mdb"))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        os.kill(holder.pid, signal.SIGSTOP)

        def release() -> None:
            holder.kill()  # a stopped process dies of it too, with the lock in its hand
            holder.wait()

        yield release
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    """Wait for the background."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@contextlib.contextmanager
def takes(at_most_s: float) -> Iterator[None]:
    """Fail if it takes longer."""
    before = time.monotonic()
    yield
    took = time.monotonic() - before
    assert took <= at_most_s, f"{took:.2f} s"


def test_lmdb_that_hangs_delays_one_step_and_a_captured_base_follows(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    model = mlp(0)
    optimizer = adamw(model)
    marks: dict[int, Any] = {}

    def step() -> float:
        before = time.monotonic()
        train(model, optimizer)
        took = time.monotonic() - before
        marks[ckpt.step] = bits(model, optimizer)
        return took

    with ada.attach(model, optimizer, run="r", store=url) as ckpt:
        ckpt.restore()
        for _ in range(3):
            step()
        ckpt.flush(30)
        with write_lock_held(tmp_path / "store") as release:
            waits = [step() for _ in range(8)]
            assert STALL_S * 0.9 <= max(waits) <= STALL_S + 10.0
            assert sum(wait > STALL_S / 2 for wait in waits) == 1, waits
            status = ckpt.status()
            assert status.exposed
            assert (status.step, status.stored) == (11, 3)
            assert "training goes on" in status.last_error
            assert status.busy_s["writer"] >= STALL_S * 0.9
            with (
                takes(20.0),
                pytest.raises(TierError, match=r"lmdb has those up to 3, .*writer busy"),
            ):
                ckpt.flush(0.5)
            release()
        until(lambda: ckpt.status().in_flight == 0)
        for _ in range(6):
            step()
        ckpt.flush(30)
        status = ckpt.status()
        assert not status.exposed
        assert status.stored == status.drained == 17
    with open_store(url) as store:
        found = restore_state(store.tiers, "r")
        gone = [step for step in range(18) if not provable(store.tiers, step)]
    assert found.step == 17
    assert gone
    assert set(gone) <= set(range(4, 14)), "steps of the hang alone are lost"
    again = mlp(1)
    restored = adamw(again)
    with ada.attach(again, restored, run="r", store=url, resume="must") as ckpt:
        assert ckpt.restore(17).step == 17
        same(bits(again, restored), marks[17])


def provable(tiers: Sequence[Tier], step: int) -> bool:
    """Whether a step can be restored."""
    try:
        restore_state(tiers, "r", step=step)
    except NotProvableError:
        return False
    return True


def left_while_it_hangs(store: Path, stack: contextlib.ExitStack, raising: bool) -> None:
    """Train a step that is stored, and one that is not; leave by an exception or without."""
    model = mlp(0)
    optimizer = adamw(model)
    with ada.attach(model, optimizer, run="r", store=store.as_uri()) as ckpt:
        ckpt.restore()
        train(model, optimizer)
        ckpt.flush(30)
        stack.enter_context(write_lock_held(store))
        train(model, optimizer)
        if raising:
            _ = 1 / 0


@pytest.mark.parametrize("raising", [False, True])
def test_leaving_while_lmdb_hangs_is_bounded_and_says_what_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, raising: bool
) -> None:
    """The user's own exception is what comes out, if there is one."""
    monkeypatch.setattr(leaving, "EXIT_FLUSH_S", 1.0)
    monkeypatch.setattr(leaving, "FAILED_FLUSH_S", 1.0)
    monkeypatch.setattr(session_module, "CLOSE_S", 1.0)
    before = {*threading.enumerate()}
    with contextlib.ExitStack() as stack:
        with takes(20.0), pytest.raises(ZeroDivisionError if raising else TierError) as raised:
            left_while_it_hangs(tmp_path / "store", stack, raising)
        told = "of 2 steps, tier lmdb has those up to 1"
        assert any("is left though not all is saved" in m and told in m for m in caplog.messages)
        if not raising:
            assert told in str(raised.value)
    for thread in {*threading.enumerate()} - before:
        thread.join(20)
        assert not thread.is_alive(), "it ends when the tier answers"


class HangingTier(WrapperTier):
    """A tier whose named calls hang while the gate is shut."""

    def __init__(self, inner: Tier, *calls: str) -> None:
        super().__init__(inner)
        self.gate = threading.Event()
        self.gate.set()
        for call in calls:
            setattr(self, call, functools.partial(self._late, call))

    def _late(self, call: str, *args: Any) -> Any:
        assert self.gate.wait(120)
        return getattr(self.inner, call)(*args)


def opened(
    tmp_path: Path, near: Sequence[str] = (), far: Sequence[str] = (), stall_s: float = STALL_S
) -> RunSession:
    """A session on a real store whose tiers' named calls can be made to hang."""
    store = open_store((tmp_path / "store").as_uri(), write=True)
    settings = dataclasses.replace(QUICK, stall_timeout_s=stall_s)
    return session_on(HangingTier(store.near, *near), HangingTier(store.far, *far), settings)


def test_a_sync_that_hangs_is_no_acknowledgement(tmp_path: Path) -> None:
    session = opened(tmp_path, near=["sync"])
    near: Any = session.store.near
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    train_toy(session, toy, journal, 3)
    session.flush(30)
    near.gate.clear()
    waits = []
    for _ in range(6):
        before = time.monotonic()
        train_toy(session, toy, journal, 1)
        waits.append(time.monotonic() - before)
    assert sum(wait > STALL_S / 2 for wait in waits) == 1, waits
    status = session.status()
    assert status.exposed
    assert status.stored == 3, "what is not synced does not count"
    with takes(20.0), pytest.raises(TierError, match="up to 3"):
        session.flush(0.3)
    near.gate.set()
    until(lambda: session.status().in_flight == 0)
    train_toy(session, toy, journal, 4)
    session.flush(30)
    assert not session.status().exposed
    session.close()
    with open_store((tmp_path / "store").as_uri()) as store:
        done = restore_state(store.tiers, "run")
    assert done.step == 13
    journal.assert_same(done)


@pytest.mark.parametrize("calls", [("head", "list", "read"), ("put",), ("sync",), ("delete",)])
def test_a_far_tier_that_hangs_holds_up_no_step_and_no_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: tuple[str, ...]
) -> None:
    """What waits are the threads that drain and prune, and no others; flush and close do not."""
    monkeypatch.setattr(session_module, "CLOSE_S", 1.0)
    session = opened(tmp_path, far=calls, stall_s=STALL_LONG_S)
    far: Any = session.store.far
    toy, journal = make_toy(), Journal()
    begin(session, toy, journal)
    train_toy(session, toy, journal, 8)
    session.flush(30)
    until(lambda: session.status().base == 8)
    far.gate.clear()
    for base in (16, 24, 32):
        with takes(STALL_LONG_S):
            train_toy(session, toy, journal, 8)
        until(lambda base=base: session.status().base == base)
    status = session.status()
    assert (status.exposed, status.gap) == (False, "")
    until(lambda: {*session.status().busy_s} in ({"drain"}, {"prune"}, {"drain", "prune"}))
    if calls != ("delete",):
        with takes(STALL_LONG_S), pytest.raises(TierError, match=r"those up to .* busy for"):
            session.flush(0.5)
    far.gate.set()
    session.flush(30)
    assert session.status().drained == 32
    train_toy(session, toy, journal, 4)
    far.gate.clear()
    train_toy(session, toy, journal, 4)
    with takes(STALL_LONG_S):
        session.close()
    far.gate.set()
    with open_store((tmp_path / "store").as_uri()) as store:
        done = restore_state(store.tiers, "run")
    assert done.step == 40
    journal.assert_same(done)
