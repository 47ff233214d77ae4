"""A tier on a small file system that fills up, and one that is read-only.

Called as ``python -m tests.faults.full_disk TIER_CLASS FOLDER`` in a mount namespace of its own,
where it may mount what it likes at FOLDER.
"""

import subprocess
import sys
from pathlib import Path

from adacheck_store.format.errors import TierFullError, TierReadOnlyError
from tests.conformance.records import MIB, World, fetch, grads, same
from tests.conformance.tiers import SUITES, open_for_reading

DISK_MIB = 48


def mount(*arguments: str) -> None:
    """Mount something."""
    subprocess.run(["mount", *arguments], check=True)


def main(name: str, folder: Path) -> None:
    """Fill the disk, free some of it, go on; then read from a read-only mount."""
    mount("-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder))
    path = folder / "tier"
    suite, world = SUITES[name](), World()
    tier = suite.make(path)
    tier.put(world.roots())
    kept = []
    for step in range(1, 100):
        source = world.delta(step, grads(4 * MIB))
        try:
            tier.put([source])
        except TierFullError as exc:
            full = exc
            break
        kept.append(source)
    else:
        raise SystemExit("the disk never filled up")
    assert "needed" in full.message
    assert full.hint
    assert len(kept) >= 3
    assert same(tier, kept)
    assert source.key not in list(tier.list(""))
    # The same tier object goes on once there is room.
    tier.delete([old.key for old in kept[:3]])
    for _ in range(2):
        tier.put([source])
        assert same(tier, [*kept[3:], source])
    tier.sync()
    tier.close()
    tier = suite.make(path)
    assert same(tier, [*kept[3:], source])
    tier.close()
    mount("-o", "remount,ro", str(folder))
    reader = open_for_reading(name, path)
    assert same(reader, [*kept[3:], source])
    try:
        writer = suite.make(path)
        writer.put([world.delta(200)])
        raise SystemExit("wrote to a read-only file system")
    except TierReadOnlyError as exc:
        print(exc)
    fetch(reader, source.key)
    print("full, freed, filled again, read back read-only")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
