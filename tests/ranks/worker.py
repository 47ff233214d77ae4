"""Training runs of several ranks, each a process of its own that a SIGKILL really kills."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from contextlib import nullcontext, suppress
from pathlib import Path

from tests.ranks.elastic import ELASTIC, build_elastic, feed_alike, whole
from tests.ranks.parallel import PARALLEL, build_parallel, data_of
from tests.waits import Gate, until

STEPS = 24
BASE_EVERY = 6
OBJECT_LAG = 4
GROWN_AT = 9
FLIPPED_AT = 7
FLIPPED = "0.weight"
EDITED_AT = 3
APART_AT = 13
AVERAGED_EVERY = 4
WINDOW = 2

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(  # what making an optimizer, and sharding a model, import
    [
        "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor",
        "adacheck_store.trainer_hooks.attach", "adacheck_store.agent.process", "adacheck_store.cli",
        "tests.conformance.tiers",
    ]
)  # fmt: skip


def build(kind: str, rank: int, ranks: int, *, steps: int = STEPS, width: int = 37):
    """Model, optimizer, schedule and loader of a rank, for so many steps.

    ``fsdp``: rows do not divide by the ranks, and of one row all but the first have none. ``ddp``:
    with a BatchNorm. ``flip``: so too, and a bit flips. ``edit``: so too, and a moment of one
    rank is. ``local``: so too, and from `APART_AT` on each rank trains by itself, with the
    parameters averaged now and then (post-local SGD).
    ``plain``: each rank has a model of its own under the same names, and nothing says so;
    ``unlike``: of another width, too.
    ``grow``: so too, and the last layer is trained from a later step on only; ``widen``: that
    under DDP. ``hsdp``: each shard
    on two ranks. ``tp``: the middle is cut by tensor parallelism, what is around it stands on all
    ranks. ``tp_fsdp``: that again sharded. ``whole``: what ``fsdp`` shards. Further kinds: see
    `parallel` and `elastic`.
    """
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(11 + rank * (kind in ("plain", "grow", "unlike")))
    if kind in PARALLEL:
        model, optimizer = build_parallel(kind, rank, ranks, width)
    elif kind in ELASTIC:
        model, optimizer = build_elastic(kind, ranks, width)
    else:
        model, optimizer = _simple(kind, ranks, width + rank * (kind == "unlike"))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(listed(optimizer)[0], steps)
    seed = 100 + data_of(kind, rank, ranks)
    random.seed(seed)
    torch.manual_seed(seed)
    data = torch.utils.data.TensorDataset(torch.randn(16 * steps, 9), torch.randn(16 * steps, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    return model, optimizer, schedule, loader


def _simple(kind: str, ranks: int, width: int):
    """A model and its one optimizer."""
    import torch
    from torch import nn

    tensor = kind.startswith("tp")
    drop = [] if tensor else [nn.Dropout(0.2)]
    layers = [nn.Linear(9, width), *drop, nn.GELU(), nn.Linear(width, 5)]
    if kind not in ("fsdp", "hsdp", "whole"):
        layers.insert(1, nn.LayerNorm(width) if tensor else nn.BatchNorm1d(width))
    model = nn.Sequential(*layers, nn.Linear(5, 1))
    if tensor:
        model = _cut(model, kind, ranks)
    elif kind in ("fsdp", "hsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        names, shape = (("dp",), (ranks,))
        if kind == "hsdp":
            names, shape = ("copies", "shards"), (2, ranks // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model[-1].bias.requires_grad_(False)
        for layer in model[:-1]:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)  # the last layer is the root's
    elif kind in ("ddp", "flip", "edit", "local", "widen"):
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    first = {"grow": model, "widen": getattr(model, "module", ())}.get(kind, ())[:-1] or model
    optimizer = torch.optim.AdamW(
        [p for p in first.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1,
        **({"foreach": False} if tensor else {"fused": True}),
    )  # fmt: skip
    return model, optimizer


def _cut(model, kind: str, ranks: int):
    """Two layers by columns and by rows; with ``tp_fsdp`` on pairs, and then sharded by FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    both = kind == "tp_fsdp"
    names = ("dp", "tp") if both else ("tp",)
    mesh = init_device_mesh("cpu", (ranks // 2, 2) if both else (ranks,), mesh_dim_names=names)
    plan = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "3": RowwiseParallel(input_layouts=Replicate()),
    }
    model = parallelize_module(model, mesh["tp"], plan)
    if both:
        fully_shard(model, mesh=mesh["dp"])
        model.clipped = False  # torch clips no gradients on several meshes
    return model


def listed(optimizer) -> list:
    """One optimizer or several as a list; of DeepSpeed's the one that it steps."""
    if type(optimizer).__module__.startswith("deepspeed"):
        return [optimizer.optimizer]
    return list(optimizer) if isinstance(optimizer, list) else [optimizer]


def _bytes(tensor) -> bytes:
    from adacheck_store.arrays import byte_view

    inner = getattr(tensor, "_local_tensor", tensor)
    return bytes(byte_view(inner.detach().contiguous()))


def digest(model, optimizer, schedule) -> str:
    """One digest of every parameter, buffer, moment, counter, hyper-parameter and RNG here."""
    import torch

    from adacheck_store.format.ids import record_id

    if hasattr(model, "reshard"):
        model.reshard()
    blob = bytearray()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        blob += name.encode() + _bytes(tensor)
    found = {}
    for each in listed(optimizer):
        found |= getattr(each, "optim", each).state
    masters = getattr(model, "masters", [])
    blob += b"".join(map(_bytes, masters))
    for index, state in enumerate(found.get(p, {}) for p in [*model.parameters(), *masters]):
        for role in sorted(state):
            blob += f"{index}{role}".encode() + _bytes(state[role])
    groups = [
        sorted((k, repr(v)) for k, v in g.items() if k != "params")
        for each in listed(optimizer) for g in each.param_groups
    ]  # fmt: skip
    blob += repr(groups).encode() + repr(sorted(schedule.state_dict().items())).encode()
    blob += _bytes(torch.get_rng_state()) + repr(random.getstate()).encode()
    return record_id(bytes(blob))


def step(model, optimizer, schedule, batch) -> float:
    """One update."""
    import torch

    for each in listed(optimizer):
        each.zero_grad()
    if hasattr(model, "run"):  # forward and backward in one
        loss = model.run(*batch)
    else:
        loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1]) * (1 + random.random())
        loss.backward()
    kinds = {type(param.data) for param in model.parameters()}
    if len(kinds) == 1 and getattr(model, "clipped", True):  # of several torch clips nothing
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not hasattr(model, "masters"):  # else all is done
        for each in listed(optimizer):
            each.step()
    schedule.step()
    return loss.item()


