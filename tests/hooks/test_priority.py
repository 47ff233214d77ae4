"""The store's threads run behind training."""

import os
import threading

import torch

import adacheck_store as ada
from adacheck_store.duty import NICE


def nice(thread: int) -> int:
    """Its nice value."""
    return os.getpriority(os.PRIO_PROCESS, thread)


def test_background_threads_give_way() -> None:
    """All of them, and nobody else."""
    before = {thread.native_id for thread in threading.enumerate()}
    own = nice(threading.get_native_id())
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with ada.attach(model, optimizer, run="r", store="memory://priority") as ckpt:
        ckpt.restore()
        model(torch.zeros(1, 4)).sum().backward()
        optimizer.step()
        ckpt.flush()
        found = {t.name: t.native_id for t in threading.enumerate() if t.native_id not in before}
        found.pop("adacheck-pages", None)  # it may be done by now
        names = {"adacheck-writer", "adacheck-compact", "adacheck-drain", "adacheck-prune"}
        assert found.keys() == names
        for name, thread in found.items():
            assert nice(thread or 0) == min(own + NICE, 19), name
    assert nice(threading.get_native_id()) == own
