"""Recovery from an agent against `torch.load`, and from each place that a state may be in.

One process trains a few steps beside its agent, so that there are bases and deltas everywhere, and
is then the one that recovers. State is float32 with AdamW: 12 bytes of each parameter.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import adacheck_store as ada
from adacheck_store import restore
from adacheck_store.restore import Restored, restore_state
from adacheck_store.tiers import credentials
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.object_local import LocalObjects
from adacheck_store.tiers.peer import PeerTier
from adacheck_store.tiers.pool import Peer
from adacheck_store.tiers.zarr import ZarrTier
from adacheck_store.trainer_hooks import checkpointer
from tests.agent.kit import Node
from tests.agent.trainer import RUN
from tests.waits import until

from .rows import Row, at_hand, seconds

SIDE = 2048
STATE = 12 * SIDE * SIDE
"""Bytes of state of one matrix of the model."""

BIG, SMALL = 20, 2
"""Matrices: 1007 MB of state against `torch.load`, 101 MB by source."""

STEPS, BASE_EVERY = 6, 4
MORE = 3
"""Steps that are trained after each recovery, for the next one to find."""
TRIES, PAIRS = 20, 5


class Matrices(torch.nn.Module):
    """So many square matrices, of which nothing is computed: their gradients are given."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.matrices = torch.nn.ParameterList(torch.randn(SIDE, SIDE) for _ in range(count))


class Trainer:
    """A trainer on a node with its agent, the far tier and up to one other agent."""

    def __init__(self, folder: Path, count: int, *, pair: bool, join: bool = False) -> None:
        """With ``join`` the agents are there already."""
        self.folder, self.count = folder, count
        self.bytes = count * STATE
        self.nodes = [Node(folder, name) for name in "ab"[: 1 + pair]]
        self.build()
        if join:
            return
        key = credentials.make(RUN)
        memory = (6 * self.bytes >> 20) + 640
        for node in self.nodes:
            node.runtime.mkdir(mode=0o700)
            credentials.write(str(node.runtime / "keys"), key)
            node.agent("--memory", f"{memory}M", program=True)
        self.keys = key

    def build(self) -> None:
        """Begin with other numbers than those that are kept."""
        self.model = Matrices(self.count)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def attach(self) -> ada.Checkpointer:
        """Under the agents, by policy bf16."""
        node = self.nodes[0]
        peers = tuple(f"tls://127.0.0.1:{other.port}" for other in self.nodes[1:])
        return ada.attach(
            self.model, self.optimizer, run=RUN, store=node.url, policy="bf16", k=len(peers),
            base_every=BASE_EVERY, object_lag=BASE_EVERY,
            agents=ada.Agents(domain=node.name, peers=peers),
        )  # fmt: skip

    def train(self) -> None:
        """A few steps, kept in all tiers."""
        with self.attach() as ckpt:
            ckpt.restore()
            self.steps(ckpt, STEPS)
        self.settle()

    def steps(self, ckpt: ada.Checkpointer, count: int) -> None:
        """So many steps, each kept before the next."""
        grads = [torch.randn(SIDE, SIDE).mul_(1e-2).bfloat16().float() for _ in range(2)]
        for number in range(count):
            for at, parameter in enumerate(self.model.parameters()):
                parameter.grad = grads[(at + number) % 2]
            self.optimizer.step()
            ckpt.flush(300.0, far=False)
        for parameter in self.model.parameters():
            parameter.grad = None

    def settle(self) -> None:
        """Wait until the own agent, whose trainer is gone, has done what it does by itself."""

        def settled() -> bool:
            time.sleep(0.5)  # who asks all the time is taken for somebody who is there
            told = self.nodes[0].status()
            waiting = [drain["waiting_records"] for drain in told["drains"].values()]
            folded = told["chains"]["p000000"]["replica_step"] == told["watermark"]
            return folded and not any(waiting)

        until(settled, "the own agent has folded and drained", 300.0)

    def digest(self) -> float:
        """Something of the state that another one would not have."""
        return sum(p.double().sum().item() for p in self.model.parameters())

    @contextlib.contextmanager
    def sources(self) -> Iterator[dict[str, Tier]]:
        """Everything that a state may be restored from, alone."""
        here, other = self.nodes
        own = Peer(_socket(here), run=RUN)
        far = Peer(f"tls://127.0.0.1:{other.port}", credentials=self.keys)
        zarr = ZarrTier(LocalObjects(here.store / "objects"))
        try:
            yield {
                "own agent": PeerTier(own, "ram", shared=True),
                "peer": PeerTier(far, "ram", shared=True),
                "LMDB": PeerTier(own, "lmdb", shared=True),
                "zarr": zarr,
            }
        finally:
            for each in (own, far, zarr):
                each.close()

    def end(self) -> None:
        """End the agents."""
        for node in self.nodes:
            node.end()


