"""A process that holds an LMDB tier: as its writer, or by a read transaction that stays open.

Called as ``python -m tests.conformance.holder write|read PATH``; says ``ready``, then waits for
its standard input to end.
"""

import sys
from pathlib import Path

import lmdb

from adacheck_store.tiers.lmdb import LmdbTier


def main(how: str, path: Path) -> None:
    """Hold it."""
    if how == "write":
        tier = LmdbTier(path)
        print("ready", flush=True)
        sys.stdin.read()
        tier.close()
        return
    with lmdb.open(str(path), readonly=True, map_size=1 << 32) as env, env.begin() as txn:
        assert txn.stat()["entries"]
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
