"""A process that reads a tier while another writes to it: verifies all it finds, prints how much.

Called as ``python -m tests.conformance.reader TIER_CLASS PATH``.
"""

import sys
import time
from pathlib import Path

from adacheck_store.format.record import verify_record
from tests.conformance.records import fetch
from tests.conformance.tiers import open_for_reading


def main(name: str, path: str) -> None:
    """Read everything a few times over."""
    tier = open_for_reading(name, Path(path))
    count = 0
    for _ in range(4):
        for key in tier.list(""):
            verify_record(fetch(tier, key))
            count += 1
        time.sleep(0.05)
    tier.close()
    print(count, "records verified")


if __name__ == "__main__":
    main(*sys.argv[1:])