def grow(kind: str, model, optimizer, number: int) -> None:
    """Before an update: train the last layer too, from `GROWN_AT` on."""
    if kind in ("grow", "widen") and number == GROWN_AT:
        last = getattr(model, "module", model)[-1]
        optimizer.add_param_group({"params": list(last.parameters()), "lr": 1e-3})


def flip(kind: str, model, rank: int, number: int) -> None:
    """``flip``: after an update one bit of one weight of rank 1 changes, and nothing sees it.

    ``deep2flip``: so does a half of rank 0, for that one boundary, at which a base is due.
    """
    import torch

    if kind == "deep2flip" and rank == 0:
        half = model.module.layers[0].weight.data
        if number == BASE_EVERY:
            model.half = half.clone()
            half.view(-1).view(torch.int16)[3] ^= 1 << 6
    if kind == "flip" and (rank, number) == (1, FLIPPED_AT):
        model.get_parameter(f"module.{FLIPPED}").data.view(-1).view(torch.int32)[3] ^= 1 << 18


def edit(kind: str, model, optimizer, rank: int, number: int) -> None:
    """``edit``: after the update `EDITED_AT` rank 1 changes a moment of one of its weights."""
    if kind == "edit" and (rank, number) == (1, EDITED_AT):
        weight = model.get_parameter(f"module.{FLIPPED}")
        optimizer.state[weight]["exp_avg"].mul_(2)


