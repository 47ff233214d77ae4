"""Compact and restore stream: their memory does not grow with the part."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20


def call(*arguments: object, timeout_s: float) -> list[float]:
    """Run the helper in a child; the numbers it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.attack.big", *map(str, arguments)], check=False,
        capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.split()]


def measure(root: Path, state_mib: int, timeout_s: float) -> dict[str, list[float]]:
    """Most RssAnon in MiB, that before, peak RSS, seconds: of each verb."""
    url, elements = (root / "store").as_uri(), state_mib * MIB // 12 // MIB * MIB
    call("make", url, elements, timeout_s=timeout_s)
    found = {"restore": call("restore", url, root / "out.safetensors", timeout_s=timeout_s)}
    (root / "out.safetensors").unlink()
    found["compact"] = call("compact", url, timeout_s=timeout_s)
    return found


def test_a_part_of_a_quarter_gigabyte(tmp_path: Path) -> None:
    for verb, (most, before, _, _) in measure(tmp_path, 264, 200).items():
        assert most - before < 200, f"{verb} took {most - before} MiB"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_part_of_four_gigabytes(tmp_path: Path) -> None:
    found = measure(tmp_path, 4104, 1500)
    print(found)
    for verb, (most, before, _, _) in found.items():
        assert most < 1024, f"{verb} took {most} MiB"
        assert most - before < 200, f"{verb} took {most - before} MiB more than its imports"
