"""A thread that speaks to the store of torch.distributed does not abort a process that ends."""

import subprocess
import sys

import torch.distributed as dist

SCRIPT = """
import sys, time
import torch.distributed as dist
from adacheck_store.trainer_hooks import background

stores = [dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False) for _ in range(3)]

def speak(store):
    while not background.ending():
        store.check(["nothing"])

for store in stores:
    background.start("speaker", speak, store)
time.sleep(0.2)
"""


def test_threads_have_left_the_store_when_the_interpreter_ends():
    """Plain daemon threads abort about every process: `terminate called`, SIGABRT."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(server.port)], timeout=60, check=False,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
