"""What other programs read of an exported step, of one rank's store and of two ranks' shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from adacheck_store.arrays import tensor_of
from adacheck_store.format.errors import UsageError
from adacheck_store.restore import Restored, restore_state
from adacheck_store.store import open_for_reading
from adacheck_store.tools.export import HF_INDEX, Choice, export
from tests.core.toy import Toy
from tests.ranks.worker import STEPS
from tests.tools.stores import LAST, cli, cli_json

Flat = dict[str, torch.Tensor]


def put_together(state: Restored) -> Flat:
    """Whole tensors from a restore's parts, box by box."""
    found: Flat = {}
    for part in state.parts.values():
        for section in part.layout.sections:
            kept = part.states[section.name]
            for index, piece in enumerate(section.slices):
                cut = slice(piece.offset, piece.offset + piece.elements)
                for role, array in ((r, part.arrays[f"{section.name}/{r}"]) for r in section.dtypes
                                    if f"{section.name}/{r}" in part.arrays):  # fmt: skip
                    main = role == section.main_role
                    label = f"model/{piece.name}" if main else f"optimizer/{piece.name}/{role}"
                    whole = found.setdefault(label, torch.full(piece.shape, torch.nan))
                    assert len(piece.boxes) <= 1
                    for box in piece.boxes:
                        place = tuple(slice(*side) for side in box)
                        whole[place] = array[cut].reshape(whole[place].shape)
                for name, values in kept.scalars.items():
                    if values[index] is not None:
                        found[f"optimizer/{piece.name}/{name}"] = tensor_of(values[index])
    return found


@pytest.fixture(scope="module")
def truth(sharded: Path) -> Flat:
    """The whole tensors of the last step of the sharded run."""
    with open_for_reading(str(sharded)) as opened:
        found = put_together(restore_state(opened.tiers, "e2e"))
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found


def flat(state: dict[str, Any]) -> Flat:
    """A nested state under the labels of a restored file."""
    found = {f"model/{name}": tensor for name, tensor in state["model"].items()}
    for name, states in state["optimizer"]["state"].items():
        found |= {f"optimizer/{name}/{role}": tensor for role, tensor in states.items()}
    return found


def check(found: Flat, expected: Flat) -> None:
    """The same tensors with the same bits."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def written(store: Path, target: Path, form: str) -> Path:
    """A step exported by the command."""
    code, document = cli_json("export", store, target, "--format", form)
    assert code == 0, document
    row = document["rows"][0]
    assert (row["path"], row["step"]) == (str(target), STEPS)
    assert {path.name for path in target.parent.iterdir()} == {target.name}, "drafts are left"
    return target


def empty_like(state: dict[str, Any]) -> dict[str, Any]:
    """A state of the same form, its tensors spoilt."""
    return {
        key: empty_like(value) if isinstance(value, dict)
        else torch.full_like(value, -7) if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }  # fmt: skip


def test_safetensors(sharded: Path, truth: Flat, tmp_path: Path) -> None:
    """Shards of two ranks are one file of whole tensors."""
    check(load_file(written(sharded, tmp_path / "out", "safetensors")), truth)


def test_torch(sharded: Path, truth: Flat, tmp_path: Path) -> None:
    """``torch.load(weights_only=True)`` reads it, and it has each tensor's bytes alone."""
    path = written(sharded, tmp_path / "out.pt", "torch")
    state = torch.load(path, weights_only=True)
    check(flat(state), truth)
    assert state["step"] == STEPS
    (group,) = state["optimizer"]["param_groups"]
    assert sorted(group["params"]) == sorted(state["optimizer"]["state"])
    assert group["weight_decay"] == 0.1
    payload = sum(tensor.nbytes for tensor in truth.values())
    assert payload < path.stat().st_size < payload + 1000 * len(truth)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp(sharded: Path, truth: Flat, tmp_path: Path) -> None:
    """``torch.distributed.checkpoint.load`` reads the folder."""
    state = empty_like(torch.load(written(sharded, tmp_path / "a.pt", "torch"), weights_only=True))
    (tmp_path / "a.pt").unlink()
    folder = written(sharded, tmp_path / "out", "dcp")
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    check(flat(state), truth)


