"""Step time with agents: two trainers on one core, their agents on the other, on two nodes.

A trainer sleeps through three fifths of each step, as one does that waits for a GPU. A node is a
network namespace where the kernel makes one, so that what goes from node to node is counted.
The trainers meet at every step, so none of them can be ahead, and send each other nothing else.
Called as ``python -m tests.benchmarks.apart FOLDER``, in the environment of torch.distributed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import adacheck_store as ada
from adacheck_store.agent.start import find_agent
from adacheck_store.config import node_name
from tests.agent.kit import free_port
from tests.cluster.kit import Host
from tests.cluster.network import network

from .rows import Row, median
from .training import Clock, Training, timed

RANKS, RUN = 2, "apart"
ROUNDS, ALONE, BEFORE, STEPS = 3, 16, 8, 64
"""Rounds; steps alone, between measurements; before the clock runs; on it, as ``base_every``."""

SLEEP = 0.6
"""The share of a step in which no trainer runs."""

SETTINGS: dict[str, Any] = {"policy": "bf16", "k": 1}
MEMORY = 2 << 30
WAIT_S = 1800.0


def pin(pid: int, core: int) -> None:
    """Keep a process, with all threads it has and will have, on one of the cores there are."""
    cores = sorted(os.sched_getaffinity(1))
    for task in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(task), {cores[core % len(cores)]})


def network_bytes() -> int:
    """Bytes that have come in at this node's network: every interface but the loopback."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]
    pairs = (line.partition(":") for line in lines)
    return sum(int(rest.split()[0]) for name, _, rest in pairs if name.strip() != "lo")


class Rank:
    """One trainer: its training, and what it measures."""

    def __init__(self, folder: Path) -> None:
        self.store = (folder / "store").as_uri()
        self.training = Training(batch=1)
        self.sleep_s = 0.0

    def run(self, steps: int, end_step: Callable[[], object] = lambda: None) -> Clock:
        """Some steps with their sleep, in step with the other trainers."""

        def after_step() -> None:
            end_step()
            dist.barrier()
            time.sleep(self.sleep_s)

        return timed(lambda: self.training.run(steps, after_step), steps)

    def settle_sleep(self) -> None:
        """Find the sleep that makes up its share of a step of both trainers."""
        found: list[Any] = [None] * RANKS
        dist.all_gather_object(found, [self.run(ALONE) for _ in range(2)][-1].wall)
        self.sleep_s = max(found) * SLEEP / (1 - SLEEP)

    def measure(self) -> tuple[Clock, dict[str, int]]:
        """Steps with agents; and bytes that this rank has stored and its node has received."""
        model, optimizer = self.training.model, self.training.optimizer
        use = ada.Agents(domain=node_name(), listen=os.environ["LISTEN"], memory=MEMORY)
        with ada.attach(
            model, optimizer, run=RUN, store=self.store, agents=use, **SETTINGS
        ) as ckpt:  # fmt: skip
            ckpt.restore()
            found = find_agent(self.store, RUN, node_name())
            assert found is not None
            pin(int(found[1]["pid"]), 1)
            found[0].close()
            self.run(BEFORE, ckpt.end_step)
            before = self._bytes(ckpt)
            clock = self.run(STEPS, ckpt.end_step)
            after = self._bytes(ckpt)
            ckpt.flush(300.0)
        return clock, {name: after[name] - before[name] for name in after}

    def _bytes(self, ckpt: ada.Checkpointer) -> dict[str, int]:
        """Counters, when all is with all holders, on all ranks."""
        ckpt.flush(300.0, far=False)
        dist.barrier()
        found = {"records": ckpt.status().bytes_stored, "network": network_bytes()}
        dist.barrier()
        return found


