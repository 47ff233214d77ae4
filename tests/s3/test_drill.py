"""The catastrophe drill: every process, all memory and every disk are gone; the bucket is left."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from adacheck_store.tiers.s3_place import parse_s3
from tests.ranks.worker import OBJECT_LAG, STEPS, WINDOW, Attempt, Launcher, check_against
from tests.s3.door import S3Door
from tests.s3.server import BUCKET, OWNER, Server, server, use
from tests.tools.stores import cli, cli_json
from tests.waits import until

pytestmark = pytest.mark.fault
RUN = "e2e"
PAUSE_S = 0.2
SEED = int(os.environ.get("ADACHECK_DRILL_SEED", "") or random.SystemRandom().randrange(10**6))
"""Of the moment at which all is lost; a failure names it."""


class Place:
    """A store in the bucket and the machines that use it."""

    def __init__(self, real: Server, folder: Path) -> None:
        self.real, self.folder = real, folder
        self.url = real.url()
        self.prefix = parse_s3(self.url).prefix

    def env(self, machine: str) -> dict[str, str]:
        """What a machine's processes find around them."""
        return {
            "AWS_ACCESS_KEY_ID": OWNER[0], "AWS_SECRET_ACCESS_KEY": OWNER[1],
            "AWS_EC2_METADATA_DISABLED": "true", "ADACHECK_CACHE": str(self.folder / machine),
        }  # fmt: skip

    def start(self, launcher: Launcher, machine: str, **options: object) -> Attempt:
        """Start all ranks on a machine."""
        return launcher.start(self.url, node=machine, env=self.env(machine), **options)

    def lose(self, attempt: Attempt, machine: str) -> None:
        """Kill every process, and take the disk away."""
        attempt.kill()
        shutil.rmtree(self.folder / machine)

    def copy(self) -> Place:
        """The same objects under another prefix."""
        other, client = Place(self.real, self.folder), self.real.client()
        for key in self.real.keys(f"{self.prefix}/"):
            client.copy_object(
                Bucket=BUCKET, CopySource={"Bucket": BUCKET, "Key": key},
                Key=other.prefix + key.removeprefix(self.prefix),
            )  # fmt: skip
        return other

    def names(self) -> list[list[str]]:
        """Names of all objects, in their parts."""
        prefix = f"{self.prefix}/"
        return [key.removeprefix(prefix).split("/") for key in self.real.keys(prefix)]

    def newest(self, ranks: int) -> int:
        """The newest step that the names alone say S3 has: a base of each part, all deltas from
        there, each rank's extra. -1 if none. Forks are taken as one line: all trainers agree."""
        bases: dict[str, set[int]] = {}
        stepped: dict[str, set[int]] = {}
        for words in self.names():
            if len(words) == 6 and words[-1] == "zarr.json" and words[3] in ("base", "pack"):
                first, _, rest = words[4].partition("-")
                if words[3] == "base":
                    bases.setdefault(words[2], set()).add(int(first))
                else:
                    steps = range(int(first), int(rest.partition("-")[0]) + 1)
                    stepped.setdefault(words[2], set()).update(steps)
        found = -1
        for step in range(STEPS + 1):
            whole = all(
                any(base <= step and stepped.get(part, set()).issuperset(range(base + 1, step + 1))
                    for base in bases.get(part, ()))
                for part in (f"p{number:06}" for number in range(ranks))
            )  # fmt: skip
            extras = all(step in stepped.get(f"r{number:06}", ()) for number in range(ranks))
            if whole and extras:
                found = step
        return found


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Launcher, list[dict[int, tuple[str, str]]]]:
    """A launcher of FSDP2 ranks, and the uninterrupted run."""
    launcher = Launcher(tmp_path_factory.mktemp("fsdp"), "fsdp", request.param)
    return launcher, launcher.reference()


