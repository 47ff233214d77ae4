"""A rank of the demo's training: a process that the harness starts, and may kill at any moment.

It reports through files that outlive it: how far it is in a small shared memory map, and one JSON
line per step.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from adacheck_store.arrays import byte_view
from adacheck_store.format.ids import block_digest
from adacheck_store.trainer_hooks.attach import Agents, Checkpointer, attach

from .model import ByteGPT, LibraryText

PHASES = ("start", "data", "forward", "backward", "clip", "optimizer", "end_step", "done")
BATCH = 4
"""Of all ranks together, where there are not more."""
CLIP_NORM = 1.0
BASE_EVERY = 8
OBJECT_LAG = 8
WINDOW = 2
AGENT_MEMORY = 1 << 30
AGENT_IDLE_S = 60.0
"""An agent that the harness does not end, since it died, ends itself after this."""

_BEAT = struct.Struct("<qqq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all ranks of a start are told. ``store`` is empty for the uninterrupted run."""

    folder: Path
    nodes: int
    ranks_per_node: int
    steps: int
    seed: int
    width: int
    run: str
    store: str

    @property
    def size(self) -> int:
        """How many ranks."""
        return self.nodes * self.ranks_per_node


class Beat:
    """A 24-byte file shared with the harness: last finished step, phase, last drained step."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.write_bytes(_BEAT.pack(-1, 0, -1))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BEAT.size)
        self._step = self._drained = -1

    def phase(self, name: str) -> None:
        """Enter a phase."""
        self._map[:] = _BEAT.pack(self._step, PHASES.index(name), self._drained)

    def finished(self, step: int, drained: int = -1) -> None:
        """A step is finished, and another known to be in the far tier."""
        self._step, self._drained = step, drained
        self.phase("data")

    def read(self) -> tuple[int, str, int]:
        """Last finished step, the phase entered last, the last drained step."""
        step, phase, drained = _BEAT.unpack(self._map[:])
        return step, PHASES[phase], drained


class Run:
    """Model, optimizer, schedule and data of a rank, made anew and alike in every process."""

    def __init__(self, job: Job, rank: int) -> None:
        torch.manual_seed(job.seed)
        self.steps = job.steps
        self.model = ByteGPT(job.width)
        self.parameters = sum(param.numel() for param in self.model.parameters())
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, weight_decay=0.1, fused=True
        )
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=1e-3, total_steps=job.steps + 1
        )
        data = LibraryText()
        sampler: DistributedSampler[Any] = DistributedSampler(data, job.size, rank, seed=job.seed)
        self.loader = DataLoader(data, batch_size=max(1, BATCH // job.size), sampler=sampler)
        torch.manual_seed(job.seed + 1 + rank)  # each rank drops out others

    def round_gradients(self) -> None:
        """What policy ``bf16`` does, for the run without a store."""
        for param in self.model.parameters():
            if param.grad is not None:
                grad = _local(param.grad)
                grad.copy_(grad.bfloat16())

    def step(self, batch: Any, beat: Beat, clip: Callable[..., Any], *, rounding: bool) -> float:
        """One training step; returns this rank's loss."""
        beat.phase("forward")
        loss = self.model(*batch)
        beat.phase("backward")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        beat.phase("clip")
        clip(self.model.parameters(), CLIP_NORM)
        beat.phase("optimizer")
        if rounding:
            self.round_gradients()
        self.optimizer.step()
        self.schedule.step()
        beat.phase("end_step")
        return float(loss.item())

    def digests(self) -> dict[str, str]:
        """A digest of every parameter, optimizer state, hyper-parameter and RNG state here."""
        assert isinstance(self.model, FSDPModule)
        self.model.reshard()
        found = {}
        names = {id(p): name for name, p in self.model.named_parameters()}
        for name, tensor in self.model.state_dict().items():
            found[f"model/{name}"] = _digest(tensor)
        for param, state in self.optimizer.state.items():
            for role, value in state.items():
                found[f"optimizer/{names[id(param)]}/{role}"] = _digest(value)
        groups = [
            {k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups
        ]
        found["hyper-parameters"] = block_digest(repr(groups).encode())
        schedule = sorted((key, repr(value)) for key, value in self.schedule.state_dict().items())
        found["schedule"] = block_digest(repr(schedule).encode())
        found["rng"] = _digest(torch.get_rng_state())
        return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def _digest(tensor: torch.Tensor) -> str:
    return block_digest(byte_view(_local(tensor).detach().contiguous()))


class Journal:
    """JSON lines about the run, one file per process."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, **row: Any) -> None:
        """Append a row; it survives the death of the process."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def reference(run: Run, beat: Beat, journal: Journal) -> None:
    """Train without a store; write the digests of every step."""
    journal.write(step=0, digests=run.digests(), parameters=run.parameters)
    batches: Iterator[Any] = iter(run.loader)
    for step in range(1, run.steps + 1):
        began = time.perf_counter()
        beat.phase("data")
        clip = torch.nn.utils.clip_grad_norm_
        loss = run.step(next(batches), beat, clip, rounding=True)
        took = time.perf_counter() - began
        journal.write(step=step, loss=loss.hex(), seconds=took, digests=run.digests())
        beat.finished(step)
    beat.phase("done")


def train(run: Run, beat: Beat, journal: Journal, job: Job, node: Path) -> None:
    """Restore what there is and train on, with a checkpoint at every step, until told to leave."""
    began = time.monotonic()
    with attach(
        run.model, run.optimizer, run=job.run, store=job.store, cache=node / "lmdb",
        policy="bf16", window=WINDOW, base_every=BASE_EVERY, object_lag=OBJECT_LAG,
        k=min(1, job.nodes - 1),
        agents=Agents(
            memory=AGENT_MEMORY, listen="127.0.0.1:0", domain=node.name, idle_s=AGENT_IDLE_S
        ),
    ) as ckpt:  # fmt: skip
        ckpt.track(schedule=run.schedule)
        _restore(run, ckpt, journal, began)
        for step, batch in enumerate(ckpt.batches(run.loader), ckpt.step + 1):
            if step > run.steps:
                break
            started = time.perf_counter()
            loss = run.step(batch, beat, ckpt.clip_grad_norm_, rounding=False)
            ckpt.end_step()
            took = time.perf_counter() - started
            journal.write(step=step, loss=loss.hex(), seconds=took, at=time.monotonic())
            beat.finished(step, ckpt.status().drained)
        journal.write(final=run.steps, digests=run.digests())
        parent = os.getppid()
        while not (job.folder / "leave").exists() and os.getppid() == parent:
            beat.finished(run.steps, ckpt.status().drained)
            beat.phase("done")
            time.sleep(0.05)


def _restore(run: Run, ckpt: Checkpointer, journal: Journal, began: float) -> None:
    attached = time.monotonic()
    report = ckpt.restore()
    took = time.monotonic() - attached
    journal.write(
        restored=report.step, attach_s=attached - began, restore_s=took, digests=run.digests(),
        certificate=str(report.certificate or "fresh run"), tiers=dict(report.tiers or {}),
        reasons=list(report.reasons),
    )  # fmt: skip


def rendezvous(port: int = 0) -> Any:
    """The store by which ranks find each other, as torchrun has one: hosted here, or joined."""
    c10d: Any = dist
    return c10d.TCPStore("127.0.0.1", port, is_master=not port, wait_for_workers=False)


def main(job: Job, port: int, rank: int, node: Path) -> None:
    """What a rank's process does; ``node`` is the folder of all that its node has."""
    folder = job.folder / str(rank)
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    torch.set_num_threads(1)
    os.environ |= {
        "ADACHECK_NODE": node.name, "ADACHECK_RUNTIME": str(node / "run"),
        "LOCAL_RANK": str(rank % job.ranks_per_node), "LOCAL_WORLD_SIZE": str(job.ranks_per_node),
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    store = rendezvous(port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.size)
    beat = Beat(folder / "beat")
    journal = Journal(folder / "journal.jsonl")
    run = Run(job, rank)
    if job.store:
        train(run, beat, journal, job, node)
    else:
        reference(run, beat, journal)
    dist.destroy_process_group()
