"""What is not run for want of a device is counted and said, and is no skip."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "test_memory_given_up_unread_is_waited_for",
    "test_host_memory_is_pinned_where_a_device_copies_to_it",
)


@pytest.mark.parametrize("chosen", [(), ("-m", "gpu")])
def test_what_needs_a_device_is_said_where_there_is_none(chosen):
    """The run passes under --fail-on-skip; asked for gpu tests alone, it has none to run."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--fail-on-skip", *chosen,
         *(f"tests/gpu/test_seam.py::{name}" for name in TESTS)],
        cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": ""},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    empty = bool(chosen)
    wanted = pytest.ExitCode.NO_TESTS_COLLECTED if empty else pytest.ExitCode.OK
    assert done.returncode == wanted, done.stdout
    assert f"{len(TESTS)} gpu tests were not run (torch sees no CUDA device here)" in done.stdout
    assert ("2 passed" in done.stdout) != empty
    assert "skipped" not in done.stdout