@pytest.fixture(scope="module")
def lost(
    trained: tuple[Launcher, list[dict[int, tuple[str, str]]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Place, Attempt]]:
    """A run of which only the bucket is left, from one moment to the next, whatever it was at."""
    launcher, _ = trained
    place = Place(server(), tmp_path_factory.mktemp("machines"))
    rng = random.Random(SEED)
    attempt = place.start(launcher, "first", pause_s=PAUSE_S)
    attempt.until(rng.randrange(6, STEPS - 4))
    time.sleep(rng.uniform(0, 2 * PAUSE_S))
    place.lose(attempt, "first")
    return place, attempt


def check_loss(attempt: Attempt, newest: int) -> None:
    """No more is lost than each rank was told in its last words, and is promised.

    What it was told is drained the bucket has. That is at most ``object_lag`` steps behind what is
    stored nearer, or it was told that it is more; and what is trained is W + 1 steps ahead of that.
    """
    said = [[row for row in attempt.rows(rank) if "kept" in row][-1]
            for rank in range(len(attempt.outs))]  # fmt: skip
    drained = min(row["kept"][1] for row in said)
    assert newest >= drained, (SEED, said)
    for row in said:
        stored, reached, behind = row["kept"]
        assert row["step"] - stored <= WINDOW + 1, (SEED, said)
        assert stored - max(reached, 0) <= OBJECT_LAG or behind, (SEED, said)
    if not any(row["kept"][2] for row in said):
        assert min(row["kept"][0] for row in said) - newest <= OBJECT_LAG, (SEED, said)


def test_restored_from_the_url_alone(
    trained: tuple[Launcher, list[dict[int, tuple[str, str]]]], lost: tuple[Place, Attempt],
    real: Server, tmp_path: Path,
) -> None:  # fmt: skip
    """By the command and by one call, to the newest step S3 has; then on to the same end."""
    (launcher, reference), (place, first) = trained, lost
    newest = place.newest(launcher.ranks)
    check_loss(first, newest)
    check_against(reference, first)
    place, file = place.copy(), tmp_path / "restored.safetensors"
    code, document = cli_json("restore", place.url, file)
    assert code == 0, document
    assert document["rows"][0]["step"] == newest
    second = place.start(launcher, "second", dump=str(tmp_path / "dumped.safetensors"))
    assert second.wait() == [0] * launcher.ranks
    check_against(reference, second)
    assert second.every("restored") == [newest] * launcher.ranks
    assert second.every("restored", "tiers") == [["zarr"]] * launcher.ranks
    assert second.every("final", "digest") == [known[STEPS][0] for known in reference]
    check_files(file, tmp_path / "dumped.safetensors")
    assert place.newest(launcher.ranks) == STEPS


def check_files(written: Path, dumped: Path) -> None:
    """What the command has written is what the ranks together have loaded."""
    found, had = safetensors.torch.load_file(written), safetensors.torch.load_file(dumped)
    assert {name for name in found if name.startswith("model/")} == {f"model/{n}" for n in had}
    for name, tensor in had.items():
        assert torch.equal(found[f"model/{name}"], tensor), name


def test_keys_are_spread(
    trained: tuple[Launcher, list[dict[int, tuple[str, str]]]], lost: tuple[Place, Attempt]
) -> None:
    """All of a part, and of a rank, has a prefix of its own, and much alike; what they have in

    common are documents: some, however long the run is.
    """
    (launcher, _), (place, _) = trained, lost
    below: Counter[str] = Counter()
    common = []
    for words in place.names():
        own = len(words) > 3 and words[3] in ("base", "pack")
        if own:
            below["/".join(words[:3])] += 1
        else:
            common.append(words)
    (term,) = {prefix.split("/")[1] for prefix in below}
    parts = [below[f"{RUN}/{term}/p{number:06}"] for number in range(launcher.ranks)]
    ranks = [below[f"{RUN}/{term}/r{number:06}"] for number in range(launcher.ranks)]
    assert sum(parts) + sum(ranks) == below.total()
    assert max(parts) <= 2 * min(parts)
    assert min(ranks) > 0
    kinds = Counter(words[2] if words[1].startswith("t0") else words[1] for words in common[1:])
    assert common[0] == ["adacheck.json"]
    assert kinds.keys() <= {"log", "layout", "manifest"}
    assert kinds.total() <= 2 * launcher.ranks + 5  # looks for copies may make layouts anew
    assert kinds.total() < sum(parts)


def _half_a_base(door: S3Door, place: Place, newest: int) -> tuple[int, int]:
    """The newest base was on its way: some chunks, no document, and an upload in parts.

    Of each harm: the step that is left, and what fsck exits with.
    """
    bases = sorted(w for w in map("/".join, place.names()) if "/p000001/base/" in w)
    old = bases[-1].rpartition("/base/")[2].partition("/")[0]
    group = f"{newest + 1:012d}-{'0' * 16}"  # and so was the next one
    for name in bases:
        if f"/{old}/" in name and name.endswith(f"{old}/zarr.json"):
            if not old.startswith("0" * 12):  # then an older base is there
                door.delete(name)
        elif f"/{old}/" in name:
            door.put(name.replace(old, group), door.get(name))
    upload = f"{place.prefix}/{bases[-1].replace(old, group)}-more"
    door.client.create_multipart_upload(Bucket=BUCKET, Key=upload)
    return newest, 0


def _chunk_of(place: Place, newest: int) -> tuple[str, int]:
    """A chunk of the pack of a rank that has the newest step; and the pack's first step."""
    packs = [words for words in place.names() if words[2:4] == ["p000001", "pack"] and "c" in words]
    (words,) = [w for w in packs if int(w[4].split("-")[0]) <= newest <= int(w[4].split("-")[1])]
    return "/".join(words), int(words[4].split("-")[0])


def _based(place: Place, first: int, newest: int) -> int:
    """The newest base among some steps of that rank, -1 if there is none: it needs no pack."""
    bases = [words for words in place.names() if words[2:4] == ["p000001", "base"]]
    steps = {int(words[4].split("-")[0]) for words in bases if words[-1] == "zarr.json"}
    return max((step for step in steps if first <= step <= newest), default=-1)


def _deleted(door: S3Door, place: Place, newest: int) -> tuple[int, int]:
    """Somebody deleted one object."""
    name, first = _chunk_of(place, newest)
    door.delete(name)
    return max(_based(place, first, newest), first - 1), 1


def _flipped(door: S3Door, place: Place, newest: int) -> tuple[int, int]:
    """One bit of one object is another."""
    name, first = _chunk_of(place, newest)
    data = bytearray(door.get(name))
    data[8] ^= 1  # of the pack's first delta
    door.put(name, bytes(data))
    return first - 1 if _based(place, first, newest) < 0 else newest, 1


@pytest.mark.parametrize(
    "harm", [_flipped, *(pytest.param(h, marks=pytest.mark.slow) for h in (_half_a_base, _deleted))]
)
def test_restored_from_a_damaged_bucket(
    trained: tuple[Launcher, list[dict[int, tuple[str, str]]]], lost: tuple[Place, Attempt],
    real: Server, tmp_path: Path, harm,
) -> None:  # type: ignore[no-untyped-def]  # fmt: skip
    """To the newest step that can still be proven, bit for bit, and it is said what is damaged."""
    (launcher, reference), (place, _) = trained, lost
    newest = place.newest(launcher.ranks)
    place = place.copy()
    expected, found = harm(S3Door(place.url), place, newest)
    code, document = cli_json("fsck", place.url)
    assert code == found, document["rows"]
    by_command, by_call = tmp_path / "command.safetensors", tmp_path / "call.safetensors"
    code, document = cli_json("restore", place.url, by_command)
    assert (code, document["rows"][0]["step"]) == (0, expected)
    third = place.start(launcher, "third", inspect=True, dump=str(by_call))
    assert third.wait() == [0] * launcher.ranks
    check_against(reference, third)
    assert third.every("restored") == [expected] * launcher.ranks
    check_files(by_command, by_call)
    if expected < newest:
        assert any("p000001" in str(reason) for reason in third.every("restored", "reasons")[0])


@pytest.mark.slow
def test_a_zombie_writes_on(
    trained: tuple[Launcher, list[dict[int, tuple[str, str]]]], real: Server, tmp_path: Path
) -> None:
    """The lost machine was only cut off: it trains on while another restores. One line remains."""
    launcher, reference = trained
    place, file = Place(real, tmp_path), tmp_path / "beside.safetensors"
    zombie = place.start(launcher, "zombie", hold=8)
    until(lambda: place.newest(launcher.ranks) >= 4, "the bucket has four steps")
    had = place.newest(launcher.ranks)
    code, document = cli_json("restore", place.url, file)
    assert (code, zombie.alive()) == (0, True)
    assert had <= document["rows"][0]["step"] <= zombie.last_step() + WINDOW
    second = place.start(launcher, "second", hold=10)
    second.until(10)
    zombie.gate.open()  # it trains on while the other does
    second.gate.open()
    assert second.wait() == [0] * launcher.ranks
    codes = zombie.wait()
    assert all(codes), f"the zombie should have been stopped: {codes}"
    for attempt in (zombie, second):
        check_against(reference, attempt)
    assert second.every("final", "digest") == [known[STEPS][0] for known in reference]
    code, document = cli_json("fsck", place.url)
    assert code == 0, document["rows"]
    third = place.start(launcher, "third", inspect=True)
    assert third.wait() == [0] * launcher.ranks
    check_against(reference, third)
    assert third.every("restored") == [STEPS] * launcher.ranks


@pytest.mark.slow
def test_restored_newer_than_s3_before_the_loss(
    trained: tuple[Launcher, list[dict[int, tuple[str, str]]]], real: Server, tmp_path: Path
) -> None:
    """All processes die, the disk's newer steps are gone on with, then the disk dies as well."""
    launcher, reference = trained
    place = Place(real, tmp_path)
    first = place.start(launcher, "first", hold=9)
    first.until(9)
    first.kill()
    had = place.newest(launcher.ranks)
    second = place.start(launcher, "first", hold=12)
    second.until(12)
    place.lose(second, "first")
    restored = second.every("restored")[0]
    assert restored >= had
    newest, file = place.newest(launcher.ranks), tmp_path / "command.safetensors"
    code, document = cli_json("restore", place.url, file)
    assert (code, document["rows"][0]["step"]) == (0, newest)
    third = place.start(launcher, "third", dump=str(tmp_path / "call.safetensors"))
    assert third.wait() == [0] * launcher.ranks
    for attempt in (first, second, third):
        check_against(reference, attempt)
    assert third.every("restored") == [newest] * launcher.ranks
    check_files(file, tmp_path / "call.safetensors")
    assert third.every("final", "digest") == [known[STEPS][0] for known in reference]


def test_the_command_is_told_where(real: Server, tmp_path: Path) -> None:
    """A mistyped prefix restores nothing, and makes nothing."""
    use(OWNER)
    file = tmp_path / "x.safetensors"
    result = cli("restore", real.url(), file)
    assert result.exit_code in (2, 3)
    assert "no store here" in result.stderr
    assert not file.exists()
