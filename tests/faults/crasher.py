"""A process that works on a tier until a failpoint kills it.

Called as ``python -m tests.faults.crasher TIER_CLASS PATH FAILPOINT...``. Prints ``put N``,
``synced N`` and ``deleted N`` once a step of its script is done, so that the parent knows what
must be there.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from adacheck_store.tiers import failpoints
from adacheck_store.tiers.base import RecordSource, Source, Tier
from adacheck_store.tiers.lmdb_check import quarantine
from tests.conformance.records import MIB, StreamSource, World
from tests.conformance.tiers import SUITES

TERM = "t000001-0123456789abcdef"
TOKEN = "0123456789abcdef"


def puts(big: int = 5 * MIB) -> Iterator[list[RecordSource]]:
    """What is put, the same bytes in every process; ``big`` is the size of large arrays."""
    rng, world = random.Random(7), World(term=TERM)
    yield [*world.roots()]
    yield [
        world.base(1, {"a/param": ("F32", rng.randbytes(2 * big)), "b/param": ("U8", b"x")}, TOKEN)
    ]
    for first in range(1, 9, 2):
        sources = []
        for step in (first, first + 1):
            size = rng.choice([100, 20_000, big])
            sources.append(world.delta(step, {"0/a/grad.raw": ("U8", rng.randbytes(size))}))
            sources.append(world.extra(step, {"rng": ("U8", rng.randbytes(500))}))
        yield sources
    yield [world.claim(1), world.claim(2)]


def main(name: str, path: Path, specs: list[str]) -> None:
    """Run the script."""
    for spec in specs:
        failpoints.arm(spec)
    tier = SUITES[name]().make(path)
    for number, sources in enumerate(puts()):
        tier.put(sources)
        print("put", number, flush=True)
        if number % 2:
            tier.sync()
            print("synced", number, flush=True)
    fail(tier)
    tier.delete([source.key for source in list(puts())[2]])
    print("deleted", 2, flush=True)
    tier.sync()
    tier.close()
    if name == "LmdbTier":
        quarantine(str(path))
        print("quarantined", 0, flush=True)


def fail(tier: Tier) -> None:
    """A put that fails midway and is withdrawn."""
    world = World(term=TERM)
    base = world.base(2, {"a/param": ("U8", bytes(9 * MIB))}, TOKEN)
    source: Source = StreamSource(base, fail_after=8)
    with suppress(InterruptedError):
        tier.put([source])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
