"""Flips random bits of a tier's files and lets a child process at each: it must not die of it.

Called as ``python -m tests.faults.flipper TIER_CLASS FOLDER COUNT SEED``. Prints one line a flip.
"""

import os
import random
import shutil
import struct
import sys
from pathlib import Path

from adacheck_store.format.errors import AdaCheckError
from adacheck_store.tiers.base import Tier
from tests.conformance.records import World, fetch, same
from tests.conformance.tiers import SUITES, open_for_reading
from tests.faults.crasher import TERM, puts

BIG = 1_200_000

CLEAN, CAUGHT, INVENTED, FAILED = 0, 10, 20, 30


def fill(tier: Tier) -> dict[str, str]:
    """Put records of all sizes, delete some; returns key -> id of what must be found."""
    world = World(term=TERM)
    for sources in puts(BIG):
        tier.put(sources)
    for first in range(100, 400, 100):
        tier.put([world.delta(step, {"0/a/grad.raw": ("U8", b"small")}, "p000001")
                  for step in range(first, first + 100)])  # fmt: skip
    tier.delete([source.key for source in list(puts(BIG))[2]])
    for step in range(500, 506):
        tier.put([world.delta(step, {"0/a/grad.raw": ("U8", bytes(3000))}, "p000002")])
    tier.sync()
    return {key: tier.head(key).id for key in tier.list("")}


def spots(name: str, folder: Path, rng: random.Random) -> tuple[Path, int]:
    """A file and the bit to flip: for LMDB half of them in metas and tree pages."""
    if name != "LmdbTier":
        file = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
        return file, rng.randrange(8 * file.stat().st_size)
    file = folder / "data.mdb"
    data = file.read_bytes()
    kind = rng.randrange(4)
    if kind == 0:
        return file, rng.choice([0, 4096]) * 8 + rng.randrange(152 * 8)
    if kind == 1:
        # Headers and node pointers of branch and leaf pages, as far as they can be told.
        pages = [
            at for at in range(8192, len(data), 4096)
            if struct.unpack_from("<Q", data, at)[0] == at // 4096
            and struct.unpack_from("<H", data, at + 10)[0] in (1, 2, 4)
        ]  # fmt: skip
        return file, (rng.choice(pages) * 8) + rng.randrange(
            4096 * 8 if rng.random() < 0.5 else 800
        )
    return file, rng.randrange(8 * len(data))


def examine(name: str, folder: Path, truth: dict[str, str], *, write: bool) -> int:
    """Open a damaged tier and read all of it; what verifies must be the truth."""
    outcome = CLEAN
    try:
        tier = SUITES[name]().make(folder) if write else open_for_reading(name, folder)
        keys = sorted({*tier.list(""), *truth})
    except AdaCheckError:
        return CAUGHT
    for key in keys:
        try:
            if truth.get(key) != fetch(tier, key).sealed.id:
                return INVENTED
        except AdaCheckError:
            outcome = CAUGHT
    if write:
        sources = list(puts(BIG))[2]
        try:
            tier.put(sources)
            tier.sync()
            if not same(tier, sources):
                return FAILED
        except AdaCheckError:
            outcome = CAUGHT
    tier.close()
    return outcome


def child(name: str, folder: Path, truth: dict[str, str], *, write: bool) -> int:
    """Examine in a child process; returns its status as the system gives it."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    try:
        status = examine(name, folder, truth, write=write)
    except BaseException as exc:
        print("unexpected", repr(exc), flush=True)
        status = FAILED
    os._exit(status)


def main(name: str, root: Path, count: int, seed: int) -> None:
    """Flip, examine, flip back."""
    sound = root / "sound"
    tier = SUITES[name]().make(sound)
    truth = fill(tier)
    tier.close()
    rng = random.Random(seed)
    assert child(name, sound, truth, write=False) == CLEAN
    every = 2 if name == "LmdbTier" else 6  # copying many files is slow
    folder = root / "damaged"
    shutil.copytree(sound, folder)
    for number in range(count):
        file, bit = spots(name, folder, rng)
        write = number % every == every - 1
        turn(file, bit)
        status = child(name, folder, truth, write=write)
        print(os.WTERMSIG(status), os.WEXITSTATUS(status), file, bit, f"write={write}", flush=True)
        if write:
            shutil.rmtree(folder)
            shutil.copytree(sound, folder)
        else:
            turn(file, bit)


def turn(file: Path, bit: int) -> None:
    """Flip one bit of a file."""
    with file.open("r+b") as handle:
        handle.seek(bit // 8)
        byte = handle.read(1)[0]
        handle.seek(bit // 8)
        handle.write(bytes([byte ^ 1 << bit % 8]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
