"""torch.distributed.checkpoint loads any step of a chain, on other ranks than wrote it."""

import json
from pathlib import Path

import pytest

from tests.ranks.elastic import build_elastic, whole
from tests.ranks.test_topology import known_of
from tests.ranks.worker import STEPS, Launcher, _context, _join


def load(out: str, rank: int, ranks: int, port: int, kind: str, store: str, steps: list) -> None:
    """A rank: load each of the steps into a fresh model and optimizer by DCP, tell what came."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    import adacheck_store as ada

    _join(rank, ranks, port, f"dcp-{kind}-{ranks}")
    rows = []
    for step in steps:
        torch.manual_seed(rank + 3)
        model, optimizer = build_elastic(kind, ranks, 37)
        states, optim = get_state_dict(model, optimizer)
        state = {"model": states, "optimizer": optim}
        reader = ada.DcpReader(store, "e2e", step)
        dcp.load(state, storage_reader=reader)
        bare = {"model": {name: torch.zeros_like(value) for name, value in states.items()}}
        dcp.load(bare, storage_reader=ada.DcpReader(store, "e2e", step))
        for name, value in bare["model"].items():
            full = (each.full_tensor() if hasattr(each, "full_tensor") else each
                    for each in (value, state["model"][name]))  # fmt: skip
            assert torch.equal(*full), name
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        rows.append([reader.step, whole(model, optimizer)])
    Path(out).write_text(json.dumps(rows))


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A chain of three ranks, and what all had at each step."""
    folder = tmp_path_factory.mktemp("dcp")
    launcher = Launcher(folder, "fsdp2", 3)
    given = {rank: {"redundancy": "off", "keep": 8} for rank in range(3)}
    attempt = launcher.start(folder / "store", wholes=True, given=given)
    assert attempt.wait() == [0, 0, 0]
    return launcher, folder / "store", known_of(attempt)


@pytest.mark.parametrize(("kind", "ranks"), [("one", 1), ("fsdp2", 2), ("copies", 2)])
def test_any_step(tmp_path, chain, kind, ranks):
    """The newest and one in the middle: parameters, moments, counters, groups; or the model."""
    launcher, store, known = chain
    outs = [tmp_path / f"{rank}.json" for rank in range(ranks)]
    port = launcher.server.port
    processes = [
        _context.Process(
            target=load, daemon=True,
            args=(str(out), rank, ranks, port, kind, store.as_uri(), [None, STEPS - 5]),
        )
        for rank, out in enumerate(outs)
    ]  # fmt: skip
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    for out in outs:
        newest, middle = json.loads(out.read_text())
        assert newest == [STEPS, known[STEPS]]
        assert middle == [STEPS - 5, known[STEPS - 5]]
