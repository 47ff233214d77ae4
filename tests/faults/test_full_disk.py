"""A full disk and a read-only one are typed errors, and nothing stored suffers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.fault


@pytest.mark.parametrize("name", ["LmdbTier", "ZarrTier"])
def test_full_disk(tmp_path: Path, name: str) -> None:
    """On a small tmpfs, mounted in a namespace of its own."""
    alone = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    command = [sys.executable, "-m", "tests.faults.full_disk", name, str(tmp_path)]
    done = subprocess.run(
        [*alone, *command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "read back read-only" in done.stdout
