"""What others wrote becomes a step that a training goes on from; nothing in it is executed."""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import adacheck_store as ada
from adacheck_store.format.errors import MalformedError, UnsupportedError, UsageError
from adacheck_store.tools.importing import take_in
from adacheck_store.tools.pickled import read_pickle
from tests.tools.stores import cli, cli_json

pytestmark = pytest.mark.filterwarnings("ignore")
RUN = "taken"


class Net(torch.nn.Module):
    """With a BatchNorm, a frozen bias and, if asked for, tied weights."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 300)
        self.norm = torch.nn.BatchNorm1d(300)
        self.middle = torch.nn.Linear(300, 300, bias=False)
        self.last = torch.nn.Linear(300, 300)
        self.last.bias.requires_grad_(False)
        if tied:
            self.last.weight = self.middle.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through all."""
        return self.last(self.middle(self.norm(self.first(x)).relu()))


def pieces(kind: str = "adamw", tied: bool = False) -> tuple[Net, torch.optim.Optimizer]:
    """A net and its optimizer."""
    net = Net(tied)
    params = [p for p in net.parameters() if p.requires_grad]
    made: dict[str, Any] = {
        "adamw": lambda: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
        "adam": lambda: torch.optim.Adam(params, lr=1e-2, betas=(0.8, 0.99)),
        "sgd": lambda: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
        "groups": lambda: torch.optim.AdamW(
            [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:]}], lr=1e-2
        ),
        "named": lambda: torch.optim.NAdam(
            [(n, p) for n, p in net.named_parameters() if p.requires_grad]
        ),
    }
    return net, made[kind]()