def alone(kind: str, model, number: int):
    """``local``: within this an update from `APART_AT` on has this rank's gradients alone."""
    return model.no_sync() if kind == "local" and number >= APART_AT else nullcontext()


def average(kind: str, model, number: int) -> None:
    """``local``: after an update now and then, give all ranks the mean of their parameters."""
    import torch.distributed as dist
    from torch.distributed.algorithms.model_averaging.utils import average_parameters

    if kind == "local" and number >= APART_AT and number % AVERAGED_EVERY == 0:
        average_parameters(model.parameters(), dist.group.WORLD)


def evaluate(model, number: int) -> None:
    """Between two updates: FSDP2 leaves the root's parameters whole after this."""
    import torch

    if number % BASE_EVERY == 0:  # where a boundary looks for new tensors
        model.eval()
        with torch.no_grad():
            model(torch.ones(4, 9))
        model.train()


def dump(model, file: str, rank: int) -> None:
    """Write the whole parameters, as all ranks together have them, to a file of rank 0."""
    import safetensors.torch

    if hasattr(model, "reshard"):
        model.reshard()
    found = {}
    for name, p in model.named_parameters():
        found[name] = (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().contiguous()
    if rank == 0:
        safetensors.torch.save_file(found, file)


def told(report, model, optimizer, schedule) -> dict:
    """A restore as a row of a journal."""
    return {
        "restored": report.step, "digest": digest(model, optimizer, schedule),
        "certificate": str(report.certificate), "reasons": list(report.reasons),
        "lost": report.lost, "tiers": sorted(report.tiers or {}),
    }  # fmt: skip


def kept(ckpt) -> tuple[int, int, bool]:
    """What a rank is told: up to which step all is stored, and drained, and whether that lags."""
    status = ckpt.status()
    return status.stored, status.drained, status.behind


def writes(journal):
    """A function that writes a row of a journal, so that the death of the process keeps it."""

    def write(**row) -> None:
        journal.write(json.dumps(row) + "\n")
        journal.flush()

    return write


def rows_of(journal: Path) -> list[dict]:
    """The whole lines of a journal."""
    found = []
    for line in (journal.read_text() if journal.exists() else "").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def check_rows(known: dict[int, tuple[str, str]], rows: list[dict]) -> None:
    """Everything that a rank has told equals the uninterrupted run."""
    for row in rows:
        if "restored" in row:
            assert row["digest"] == known[row["restored"]][0], row
        if "loss" in row:
            assert row["loss"] == known[row["step"]][1], row
        if "final" in row:
            assert row["digest"] == known[row["final"]][0], row


def _join(rank: int, ranks: int, port: int, prefix: str):
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(prefix, store), rank=rank, world_size=ranks
    )


def _reference(out: str, rank: int, ranks: int, port: int, kind: str, sizes: dict) -> None:
    _join(rank, ranks, port, f"reference-{kind}-{ranks}")
    model, optimizer, schedule, loader = build(kind, rank, ranks, **sizes)
    rows = {0: (digest(model, optimizer, schedule), "")}
    for number, batch in zip(range(1, sizes.get("steps", STEPS) + 1), loader, strict=False):
        grow(kind, model, optimizer, number)
        with alone(kind, model, number):
            loss = step(model, optimizer, schedule, batch)
        average(kind, model, number)
        flip(kind, model, rank, number)
        edit(kind, model, optimizer, rank, number)
        evaluate(model, number)
        rows[number] = (digest(model, optimizer, schedule), loss.hex())
    Path(out).write_text(json.dumps(rows))


