"""A trainer to be killed, in a process of its own."""

from __future__ import annotations

import logging
import multiprocessing
import traceback
from pathlib import Path

import torch

from adacheck_store.format.errors import AdaCheckError
from adacheck_store.tiers import failpoints
from tests.s3.server import OWNER, use
from tests.stateful.places import Place, find
from tests.stateful.trainers import QUICK
from tests.stateful.truth import journal
from tests.stateful.world import World

NODE = "c"
"""Its node: a process that reads an LMDB which it once wrote to keeps the writer's lock."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch._dynamo", "tests.stateful.child"])


def _train(url: str, cache: str, out: Path, failpoint: str, steps: int, seed: int) -> None:
    """Restore, train, flush; a failpoint may end it anywhere."""
    use(OWNER)
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    for module, name, value in QUICK:
        setattr(module, name, value)
    log = journal(out)
    world = World(find(url, cache), log)
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


def run(place: Place, out: Path, failpoint: str, steps: int, seed: int) -> int:
    """Have a trainer work on a store; its exit code, -9 if the failpoint was met."""
    process = _context.Process(
        target=_train, args=(place.url, str(place.cache), out, failpoint, steps, seed)
    )
    process.start()
    process.join(120)
    assert process.exitcode is not None, "the child hangs"
    return process.exitcode
