"""Each tool is killed at each failpoint that it passes, and run again: nothing is lost by either.

A failpoint is passed many times: it is killed at the first, at one in the middle, and at the last.

Those of gc, of repairs and of drains have tests of their own. `drill`, `fsck` and the other verbs
that only look pass none, which is held here too.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch
import torch

from adacheck_store.format.errors import RestoreError
from adacheck_store.restore import restore_state
from adacheck_store.store import open_for_reading
from adacheck_store.tiers import failpoints
from tests.core.toy import Toy
from tests.forked import run
from tests.tools.stores import LAST, RUN, cli, cli_json, findings, keys_of, tree_digest

pytestmark = pytest.mark.fault
OTHER = "imported"


@dataclass(frozen=True)
class Act:
    """A verb's arguments after the store; whether it is done; whether the store may change.

    ``again`` is how the verb ends where it is run again though all was done before it was killed.
    ``left`` are kinds of findings that a kill of it may leave, besides what any put leaves: of a
    save that was killed among its heads fsck cannot know that it never was whole.
    """

    words: tuple[str, ...]
    done: Callable[[Path, Path], bool]
    writes: bool = False
    again: int = 0
    left: tuple[str, ...] = ()


def model_in(target: Path, toy: Path) -> bool:
    """Whether a target holds the step whole, in any format."""
    del toy
    if target.is_dir() and (target / ".metadata").exists():
        return any(target.glob("*.distcp"))
    if target.is_dir():
        return all(safetensors.torch.load_file(file) for file in target.glob("*.safetensors"))
    try:
        return bool(safetensors.torch.load_file(target))
    except safetensors.SafetensorError:
        return bool(torch.load(target, weights_only=True))


def has_base(target: Path, store: Path) -> bool:
    """Whether the object tier has a base of the step."""
    del target
    with open_for_reading(str(store)) as opened:
        return any(f"/base/{LAST - 1:012}-" in key for key in opened.far.list(f"{RUN}/"))


def has_near_base(target: Path, store: Path) -> bool:
    """Whether the LMDB has a base of the step."""
    del target
    return any(f"/base/{LAST - 1:012}-" in key for key in keys_of(store, "lmdb", "base"))


def has_tag(target: Path, store: Path) -> bool:
    """Whether the tag stands."""
    del target
    return [row["name"] for row in cli_json("tag", store, "--run", RUN)[1]["rows"]] == ["good"]


def has_other(target: Path, store: Path) -> bool:
    """Whether the other run has the step."""
    del target
    try:
        with open_for_reading(str(store)) as opened:
            return restore_state(opened.tiers, OTHER).step == 7
    except RestoreError:
        return False


ACTS = {
    "restore": Act(("restore", "STORE", "TARGET"), model_in),
    "restore --force": Act(("restore", "STORE", "TARGET", "--force"), model_in),
    "hf": Act(("export", "STORE", "TARGET", "--format", "hf"), model_in),
    "torch": Act(("export", "STORE", "TARGET", "--format", "torch"), model_in),
    "dcp": Act(("export", "STORE", "TARGET", "--format", "dcp"), model_in),
    "compact": Act(("compact", "STORE", "--to", str(LAST - 1)), has_base, writes=True),
    "compact --tier": Act(
        ("compact", "STORE", "--to", str(LAST - 1), "--tier", "lmdb"), has_near_base, writes=True
    ),
    "tag": Act(("tag", "STORE", "good", str(LAST)), has_tag, writes=True),
    "import": Act(
        ("import", "STORE", "SOURCE", "--run", OTHER, "--step", "7"), has_other, writes=True,
        again=2, left=("gap",),
    ),
}  # fmt: skip
LOOKS = ("fsck", "drill", "ls", "log")


def arguments(act: Act, store: Path, target: Path, source: Path) -> list[str]:
    """The command line."""
    places = {"STORE": str(store), "TARGET": str(target), "SOURCE": str(source)}
    words = [places.get(word, word) for word in act.words]
    return [*words, "--run", RUN] if "--run" not in words else words


def killed(line: list[str], spec: str) -> bool:
    """Run a command in a process that a failpoint may kill; whether it did."""
    code, said = run(["adacheck_store", *line], fail=spec)
    assert code in (0, -signal.SIGKILL), (spec, said)
    return code == -signal.SIGKILL


def whole(store: Path, toy: Toy, left: tuple[str, ...] = ()) -> None:
    """The newest step is what the trainer had, and fsck finds no damage but of some kinds."""
    with open_for_reading(str(store)) as opened:
        state = restore_state(opened.tiers, RUN)
    assert state.step == LAST
    assert toy.same_as(state.parts["p000000"])
    found = findings(store)[1]
    assert all(row["kind"] in ("unfinished", "unnamed", *left) for row in found), found


@pytest.fixture
def source(trained: tuple[Path, Toy], tmp_path: Path) -> Path:
    """A file to be imported."""
    file = tmp_path / "source.safetensors"
    assert cli("restore", trained[0], file, "--run", RUN).exit_code == 0
    return file


def passed(act: Act, store: Path, source: Path, folder: Path) -> dict[str, int]:
    """The failpoints that a command passes on a copy of a store, and how often."""
    copy = shutil.copytree(store, folder / "count" / "store")
    found = Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failpoints, "hit", lambda name: found.update([name]))
        assert cli(*arguments(act, copy, folder / "count" / "x", source)).exit_code == 0
    assert act.done(folder / "count" / "x", copy)
    shutil.rmtree(folder / "count")
    return dict(sorted(found.items()))


def hits(count: int) -> list[int]:
    """The first of so many, one in the middle, and the last."""
    return sorted({1, (count + 1) // 2, count})


def play(act: Act, store: Path, toy: Toy, source: Path, folder: Path, spec: str) -> None:
    """Killed there on a copy, looked at, and run again."""
    copy, target = shutil.copytree(store, folder / "store"), folder / "x"
    before = tree_digest(copy)
    assert killed(arguments(act, copy, target, source), spec), spec
    assert act.writes or tree_digest(copy) == before
    assert not os.path.lexists(target) or act.done(target, copy), "the target is half there"
    whole(copy, toy, act.left)
    if not os.path.lexists(target):
        ended = act.again if act.writes and act.done(target, copy) else 0
        result = cli(*arguments(act, copy, target, source))
        assert result.exit_code == ended, result.output
    assert act.done(target, copy)
    whole(copy, toy)
    shutil.rmtree(folder)


@pytest.mark.parametrize("verb", ACTS)
def test_killed_twice(store: Path, toy: Toy, source: Path, tmp_path: Path, verb: str) -> None:
    """At one of the places it passes first, and where it passes one last."""
    found = list(passed(ACTS[verb], store, source, tmp_path).items())
    first, (last, count) = found[len(found) // 2][0], found[len(found) // 3]
    for spec in (first, f"{last}:{count}"):
        play(ACTS[verb], store, toy, source, tmp_path / "play", spec)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("verb", ACTS)
def test_killed_everywhere(store: Path, toy: Toy, source: Path, tmp_path: Path, verb: str) -> None:
    """At each of them: the first time, in the middle, and the last."""
    for name, count in passed(ACTS[verb], store, source, tmp_path).items():
        for hit in hits(count):
            play(ACTS[verb], store, toy, source, tmp_path / "play", f"{name}:{hit}")


def test_what_only_looks_passes_none(store: Path) -> None:
    """There is nothing that it could leave half done."""
    failpoints.disarm()
    for verb in LOOKS:
        assert cli(verb, store, "--run", RUN).exit_code == 0, verb
    assert not failpoints.seen()
