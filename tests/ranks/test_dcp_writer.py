"""torch.distributed.checkpoint saves steps into a run; other ranks load them, and train on."""

import io
import json
import os
import signal
import time
import warnings
from pathlib import Path

import pytest

from adacheck_store.catalog import read_catalog
from adacheck_store.format.errors import AdaCheckError
from adacheck_store.store import open_store
from adacheck_store.tools.findings import Finding
from adacheck_store.tools.fsck import fsck
from tests.ranks.elastic import build_elastic, feed_alike, whole
from tests.ranks.test_dcp import load
from tests.ranks.worker import Launcher, _context, _join

SAVED = (2, 5, 6)
MORE = 3


def train(kind: str, model, optimizer, number: int) -> None:
    """One update by a batch that its number says, the same on all ranks."""
    import torch

    torch.manual_seed(number)
    batch = [torch.randn(8, 9)]
    feed_alike(kind, batch, number)
    optimizer.zero_grad()
    model(batch[0]).square().mean().backward()
    optimizer.step()


def save(out: str, rank: int, ranks: int, port: int, kind: str, store: str, fail: str) -> None:
    """A rank: train, and save some steps by DCP; ``fail``: in which it meets which failpoint."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    import adacheck_store as ada
    from adacheck_store.tiers import failpoints

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _join(rank, ranks, port, f"save-{kind}-{ranks}-{Path(out).parent.name}")
    torch.manual_seed(3)
    model, optimizer = build_elastic(kind, ranks, 37)
    rows = {}
    for number in range(1, SAVED[-1] + 1):
        train(kind, model, optimizer, number)
        if number not in SAVED:
            continue
        if hasattr(model, "reshard"):
            model.reshard()
        rows[number] = whole(model, optimizer)
        Path(out).write_text(json.dumps(rows))
        states, optim = get_state_dict(model, optimizer)
        state = {"model": states, "optimizer": optim, "epoch": {"number": number, "rows": [1, 2]}}
        writer = ada.DcpWriter(store, "e2e", number)
        at, _, point = fail.partition(" ")
        if at == str(number):
            failpoints.arm(point)
        if number == SAVED[1]:
            dcp.async_save(state, storage_writer=writer).result()
        else:
            dcp.save(state, storage_writer=writer)


def go_on(out: str, rank: int, ranks: int, port: int, kind: str, store: str) -> None:
    """A rank: restore the newest step by `attach`, and train on."""
    import torch

    import adacheck_store as ada

    torch.set_num_threads(1)
    _join(rank, ranks, port, f"on-{kind}-{ranks}-{Path(out).parent.name}")
    torch.manual_seed(99)
    model, optimizer = build_elastic(kind, ranks, 37)
    rows = {}
    with ada.attach(model, optimizer, "e2e", store) as ckpt:
        start = ckpt.restore().step
        rows[start] = whole(model, optimizer)
        for number in range(start + 1, start + MORE + 1):
            train(kind, model, optimizer, number)
            assert ckpt.end_step() == number
            rows[number] = whole(model, optimizer)
    Path(out).write_text(json.dumps(rows))


def run(
    target, folder: Path, ranks: int, *args, fail: dict[int, str] | None = None,
    after_s: float = 0.0,
) -> list:  # fmt: skip
    """What each rank wrote; those told to die do, and ``after_s`` later the others are killed."""
    folder.mkdir(parents=True)
    launcher = Launcher(folder, args[0], ranks)
    outs = [folder / f"{rank}.json" for rank in range(ranks)]
    more = [() if fail is None else (fail.get(rank, ""),) for rank in range(ranks)]
    processes = [
        _context.Process(
            target=target, daemon=True,
            args=(str(out), rank, ranks, launcher.server.port, *args, *more[rank]),
        )
        for rank, out in enumerate(outs)
    ]  # fmt: skip
    for process in processes:
        process.start()
    for rank in fail or {}:
        processes[rank].join(120)
        assert processes[rank].exitcode == -signal.SIGKILL, "the failpoint was not reached"
    time.sleep(after_s)
    for process in processes:
        if fail and process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join(120)
        assert process.exitcode == 0 or fail
    return [{int(k): v for k, v in json.loads(out.read_text()).items()} for out in outs]


def loaded(folder: Path, kind: str, ranks: int, store: Path, steps: list) -> list:
    """What `DcpReader` gives on each of some ranks."""
    folder.mkdir(parents=True)
    launcher = Launcher(folder, kind, ranks)
    outs = [folder / f"{rank}.json" for rank in range(ranks)]
    processes = [
        _context.Process(
            target=load, daemon=True,
            args=(str(out), rank, ranks, launcher.server.port, kind, store.as_uri(), steps),
        )
        for rank, out in enumerate(outs)
    ]  # fmt: skip
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    return [json.loads(out.read_text()) for out in outs]


def damage(store: Path) -> list:
    """What fsck calls damage."""
    with open_store(store.as_uri()) as opened:
        found = [item for item in fsck(opened) if isinstance(item, Finding)]
    return [finding for finding in found if finding.severity == "damage"]


@pytest.mark.parametrize(
    ("kind", "ranks", "other", "others"),
    [("fsdp2", 4, "copies", 2), ("copies", 2, "fsdp2", 2), ("one", 1, "fsdp2", 2)],
)
def test_saved_steps_are_loaded_and_trained_on(tmp_path, kind, ranks, other, others):
    """Uneven and empty shards, replicas, a plain module; by `save`, `async_save`; bit for bit."""
    store = tmp_path / "store"
    told = run(save, tmp_path / "save", ranks, kind, store.as_uri(), fail={})
    known = told[0]
    assert all(each == known for each in told)
    for rows in loaded(tmp_path / "load", other, others, store, [None, *SAVED[:2]]):
        assert rows == [[step, known[step]] for step in (SAVED[-1], *SAVED[:2])]
    assert not damage(store)
    alike = run(go_on, tmp_path / "on", others, other, store.as_uri())
    assert all(each == alike[0] for each in alike)
    assert alike[0][SAVED[-1]] == known[SAVED[-1]]
    again = run(go_on, tmp_path / "again", ranks, kind, store.as_uri())
    assert again[0][SAVED[-1] + MORE] == alike[0][SAVED[-1] + MORE]
    assert not damage(store)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("rank", "point"),
    [(0, "local.file.fsync.before:1"), (0, "local.link.before:4"), (1, "local.link.before:2"),
     (1, "local.rename.before:1")],
)  # fmt: skip
def test_a_killed_save_leaves_nothing_that_counts(tmp_path, rank, point):
    """The step before stays the newest, nothing is damaged, and the same step is saved anew."""
    store = tmp_path / "store"
    known = run(
        save, tmp_path / "save", 2, "fsdp2", store.as_uri(), fail={rank: f"{SAVED[-1]} {point}"}
    )[0]
    (rows,) = loaded(tmp_path / "load", "one", 1, store, [None, SAVED[0]])
    assert rows == [[SAVED[1], known[SAVED[1]]], [SAVED[0], known[SAVED[0]]]]
    assert not damage(store)
    on = run(go_on, tmp_path / "on", 1, "one", store.as_uri())
    assert on[0][SAVED[1]] == known[SAVED[1]]


@pytest.mark.fault
def test_a_killed_first_save_leaves_no_run(tmp_path):
    """Rank 1 dies while it writes blocks: rank 0 has made nothing visible that a run would meet."""
    store = tmp_path / "store"
    fail = {1: f"{SAVED[0]} local.rename.before:1"}
    run(save, tmp_path / "save", 2, "fsdp2", store.as_uri(), fail=fail, after_s=1.0)
    with open_store(store.as_uri()) as opened:
        assert read_catalog(opened.tiers, "e2e").empty
    on = run(go_on, tmp_path / "on", 1, "one", store.as_uri())
    assert min(on[0]) == 0


def test_a_failing_rank_fails_all(tmp_path):
    """A full disk on one rank: every rank's save raises, and the step is not there."""
    store = tmp_path / "store"
    folder = tmp_path / "save"
    folder.mkdir()
    launcher = Launcher(folder, "fsdp2", 2)
    fail = ["", f"{SAVED[-1]} local.rename.before:1=raise"]
    processes = [
        _context.Process(
            target=save, daemon=True,
            args=(str(folder / f"{rank}.json"), rank, 2, launcher.server.port, "fsdp2",
                  store.as_uri(), fail[rank]),
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 1
    (rows,) = loaded(tmp_path / "load", "one", 1, store, [None])
    assert rows[0][0] == SAVED[1]
    assert not damage(store)


def test_a_step_before_the_run_is_refused(tmp_path):
    """All that there is would be off the line."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    import adacheck_store as ada

    store = (tmp_path / "store").as_uri()
    state = {"model": {"w": torch.arange(5.0)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=ada.DcpWriter(store, "r", 5))
        with pytest.raises(CheckpointException, match="nothing to come after"):
            dcp.save(state, storage_writer=ada.DcpWriter(store, "r", 5))
        found = {"model": {"w": torch.zeros(5)}}
        reader = ada.DcpReader(store, "r")
        dcp.load(found, storage_reader=reader)
    assert reader.step == 5
    assert torch.equal(found["model"]["w"], torch.arange(5.0))
    with pytest.raises(AdaCheckError):
        ada.DcpWriter(store, "../r", 5)


@pytest.mark.parametrize("form", ["numbers", "module", "nothing", "no groups", "no group of it"])
def test_optimizer_state_that_is_not_of_the_model_is_refused(tmp_path, form):
    """By name; else the step would be there without it, and without a word."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import get_state_dict

    import adacheck_store as ada

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    train_on(model, optimizer)
    states, optim = get_state_dict(model, optimizer)
    if form == "numbers":
        state, name = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "'0'"
    elif form == "module":
        states = {f"module.{key}": value for key, value in states.items()}
        state, name = {"model": states, "optimizer": optim}, "'bias'"
    elif form == "nothing":
        state, name = {"epoch": 3}, "no tensor of a model"
    elif form == "no groups":
        state, name = {"model": states, "optimizer": {"state": optim["state"]}}, "'bias', which"
    else:
        optim["param_groups"][0]["params"].remove("weight")
        state, name = {"model": states, "optimizer": optim}, "'weight', which is in none"
    store = (tmp_path / "store").as_uri()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointException, match=name):
            dcp.save(state, storage_writer=ada.DcpWriter(store, "r", 5))
    assert not (tmp_path / "store").exists()


def test_values_of_the_model_that_are_no_tensors_are_kept(tmp_path):
    """``_extra_state``, as a dict and as bytes: `DcpReader` gives them back."""
    import torch
    import torch.distributed.checkpoint as dcp

    import adacheck_store as ada

    store = (tmp_path / "store").as_uri()
    bytes_of = io.BytesIO(b"scales")
    model = {"w": torch.arange(5.0), "a._extra_state": {"scale": [1, 2]},
             "b._extra_state": bytes_of}  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model}, storage_writer=ada.DcpWriter(store, "r", 5))
        empty = {"w": torch.zeros(5), "a._extra_state": {"scale": [0]}, "b._extra_state": None}
        found = {"model": empty}
        dcp.load(found, storage_reader=ada.DcpReader(store, "r"))
    assert found["model"]["a._extra_state"] == {"scale": [1, 2]}
    assert torch.equal(found["model"]["w"], model["w"])
    kept = found["model"]["b._extra_state"]
    assert kept.getvalue() == b"scales"


def train_on(model, optimizer) -> None:
    """One update of a small model."""
    import torch

    model(torch.randn(8, 3)).square().mean().backward()
    optimizer.step()
