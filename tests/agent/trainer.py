"""A toy that trains with an agent, in a process to be killed.

Called as ``python -m tests.agent.trainer URL STEPS [OPTIONS]``, with the options of an agent as
JSON; says ``ready`` and then each step
that all live holders have, on a line; waits for its end after the last.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

import torch

from adacheck_store.agent.crew import Agents
from adacheck_store.config import Settings
from adacheck_store.session import RunSession
from tests.core.kit import Journal, begin, make_toy

SETTINGS = Settings(base_every=8, object_lag=8, object_lag_s=0.5, grace_s=0.0, stall_timeout_s=5.0)
RUN = "run"
MEMORY = 512 << 20


def reference(steps: int) -> Journal:
    """An uninterrupted run."""
    toy, journal = make_toy(), Journal()
    journal.note(toy)
    for _ in range(steps):
        toy.train()
        journal.note(toy)
    return journal


def open_session(url: str, **how: Any) -> RunSession:
    """A session with an agent; ``how`` goes into `Agents`, and ``k`` into the settings."""
    settings = dataclasses.replace(SETTINGS, k=how.pop("k", 0))
    use = Agents(**({"memory": MEMORY} | how))
    return RunSession.open(url, RUN, settings=settings, agents=use)


def main(url: str, steps: int, how: str = "{}") -> None:
    """Restore if there is anything, and train."""
    torch.set_num_threads(1)
    session, toy = open_session(url, **json.loads(how)), make_toy()
    begin(session, toy, reference(100))
    print("ready", toy.step, flush=True)
    said = -1
    while toy.step < steps:
        gap = session.wants_base()
        toy.train()
        session.append(toy.boundary(gap))
        stored = session.status().stored
        if stored > said:
            said = stored
            print("stored", stored, flush=True)
    session.flush(30.0, far=False)
    print("stored", session.status().stored, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
