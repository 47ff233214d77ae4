"""diff, cat, log --graph: what they say of states and histories is so."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch

from adacheck_store.format.record import decode_header
from adacheck_store.restore import restore_state
from adacheck_store.session import RunSession
from adacheck_store.store import open_for_reading
from adacheck_store.tools.cat import cat_record, cat_tensor
from adacheck_store.tools.diff import TensorDiff, _Tally, diff
from adacheck_store.tools.export import Choice
from tests.core.toy import Toy
from tests.tools import stores
from tests.tools.stores import FIRST, LAST, RUN, cli, cli_json, flip, keys_of, train
from tests.tools.test_export_formats import put_together


def whole_of(store: Path, run: str, step: int) -> dict[str, torch.Tensor]:
    """Tensors of a step by their labels, put together here."""
    with open_for_reading(str(store)) as opened:
        return put_together(restore_state(opened.tiers, run, step=step))


def check_diff(store: Path, run: str, first: int, second: int) -> int:
    """Every row is what torch finds; how many there are."""
    code, document = cli_json("diff", store, first, second)
    assert code == 0
    rows = {row["tensor"]: row for row in document["rows"] if row["row"] == "TensorDiff"}
    values = {row["what"]: row for row in document["rows"] if row["row"] == "ValueDiff"}
    one, two = whole_of(store, run, first), whole_of(store, run, second)
    assert one.keys() == two.keys()
    for label, a in one.items():
        b = two[label]
        if label.endswith("/step"):
            assert (values[label]["first"], values[label]["second"]) == (a.item(), b.item())
            continue
        where = a.view(torch.int32) != b.view(torch.int32)
        assert (label in rows) == bool(where.any()), label
        if label in rows:
            row, gap = rows[label], (a.double() - b.double()).abs()[where]
            scale = torch.maximum(a.double().abs(), b.double().abs())[where]
            assert row["differ"] == int(where.sum())
            assert (row["elements"], row["nbytes"]) == (a.numel(), a.nbytes)
            mine, theirs = a.numpy().tobytes(), b.numpy().tobytes()
            assert row["changed"] == sum(x != y for x, y in zip(mine, theirs, strict=True))
            assert row["max_abs"] == float(gap.max())
            assert row["max_rel"] == float((gap / scale).max())
    return len(rows)


def test_diff_is_what_torch_finds(store: Path) -> None:
    """Of one rank, across a fork."""
    assert check_diff(store, RUN, FIRST, LAST - 3) == 9
    result = cli("diff", store, LAST, LAST)
    assert (result.exit_code, result.stdout) == (0, "no difference\n")
    rows = cli_json("diff", store, LAST, LAST, "--all")[1]["rows"]
    assert len([row for row in rows if row["row"] == "TensorDiff" and not row["differ"]]) == 12


def test_diff_of_shards(sharded: Path) -> None:
    """Of two ranks' shards: whole tensors are compared."""
    with open_for_reading(str(sharded)) as opened:
        newest = restore_state(opened.tiers, "e2e").step
    assert check_diff(sharded, "e2e", newest - 3, newest) > 4


def test_diff_by_tags_and_what_is_in_one_alone(tmp_path: Path) -> None:
    """A term of another layout has other tensors, and says so."""
    store = tmp_path / "store"
    train(str(store), 10)
    with open_for_reading(str(store)) as opened:
        first = restore_state(opened.tiers, RUN).plan.term
    session = RunSession.open(
        str(store), RUN, settings=stores.Settings(resume="never", base_every=8, object_lag=4)
    )
    toy = Toy([(40, 30), (8,)], stores.adamw, base_every=8)
    try:
        session.restore()
        session.start(toy.layout, start_step=0, base=toy.base, extra=toy.extra)
        for _ in range(3):
            toy.train()
            session.append(toy.boundary())
        session.flush(60)
    finally:
        session.close()
    with open_for_reading(str(store)) as opened:
        rows = list(diff(opened, Choice(step=10, term=first), Choice(step=3)))
    only = {row.tensor: row.only for row in rows if isinstance(row, TensorDiff) and row.tensor[:5]
            == "model"}  # fmt: skip
    assert only == {"model/w0": "", "model/w2": "first", "model/w3": "first", "model/w1": "second"}
    twice = [row.only for row in rows if isinstance(row, TensorDiff) and row.tensor == "model/w1"]
    assert twice == ["first", "second"], "another shape"
    assert cli("tag", store, "good", 2).exit_code == 0
    assert cli("diff", store, "good", "3").exit_code == 0
    assert cli("restore", store, tmp_path / "out", "--step", "good").exit_code == 0
    with safetensors.safe_open(str(tmp_path / "out"), "pt") as file:
        assert file.metadata()["step"] == "2"
    assert "no step and no tag" in cli("restore", store, tmp_path / "no", "--step", "-1").stderr
    result = cli("diff", store, "bad", "3")
    assert (result.exit_code, "of: good" in result.stderr) == (2, True)


