"""What is deleted beneath a reader, and what has changed between a floor and its deletions."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch

from adacheck_store.agent.prune import Prunes
from adacheck_store.agent.replica import FAR
from adacheck_store.ahead import Streamed
from adacheck_store.config import Settings
from adacheck_store.fetch import Fetcher
from adacheck_store.format.errors import NotProvableError
from adacheck_store.format.keys import Term, log_key
from adacheck_store.format.manifest import Claim, Floor
from adacheck_store.pruner import Pruner
from adacheck_store.session import RunSession
from adacheck_store.store import open_for_reading, open_store
from adacheck_store.terms import Rivals, claim_term, read_log
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.object_local import LocalObjects
from adacheck_store.tools import export as export_module
from adacheck_store.tools import restore as restore_module
from adacheck_store.tools.gc import rivals
from adacheck_store.tools.restore import open_parts
from tests.tools.stores import RUN, cli, cli_json, keys_of, make_toy, train

END = 11


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """An object tier with bases at 0, 4 and 8, of which nothing was pruned."""
    folder = tmp_path / "store"
    train(str(folder), END, even=True, base_every=4, keep_bases=100)
    shutil.rmtree(folder / "lmdb")
    return folder


def collects(store: Path, at: int) -> Any:
    """`open_parts`, beneath which a base comes at a step, and all before it goes, once."""
    left = [at]

    def open_late(*arguments: Any, **named: Any) -> Any:
        if left and left.pop():
            assert cli("compact", store, "--to", at).exit_code == 0
            assert cli("gc", store, "--last", 1, "--grace", 0, "--apply").exit_code == 0
        return open_parts(*arguments, **named)

    return open_late


@pytest.mark.parametrize("verb", ["restore", "export"])
def test_a_reader_plans_anew(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """The step is the one it would have been, from the base that is there now; it is said."""
    before, after = tmp_path / "before.safetensors", tmp_path / "after"
    assert cli("restore", store, before).exit_code == 0
    module = restore_module if verb == "restore" else export_module
    monkeypatch.setattr(module, "open_parts", collects(store, END))
    form = () if verb == "restore" else ("--format", "hf")
    code, document = cli_json(verb, store, after, *form)
    assert code == 0, document
    (row,) = document["rows"]
    assert (row["step"], row["lost"]) == (END, 0)
    assert any("planned anew" in reason for reason in row["reasons"])
    assert row["certificate"]["base_step"] == END
    file = after if verb == "restore" else next(after.glob("*.safetensors"))
    old, new = safetensors.torch.load_file(before), safetensors.torch.load_file(file)
    names = {"model/" + name for name in new} if verb == "export" else set(new)
    assert names == {name for name in old if verb == "restore" or name.startswith("model/")}
    for name in names:
        assert old[name].equal(new[name.removeprefix("model/") if verb == "export" else name])


def test_a_step_that_went_beneath_its_reader_is_named(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked for by name: no other is given in its place, and no file is left."""
    monkeypatch.setattr(restore_module, "open_parts", collects(store, END))
    with open_for_reading(str(store)) as opened, pytest.raises(NotProvableError):
        restore_module.restore(opened, tmp_path / "x", RUN, step=6)
    assert not [path for path in tmp_path.iterdir() if path.name != "store"]


def floors_of(tier: Tier) -> list[str]:
    """The keys of the log's floors."""
    return [str(log_key(RUN, entry.index)) for entry in read_log(tier, RUN)
            if isinstance(entry, Floor)]  # fmt: skip


def test_a_trainer_deletes_what_its_floor_allows_when_it_does(store: Path) -> None:
    """A floor that was taken back within the grace period, as a repair may, allows nothing."""
    settings = Settings(base_every=4, object_lag=1, keep_bases=1, grace_s=3600.0)
    session = RunSession.open(str(store), RUN, settings=settings)
    toy = make_toy()
    try:
        session.restore(step=0)
        session.start(toy.layout, start_step=0, base=toy.base, extra=toy.extra)
        pruner, far = session._upkeep._pruner, session.store.far  # type: ignore[union-attr]
        deadline = time.monotonic() + 60
        while not (graves := [keys for _, tier, keys in pruner._graves if tier is far]):
            assert time.monotonic() < deadline
            if toy.step < 40:
                toy.train()
                session.append(toy.boundary())
            time.sleep(0.01)
        session.flush(60.0)
        late: Any = SimpleNamespace(_run=RUN, _graves=[(0.0, far, graves[0])])
        floors, had = floors_of(far), set(far.list(""))
        far.delete(floors)
        Pruner._bury(late, far)
        assert set(far.list("")) == had - set(floors)
        assert not late._graves
    finally:
        session.close()


def test_an_agent_deletes_what_its_floor_allows_when_it_does(store: Path) -> None:
    """The same: first nothing, for the floor is gone, then what a floor that stands allows."""
    with open_store(str(store), write=True) as opened:
        far = opened.far
        prunes = Prunes(SimpleNamespace(places={FAR: far}, run=RUN))  # type: ignore[arg-type]
        try:
            low = [key for key in far.list("") if "/base/000000000000-" in key]
            prunes._graves = [(0.0, FAR, low)]
            prunes._bury()
            assert set(low) <= set(far.list(""))
        finally:
            prunes.work.end()
    assert cli("gc", store, "--last", 1, "--grace", 0, "--apply").exit_code == 0
    assert not set(low) & set(keys_of(store, "zarr", "base"))


def test_a_claim_whose_time_is_not_told_is_alive(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is being written at this moment: neither gc nor a trainer takes it for long dead."""
    clock = [1000.0]
    with open_store(str(store), write=True) as opened:
        far, old = opened.far, Term.parse("t000001-0000000000000000")
        claim = str(claim_term(far, RUN, seen=[str(old)]))
        (index,) = [entry.index for entry in read_log(far, RUN)
                    if isinstance(entry, Claim) and entry.term == claim]  # fmt: skip
        dated = LocalObjects.dated
        monkeypatch.setattr(
            LocalObjects, "dated", lambda self, prefix: (
                (name, at) for name, at in dated(self, prefix)
                if str(log_key(RUN, index)) not in name
            ),
        )  # fmt: skip
        assert rivals(far, RUN, str(old)) == ({claim}, set())
        monkeypatch.setattr("adacheck_store.terms.time.monotonic", lambda: clock[0])
        assert Rivals(far, RUN, old).look() == ({claim}, set())


def test_tools_read_ahead_where_reads_wait(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands that stream ask for it, and give the same."""
    begun, readers = Streamed.__init__, []
    assert cli("restore", store, tmp_path / "plain").exit_code == 0

    def begin(self: Streamed, parallel: int) -> None:
        readers.append(parallel)
        begun(self, parallel)

    monkeypatch.setattr(Streamed, "__init__", begin)
    monkeypatch.setattr(Fetcher, "parallel", 3)
    assert cli("restore", store, tmp_path / "ahead").exit_code == 0
    assert cli("export", store, tmp_path / "hf", "--format", "hf").exit_code == 0
    assert cli("compact", store, "--to", END).exit_code == 0
    assert readers == [3, 3, 3]
    plain, ahead = (safetensors.torch.load_file(tmp_path / name) for name in ("plain", "ahead"))
    assert {name: tensor.tolist() for name, tensor in ahead.items()} == {
        name: tensor.tolist() for name, tensor in plain.items()
    }