def _train(out: str, rank: int, ranks: int, port: int, prefix: str, kind: str, options: dict):
    import warnings

    from adacheck_store.format.errors import AdaCheckError
    from adacheck_store.trainer_hooks.attach import attach
    from adacheck_store.trainer_hooks.ranks import find_group

    os.environ.update(options.get("env", {}))
    os.environ["ADACHECK_NODE"] = options.get("node", "node-a")
    os.environ.update(options.get("envs", {}).get(rank, {}))
    os.environ["LOCAL_RANK"] = str(options.get("local", {}).get(rank, rank))
    os.environ["ADACHECK_FAILPOINT"] = options.get("failpoint", {}).get(rank, "")
    _join(rank, ranks, port, prefix)
    if rank in options.get("absent", ()):
        time.sleep(5.0)
        return
    model, optimizer, schedule, loader = build(kind, rank, ranks, **options.get("sizes", {}))
    if options.get("grown"):
        grow(kind, model, optimizer, GROWN_AT)
    warnings.simplefilter("error")
    # Under tensor parallelism; nothing here changes such a view in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if kind.startswith("deep"):  # it calls what torch has given another name
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
    before = digest(model, optimizer, schedule)
    with open(out, "w", encoding="utf-8") as journal:
        write = writes(journal)
        given = {
            "run": "e2e", "store": options["store"], "window": WINDOW, "base_every": BASE_EVERY,
            "object_lag": OBJECT_LAG,
            "group": find_group(options.get("timeout_s", 60.0), options.get("silent_s", 30.0)),
            "resume": options.get("resume", "auto"),
        }  # fmt: skip
        given |= options.get("given", {}).get(rank, {})
        exchanged = options.get("before_attach", _nothing)(rank)
        try:
            ckpt = attach(model, optimizer, **given)
        except AdaCheckError as error:
            write(refused=str(error), error=type(error).__name__)
            return
        with ckpt:
            ckpt.track(schedule=schedule)
            options.get("before_restore", _nothing)(rank)
            try:
                report = ckpt.restore()
            except AdaCheckError as error:
                write(refused=str(error), error=type(error).__name__,
                      touched=digest(model, optimizer, schedule) != before)  # fmt: skip
                return
            wholes = options.get("wholes")
            more = {"whole": whole(model, optimizer)} if wholes else {}
            write(**told(report, model, optimizer, schedule), **more)
            if options.get("dump"):
                dump(model, options["dump"], rank)
            if options.get("inspect"):
                return
            for number, batch in enumerate(ckpt.batches(loader), report.step + 1):
                options["gate"].wait(number)
                if number > STEPS:
                    break
                grow(kind, model, optimizer, number)
                feed_alike(kind, batch, number)
                with alone(kind, model, number):
                    loss = step(model, optimizer, schedule, batch)
                average(kind, model, number)
                flip(kind, model, rank, number)
                edit(kind, model, optimizer, rank, number)
                evaluate(model, number)
                if wholes:  # before it is stored: what is restored has been told
                    write(made=number, whole=whole(model, optimizer))
                if number == options.get("poisoned", {}).get(rank):
                    ckpt.flush(60, far=False)
                    os.kill(os.getpid(), signal.SIGKILL)
                try:
                    assert ckpt.end_step() == number
                except AdaCheckError as error:
                    write(ended=str(error))
                    raise
                finally:  # also where the run stops
                    write(step=number, loss=loss.hex(), kept=kept(ckpt))
                time.sleep(options.get("pause_s", 0.0) * options.get("slower", {}).get(rank, 1))
            write(final=STEPS, digest=digest(model, optimizer, schedule))
            if options.get("flush", True):
                ckpt.flush(60)
            status = ckpt.status()
            write(stored=status.stored, drained=status.drained, error=status.last_error,
                  mismatch=status.mismatch, redundancy=status.redundancy,
                  exchanged=exchanged)  # fmt: skip


def _nothing(rank: int) -> None:
    """What most tests do before a restore."""


