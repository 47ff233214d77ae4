"""SIGTERM with a grace period: what was done is stored, the grace is kept whatever hangs."""

import os
import shutil
import signal
import threading
import time

import pytest

import adacheck_store as ada
from adacheck_store.format.errors import UsageError
from tests.core.test_hanging import write_lock_held
from tests.e2e.worker import Worker, check_against
from tests.hooks.helpers import adamw, mlp, new_url, train
from tests.waits import until

pytestmark = pytest.mark.fault

BUSY_S = 8.0
"""A grace of four seconds, and what a busy machine takes to end a process."""

FAR_OFF = 10_000
"""A lag at which nothing is drained unless something asks for it."""


def terminate(worker):
    """SIGTERM to a worker that waits in a step; how long it took to end, and the exit code."""
    before = time.monotonic()
    os.kill(worker.process.pid, signal.SIGTERM)
    worker.gate.open()
    code = worker.wait(120)
    return time.monotonic() - before, code


def start(tmp_path, **options):
    """A worker that drains nothing by itself."""
    given = {"sigterm_grace_s": 60.0} | options.pop("given", {})
    return Worker(
        tmp_path / "w", (tmp_path / "store").as_uri(), base_every=FAR_OFF, object_lag=FAR_OFF,
        settled=True, given=given, hang=str(tmp_path / "hang"), **options,
    )  # fmt: skip


def restored_elsewhere(tmp_path, reference):
    """What another machine restores from the far tier alone."""
    shutil.rmtree(tmp_path / "store" / "lmdb")
    other = Worker(tmp_path / "o", (tmp_path / "store").as_uri(), node="node-b", inspect=True)
    assert other.wait() == 0
    check_against(reference, other)
    assert other.row("restored")["tiers"] == ["zarr"]
    return other.row("restored")["restored"]


def test_every_step_is_in_the_far_tier_at_the_end(tmp_path, reference):
    """It stops at the next boundary, long before the grace is over, with the signal's code."""
    worker = start(tmp_path, handler="notes", hold=5)
    worker.until(5)
    took, code = terminate(worker)
    assert code == 128 + signal.SIGTERM
    assert took < 30
    check_against(reference, worker)
    last = worker.last_step()
    assert last < 30, "it did not stop"
    assert [row for row in worker.rows() if "step" in row][-1]["handled"] == 1, "theirs is called"
    assert restored_elsewhere(tmp_path, reference) == last


def test_without_being_asked_the_signal_is_left_alone(tmp_path):
    """It dies of it at once, as any process."""
    worker = start(tmp_path, given={"sigterm_grace_s": 0.0}, hold=2)
    worker.until(2)
    assert terminate(worker)[1] == -signal.SIGTERM


def test_step_that_does_not_end_is_given_up_and_the_others_are_drained(tmp_path, reference):
    """The training thread never comes back to the interpreter: a collective may not, either."""
    worker = start(tmp_path, stuck=25, given={"sigterm_grace_s": 4.0})
    until(lambda: any("stuck" in row for row in worker.rows()), "it is stuck")
    took, code = terminate(worker)
    assert code == 128 + signal.SIGTERM
    assert took <= BUSY_S
    assert restored_elsewhere(tmp_path, reference) == 24


@pytest.mark.parametrize("tier", ["near", "far"])
def test_grace_is_kept_though_a_tier_hangs(tmp_path, reference, tier):
    """LMDB's lock is in a stopped process, or a put of an object does not come back."""
    store = tmp_path / "store"
    worker = start(tmp_path, given={"sigterm_grace_s": 4.0}, hold=4)
    worker.until(4)
    if tier == "near":
        with write_lock_held(store):
            took, code = terminate(worker)
    else:
        (tmp_path / "hang").touch()
        took, code = terminate(worker)
    assert (code, took <= BUSY_S) == (128 + signal.SIGTERM, True), took
    assert took > 2.0, "nothing hung"
    last = worker.last_step()
    again = Worker(tmp_path / "again", store.as_uri(), inspect=True)
    assert again.wait() == 0
    check_against(reference, again)
    assert again.row("restored")["restored"] >= (last if tier == "far" else 1)


def test_what_the_signal_breaks_in_the_loop_is_no_reason_to_lose_steps(tmp_path, reference):
    """SIGTERM comes to the loader's workers too, and their death is an exception in the loop."""
    worker = start(tmp_path, handler="raises", hold=3)
    worker.until(3)
    assert terminate(worker)[1] == 128 + signal.SIGTERM
    assert restored_elsewhere(tmp_path, reference) >= worker.last_step()


def test_handler_is_put_back_and_a_fork_is_no_trainer():
    """In the middle of a run ours is there; after it, theirs. A child dies of its own SIGTERM."""
    theirs = signal.getsignal(signal.SIGTERM)
    model = mlp(0)
    optimizer = adamw(model)
    with ada.attach(
        model, optimizer, run="r", store=new_url(), sigterm_grace_s=30.0
    ) as ckpt:  # fmt: skip
        assert signal.getsignal(signal.SIGTERM) == theirs, "nothing to save yet"
        ckpt.restore()
        assert signal.getsignal(signal.SIGTERM) != theirs
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writes, b"x")
            time.sleep(60)
            os._exit(0)
        assert os.read(reads, 1) == b"x"
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        os.close(reads)
        os.close(writes)
        time.sleep(0.2)
        for _ in range(3):
            train(model, optimizer)
        assert ckpt.step == 3
    assert signal.getsignal(signal.SIGTERM) == theirs
    assert signal.set_wakeup_fd(-1) == -1


def test_only_the_main_thread_can():
    """Elsewhere it is refused, before anything is made."""
    found = []

    def work():
        model = mlp(0)
        try:
            ada.attach(model, adamw(model), run="r", store=new_url(), sigterm_grace_s=1.0)
        except UsageError as error:
            found.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert "main thread" in found[0]
