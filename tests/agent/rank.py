"""One rank of several: a toy of its own seed, with the agent of its node.

Called as ``python -m tests.agent.rank URL RANK SIZE PORT STEPS PAUSE_MS``; the listener at PORT is
the parent's. Says ``ready STEP TIERS SAME``, then ``stored STEP``, and waits for its end.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time

import torch
import torch.distributed as dist

from adacheck_store.agent.crew import Agents
from adacheck_store.arrays import byte_view
from adacheck_store.config import node_name
from adacheck_store.session import RunSession
from adacheck_store.trainer_hooks.ranks import find_group
from tests.agent.trainer import MEMORY, RUN, SETTINGS
from tests.core.kit import Journal, load, make_toy


def main(url: str, rank: int, size: int, port: int, steps: int, pause_ms: int) -> None:
    """Restore if there is anything, and train up to a step."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    toy, truth = make_toy(seed=rank), Journal()
    for _ in range(100):
        truth.note(toy)
        toy.train()
    toy = make_toy(seed=rank)
    use = Agents(memory=MEMORY, listen="127.0.0.1:0", domain=node_name())
    session = RunSession.open(
        url, RUN, settings=dataclasses.replace(SETTINGS, k=1), group=find_group(), agents=use
    )
    restored = session.restore()
    same, tiers = True, {}
    if restored is not None:
        state = restored.parts[session.part]
        load(toy, state, truth)
        found = {name: bytes(byte_view(t)) for name, t in state.arrays.items()}
        same, tiers = found == truth.at[restored.step][0], dict(restored.tiers)
    session.start(toy.layout, start_step=toy.step, base=toy.base, extra=toy.extra)
    print("ready", toy.step, json.dumps(sorted(tiers)), same, flush=True)
    while toy.step < steps:
        session.check()
        gap = session.wants_base()
        toy.train()
        session.append(toy.boundary(gap))
        time.sleep(pause_ms / 1000)
    session.flush(60.0, far=False)
    print("stored", session.status().stored, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
