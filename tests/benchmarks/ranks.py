"""Finding copies on many ranks: forked processes over gloo, each with its looks at two boundaries.

And what it costs on more ranks than a machine can run, by the exchange's own code. Called by itself
too: ``python -m tests.benchmarks.ranks 128`` measures that many ranks, without that.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from adacheck_store.config import Settings
from adacheck_store.redundancy.agreement import Told, encode_told
from adacheck_store.redundancy.costs import exchange_bytes
from adacheck_store.redundancy.detector import Finding
from adacheck_store.redundancy.states import holdings
from adacheck_store.trainer_hooks.detection import Detection, sightings
from adacheck_store.trainer_hooks.layouts import bind
from adacheck_store.trainer_hooks.ranks import StoreGroup, find_group
from tests.redundancy.virtual import Virtual

from .rows import Row, median

TENSORS = 1000
SIZES = (16, 32, 64, 128)
COUNTED = (256, 1024, 4096, 16_384)
LIMIT_S, WAIT_S = 30.0, 300.0

_context = multiprocessing.get_context("fork")


def _model(tensors: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """So many tensors, moments among them; the same on all ranks, as under data parallelism."""
    torch.manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(64)) for _ in range(-(-tensors // 3))]
    model = torch.nn.Module()
    model.params = torch.nn.ParameterList(params)
    return model, torch.optim.AdamW(params, lr=1e-3, foreach=True)


def _update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One that changes every tensor."""
    for at, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, 1.0 + number + at)
    optimizer.step()


def _memory(key: str) -> int:
    """A line of this process's status in bytes."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split(f"{key}:")[1].split()[0]) << 10


def _rank(rank: int, size: int, port: int, folder: str) -> None:
    """Join, look twice with an update between, and write down what it took."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    model, optimizer = _model(TENSORS)
    group = find_group()
    detection = Detection(group, Settings(redundancy="auto", stall_timeout_s=WAIT_S))
    sent = _counted()
    group.gather(b"")  # as in `attach`: all are here
    whole = bind(model, optimizer, None, group)
    row: dict[str, Any] = {"looks": []}

    def adopt(mine: Any, *_: Any) -> None:
        row["written"] = len(mine.slots)

    before = 0
    for step in (1, 2):
        _update(model, optimizer, step)
        if step == 1:
            whole = bind(model, optimizer, None, group)
            Path("/proc/self/clear_refs").write_text("5")
            before = _memory("VmRSS")
        dist.barrier()
        began, used = time.monotonic(), time.process_time()
        detection.look(step, step, whole, adopt)
        row["looks"].append((began, time.monotonic(), time.process_time() - used))
    row |= {"memory": _memory("VmHWM") - before, "sent": sent, "said": detection.said}
    Path(folder, f"{rank}.json").write_text(json.dumps(row))
    dist.barrier()
    os._exit(0)  # nothing of it is wanted any more


def _counted() -> list[int]:
    """The bytes of each all-to-all of this rank, from here on."""
    sent: list[int] = []
    exchange = StoreGroup.exchange

    def counted(self: Any, messages: Any, timeout_s: float) -> Any:
        sent.append(sum(map(len, messages)))
        return exchange(self, messages, timeout_s)

    StoreGroup.exchange = counted  # type: ignore[method-assign]
    return sent


def _serve(port: Any) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(server.port)
    port.recv()


def measured(size: int) -> list[dict[str, Any]]:
    """What each of so many ranks wrote down."""
    here, there = multiprocessing.Pipe()
    server = _context.Process(target=_serve, args=(there,), daemon=True)
    server.start()
    with tempfile.TemporaryDirectory(prefix="adacheck-bench-") as folder:
        port = here.recv()
        ranks = [
            _context.Process(target=_rank, args=(rank, size, port, folder), daemon=True)
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(WAIT_S)
            assert process.exitcode == 0, "a rank has failed: see what it said"
        here.send(None)
        server.join()
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]


def rows(sizes: tuple[int, ...] = SIZES, counted_sizes: tuple[int, ...] = COUNTED) -> Iterator[Row]:
    """Seconds, memory and bytes by number of ranks; then bytes alone."""
    for size in sizes:
        found = measured(size)
        took = [
            max(row["looks"][look][1] for row in found)
            - min(row["looks"][look][0] for row in found)
            for look in (0, 1)
        ]
        assert sum(row["written"] for row in found) == -(-TENSORS // 3), found[0]["said"]
        cpu = sum(used for row in found for *_, used in row["looks"])
        whole = size == max(SIZES)
        yield Row(
            f"finding copies, {size} ranks x {TENSORS} tensors", f"{sum(took):.1f} s",
            f"<= {LIMIT_S:.0f} s" if whole else "", sum(took) <= LIMIT_S if whole else None,
            f"looks {took[0]:.1f} and {took[1]:.1f} s; {cpu:.1f} s of processor time in all",
        )  # fmt: skip
        memory = [row["memory"] / 1e6 for row in found]
        yield Row(
            "  memory that a rank takes for it, at most", f"{median(memory[1:]):.1f} MB", "", None,
            f"rank 0, which decides for all, {memory[0]:.1f} MB",
        )  # fmt: skip
        payload = sum(sum(row["sent"][:4]) for row in found) / size
        counted = exchange_bytes(tokens=_tokens(), sets=0, runs=0)
        told = sum(row["sent"][4] for row in found) / size
        yield Row(
            "  bytes that a rank sends to compare", f"{payload:.0f}", f"{counted.payload}",
            payload == counted.payload, f"as counted; to rank 0 {told:.0f} more",
        )  # fmt: skip
    for size in counted_sizes:
        yield _simulated(size)


def _simulated(size: int) -> Row:
    """Bytes of one of so many virtual ranks, whose homes are run; and what rank 0 is told."""
    world = Virtual(size, 8, TENSORS)
    rank = size // 3
    payload, found = world.follow(rank)
    assert found == world.copies(rank)
    counted = exchange_bytes(tokens=TENSORS, sets=1, runs=1, size=size)
    model, optimizer = _model(TENSORS)
    _update(model, optimizer, 1)
    everyone = frozenset(range(size))
    findings = [
        Finding(identity=each.identity, copies=everyone)
        for each in sightings(bind(model, optimizer), size)
    ]
    told = len(encode_told(Told(node="node-0", updated=True, held=holdings(findings))))
    return Row(
        f"simulated, {size} ranks: bytes that a rank sends to compare", f"{payload}",
        f"{counted.payload}", payload == counted.payload,
        f"half on all ranks, half on 8; lengths of messages {counted.counts}; to rank 0 {told}, "
        f"which is told {told * size / 1e6:.1f} MB",
    )  # fmt: skip


def _tokens() -> int:
    """Tensors that a rank offers: a parameter and its two moments each."""
    return 3 * -(-TENSORS // 3)


if __name__ == "__main__":
    for line in rows(tuple(map(int, sys.argv[1:])) or SIZES, () if sys.argv[1:] else COUNTED):
        print(line.what, line.figure, line.bar, line.detail, sep=" | ", flush=True)
