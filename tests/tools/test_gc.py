"""gc and tags: what goes is what nothing keeps, whenever it is killed and whoever writes beside."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Set
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from adacheck_store.config import Settings
from adacheck_store.format.canonical import dumps
from adacheck_store.format.errors import NotProvableError, TierUnavailableError, UnsupportedError
from adacheck_store.format.keys import Term, log_key, parse_key
from adacheck_store.policy import Retention, from_settings, to_settings
from adacheck_store.restore import Restored, restore_state
from adacheck_store.retention import FloorChoice, floor_of, plan_floor, raise_floor
from adacheck_store.session import RunSession
from adacheck_store.store import open_for_reading, open_store
from adacheck_store.tagged import Tagged
from adacheck_store.terms import CLAIM_S, Rivals, claim_term, put_floor
from adacheck_store.tiers import failpoints
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.object_local import LocalObjects
from adacheck_store.tiers.wrappers import WrapperTier
from adacheck_store.tiers.zarr import ZarrTier
from adacheck_store.tiers.zarr_meta import group_document, read_attributes
from adacheck_store.tools.gc import gc
from tests.forked import run
from tests.tools.stores import (
    RUN,
    cli,
    cli_json,
    findings,
    keys_of,
    load,
    make_toy,
    train,
    tree_digest,
)  # fmt: skip
from tests.waits import until

END = 42
ALL = range(END + 1)
PACK = 4
"""Steps in a pack at most: the store's object lag."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Restored]]:
    """A store of which nothing has been pruned, bases at every eighth step; and all its states."""
    folder = tmp_path_factory.mktemp("whole") / "a b"
    train(str(folder), END, even=True, keep_bases=100)
    with open_for_reading(str(folder)) as opened:
        return folder, {step: restore_state(opened.tiers, RUN, step=step) for step in ALL}


@pytest.fixture
def store(whole: tuple[Path, dict[int, Restored]], tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(whole[0], tmp_path / "a b"))


@pytest.fixture
def states(whole: tuple[Path, dict[int, Restored]]) -> dict[int, Restored]:
    """Step -> its state."""
    return whole[1]


def collected(store: Path, *more: object) -> list[dict[str, Any]]:
    """The rows of a gc that does not wait."""
    code, document = cli_json("gc", store, "--grace", "0", *more)
    assert code == 0, document
    return [row for row in document["rows"] if row["row"] == "GcRow"]


def provable(tiers: list[Tier], states: dict[int, Restored]) -> list[int]:
    """Steps that are restored, each of which must be what it was."""
    found = []
    for step, state in states.items():
        try:
            restored = restore_state(tiers, RUN, step=step)
        except NotProvableError:
            continue
        for name, array in state.parts["p000000"].arrays.items():
            assert torch.equal(restored.parts["p000000"].arrays[name], array), (step, name)
        found.append(step)
    return found


def check(store: Path, states: dict[int, Restored], alone: set[int]) -> None:
    """What the far tier proves alone is all right, is these steps, and fsck finds nothing."""
    with open_for_reading(str(store)) as opened:
        assert provable([opened.far], states) == sorted(alone)
    assert findings(store) == (0, [])


def below_floor(store: Path, kept: Set[int] = frozenset({0, 13, 16})) -> set[str]:
    """Kinds of what lies below step 32, but in packs that reach above it; of what is kept alone."""
    left = [parse_key(key) for kind in ("base", "delta", "extra")
            for key in keys_of(store, "zarr", kind)]  # fmt: skip
    low = [key for key in left if key.step < 32 - PACK]
    assert {key.step for key in low} == kept
    return {key.kind for key in low}


def test_a_dry_run_says_what_will_go_and_changes_nothing(store: Path) -> None:
    """By default nothing is touched; what it counts is what then goes."""
    before = tree_digest(store)
    said = collected(store, "--every", 16)
    assert tree_digest(store) == before
    assert [row["done"] for row in said if row["applied"]] == []
    done = collected(store, "--every", 16, "--apply")
    assert [{**row, "applied": True} for row in said] == done
    assert {(row["tier"], row["what"]) for row in done} == {
        (tier, what) for tier in ("zarr", "lmdb") for what in ("floor", "below floor")
    }


