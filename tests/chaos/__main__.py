"""``python -m tests.chaos SEED [ROUNDS]``: play a seed (10 rounds), and tell each."""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.chaos.play import play


def main(seed: int, count: int = 10) -> None:
    """Play, and print what came of it."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        print(play(seed, count, Path(folder), partial(print, flush=True)))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