@pytest.mark.parametrize("shard_bytes", [1, 1000, 1 << 30])
def test_hf(sharded: Path, truth: Flat, tmp_path: Path, shard_bytes: int) -> None:
    """The index names the file of each tensor of the model, and nothing else."""
    with open_for_reading(str(sharded)) as opened:
        export(opened, tmp_path / "out", "hf", Choice(), shard_bytes=shard_bytes)
    index = json.loads((tmp_path / "out" / HF_INDEX).read_text())
    files = {path.name for path in (tmp_path / "out").iterdir()} - {HF_INDEX}
    assert files == set(index["weight_map"].values())
    expected = {k.partition("/")[2]: v for k, v in truth.items() if k.startswith("model/")}
    kept = {name: load_file(tmp_path / "out" / name) for name in files}
    check({n: kept[file][n] for n, file in index["weight_map"].items()}, expected)
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in expected.values())
    for tensors in kept.values():
        size = sum(each.nbytes for each in tensors.values())
        assert len(tensors) == 1 or size <= shard_bytes
    assert len(files) == {1: len(expected), 1000: len(files), 1 << 30: 1}[shard_bytes]


def test_one_rank(store: Path, toy: Toy, tmp_path: Path) -> None:
    """A store of one rank: the trainer's own parameters and moments."""
    assert cli("export", store, tmp_path / "out", "--format", "torch").exit_code == 0
    state = torch.load(tmp_path / "out", weights_only=True)
    assert state["step"] == LAST
    for index, param in enumerate(toy.params):
        assert torch.equal(state["model"][f"w{index}"], param)
        for role, value in toy.optimizer.state[param].items():
            assert torch.equal(state["optimizer"]["state"][f"w{index}"][role], value)


@pytest.mark.parametrize(("step", "near"), [(2, "{0} and {1}"), (10**6, "{2} and {3}")])
def test_a_step_that_is_gone(store: Path, tmp_path: Path, step: int, near: str) -> None:
    """The nearest two that exist are named, and nothing is left."""
    with open_for_reading(str(store)) as opened:
        steps = [s for s in range(LAST + 1) if provable(opened, s)]
    said = near.format(*steps[:2], *steps[-2:])
    for form in ("safetensors", "hf", "torch", "dcp"):
        result = cli("export", store, tmp_path / "out", "--format", form, "--step", step)
        assert result.exit_code == 3
        assert f"nearest provable steps: {said}" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"a b"}


def provable(opened: Any, step: int) -> bool:
    """Whether restore gives a step."""
    from adacheck_store.format.errors import NotProvableError

    try:
        return restore_state(opened.tiers, "toy", step=step).step == step
    except NotProvableError:
        return False


@pytest.fixture
def targets(tmp_path: Path) -> Iterator[Path]:
    """A file that is there already, and stays as it is."""
    (tmp_path / "there").write_text("mine")
    yield tmp_path / "there"
    assert (tmp_path / "there").read_text() == "mine"


@pytest.mark.parametrize("form", ["safetensors", "hf", "torch", "dcp"])
def test_what_exists_is_left(store: Path, targets: Path, form: str) -> None:
    """A target that exists is refused, whatever it is to become."""
    result = cli("export", store, targets, "--format", form)
    assert result.exit_code == 2
    assert "the target exists" in result.stderr


def test_ranks_and_formats_that_are_none(store: Path, tmp_path: Path) -> None:
    """One clear error each."""
    with open_for_reading(str(store)) as opened:
        with pytest.raises(UsageError, match="no rank 3"):
            export(opened, tmp_path / "out", "torch", Choice(rank=3))
        with pytest.raises(UsageError, match="no format 'onnx'"):
            export(opened, tmp_path / "out", "onnx", Choice())