def test_rules_compose_and_a_second_run_finds_nothing(
    store: Path, states: dict[int, Restored]
) -> None:
    """The last bases with all that follows, one step in so many, and the tagged ones."""
    assert cli("tag", store, "good", 13).exit_code == 0
    with open_for_reading(str(store)) as opened:
        below_13 = [key for key in opened.far.list("") if "/base/" in key]
    assert len(below_13) == 7
    (floor, gone, *_) = collected(store, "--every", 16, "--apply")
    assert floor["step"] == 32
    assert floor["kept"] == {"0": ["every"], "13": ["tag good"], "16": ["every"]}
    check(store, states, {0, 13, 16, *range(32, END + 1)})
    assert below_floor(store) <= {"base", "extra"}
    assert gone["count"] > 0
    before = tree_digest(store / "objects")
    again = collected(store, "--every", 16, "--apply")
    assert {row["done"] for row in again} == {"stands"}
    assert tree_digest(store / "objects") == before
    # Without a rule what is kept stays; a floor is never taken back; the tag holds its step.
    assert {row["done"] for row in collected(store, "--last", 5, "--apply")} <= {"stands"}
    last = ("--last", 1, "--drop-kept", "--apply")
    assert collected(store, *last)[0]["kept"] == {"13": ["tag good"]}
    check(store, states, {13, *range(40, END + 1)})
    assert cli("tag", store, "good", "--remove").exit_code == 0
    collected(store, "--last", 1, "--apply")  # it stays as long as a floor says that it is kept
    check(store, states, {13, *range(40, END + 1)})
    collected(store, *last)
    check(store, states, set(range(40, END + 1)))


def test_a_base_that_does_not_verify_keeps_nothing(
    store: Path, states: dict[int, Restored]
) -> None:
    """The next step of its stretch is kept in its place."""
    for path in (store / "objects").glob("*/*/p000000/base/*16-*/s0/param/c/0"):
        data = bytearray(path.read_bytes())
        data[9] ^= 4
        path.write_bytes(data)
    floor = collected(store, "--every", 16, "--apply")[0]
    assert list(floor["kept"]) == ["0", "24"]
    check(store, states, {0, 24, *range(32, END + 1)})


@pytest.mark.parametrize("old", [False, True], ids=["said", "of an old writer"])
def test_by_time(store: Path, states: dict[int, Restored], old: bool) -> None:
    """Steps are told apart by when their bases were made, which a copy of the store leaves alone;
    where a base does not say it, by when the store got it."""
    for step in range(0, END, 8):
        (path,) = (store / "objects").glob(f"*/*/p000000/base/{step:012d}-*/zarr.json")
        attributes, at = read_attributes(path.read_bytes()), 1e9 + 1000 + 100 * step
        info = json.loads(attributes["info"])
        if step:  # the first one is the toy's own
            assert abs(datetime.fromisoformat(info["time"]).timestamp() - time.time()) < 3600
        info.pop("time", None)
        if not old:
            info["time"] = datetime.fromtimestamp(at, UTC).isoformat()
        path.write_bytes(group_document({**attributes, "info": dumps(info).decode()}))
        os.utime(path, (at if old else 2e9 - at,) * 2)
    floor = collected(store, "--every-time", "1600s", "--apply")[0]
    assert list(floor["kept"]) == ["0", "8", "24"]
    check(store, states, {0, 8, 24, *range(32, END + 1)})


def test_without_rules_those_of_the_trainer(tmp_path: Path) -> None:
    """A bare gc gives up nothing that the run's writer keeps; rules that are given are obeyed."""
    store = tmp_path / "store"
    rules = Retention(last=100, every=16, every_s=1e9)
    train(str(store), END, even=True, keep_bases=100, retention=rules)
    assert collected(store) == []
    floor = collected(store, "--last", 2)[0]
    assert (floor["step"], floor["kept"]) == (32, {"0": ["every", "every_s"], "16": ["every"]})
    assert collected(store, "--last", 2, "--drop-kept")[0]["kept"] == {}
    with open_for_reading(str(store)) as opened:
        row = next(iter(gc(opened, rules=Retention(last=4, every=8))))
    assert (row.step, list(row.kept)) == (16, [0, 8])


