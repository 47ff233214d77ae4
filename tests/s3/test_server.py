"""The test server itself: what is killed with its worker leaves none running."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.agent.kit import ROOT

SERVE = """
import time
from tests.s3.server import server
print(server().process.pid, flush=True)
time.sleep(600)
"""


def test_server_ends_with_who_has_started_it() -> None:
    """A worker that pytest's time limit or the kernel kills runs nothing at its exit."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as worker:  # fmt: skip
        assert worker.stdout is not None
        server = int(worker.stdout.readline())
        assert Path(f"/proc/{server}").exists()
        worker.kill()
    end = time.monotonic() + 30.0
    while Path(f"/proc/{server}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    gone = not Path(f"/proc/{server}").exists()
    if not gone:
        os.kill(server, signal.SIGKILL)
    assert gone