def main(folder: Path) -> None:
    """Be a rank: measure, and write down what came out."""
    pin(os.getpid(), 0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = Rank(folder)
    rank.settle_sleep()
    rows = []
    alone = rank.run(ALONE)
    for number in range(ROUNDS):
        clock, counted = rank.measure()
        dist.barrier()  # the other one may be closing still
        after = rank.run(ALONE)
        row = {"clock": clock, "alone": (alone, after)}
        rows.append({name: _plain(each) for name, each in row.items()} | {"bytes": counted})
        print(f"round {number}, rank {dist.get_rank()}: {_said(clock, alone, after)}", flush=True)
        alone = after
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _said(clock: Clock, *alone: Clock) -> str:
    """A round in a line, said as soon as it is over: three take five minutes."""

    def more(name: str) -> float:
        return 1e3 * (getattr(clock, name) - sum(getattr(each, name) for each in alone) / 2)

    parts = ", ".join(f"{name} {more(name):+.1f}" for name in ("cpu", "queued", "blocked"))
    ratio = 2 * clock.wall / sum(each.wall for each in alone)
    return f"{ratio:.3f} of {1e3 * alone[0].wall:.0f} ms; {parts}, others {1e3 * clock.others:.1f}"


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, tuple) else dataclasses.asdict(value)


def rows() -> Iterator[Row]:
    """Step time, the training thread's time, bytes between the nodes."""
    with tempfile.TemporaryDirectory(prefix="adacheck-bench-", dir=os.curdir) as name:
        folder = Path(name).absolute()
        with network() as net:
            hosts = [Host(folder, node, net, at, None) for at, node in enumerate("ab", 1)]
            try:
                _run(hosts, folder)
                told = [json.loads((folder / f"rank{r}.json").read_text()) for r in range(RANKS)]
            finally:
                for host in hosts:
                    host.end()
            yield from _rows_of([row for rank in told for row in rank], net.how)
            yield _wire(told, net.counts, net.how)


def _run(hosts: list[Host], folder: Path) -> None:
    """Both trainers, to their end."""
    there = {
        "MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS),
        "LOCAL_RANK": "0",
    }  # fmt: skip
    running = []
    for rank, host in enumerate(hosts):
        given = there | {"RANK": str(rank)}
        host.prefix = [*host.prefix, "env", *(f"{name}={value}" for name, value in given.items())]
        running.append(
            host.run("tests.benchmarks.apart", str(folder), stdout=sys.stderr, stderr=sys.stderr)
        )
    for process in running:
        assert process.wait(WAIT_S) == 0, "a trainer has failed: see what it said"


def _rows_of(samples: list[dict[str, Any]], how: str) -> Iterator[Row]:
    def mean(sample: dict[str, Any], what: Callable[[Clock], float]) -> float:
        return sum(what(Clock(**clock)) for clock in sample["alone"]) / 2

    def more(what: Callable[[Clock], float]) -> float:
        return 1e3 * median([what(Clock(**s["clock"])) - mean(s, what) for s in samples])

    ratios = [s["clock"]["wall"] / mean(s, lambda clock: clock.wall) for s in samples]
    none = median([mean(s, lambda clock: clock.wall) for s in samples])
    yield Row(
        "step time, k=1 with agents / none", f"{median(ratios):.3f}", "<= 1.05",
        median(ratios) <= 1.05,
        ", ".join(f"{ratio:.3f}" for ratio in ratios) + f"; none {none * 1e3:.0f} ms, of which "
        f"{SLEEP:.0%} asleep; {how}",
    )  # fmt: skip
    cpu, queued = more(lambda c: c.cpu), more(lambda c: c.queued)
    others = 1e3 * median([s["clock"]["others"] for s in samples])
    yield Row(
        "  processor time of a step, for capture and send", f"{cpu:+.1f} ms", "", None,
        f"the training thread; it queues {queued:+.1f}, blocks {more(lambda c: c.blocked):+.1f}; "
        f"the trainer's other threads run {others:.1f} ms",
    )  # fmt: skip


def _wire(told: list[list[dict[str, Any]]], counts: bool, how: str) -> Row:
    what = "bytes received by the nodes / records stored"
    if not counts:
        return Row(what, "not counted", "< 1.01", None, how)
    sums = [
        [sum(row["bytes"][name] for row in each) for each in zip(*told, strict=True)]
        for name in ("network", "records")
    ]
    shares = [network / records for network, records in zip(*sums, strict=True)]
    share = median(shares)
    return Row(
        what, f"{share:.4f}", "< 1.01", share < 1.01,
        f"{sums[0][-1] / 1e6:.1f} and {sums[1][-1] / 1e6:.1f} MB in {STEPS} steps; with TLS, "
        "acknowledgements, reports, and the trainers' own words",
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