def test_rules_of_a_newer_program_are_not_guessed(store: Path) -> None:
    """Nothing is decided by rules that cannot be understood; whoever names some goes on."""
    told = to_settings(2, Retention(every=16))
    assert from_settings(json.loads(json.dumps(told))) == (2, Retention(every=16))
    assert from_settings({}) == (None, None)
    told["keep"]["moon"] = "full"
    with pytest.raises(UnsupportedError, match="moon"):
        from_settings(told)


def test_a_damaged_extra_of_a_tagged_step_stops_nothing(
    store: Path, states: dict[int, Restored]
) -> None:
    """It stays with its whole pack, for whoever can mend it; all else goes."""
    assert cli("tag", store, "good", 13).exit_code == 0
    with open_for_reading(str(store)) as opened:
        (pack,) = opened.far.holding(f"{keys_of(store, 'zarr', 'extra')[0][:-12]}{13:012d}")
    path = store / "objects" / str(pack) / "zarr.json"
    document = json.loads(path.read_text())
    for record in document["attributes"]["records"]:
        if record["key"].endswith(f"{13:012d}"):
            record["id"] = "0" * len(record["id"])
    path.write_text(json.dumps(document))
    rows = collected(store, "--last", 2, "--apply")
    assert [(row["tier"], row["done"]) for row in rows][:2] == [
        ("zarr", "raised"),
        ("zarr", "deleted"),
    ]
    assert path.exists()
    with open_for_reading(str(store)) as opened:
        assert provable([opened.far], states) == list(range(32, END + 1))
    assert {parse_key(key).step for key in keys_of(store, "zarr", "base")} == {13, 32, 40}
    assert findings(store)[0] == 1


def rot(store: Path, step: int) -> None:
    """Damage every base of a step in the far tier."""
    keys = [key for key in keys_of(store, "zarr", "base") if parse_key(key).step == step]
    assert keys
    for key in keys:
        chunk = next((store / "objects" / key).rglob("c/0"))
        chunk.write_bytes(bytes(chunk.stat().st_size))


def test_a_tag_whose_base_is_damaged_keeps_its_chain(
    store: Path, states: dict[int, Restored]
) -> None:
    """The chain still gives the step; when a new base does, the rest may go."""
    assert cli("tag", store, "good", 13).exit_code == 0
    rot(store, 13)
    rows = collected(store, "--last", 2, "--apply")
    assert (rows[0]["done"], rows[0]["step"]) == ("raised", 8)
    with open_for_reading(str(store)) as opened:
        assert provable([opened.far], states) == list(range(8, END + 1))
    assert cli("compact", store, "--to", 13).exit_code == 0
    rows = collected(store, "--last", 2, "--apply")
    assert (rows[0]["done"], rows[0]["step"]) == ("raised", 32)
    with open_for_reading(str(store)) as opened:
        assert provable([opened.far], states) == [13, *range(32, END + 1)]


