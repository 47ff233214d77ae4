"""Saves by `DcpWriter` to S3: blocks are under way beside each other, and all come first."""

from __future__ import annotations

import os
import secrets
import signal
import time
import warnings
from pathlib import Path
from threading import Event

import pytest

from adacheck_store.catalog import read_catalog
from adacheck_store.recovery import plan_restore
from adacheck_store.store import open_for_reading
from tests.ranks.worker import Launcher, _context, _join
from tests.s3.proxy import Fault, Proxy, Request
from tests.s3.server import Server

STEP = 5
AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED",
       "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")  # fmt: skip


def save(rank: int, port: int, attempt: str, url: str, env: dict[str, str]) -> None:
    """A rank: it saves what it alone has, and a tensor that makes its extra have an array."""
    import torch
    import torch.distributed.checkpoint as dcp

    import adacheck_store as ada

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(env)
    _join(rank, 2, port, attempt)
    state = {"model": {f"w{rank}": torch.full((1000,), float(rank))},
             f"seen{rank}": torch.arange(100)}  # fmt: skip
    dcp.save(state, storage_writer=ada.DcpWriter(url, "r", STEP))


def start(folder: Path, attempt: str, urls: list[str]) -> tuple[list, Launcher]:
    """Two ranks, each with a URL of its own for the same store."""
    launcher = Launcher(folder, "save", 2)
    env = {name: os.environ[name] for name in (*AWS, "ADACHECK_CACHE")}
    processes = [
        _context.Process(target=save, args=(rank, launcher.server.port, attempt, url, env),
                         daemon=True)
        for rank, url in enumerate(urls)
    ]  # fmt: skip
    for process in processes:
        process.start()
    return processes, launcher


@pytest.mark.fault
@pytest.mark.parametrize("what", ["/p000001/base/", "/r000001/pack/"])
def test_a_rank_killed_with_blocks_in_flight(
    real: Server, proxy: Proxy, tmp_path: Path, what: str
) -> None:
    """Its base's blocks, or those of its extra: the other has made nothing visible."""
    prefix, reached = f"save-{secrets.token_hex(6)}", Event()
    urls = [real.url(prefix), real.url(prefix, proxy.endpoint)]

    def silent(request: Request) -> Fault | None:
        if request.kind != "PUT" or what not in request.path:
            return None
        reached.set()
        return Fault("silent")

    def visible() -> list[str]:
        return [key for key in real.keys(prefix) if "/manifest/" in key]

    proxy.restart(silent)
    processes, launcher = start(tmp_path, "killed", urls)
    assert reached.wait(60), "the other rank has not written what it is to be stopped at"
    for struck in (processes[1], processes[0]):
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            assert not visible()
            time.sleep(0.1)
        assert struck.pid is not None
        os.kill(struck.pid, signal.SIGKILL)
        struck.join(60)
    assert not visible()
    proxy.restart()
    processes, launcher = start(tmp_path, "again", urls)
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    with open_for_reading(urls[0]) as store:
        assert plan_restore(read_catalog(store.tiers, "r")).step == STEP
    del launcher