def test_odd_numbers_are_counted_apart() -> None:
    """Infinities and NaNs have no difference; other bits of one value are a difference of 0."""
    tally = _Tally()
    nan, inf = float("nan"), float("inf")
    tally.add(
        torch.tensor([1.0, nan, 2.0, inf, 0.0, 5.0]), torch.tensor([1.0, nan, nan, 3.0, -0.0, 4.0])
    )
    assert (tally.differ, tally.odd, tally.max_abs, tally.max_rel) == (4, 2, 1.0, 0.2)
    tally.add(torch.tensor([1, 2], dtype=torch.int64), torch.tensor([1, -(2**40)]))
    assert (tally.differ, tally.max_abs) == (5, 2.0**40 + 2)
    tally = _Tally()
    tally.add(torch.tensor([1 + 1j]), torch.tensor([1 + 4j]))
    assert (tally.differ, tally.max_abs) == (1, 3.0)
    tally.add(torch.tensor([True, False]), torch.tensor([True, True]))
    tally.add(torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([9.0], dtype=torch.bfloat16))
    assert (tally.differ, tally.max_abs, tally.changed) == (3, 8.0, 1 + 1 + 2)


@pytest.mark.parametrize("label", ["model/w0", "optimizer/w3/exp_avg", "model/w2"])
def test_cat_of_a_tensor(store: Path, tmp_path: Path, label: str) -> None:
    """Raw to stdout, and as a file that numpy loads."""
    expected = whole_of(store, RUN, LAST - 1)[label]
    result = cli("cat", store, label, "--step", LAST - 1)
    assert result.exit_code == 0
    assert result.stdout_bytes == expected.numpy().tobytes()
    code, document = cli_json("cat", store, label, "--step", LAST - 1, "--npy", tmp_path / "x.npy")
    assert (code, document["rows"][0]["tensor"]) == (0, label)
    found = np.load(tmp_path / "x.npy", allow_pickle=False)
    assert found.dtype == np.float32
    assert torch.equal(torch.from_numpy(found), expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a b", "x.npy"]
    again = cli("cat", store, label, "--npy", tmp_path / "x.npy")
    assert (again.exit_code, "the target exists" in again.stderr) == (2, True)


def test_cat_of_shards_and_of_little_memory(sharded: Path) -> None:
    """Pieces of two ranks come to their places; what is folded is the tensor's part alone."""
    with open_for_reading(str(sharded)) as opened:
        newest = restore_state(opened.tiers, "e2e").step
        for label, expected in whole_of(sharded, "e2e", newest).items():
            if label.endswith("/step"):
                continue
            out = io.BytesIO()
            row = cat_tensor(opened, label, out, Choice())
            assert out.getvalue() == expected.numpy().tobytes(), label
            assert (row.step, row.shape) == (newest, tuple(expected.shape))


def test_cat_of_half_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy has no bfloat16: the file has the same values as float32, stdout the bits."""
    monkeypatch.setattr(
        stores, "make_toy",
        lambda: Toy([(33, 5)], stores.adamw, base_every=8, dtype=torch.bfloat16),
    )  # fmt: skip
    toy = train(str(tmp_path / "store"), 4)
    result = cli("cat", tmp_path / "store", "model/w0", "--npy", tmp_path / "x.npy")
    assert result.exit_code == 0, result.output
    found = torch.from_numpy(np.load(tmp_path / "x.npy"))
    assert found.dtype == torch.float32
    assert torch.equal(found.bfloat16(), toy.params[0].detach())
    raw = cli("cat", tmp_path / "store", "model/w0").stdout_bytes
    assert raw == toy.params[0].detach().view(torch.int16).numpy().tobytes()


def test_cat_of_a_record(store: Path) -> None:
    """A safetensors file with its head; blocks from a tier that has them right."""
    key = keys_of(store, "zarr", "base")[-1]
    raw = cli("cat", store, key).stdout_bytes
    head = decode_header(raw)
    with open_for_reading(str(store)) as opened:
        assert head.id == opened.far.head(key).id
    found = dict(safetensors.deserialize(raw))
    assert set(found) == {info.name for info in head.head.arrays}
    for path in (store / "objects" / key).glob("*/*/c/0"):
        flip(path, 3)
    assert cli("cat", store, key).stdout_bytes == raw
    shutil.rmtree(store / "lmdb")
    out = io.BytesIO()
    with open_for_reading(str(store)) as opened, pytest.raises(Exception, match="whole") as caught:
        cat_record(opened, key, out)
    assert caught.value.exit_code == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(("arguments", "code", "text"), [
    (("model/w7",), 2, "such as: model/w"), (("model/w0", "--step", 999), 3, "nearest provable"),
    (("toy/layout/" + "0" * 64,), 3, "no tier has this record"),
    (("model/w0", "--json"), 2, "--json belongs to --npy"),
    (("model/w0", "--rank", 3), 2, "no rank 3"),
    (("toy/log/000000000001", "--step", 3), 2, "a record is written as it is"),
])  # fmt: skip
def test_what_cat_cannot_give(
    store: Path, arguments: tuple[Any, ...], code: int, text: str
) -> None:
    """One clear error each, and nothing on stdout but a document."""
    result = cli("cat", store, *arguments)
    assert (result.exit_code, text in result.stderr) == (code, True), result.stderr


def test_graph(tmp_path: Path) -> None:
    """Two branches of one term, one of them off the line; a tag, bases and floors in place."""
    store = tmp_path / "store"
    train(str(store), 20, even=True, keep_bases=100)
    train(str(store), 26, even=True, keep_bases=100)
    session = RunSession.open(str(store), RUN, settings=stores.Settings(base_every=8, object_lag=4))
    toy = stores.make_toy()
    try:
        stores.load(toy, session.restore(step=16))
        session.start(toy.layout, start_step=toy.step, base=toy.base, extra=toy.extra)
        toy.train()
        session.append(toy.boundary())
        session.flush(60)
    finally:
        session.close()
    assert cli("tag", store, "good", 17).exit_code == 0
    assert cli("gc", store, "--apply", "--grace", 0).exit_code == 0
    rows = cli_json("log", store, "--graph")[1]["rows"]
    first, second, third = sorted({row["term"] for row in rows})
    assert [(row["graph"], row["what"], row["term"], row["step"]) for row in rows] == [
        ("*", "term", third, None), ("o", "base", third, 17), ("@", "tag", third, 17),
        ("|", "start", third, 16),
        ("| *", "term", second, None), ("| o", "base", second, 24), ("| |", "start", second, 20),
        ("| | *", "term", first, None), ("| |/", "fork", first, 20), ("|/", "fork", first, 16),
        ("o", "base", first, 16), ("_", "floor", first, 16),
        ("o", "base", first, 8), ("_", "floor", first, 8),
    ]  # fmt: skip
    assert "off the line" in rows[4]["text"]
    text = cli("log", store, "--graph").stdout.splitlines()
    assert len(text) == len(rows)
    assert text[2] == "@ tag good, step 17"


def test_ls_of_one_tier_or_term(store: Path) -> None:
    """Filters leave out the rest, and belong to a run that is named."""
    rows = cli_json("ls", store, "--run", RUN, "--tier", "zarr", "--term", "t000002")[1]["rows"]
    (row,) = [row for row in rows if row["row"] == "HoldingRow"]
    assert (row["tier"], row["term"][:7]) == ("zarr", "t000002")
    assert cli("ls", store, "--tier", "zarr").exit_code == 2


def test_deep_by_the_command(store: Path) -> None:
    """Rows for a sample; the result is that of the whole check."""
    code, document = cli_json("fsck", store, "--deep", "--sample", 3)
    rows = [row for row in document["rows"] if row["row"] == "FoldedRow"]
    assert code == document["exit_code"] == 0
    assert len(rows) == 3
    assert rows[0]["step"] == LAST
    assert all(row["checked"] > 0 for row in rows if row["deltas"])
    text = cli("fsck", store, "--deep").stdout
    assert "Folded" in text
    assert "clean" in text
