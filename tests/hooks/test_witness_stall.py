"""What a rank witnesses while its tier hangs, or where a step of its own could not be kept."""

import dataclasses
import logging
import threading
from typing import Any

import pytest
import torch

import adacheck_store as ada
from adacheck_store.format.bodies import decode_extra
from adacheck_store.session import RunSession
from adacheck_store.store import Store
from adacheck_store.tiers.memory import MemoryTier
from adacheck_store.trainer_hooks.copies import Landing
from adacheck_store.trainer_hooks.detection import Detection
from tests.core.kit import GateTier
from tests.hooks.helpers import adamw, mlp, train

SHARED = {("p000000", "", name): "0.1" for name in ("0.bias", "0.weight", "3.bias")}
FOUND_AT = 2
STALL_S = 0.05
WAIT_S = 60.0


class Rank:
    """A rank in training, alone in its store; all copies are equal at `FOUND_AT`, and ``again``."""

    def __init__(self, patch: pytest.MonkeyPatch, *, window: int = 2, again: int = -1) -> None:
        self.tier = GateTier(MemoryTier("near"))

        def opened(store: str, run: str, *, settings: Any, **options: Any) -> RunSession:
            soon = dataclasses.replace(settings, stall_timeout_s=STALL_S)
            return RunSession(Store("memory://x", self.tier, self.tier), run, soon)

        def agreed(detection: Detection, step: int) -> Any:
            return SHARED if step in (FOUND_AT, again) else None

        patch.setattr(RunSession, "open", opened)
        patch.setattr(Detection, "agreed", agreed)
        self.model = mlp(norm=False, dropout=0.0)
        self.optimizer = adamw(self.model)
        self.ckpt = ada.attach(
            self.model, self.optimizer, run="r", store="memory://x", window=window, base_every=100
        )
        self.ckpt.restore()
        torch.manual_seed(5)

    def train(self, steps: int) -> None:
        """So many steps, each of them stored."""
        for _ in range(steps):
            train(self.model, self.optimizer)
            self.ckpt.flush(WAIT_S)

    def hang(self, steps: int) -> None:
        """So many steps while the tier does not answer; then flush, as at the end of a run."""
        self.tier.gate.clear()
        for _ in range(steps):
            train(self.model, self.optimizer)
        self.tier.gate.set()
        self.ckpt.flush(WAIT_S)

    def end(self) -> dict[int, tuple[int, Any]]:
        """Of each step that was stored since copies were found: since when, and the digests."""
        told = {}
        for key in self.tier.list("r/"):
            head = self.tier.head(key).head
            if head.kind == "extra" and head.step >= FOUND_AT:
                witness = decode_extra(head).tree["witness"]
                digests = head.array(witness["digests"].array).digests
                told[head.step] = witness["since"], digests
        self.ckpt.close()
        return told


@pytest.mark.parametrize("given_up", [1, 4])
def test_what_is_given_up_in_a_stall_is_witnessed(monkeypatch, given_up):
    """The base that a flush stores then, and all after it, are told as by ranks without a stall."""
    calm = Rank(monkeypatch)
    calm.train(7 + given_up)
    known = calm.end()
    rank = Rank(monkeypatch)
    rank.train(3)
    rank.hang(2 + given_up)
    rank.train(2)
    told = rank.end()
    assert sorted(known.keys() - told.keys()) == list(range(6, 5 + given_up))
    assert told == {step: known[step] for step in told}
    assert {since for since, _ in told.values()} == {FOUND_AT}
    assert len(set(told.values())) == len(told)


def test_a_look_that_is_given_up_leaves_those_before_it_as_they_were(monkeypatch):
    """They wait to be stored when all are found equal: theirs are the witnesses before that."""
    calm = Rank(monkeypatch, window=3, again=7)
    calm.train(9)
    known = calm.end()
    rank = Rank(monkeypatch, window=3, again=7)
    rank.train(3)
    rank.hang(5)
    rank.train(1)
    told = rank.end()
    assert sorted(told) == [2, 3, 4, 5, 6, 8, 9]
    assert told == {step: known[step] for step in told}
    assert [told[step][0] for step in (5, 6, 8)] == [FOUND_AT, FOUND_AT, 7]


def test_what_was_not_captured_is_not_known(monkeypatch, caplog):
    """A rank says so, in its extra and in the log, for a flush stores what is not restored."""
    caplog.set_level(logging.WARNING)
    rank = Rank(monkeypatch)
    rank.train(3)
    rank.ckpt.capture_failed(RuntimeError("no room"))
    rank.train(2)
    told = rank.end()
    assert [told[step][0] for step in (3, 4, 5)] == [FOUND_AT, -1, -1]
    assert [text for text in caplog.messages if "step 4 is kept, but is not restored" in text]


def test_two_threads_that_read_one_buffer_both_wait_for_it():
    """In a stall the training thread reads what the writer reads."""

    class Mark:
        """The end of a copy, which somebody waits for already."""

        waited, over = threading.Semaphore(0), threading.Event()

        def synchronize(self) -> None:
            """Wait for the copy."""
            self.waited.release()
            assert self.over.wait(WAIT_S)

    landing = Landing()
    landing._events = [Mark()]
    threads = [threading.Thread(target=landing.settle) for _ in range(2)]
    threads[0].start()
    assert Mark.waited.acquire(timeout=WAIT_S)
    threads[1].start()
    assert Mark.waited.acquire(timeout=WAIT_S)
    Mark.over.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert not landing._events