class CountingTier(WrapperTier):
    """A tier that counts the reads of blocks, by key."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.reads: Counter[str] = Counter()

    def read(self, key: str, array: str, first: int, count: int) -> bytes:
        """Count, and hand on."""
        self.reads[key] += 1
        return super().read(key, array, first, count)


def test_an_attempt_reads_only_what_is_new(store: Path) -> None:
    """A tag holds the floor down: tried again only the damaged block is read, until it is mended;
    and no floor is raised by what was read long ago."""
    for name in ("good", "also"):
        assert cli("tag", store, name, 13).exit_code == 0
    rot(store, 13)
    tagged = Tagged()
    with open_for_reading(str(store)) as opened:
        far = CountingTier(opened.far)
        choice = plan_floor(far, RUN, 2, cap=None, tagged=tagged)
        assert choice is not None
        assert choice.step == 8
        assert tagged.bears == 32
        assert "compact --to 13" in str(tagged.held)
        assert "tag good" in str(tagged.held)
        assert len(far.reads) > 5
        far.reads.clear()
        for _ in range(3):
            assert plan_floor(far, RUN, 2, cap=None, current=8, tagged=tagged) is None
            ((key, count),) = far.reads.items()
            assert (parse_key(key).kind, parse_key(key).step) == ("base", 13)
            assert count <= 2  # one for each tag
            far.reads.clear()
    assert cli("compact", store, "--to", 13).exit_code == 0
    with open_for_reading(str(store)) as opened:
        far = CountingTier(opened.far)
        choice = plan_floor(far, RUN, 2, cap=None, current=8, tagged=tagged)
        assert choice is not None
        assert choice.step == 32
        assert tagged.held is None
        rot(store, 13)
        assert plan_floor(far, RUN, 2, cap=None, current=8, tagged=tagged) is None
        assert tagged.held is not None


def test_a_floor_that_a_tag_needs_is_the_next_one_below(store: Path) -> None:
    """The chain of a tag right below the highest floor begins at the base before."""
    assert cli("tag", store, "good", 29).exit_code == 0
    rot(store, 29)
    rows = collected(store, "--last", 2, "--apply")
    assert (rows[0]["done"], rows[0]["step"]) == ("raised", 24)


def test_a_tag_whose_base_is_damaged_does_not_fill_the_near_tier(store: Path) -> None:
    """The near floor goes on as if the far one had; the tag's chain stays, and it is said."""
    assert cli("tag", store, "good", 13).exit_code == 0
    with open_for_reading(str(store)) as opened:
        tagged = restore_state(opened.tiers, RUN, step=13)
    rot(store, 13)
    settings = Settings(base_every=8, object_lag=4, grace_s=0.0, keep_bases=2)
    session = RunSession.open(str(store), RUN, settings=settings)
    toy = make_toy()
    restored = session.restore()
    assert restored is not None
    load(toy, restored)
    session.start(toy.layout, start_step=toy.step, base=toy.base, extra=toy.extra)
    term = session.status().term
    near, far = session.store.near, session.store.far

    def pruned() -> bool:
        for _ in range(4):
            toy.train()
            session.append(toy.boundary())
        session.flush(60)
        return floor_of(near, RUN, term) > END

    until(pruned, "the near floor has passed what the restore began with")
    assert floor_of(far, RUN, term) == 8
    steps = [parse_key(key).step for key in near.list(f"{RUN}/") if "/delta/" in key]
    assert min(steps) > END
    assert "tag good" in session.status().last_error
    assert "compact --to 13" in session.status().last_error
    session.close()
    with open_for_reading(str(store)) as opened:
        floor = floor_of(opened.near, RUN, term)
        assert provable([opened.far], {13: tagged}) == [13]
        for step in range(8, toy.step + 1):  # what went from the near tier the far one gives
            restore_state([opened.far], RUN, step=step)
        for step in range(floor, toy.step + 1):
            restore_state([opened.near], RUN, step=step)


def test_best_by_what_is_tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number stands in rank 0's extra; steps without one are no best."""
    from tests.core import toy as module

    plain = module.ExtraBody

    def with_loss(*, tree: Any, **more: Any) -> Any:
        step = with_loss.step
        tracked = {} if step == 8 else {"metrics": {"loss": abs(step - 17) / 10}}
        return plain(tree={**tree, "tracked": tracked}, **more)

    monkeypatch.setattr(module, "ExtraBody", with_loss)
    made = module.Toy.extra

    def extra(self: Any, *arguments: Any) -> Any:
        with_loss.step = self.step
        return made(self, *arguments)

    monkeypatch.setattr(module.Toy, "extra", extra)
    store = tmp_path / "store"
    train(str(store), END, even=True, keep_bases=100)
    rows = collected(store, "--best", "metrics/loss", "--best-count", 2)
    assert rows[0]["kept"] == {"16": ["best"], "24": ["best"]}
    rows = collected(store, "--best", "metrics/loss", "--largest")
    assert rows[0]["kept"] == {"0": ["best"]}
    assert collected(store, "--best", "metrics/none")[0]["kept"] == {}


def test_a_trainer_keeps_what_attach_and_tags_say(
    tmp_path: Path, states: dict[int, Restored]
) -> None:
    """The same rule prunes behind a trainer; a floor that a command has raised is kept to."""
    store = tmp_path / "store"
    train(str(store), 20, even=True, retention=Retention(last=1, every=16), keep_bases=1)
    assert cli("tag", store, "good", 18).exit_code == 0
    train(str(store), 30, even=True, retention=Retention(last=1, every=16), keep_bases=1)
    # Not every floor in between is certain, as upkeep may be late; the last one is, with gc's help.
    collected(store, "--last", 1, "--every", 16, "--apply")
    train(str(store), END, even=True, keep_bases=1)
    collected(store, "--last", 1, "--apply")
    assert cli_json("log", store)[1]["rows"][-1]["kept"] == "0, 16, 18"
    first = {step: states[step] for step in range(21)}  # after a restart the toy goes other ways
    with open_for_reading(str(store)) as opened:
        assert provable([opened.far], first) == [0, 16, 18]
    assert findings(store) == (0, [])


