"""Fresh memory: zeros that may be written to while their pages are being made."""

import gc
import os
import threading
import weakref

import pytest
import torch

from adacheck_store.trainer_hooks import fresh


def pages_thread() -> threading.Thread | None:
    """The thread that makes pages, if there is one."""
    return next((t for t in threading.enumerate() if t.name == "adacheck-pages"), None)


def wait_for_pages() -> None:
    """Until all are made."""
    while (thread := pages_thread()) is not None:
        thread.join(60)
        assert not thread.is_alive()


def resident(memory: torch.Tensor) -> int:
    """How many of its bytes have pages."""
    first = memory.data_ptr()
    found = 0
    with open("/proc/self/smaps", encoding="ascii") as lines:
        here = False
        for line in lines:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                low, high = (int(text, 16) for text in words[0].split("-"))
                here = low <= first < high
            elif here and words[0] == "Rss:":
                found += int(words[1]) << 10
    return found


def test_pages_are_made_without_being_asked_for() -> None:
    """By a thread, which ends; what was asked for first is made first."""
    memory = fresh.zeros(12 << 20, torch.float32, pinned=False)
    wait_for_pages()
    assert resident(memory) >= memory.nbytes
    assert not memory.any()
    again = fresh.zeros(2 << 20, torch.bfloat16, pinned=False)
    wait_for_pages()
    assert resident(again) >= again.nbytes


def test_what_is_written_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, while and after the pages of a place are made."""
    begun, go_on, populate = threading.Event(), threading.Event(), fresh.populate

    def slow(view: memoryview) -> None:
        begun.set()
        assert go_on.wait(60)
        populate(view)

    monkeypatch.setattr(fresh, "populate", slow)
    memory = fresh.zeros(3 << 20, torch.float32, pinned=False)
    assert begun.wait(60)
    memory[::1000] = 1.0
    go_on.set()
    memory[1::1000] = 2.0
    wait_for_pages()
    assert memory[::1000].eq(1).all()
    assert memory[1::1000].eq(2).all()
    assert memory.sum() == 3 * len(memory[::1000])


def test_memory_that_nobody_has_goes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread keeps nothing alive, and passes it over."""
    made: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def slow(view: memoryview) -> None:
        made.append(len(view))
        begun.set()
        assert go_on.wait(60)

    monkeypatch.setattr(fresh, "populate", slow)
    first = fresh.zeros(2 << 20, torch.uint8, pinned=False)
    assert begun.wait(60)
    second = fresh.zeros(8 << 20, torch.uint8, pinned=False)
    gone = weakref.ref(second.untyped_storage())
    del second
    gc.collect()
    assert gone() is None
    go_on.set()
    wait_for_pages()
    assert made == [2 << 20]
    assert not first.any()


def test_small_memory_starts_no_thread() -> None:
    """Its pages are there already, or are few."""
    memory = fresh.zeros(100, torch.float64, pinned=False)
    assert memory.dtype == torch.float64
    assert not memory.any()
    assert pages_thread() is None


def test_a_child_has_its_own() -> None:
    """What a forked child writes, as a loader's worker is one, is not seen here."""
    memory = fresh.zeros(1 << 20, torch.uint8, pinned=False)
    wait_for_pages()
    child = os.fork()
    if not child:
        memory.numpy()[:] = 7
        os._exit(0)
    os.waitpid(child, 0)
    assert not memory.any()
