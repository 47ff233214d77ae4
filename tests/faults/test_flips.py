"""Random bits flip anywhere in a tier's files: no process dies, and nothing is invented."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.flipper import CAUGHT, CLEAN

pytestmark = pytest.mark.fault


def flip(name: str, path: Path, count: int, seed: int) -> None:
    """Run the flipper and judge each line of it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.flipper", name, str(path), str(count), str(seed)],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    bad = [line for line in lines if not line.startswith((f"0 {CLEAN} ", f"0 {CAUGHT} "))]
    assert not bad, "\n".join(bad)
    caught = sum(line.startswith(f"0 {CAUGHT} ") for line in lines)
    assert len(lines) == count
    assert caught >= count // 3, f"only {caught} of {count} flips were noticed"


@pytest.mark.parametrize("name", ["LmdbTier", "ZarrTier"])
def test_flipped_bits(tmp_path: Path, name: str) -> None:
    """30 bits."""
    flip(name, tmp_path, 30, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("name", ["LmdbTier", "ZarrTier"])
def test_many_flipped_bits(tmp_path: Path, name: str, seed: int) -> None:
    """500 bits of each tier."""
    flip(name, tmp_path, 50, seed)