def train(net: Net, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    """Some steps, whose numbers are their seeds."""
    for number in range(first, first + count):
        torch.manual_seed(number)
        optimizer.zero_grad()
        net(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()


def same(one: Any, other: Any) -> None:
    """Two nets and their optimizers have the same bits."""
    for (name, a), (_, b) in zip(
        one[0].state_dict().items(), other[0].state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name
    mine, theirs = one[1].state_dict(), other[1].state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for number, state in theirs["state"].items():
        assert mine["state"][number].keys() == state.keys()
        for role, value in state.items():
            assert torch.equal(torch.as_tensor(mine["state"][number][role]),
                               torch.as_tensor(value))  # fmt: skip


def state_of(trained: Any) -> dict[str, Any]:
    """What torch's own interface gives."""
    model, optimizer = get_state_dict(*trained)
    return {"model": model, "optimizer": optimizer, "step": 5, "note": "theirs"}


def goes_on(url: str, trained: Any, kind: str, tied: bool = False, run: str = RUN) -> None:
    """`attach` restores what was imported, and trains on as the original does."""
    mine = pieces(kind, tied)
    train(*mine, 77, 1)
    with ada.attach(*mine, run, url) as ckpt:
        assert ckpt.restore().step == 5
        same(mine, trained)
        train(*mine, 6, 3)
        train(*trained, 6, 3)
        same(mine, trained)


@pytest.mark.parametrize(
    ("form", "kind", "tied"),
    [("dcp", "adamw", False), ("dcp", "groups", True), ("torch", "adam", True),
     ("torch", "sgd", False), ("plain", "sgd", False), ("plain", "named", False)],
)  # fmt: skip
def test_a_training_goes_on(tmp_path: Path, form: str, kind: str, tied: bool) -> None:
    """A folder of DCP, a file of names, one of plain state dicts whose optimizer has numbers."""
    trained = pieces(kind, tied)
    if form == "plain" and kind == "sgd":
        trained[0].last.bias.requires_grad_(True)  # then numbers count all parameters
        trained = trained[0], torch.optim.SGD(trained[0].parameters(), lr=1e-2, momentum=0.9)
    train(*trained, 1, 5)
    source, url = tmp_path / "source", (tmp_path / "store").as_uri()
    more = ["--tied", "last.weight=middle.weight"] if form == "dcp" and tied else []
    if form == "dcp":
        dcp.save(state_of(trained), checkpoint_id=str(source))
    elif form == "torch":
        torch.save(state_of(trained), source)
    else:
        net, optimizer = trained
        torch.save({"state_dict": {f"module.{k}": v for k, v in net.state_dict().items()},
                    "optimizer_state_dict": optimizer.state_dict(), "step": 5}, source)  # fmt: skip
    code, document = cli_json("import", url, source, "--run", RUN, *more)
    assert code == 0, document
    (row,) = document["rows"]
    assert (row["step"], row["form"]) == (5, "dcp" if form == "dcp" else "torch")
    assert row["left_out"] == (["note"] if form != "plain" else [])
    if (form, kind) == ("plain", "sgd"):
        mine = Net()
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.5, momentum=0.9)
        with ada.attach(mine, optimizer, RUN, url) as ckpt:
            assert ckpt.restore().step == 5
            same((mine, optimizer), trained)
        return
    goes_on(url, trained, kind, tied)
    code, document = cli_json("fsck", url, "--deep")
    assert code == 0, document


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp"])
def test_export_and_import(tmp_path: Path, form: str, tied: bool) -> None:
    """What is exported comes back: every tensor, counter and number, and trains on alike."""
    trained = pieces("groups", tied)
    first, second = (tmp_path / "first").as_uri(), (tmp_path / "second").as_uri()
    with ada.attach(*trained, RUN, first):
        train(*trained, 1, 5)
    name = "a.safetensors" if form == "safetensors" else "a"
    assert cli("export", first, tmp_path / name, "--format", form).exit_code == 0
    more = ["--tied", "last.weight=middle.weight"] if form == "dcp" and tied else []
    assert cli("import", second, tmp_path / name, "--run", RUN, *more).exit_code == 0
    goes_on(second, trained, "groups", tied)


def test_a_model_alone(tmp_path: Path) -> None:
    """Of Hugging Face: it can be loaded; a training is told why it is refused."""
    trained = pieces()
    first, second = (tmp_path / "first").as_uri(), (tmp_path / "second").as_uri()
    with ada.attach(*trained, RUN, first):
        train(*trained, 1, 5)
    assert cli("export", first, tmp_path / "hf", "--format", "hf").exit_code == 0
    refused = cli("import", second, tmp_path / "hf", "--run", RUN)
    assert refused.exit_code == 2
    assert "--step" in refused.output
    result = cli("import", second, tmp_path / "hf", "--run", RUN, "--step", "5")
    assert "no optimizer" in result.output
    found = {"model": {k: torch.zeros_like(v) for k, v in trained[0].state_dict().items()}}
    dcp.load(found, storage_reader=ada.DcpReader(second, RUN), no_dist=True)
    for name, tensor in trained[0].state_dict().items():
        assert torch.equal(found["model"][name], tensor)
    with pytest.raises(UsageError, match="trained of"), ada.attach(*pieces(), RUN, second) as ckpt:
        ckpt.restore()


def test_a_sharded_folder(tmp_path: Path) -> None:
    """Chunks of a tensor are put together; a missing one is an error, and nothing is there."""
    from torch.distributed.checkpoint import filesystem, metadata
    from torch.distributed.checkpoint.storage import WriteResult

    whole = torch.arange(42.0).reshape(7, 6)
    folder = tmp_path / "folder"
    folder.mkdir()
    size, index = torch.Size, metadata.MetadataIndex
    chunks = [metadata.ChunkStorageMetadata(size((low, 0)), size((count, 6)))
              for low, count in ((0, 3), (3, 4), (7, 0))]  # fmt: skip
    places, data = {}, b""
    for chunk in chunks[:2]:
        low, count = chunk.offsets[0], chunk.sizes[0]
        buffer = io.BytesIO()
        torch.save(whole[low : low + count].clone(), buffer)
        info = filesystem._StorageInfo("a.distcp", len(data), len(buffer.getvalue()))
        places[index("model.w", chunk.offsets)] = info
        data += buffer.getvalue()
    (folder / "a.distcp").write_bytes(data)
    url = (tmp_path / "store").as_uri()
    for kept, error in ((chunks[:1], MalformedError), (chunks, None)):
        entry = metadata.TensorStorageMetadata(metadata.TensorProperties(), size((7, 6)), kept)
        filesystem.FileSystemWriter(folder).finish(
            metadata.Metadata({"model.w": entry}),
            [[WriteResult(index=at, size_in_bytes=info.length, storage_data=info)
              for at, info in places.items()]],
        )  # fmt: skip
        if error:
            with pytest.raises(error, match="18 elements of 42"):
                take_in(url, folder, RUN, step=1)
        else:
            take_in(url, folder, RUN, step=1)
    found = {"model": {"w": torch.zeros(7, 6)}}
    dcp.load(found, storage_reader=ada.DcpReader(url, RUN), no_dist=True)
    assert torch.equal(found["model"]["w"], whole)


EVIL = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0btouch /evil\x85R."
"""A pickle that would run a command."""


def test_nothing_is_executed(tmp_path: Path) -> None:
    """Objects in an index are told, not made; one among the values is refused."""
    told = read_pickle(EVIL)
    assert (told.name, told.args) == ("posix.system", ("touch /evil",))
    assert not os.path.lexists("/evil")
    folder, url = tmp_path / "folder", (tmp_path / "store").as_uri()
    folder.mkdir()
    (folder / ".metadata").write_bytes(EVIL)
    with pytest.raises(MalformedError):
        take_in(url, folder, RUN, step=1)
    net = pieces()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**state_of(net), "object": Path("x")}, checkpoint_id=str(tmp_path / "with"))
    with pytest.raises(UnsupportedError, match="weights_only"):
        take_in(url, tmp_path / "with", RUN)
    torch.save({"model": net[0].state_dict(), "object": Path("x")}, tmp_path / "file")
    with pytest.raises(UnsupportedError, match="weights_only"):
        take_in(url, tmp_path / "file", RUN)
    assert cli("ls", url).exit_code != 0  # not even a store was made