def test_a_floor_that_a_writer_raises_lets_whole_packs_go(
    store: Path, states: dict[int, Restored]
) -> None:
    """An extra that is kept has a pack of its own by then, and the rest of its pack goes."""
    with open_store(str(store), write=True) as opened:
        far = opened.far

        def put(choice: FloorChoice) -> bool:
            floor = put_floor(
                far, RUN, term=choice.terms[-1], terms=choice.terms, step=choice.step,
                kept=tuple(choice.kept),
            )  # fmt: skip
            return floor is not None

        rules = Retention(last=2, every=16)
        floor, doomed = raise_floor(far, RUN, 2, cap=None, current=-1, put=put, retention=rules)
        far.delete(doomed)
    assert floor == 32
    assert below_floor(store, {0, 16}) == {"base", "extra"}
    check(store, states, {0, 16, *range(32, END + 1)})


def loose(store: Path, age_s: float) -> Path:
    """What a put that was killed leaves: chunks of a base without its document."""
    base = sorted((store / "objects").glob("*/*/p000000/base/*"))[-1]
    left = base.with_name(base.name[:-16] + f"{int(age_s):016d}")
    shutil.copytree(base, left)
    (left / "zarr.json").unlink()
    for path in left.rglob("*"):
        at = time.time() - age_s
        os.utime(path, (at, at))
    return left


