"""A trainer to be killed, in a process of its own."""

from __future__ import annotations

import logging
import multiprocessing
import traceback
from pathlib import Path

import torch

from adacheck_store.format.errors import AdaCheckError
from adacheck_store.tiers import failpoints
from tests.stateful.world import QUICK, World, journal

NODE = "c"
"""Its node: a process that reads an LMDB which it once wrote to keeps the writer's lock."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch._dynamo", "tests.stateful.child"])


def _train(store: Path, out: Path, failpoint: str, steps: int, seed: int) -> None:
    """Restore, train, flush; a failpoint may end it anywhere."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    for module, name, value in QUICK:
        setattr(module, name, value)
    log = journal(out)
    world = World(store, log)
    world.planted = True  # what was done to the store before is not known here
    world.trust_truth = False
    world.seed = seed
    failpoints.arm(failpoint)
    try:
        world.begin(NODE)
        world.append(NODE, steps)
        world.flush(NODE)
        world.close_all()
    except AdaCheckError:
        log(refused=traceback.format_exc())
    except BaseException:
        log(failed=traceback.format_exc())
        raise


def run(store: Path, out: Path, failpoint: str, steps: int, seed: int) -> int:
    """Have a trainer work on a store; its exit code, -9 if the failpoint was met."""
    process = _context.Process(target=_train, args=(store, out, failpoint, steps, seed))
    process.start()
    process.join(120)
    assert process.exitcode is not None, "the child hangs"
    return process.exitcode