def _socket(node: Node) -> str:
    return next(text for text in node.ask("who")["endpoints"] if text.startswith("unix:"))


@contextlib.contextmanager
def trained(count: int, *, pair: bool) -> Iterator[tuple[Trainer, Path]]:
    """A trainer that has trained, and a folder for what else there is."""
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(prefix="adacheck-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        Node(Path(folder), "a").here(patch)
        trainer = Trainer(Path(folder), count, pair=pair)
        try:
            trainer.train()
            yield trainer, Path(folder)
        finally:
            trainer.end()


def rows() -> Iterator[Row]:
    """The ratio to `torch.load`, then each source."""
    with trained(BIG, pair=False) as (trainer, folder):
        yield from _against_torch_load(trainer, folder / "state.pt")
    with trained(SMALL, pair=True) as (trainer, _):
        yield from _by_source(trainer)


def _against_torch_load(trainer: Trainer, file: Path) -> Iterator[Row]:
    """Into model and optimizer, and what does as much without us, from page cache; in turns.

    A state is loaded once in a process's life, into memory that is fresh. So each try of either is
    a process of its own: one that has loaded before reuses its memory, and takes a fourth. What is
    fresh to the process is not to the machine, see `at_hand`.
    """
    model, optimizer = trainer.model, trainer.optimizer
    kept, step = trainer.digest(), STEPS
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    found: dict[str, list[float]] = defaultdict(list)
    said = ""
    for number in range(PAIRS + 1):
        ours = _apart(trainer, "restore", file)
        assert (ours.pop("step"), ours.pop("digest")) == (step, kept), ours
        kept, step = ours.pop("trained"), step + MORE
        trainer.settle()
        told = [ours, *(_apart(trainer, what, file) for what in ("load", "load all"))]
        tiers = ours.pop("tiers")
        assert set(tiers) == {"agent a"}, tiers
        said = f"{sum(tiers.values()) / 1e6:.0f} MB read, {ours.pop('deltas')} deltas folded"
        if number:  # the first is the warm-up
            for name, took in (pair for times in told for pair in times.items()):
                found[name].append(took)
    for what, ours, than, theirs, bar in (
        ("from plan to loaded", "loaded", "torch.load", "bare", 0.7),
        ("from plan to loaded", "loaded", "torch.load and load_state_dict", "all", None),
        ("from claim to loaded", "claimed", "torch.load and load_state_dict", "all", None),
        ("until training may begin", "ready", "torch.load and load_state_dict", "all", None),
    ):
        pairs = list(zip(found[ours], found[theirs], strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        yield Row(
            f"recovery of {trainer.bytes / 1e6:.0f} MB from the own agent, {what} / {than}",
            f"{ratio:.2f}", f"<= {bar}" if bar else "", ratio <= bar if bar else None,
            f"{', '.join(f'{a:.2f}/{b:.2f}' for a, b in pairs)} s; {said}",
        )  # fmt: skip


def _apart(trainer: Trainer, what: str, file: Path) -> dict[str, Any]:
    """Have something done in a process of its own on the trainer's node; what it tells."""
    node = trainer.nodes[0]
    words = (what, str(trainer.folder), str(trainer.count), str(file))
    process = node.run("tests.benchmarks.recovery", *words)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    told: dict[str, Any] = json.loads(said.splitlines()[-1])
    return told


def main(what: str, folder: Path, count: int, file: Path) -> None:
    """Be a trainer that begins, and do one thing; tells seconds, and what it has got."""
    torch.set_num_threads(1)
    trainer = Trainer(folder, count, pair=False, join=True)

    def load() -> None:
        torch.load(file, weights_only=True)

    def load_all() -> None:
        found = torch.load(file, weights_only=True)
        trainer.model.load_state_dict(found["model"])
        trainer.optimizer.load_state_dict(found["optimizer"])

    if what == "restore":
        told = _restored(trainer)
    else:
        at_hand(3 * trainer.bytes)
        told = {"bare": seconds(load)} if what == "load" else {"all": seconds(load_all)}
    print(json.dumps(told))


def _restored(trainer: Trainer) -> dict[str, Any]:
    """A restore: seconds from its plan and from its claim until all is loaded, and until the term
    is open and memory for capture is made; then a few steps more."""
    load, fetch, marks = checkpointer.load, restore.fetch_parts, {}

    def timed_fetch(*args: Any) -> Any:
        marks["planned"] = time.perf_counter()
        return fetch(*args)

    def timed_load(*args: Any) -> None:
        load(*args)
        marks["loaded"] = time.perf_counter()

    with pytest.MonkeyPatch.context() as patch, trainer.attach() as ckpt:
        patch.setattr(checkpointer, "load", timed_load)
        patch.setattr(restore, "fetch_parts", timed_fetch)
        at_hand(3 * trainer.bytes)
        began = time.perf_counter()
        report = ckpt.restore()
        ready = time.perf_counter()
        told = {
            "loaded": marks["loaded"] - marks["planned"], "claimed": marks["loaded"] - began,
            "ready": ready - began, "step": report.step, "digest": trainer.digest(),
            "tiers": report.tiers, "deltas": report.certificate.deltas,
        }  # fmt: skip
        trainer.steps(ckpt, MORE)
    return {**told, "trained": trainer.digest()}


def _by_source(trainer: Trainer) -> Iterator[Row]:
    """Plan, fetch, verify and fold, from one source alone, into memory; in turns."""
    with trainer.sources() as tiers:
        found: dict[str, list[tuple[float, Restored]]] = {name: [] for name in tiers}
        for _ in range(TRIES + 1):
            for name, tier in tiers.items():
                began = time.perf_counter()
                restored = restore_state([tier], RUN)
                found[name].append((time.perf_counter() - began, restored))
                restored.parts["p000000"].arrays.clear()
    for name, tries in found.items():
        yield _row(name, trainer.bytes, tries[1:])


def _row(name: str, size: int, tries: list[tuple[float, Restored]]) -> Row:
    times = sorted(took for took, _ in tries)
    half, last = (times[round(share * (len(times) - 1))] for share in (0.5, 0.99))
    steps = {restored.step for _, restored in tries}
    deltas = {restored.certificate.deltas for _, restored in tries}
    return Row(
        f"recovery of {size / 1e6:.0f} MB from: {name}",
        f"P50 {half * 1e3:.0f} ms, P99 {last * 1e3:.0f} ms", "", None,
        f"{size / half / 1e6:.0f} and {size / last / 1e6:.0f} MB/s; step {_both(steps)}, "
        f"{_both(deltas)} deltas folded; {len(times)} tries",
    )  # fmt: skip


def _both(numbers: set[int]) -> str:
    return " to ".join(map(str, sorted({min(numbers), max(numbers)})))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