def test_what_puts_have_left(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is old goes, by the store's clock, and only what a put of ours can have left."""
    old, young = loose(store, 200_000), loose(store, 50_000)
    half = loose(store, 300_000)
    os.utime(next(path for path in half.rglob("*") if path.is_file()))  # a put that is going on
    drafts = store / "objects" / ".tmp"
    drafts.mkdir(exist_ok=True)
    for name, age_s in (("a", 100_000), ("b", 1000)):
        (drafts / name).write_text("half")
        os.utime(drafts / name, (time.time() - age_s,) * 2)
    foreign = store / "objects" / "toy" / "mine.txt"
    foreign.write_text("not ours")
    aside = store / "objects" / "_aside" / "toy" / "x"
    aside.parent.mkdir(parents=True)
    aside.write_text("quarantined")
    for path in (foreign, aside):
        os.utime(path, (1e9, 1e9))
    monkeypatch.setattr(time, "time", lambda: 4e9)  # this machine's clock is decades ahead
    rows = {row["what"]: row["count"] for row in collected(store, "--last", 100, "--apply")}
    assert rows == {"unfinished": len([1 for _ in young.rglob("*") if _.is_file()]), "begun": 1}
    assert not old.exists()
    assert young.exists()
    assert half.exists()
    assert sorted(path.name for path in drafts.iterdir()) == ["b"]
    assert foreign.exists()
    assert aside.exists()
    more = ("--last", 100, "--apply", "--aside")
    other = store / "objects" / "_aside" / "other" / "x"
    other.parent.mkdir()
    other.write_text("another run's")
    os.utime(other, (1e9, 1e9))
    for given, left in ((("--run", RUN), [True, False]), ((), [False, False])):
        rows = {row["what"]: row["count"] for row in collected(store, *more, *given)}
        assert rows == {"set aside": 1}
        assert [other.exists(), aside.exists()] == left


def test_a_floor_stands_for_the_grace_period_first(store: Path) -> None:
    """By the store's clock; what a killed gc has begun is gone on with."""
    began = time.monotonic()
    collected(store, "--last", 2, "--grace", "3s", "--apply")
    assert time.monotonic() - began > 2.0
    with open_for_reading(str(store)) as opened:
        assert {row.done for row in gc(opened, last=2, apply=True)} == {"stands"}


@pytest.mark.parametrize("age_s", [10, 700])
def test_a_claim_that_may_be_restoring_holds_floors_up(store: Path, age_s: int) -> None:
    """Until it has stood so long that it is taken for dead."""
    with open_store(str(store), write=True) as opened:
        claim_term(opened.far, RUN, seen=["t000001-0000000000000000"])
    (entry,) = (store / "objects" / RUN / "log").glob("000000000002/zarr.json")
    os.utime(entry, (time.time() - age_s,) * 2)
    rows = collected(store, "--last", 2, "--apply")
    if age_s < 600:
        assert [row["done"] for row in rows] == ["left"]
        assert "may be under way" in rows[0]["why"]
    else:
        assert [row["done"] for row in rows] == ["raised", "deleted"] * 2


def test_a_claim_lives_as_long_as_its_restore(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: it gives signs of life, and ends with them."""
    monkeypatch.setattr("adacheck_store.terms.RENEW_S", 0.02)
    claimed = store / "objects" / RUN / "log" / "000000000002" / "zarr.json"
    seen: list[set[str]] = []

    def aged() -> None:
        for path in claimed.parent.parent.glob("*/zarr.json"):
            os.utime(path, (time.time() - 700,) * 2)

    def slow(*arguments: Any, **named: Any) -> Restored:
        aged()
        deadline = time.monotonic() + 60
        while time.time() - claimed.stat().st_mtime > 600:
            assert time.monotonic() < deadline, "no sign of life"
            time.sleep(0.01)
        seen.append({row["done"] for row in collected(store, "--last", 2)})
        return restore_state(*arguments, **named)

    monkeypatch.setattr("adacheck_store.session.restore_state", slow)
    session = RunSession.open(str(store), RUN)
    try:
        restored = session.restore(step=3)
    finally:
        session.close()
    assert restored is not None
    assert seen == [{"left"}]
    aged()
    time.sleep(0.2)
    assert {row["done"] for row in collected(store, "--last", 2)} == {"raised", "deleted"}


def test_a_trainer_sees_signs_of_life(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim without them is dead to it after a while, one with them is not."""
    clock = [1000.0]
    monkeypatch.setattr("adacheck_store.terms.time.monotonic", lambda: clock[0])
    with open_store(str(store), write=True) as opened:
        far, old = opened.far, Term.parse("t000001-0000000000000000")
        assert isinstance(far, ZarrTier)
        claim = str(claim_term(far, RUN, seen=[str(old)]))
        rivals = Rivals(far, RUN, old)
        assert rivals.look() == ({claim}, set())
        for _ in range(3):
            clock[0] += CLAIM_S - 1
            far.renew(str(log_key(RUN, 2)))
            assert rivals.look() == ({claim}, set())
        clock[0] += CLAIM_S + 1
        assert rivals.look() == (set(), {claim})


def test_a_near_tier_that_is_written_is_left_to_its_writer(store: Path) -> None:
    """The far one is collected all the same."""
    with open_store(str(store), write=True):
        done = subprocess.run(
            [sys.executable, "-m", "adacheck_store", "gc", str(store), "--last", "2", "--apply",
             "--grace", "0"],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "left:" in done.stdout
    assert "pid" in done.stdout
    assert keys_of(store, "lmdb", "base") != keys_of(store, "zarr", "base")


PASSED = ("local.", "lmdb.delete", "lmdb.head", "lmdb.sync")
POINTS = [name for name in failpoints.names() if name.startswith(PASSED)]
OFTEN = [(name, 1) for name in POINTS if "unlink" in name or "delete" in name or "link" in name]
OTHERS = [(name, count) for name in POINTS for count in (1, 7) if (name, count) not in OFTEN]


@pytest.mark.fault
@pytest.mark.parametrize(
    ("name", "count"), OFTEN + [pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS]
)
def test_killed_anywhere(store: Path, states: dict[int, Restored], name: str, count: int) -> None:
    """What is promised stays, and the next one ends it: nothing below the floor, nothing loose."""
    assert cli("tag", store, "good", 13).exit_code == 0
    killed_and_run_again(store, states, f"{name}:{count}", certain=count == 1)


COLLECT = ("--every", "16", "--apply", "--grace", "0", "--older", "0")


def killed_and_run_again(
    store: Path, states: dict[int, Restored], spec: str, *, certain: bool
) -> None:  # fmt: skip
    """Killed at a failpoint, which it is ``certain`` to come to; looked at, and run again."""
    ended, said = run(["adacheck_store", "gc", str(store), *COLLECT], fail=spec)
    assert ended in ((-signal.SIGKILL,) if certain else (-signal.SIGKILL, 0)), (spec, said)
    kept = {0, 13, 16, *range(32, END + 1)}
    with open_for_reading(str(store)) as opened:
        assert set(provable([opened.far], {step: states[step] for step in kept})) == kept
    assert all(found["kind"] == "unfinished" for found in findings(store)[1])
    collected(store, "--every", "16", "--apply", "--older", "0")
    check(store, states, kept)
    assert below_floor(store) <= {"base", "extra"}


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_anywhere_later(
    store: Path, states: dict[int, Restored], tmp_path: Path
) -> None:  # fmt: skip
    """In the middle of what passes a failpoint, and at the last of it."""
    assert cli("tag", store, "good", 13).exit_code == 0
    copy, counts = tmp_path / "copy", Counter[str]()
    shutil.copytree(store, copy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failpoints, "hit", lambda name: counts.update([name]))
        collected(copy, *COLLECT)
    shutil.rmtree(copy)
    assert counts.keys() == set(POINTS)
    for name, count in sorted(counts.items()):
        for hit in sorted({(count + 1) // 2, count}):
            shutil.copytree(store, copy)
            killed_and_run_again(copy, states, f"{name}:{hit}", certain=True)
            shutil.rmtree(copy)


def test_these_are_all_that_it_passes(store: Path) -> None:
    """Where the one above kills it."""
    failpoints.disarm()
    collected(store, "--every", "16", "--apply", "--older", "0")
    assert failpoints.seen() == set(POINTS)


def test_tags_by_the_command(store: Path) -> None:
    """Added once, listed, removed; what makes no sense is one error."""
    code, document = cli_json("tag", store, "end")
    assert code == 0
    assert (document["rows"][0]["step"], document["rows"][0]["done"]) == (END, "added")
    code, document = cli_json("tag", store, "end", END)  # done again it changes nothing
    assert (code, document["rows"][0]["done"]) == (0, "stands")
    assert cli("tag", store, "early", 3).exit_code == 0
    rows = cli_json("tag", store)[1]["rows"]
    assert [(row["name"], row["step"], row["base"]) for row in rows] == [
        ("early", 3, True), ("end", END, True),
    ]  # fmt: skip
    for arguments, code, text in (
        (("end", 4), 2, "'end' stands, for step 42"), (("../x", 4), 2, "not the name of a tag"),
        (("new", 999), 3, "nearest provable steps: 41 and 42"),
        (("none", "--remove"), 2, "of: early, end"),
    ):  # fmt: skip
        result = cli("tag", store, *arguments)
        assert (result.exit_code, text in result.stderr) == (code, True), result.output
    assert cli("tag", store, "end", "--remove").exit_code == 0
    assert [row["name"] for row in cli_json("tag", store)[1]["rows"]] == ["early"]


def test_a_tag_of_a_step_that_only_the_near_tier_has(tmp_path: Path) -> None:
    """Its base and its extras are brought to the far tier first."""
    store = tmp_path / "store"
    toy = train(str(store), 20, keep_bases=100)
    shutil.rmtree(store / "objects" / RUN / keys_of(store, "zarr", "extra")[0].split("/")[1])
    assert cli("tag", store, "good", 19).exit_code == 0
    with open_for_reading(str(store)) as opened:
        state = restore_state([opened.far], RUN, step=19)
    assert state.step == 19
    assert toy.step == 20


@pytest.mark.parametrize("what", ["/c/", "zarr.json"])
def test_a_base_that_could_not_be_read_is_not_damaged(
    store: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """No floor is chosen while a tier does not answer for it: the base may be whole."""
    real = LocalObjects.get

    def get(self: LocalObjects, name: str, *more: Any) -> bytes:
        if "/base/000000000016-" in name and what in name:
            raise TierUnavailableError("does not answer")
        return real(self, name, *more)

    monkeypatch.setattr(LocalObjects, "get", get)
    rules = Retention(last=2, every=16)
    with open_store(str(store), write=True) as opened, pytest.raises(TierUnavailableError):
        plan_floor(opened.far, RUN, 2, cap=None, retention=rules)
    monkeypatch.setattr(LocalObjects, "get", real)
    with open_store(str(store), write=True) as opened:
        choice = plan_floor(opened.far, RUN, 2, cap=None, retention=rules)
    assert choice is not None
    assert list(choice.kept) == [0, 16]