class Launcher:
    """Hosts the rendezvous, as torchrun's agent does, and starts attempts of a run."""

    def __init__(self, folder: Path, kind: str, ranks: int) -> None:
        import torch.distributed as dist

        self.folder, self.kind, self.ranks = folder, kind, ranks
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.attempts = 0

    def reference(self, **sizes: int) -> list[dict[int, tuple[str, str]]]:
        """Digest and loss of every step of the run undisturbed, by rank; ``sizes``: see `build`."""
        outs = [self.folder / f"reference-{self.kind}-{rank}.json" for rank in range(self.ranks)]
        processes = [
            _context.Process(
                target=_reference,
                args=(str(out), rank, self.ranks, self.server.port, self.kind, sizes), daemon=True,
            )
            for rank, out in enumerate(outs)
        ]  # fmt: skip
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
            assert process.exitcode == 0
        found = [json.loads(out.read_text()) for out in outs]
        return [{int(k): (row[0], row[1]) for k, row in rows.items()} for rows in found]

    def start(self, store: Path | str, *, ranks: int = 0, **options) -> Attempt:
        """Start all ranks; ``hold``: after that step they wait, to be killed or let go on."""
        self.attempts += 1
        return Attempt(self, store, ranks or self.ranks, options)


class Attempt:
    """The processes of one attempt; `kill` is SIGKILL to all that live."""

    def __init__(self, launcher: Launcher, store: Path | str, ranks: int, options: dict) -> None:
        folder = launcher.folder / f"attempt-{launcher.attempts}"
        folder.mkdir(parents=True, exist_ok=True)
        self.outs = [folder / f"{rank}.jsonl" for rank in range(ranks)]
        prefix = f"attempt-{launcher.attempts}"
        url = store if isinstance(store, str) else store.as_uri()
        self.gate = Gate(folder / "gate")
        if "hold" in options:
            self.gate.open(options["hold"])
        options = {"store": url, "gate": self.gate, **options}
        kind = options.get("kind", launcher.kind)
        self.processes = [
            _context.Process(
                target=_train,
                args=(str(out), rank, ranks, launcher.server.port, prefix, kind, options),
                daemon=True,
            )
            for rank, out in enumerate(self.outs)
        ]  # fmt: skip
        for process in self.processes:
            process.start()

    def wait(self, timeout_s: float = 120.0) -> list[int]:
        """Exit codes; negative for a signal."""
        for process in self.processes:
            process.join(timeout_s)
            assert process.exitcode is not None, "a rank hangs"
        return [process.exitcode for process in self.processes]

    def alive(self) -> bool:
        """Whether all ranks are at it."""
        return all(process.is_alive() for process in self.processes)

    def terminate(self, rank: int) -> None:
        """SIGTERM to one rank, if it has not ended by then."""
        with suppress(ProcessLookupError):
            os.kill(self.processes[rank].pid, signal.SIGTERM)

    def kill(self, first: int = 0) -> None:
        """SIGKILL to one rank, and then, as a launcher would, to the others."""
        order = [first, *(rank for rank in range(len(self.processes)) if rank != first)]
        for rank in order:
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, signal.SIGKILL)
        for process in self.processes:
            process.join(30)

    def until(self, number: int) -> None:
        """Wait until every rank has finished a step; all are at it still, or this raises."""

        def reached() -> bool:
            found = self.last_step() >= number
            ends = [process.exitcode for process in self.processes]
            assert self.alive(), f"ended by itself before step {number}, or after it: {ends}"
            return found

        until(reached, f"step {number} on all ranks")

    def rows(self, rank: int) -> list[dict]:
        """The whole lines of a rank's journal."""
        return rows_of(self.outs[rank])

    def last_step(self) -> int:
        """The last step that all ranks finished, -1 if none."""
        return min(
            max((row["step"] for row in self.rows(rank) if "step" in row), default=-1)
            for rank in range(len(self.outs))
        )

    def every(self, name: str, key: str = "") -> list:
        """A value of each rank's row of that name."""
        return [
            next((row[key or name] for row in self.rows(rank) if name in row), None)
            for rank in range(len(self.outs))
        ]


def check_against(reference: list[dict[int, tuple[str, str]]], attempt: Attempt) -> None:
    """Everything the ranks reported equals the uninterrupted run."""
    for rank, known in enumerate(reference):
        check_rows(known, attempt.rows(rank))