def test_bad_input(tmp_path: Path) -> None:
    """Each is refused by one clear error, and no run is there afterwards."""
    url = (tmp_path / "store").as_uri()
    net, optimizer = pieces("groups")
    train(net, optimizer, 1, 1)
    plain = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    named = state_of((net, optimizer))
    half = {name: v for name, v in named["model"].items() if name != "first.weight"}
    options = [{k: v for k, v in g.items() if k != "decoupled_weight_decay"}
               for g in named["optimizer"]["param_groups"]]  # fmt: skip
    state = named["optimizer"]["state"]
    cases: list[tuple[Any, type[Exception], str]] = [
        (plain, UnsupportedError, "named_parameters"),
        ({**named, "model": half}, UsageError, "first.weight"),
        ({**named, "optimizer": {"state": state, "param_groups": options}}, UnsupportedError,
         "optimizer_class"),
        ({**named, "model": {}}, UsageError, "--model"),
        ([1, 2], UnsupportedError, "a list"),
    ]  # fmt: skip
    for number, (value, error, text) in enumerate(cases):
        path = tmp_path / f"{number}.pt"
        torch.save(value, path)
        with pytest.raises(error, match=text):
            take_in(url, path, RUN)
    (tmp_path / "cut.pt").write_bytes((tmp_path / "0.pt").read_bytes()[:2000])
    (tmp_path / "cut.safetensors").write_bytes(b"\xff" * 20)
    for name, error in (("cut.pt", UnsupportedError), ("cut.safetensors", MalformedError),
                        ("none", UsageError)):  # fmt: skip
        with pytest.raises(error):
            take_in(url, tmp_path / name, RUN)
    assert cli("ls", url).exit_code != 0


