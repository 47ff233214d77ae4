"""A trainer to be killed: ``python -m tests.stateful.child STORE JOURNAL FAILPOINT STEPS SEED``."""

import sys
from pathlib import Path

import torch

from adacheck_store.tiers import failpoints
from tests.stateful.world import World, journal


def main(store: str, out: str, failpoint: str, steps: int, seed: int) -> None:
    """Restore, train, flush; a failpoint may end it anywhere."""
    torch.set_num_threads(1)
    world = World(Path(store), journal(Path(out)))
    world.planted = True  # what was done to the store before is not known here
    world.trust_truth = False
    world.seed = seed
    failpoints.arm(failpoint)
    world.begin("a")
    world.append("a", steps)
    world.flush("a")
    world.close_all()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
