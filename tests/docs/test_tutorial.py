"""The tutorial, done as a newcomer does it: files written, commands run, in one folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks

TUTORIAL = ROOT / "docs" / "tutorial.md"
BLOCK_S = 240


@pytest.mark.timeout(900)
@pytest.mark.fault
def test_tutorial(tmp_path: Path) -> None:
    """Every block works; restored runs begin late; the last block compares the weights."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, call in {"python": "", "adacheck-store": " -m adacheck_store"}.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}"{call} "$@"\n')
        program.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT),
                   "PATH": f"{programs}:{os.environ['PATH']}"}  # fmt: skip
    folder = tmp_path / "newcomer"
    folder.mkdir()
    for block in blocks(TUTORIAL):
        if block.file:
            (folder / block.file).write_text(block.text)
            continue
        if block.language == "python":
            command = ["python", "-c", block.text]
        elif block.language == "sh":
            command = ["bash", "-euo", "pipefail", "-c", block.text]
        else:
            continue
        result = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=BLOCK_S,
            check=False,
        )  # fmt: skip
        assert result.returncode == 0, f"{block.text}\n{result.stdout}\n{result.stderr}"
    first = {name: (folder / name).read_text().splitlines()[0] for name in LOGS}
    assert first["first.log"] == "begins at step 0: a fresh run"
    assert 147 <= int(first["second.log"].split(":")[0].split()[-1]) < 400
    assert 64 <= int(first["third.log"].split(":")[0].split()[-1]) < 400
    assert ", exact, " in first["second.log"]
    assert ", exact, " in first["third.log"]


LOGS = ("first.log", "second.log", "third.log")