def test_into_a_run_that_is_there(tmp_path: Path) -> None:
    """The history stays; the import is the newest step, and an older one is refused."""
    trained, url = pieces(), (tmp_path / "store").as_uri()
    with ada.attach(*trained, RUN, url):
        train(*trained, 1, 4)
    train(*trained, 5, 1)
    torch.save(state_of(trained), tmp_path / "a.pt")
    take_in(url, tmp_path / "a.pt", RUN)
    code, document = cli_json("restore", url, tmp_path / "out", "--step", "4")
    assert code == 0, document
    goes_on(url, trained, "adamw")


def test_a_bare_gc_keeps_what_the_trainer_kept(tmp_path: Path) -> None:
    """A step that is taken in says nothing of what is to stay; the trainer before it does."""
    trained, store = pieces(), (tmp_path / "store").as_uri()
    keep = ada.Retention(last=100)
    with ada.attach(*trained, RUN, store, base_every=2, keep=keep) as ckpt:
        for step in range(1, 13):
            train(*trained, step, 1)
            if step % 2 == 0:
                ckpt.flush(60)
    name = tmp_path / "a.safetensors"
    assert cli("export", store, name, "--format", "safetensors").exit_code == 0
    code, before = cli_json("ls", store)
    assert code == 0
    assert cli("import", store, name, "--run", RUN, "--step", "20").exit_code == 0
    code, document = cli_json("gc", store, "--run", RUN)
    assert (code, document["rows"]) == (0, []), before
    assert cli_json("gc", store, "--run", RUN, "--last", "1")[1]["rows"], "there is what to delete"


def test_chunks_that_overlap_are_refused(tmp_path: Path) -> None:
    """As many elements as there should be, and some of them nowhere: that is no tensor."""
    from torch.distributed.checkpoint import filesystem, metadata
    from torch.distributed.checkpoint.storage import WriteResult

    size, folder, data = torch.Size, tmp_path / "folder", b""
    folder.mkdir()
    results = []
    for low, count in ((0, 4), (2, 4)):  # of 8 rows: the last two are nowhere
        buffer = io.BytesIO()
        torch.save(torch.ones(count, 3), buffer)
        info = filesystem._StorageInfo("a.distcp", len(data), len(buffer.getvalue()))
        at = metadata.MetadataIndex("model.w", size((low, 0)))
        results.append(WriteResult(index=at, size_in_bytes=info.length, storage_data=info))
        data += buffer.getvalue()
    (folder / "a.distcp").write_bytes(data)
    chunks = [metadata.ChunkStorageMetadata(size((low, 0)), size((4, 3))) for low in (0, 2)]
    entry = metadata.TensorStorageMetadata(metadata.TensorProperties(), size((8, 3)), chunks)
    filesystem.FileSystemWriter(folder).finish(metadata.Metadata({"model.w": entry}), [results])
    with pytest.raises(MalformedError, match="overlap"):
        take_in((tmp_path / "store").as_uri(), folder, RUN, step=1)


@pytest.mark.parametrize("form", ["dcp", "torch", "plain"])
def test_values_of_the_model_that_are_no_tensors_are_named(tmp_path: Path, form: str) -> None:
    """``_extra_state`` as Transformer Engine had it; of a model by itself also what is no model."""
    more = {"_extra_state": io.BytesIO(b"scales")}
    model = {"w": torch.arange(4.0), **more}
    source, url = tmp_path / "source", (tmp_path / "store").as_uri()
    if form == "dcp":
        dcp.save({"model": model}, checkpoint_id=str(source))
    else:
        torch.save(model if form == "plain" else {"model": model}, source)
    left = "_extra_state" if form == "plain" else "model._extra_state"
    assert take_in(url, source, RUN, step=1).left_out == (left,)
