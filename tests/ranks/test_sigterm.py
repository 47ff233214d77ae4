"""SIGTERM to some of the ranks: all stop at one boundary, and nobody waits for ever."""

import os
import shutil
import signal
import time

import pytest

from tests.ranks.worker import STEPS, Launcher, check_against

pytestmark = pytest.mark.fault

CODE = 128 + signal.SIGTERM
GRACE_S = 60.0


@pytest.fixture(scope="module", params=["ddp", "plain"])
def trained(request, tmp_path_factory):
    """A launcher of two ranks: with collectives in each step, and with none at all."""
    launcher = Launcher(tmp_path_factory.mktemp(request.param), request.param, 2)
    return launcher, launcher.reference()


def start(launcher, store, grace_s=GRACE_S, **options):
    """Two ranks that drain nothing by themselves."""
    given = {"sigterm_grace_s": grace_s, "base_every": 10_000, "object_lag": 10_000}
    return launcher.start(store, given={0: given, 1: given}, **options)


@pytest.mark.parametrize("signalled", [[0], [1], [1, 0]])
def test_all_ranks_stop_at_one_boundary(tmp_path, trained, signalled):
    """Whoever gets the signal, and when; one rank is slower, and its steps are not cut off.

    The signal comes while both wait in a step, so that none has ended before."""
    launcher, reference = trained
    store = tmp_path / "store"
    attempt = start(launcher, store, pause_s=0.05, slower={1: 2}, hold=3)
    attempt.until(3)
    before = time.monotonic()
    for rank in signalled:
        attempt.terminate(rank)
        time.sleep(0.2)  # one is told by the signal before the other
    attempt.gate.open()
    assert attempt.wait() == [CODE, CODE]
    assert time.monotonic() - before < GRACE_S / 2
    check_against(reference, attempt)
    last = [attempt.rows(rank)[-1]["step"] for rank in (0, 1)]
    assert last[0] == last[1] < STEPS
    shutil.rmtree(store / "lmdb")
    other = launcher.start(store, inspect=True, node="node-b")
    assert other.wait() == [0, 0]
    check_against(reference, other)
    assert other.every("restored") == last
    assert other.every("restored", "tiers") == [["zarr"], ["zarr"]]


@pytest.mark.parametrize("trained", ["plain"], indirect=True)
def test_rank_that_hangs_does_not_hold_the_others_beyond_the_grace(tmp_path, trained):
    """It is stopped in the middle of a step, and cannot say how far it goes."""
    launcher, reference = trained
    store = tmp_path / "store"
    attempt = start(launcher, store, grace_s=4.0, hold=4)
    attempt.until(4)
    os.kill(attempt.processes[1].pid, signal.SIGSTOP)
    before = time.monotonic()
    attempt.terminate(0)
    attempt.gate.open()
    attempt.processes[0].join(60)
    assert time.monotonic() - before <= 8.0  # four, and what a busy machine takes to end
    assert attempt.processes[0].exitcode == CODE
    seen = attempt.last_step()
    attempt.kill()
    other = launcher.start(store, inspect=True)
    assert other.wait() == [0, 0]
    check_against(reference, other)
    assert min(other.every("restored")) >= seen - 2
