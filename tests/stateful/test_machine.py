"""Anything a run can go through, in any order, against a dictionary of what the trainers had.

After every rule fsck must be clean, or true: what it calls provable restores to the trainer's
bits, and every acknowledged step that a surviving copy proves is among it.
"""

from __future__ import annotations

import logging
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from adacheck_store.format.errors import RestoreError, TierUnavailableError
from adacheck_store.tiers import failpoints
from tests.s3.server import OWNER, server, use
from tests.stateful import child, verbs
from tests.stateful.places import Bucket, Folder, Memory
from tests.stateful.trainers import DONE, NODES, QUICK
from tests.stateful.world import World

pytestmark = pytest.mark.fault

RAISING = [name for name in failpoints.names() if not name.startswith("lmdb.quarantine")]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short pauses, one thread for torch, no talk."""
    for module, name, value in QUICK:
        monkeypatch.setattr(module, name, value)
    monkeypatch.setenv("ADACHECK_NODE", NODES[0])
    threads, level = torch.get_num_threads(), logging.root.manager.disable
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(level)
    torch.set_num_threads(threads)
    failpoints.disarm()


class Machine(RuleBasedStateMachine):
    """Rules for any store; all of it is checked after ``every`` so many of them."""

    world: World
    every = 1
    passed = 0

    def __init__(self) -> None:
        super().__init__()
        self.world = self.make()
        self.choose = lambda items: items[0]

    def make(self) -> World:
        """An empty world."""
        return World(Memory())

    @initialize(seed=st.integers(0, 2**32))
    def first(self, seed: int) -> None:
        """A run begins."""
        self.choose = random.Random(seed).choice
        self.world.begin()
        self.world.append("a", 2)

    def someone(self) -> str:
        """A live writer, begun if there is none; empty if nothing is left to begin from.

        No preconditions: who lives depends on threads, and what hypothesis draws must not.
        """
        if not self.world.writers:
            self.begin(keep_bases=2, every=0, older=False, first=True)
        return self.choose(sorted(self.world.writers)) if self.world.writers else ""

    @rule(steps=st.integers(1, 7), flush=st.booleans(), checked=st.booleans())
    def append(self, steps: int, flush: bool, checked: bool) -> None:
        """Train, with a captured base at every step if ``checked``."""
        node = self.someone()
        if node and self.world.append(node, steps, checked=checked) and flush:
            self.world.flush(node)

    @rule(steps=st.integers(1, 3), hard=st.booleans())
    def skip(self, steps: int, hard: bool) -> None:
        """The near tier fails, training goes on exposed, a captured base closes the gap."""
        error = TierUnavailableError("planned") if hard else None
        if node := self.someone():
            self.world.skip(node, steps, error)

    @rule(back=st.integers(1, 4))
    def gap(self, back: int) -> None:
        """The last steps are found wrong."""
        if node := self.someone():
            self.world.declare_gap(node, back)

    @rule()
    def prune(self) -> None:
        """Train until the oldest steps may go, and see them gone from every tier."""
        if node := self.someone():
            self.world.prune(node)

    @rule()
    def compact(self) -> None:
        """A base by hand, at some provable step."""
        verbs.compact(self.world, self.choose)

    @rule()
    def tag(self) -> None:
        """A step gets a name, and stays."""
        verbs.tag(self.world, self.choose)

    @rule()
    def untag(self) -> None:
        """A name is taken back."""
        verbs.untag(self.world, self.choose)

    @rule(last=st.integers(1, 3), every=st.sampled_from([0, 8, 12]))
    def collect(self, last: int, every: int) -> None:
        """Garbage goes, by rules or without, beside live writers or after them."""
        verbs.collect(self.world, last, every)

    @rule()
    def mend(self) -> None:
        """The store is repaired."""
        verbs.mend(self.world)

    @rule()
    def close(self) -> None:
        """A writer ends in order."""
        if node := self.someone():
            self.world.close(node)

    @rule(pending=st.integers(0, 3))
    def crash(self, pending: int) -> None:
        """A writer dies with steps in flight."""
        if node := self.someone():
            self.world.crash(node, pending)

    @rule(keep_bases=st.integers(1, 3), every=st.sampled_from([0, 0, 8]), older=st.booleans(),
          first=st.booleans())  # fmt: skip
    def begin(self, keep_bases: int, every: int, older: bool, first: bool) -> None:
        """A writer restores and goes on: the newest step, or a fork; perhaps the second writer."""
        free = [node for node in self.nodes() if node not in self.world.writers]
        if not free:
            return
        node = free[0] if first else free[-1]
        step = None
        if older:
            with self.world.read() as store:
                found = self.world.provable(self.world.catalog(store))
            step = self.choose(found) if found else None
        try:
            self.world.begin(node, step=step, keep_bases=keep_bases, every=every)
        except RestoreError:
            assert self.world.planted, "nothing was damaged, and nothing can be restored"
            assert not self.world.promised_on_line()

    def nodes(self) -> tuple[str, ...]:
        """Where writers may run."""
        return NODES[:1]

    @rule(twice=st.booleans())
    def corrupt(self, twice: bool) -> None:
        """Flip a bit of a block in one tier; fsck must name it."""
        self.world.close_all()
        for _ in range(1 + twice):
            found = self.world.corrupt(self.choose)
            if found is not None:
                named = {(f.tier, f.key) for f in self.world.check(self.choose)}
                assert any(t == found[0] and key == found[1] for t, key in named), found

    @invariant()
    def truthful(self) -> None:
        """Fsck, and some restores."""
        self.passed += 1
        if self.world.exists() and self.passed % self.every == 0:
            self.world.check(self.choose)

    def teardown(self) -> None:
        """In the end every provable step is restored."""
        try:
            if self.world.exists():
                self.world.close_all()
                self.world.check()
        finally:
            self.world.writers.clear()
            self.world.place.end()


class FileMachine(Machine):
    """More rules: two nodes, files to lose, failures of the medium, SIGKILL in a child."""

    def make(self) -> World:
        """A store in a folder of its own."""
        self.folder = Path(tempfile.mkdtemp(prefix="ada-stateful-"))
        return World(Folder(self.folder / "store"))

    def nodes(self) -> tuple[str, ...]:
        """Two."""
        return NODES

    @rule(point=st.sampled_from(RAISING), hit=st.integers(1, 4), steps=st.integers(1, 5),
          eio=st.booleans())  # fmt: skip
    def fail(self, point: str, hit: int, steps: int, eio: bool) -> None:
        """One call of the medium fails somewhere; the writer recovers by itself."""
        if node := self.someone():
            self.world.stumble(node, steps, f"{point}:{hit}=raise{'-eio' * eio}")

    @rule(which=st.integers(0, 2), flush=st.booleans())
    def drop(self, which: int, flush: bool) -> None:
        """A tier is lost: the machine, or the object store."""
        flushed = [self.world.flush(node) for node in sorted(self.world.writers) if flush]
        self.world.close_all()
        with self.world.read() as store:
            names = [tier.traits.name for tier in store.tiers]
        if len(names) > 1:
            safe = bool(flushed) and all(flushed)
            self.world.drop(names[which % len(names)], flushed=safe)

    @rule(point=st.sampled_from(RAISING), hit=st.integers(1, 6), steps=st.integers(1, 12))
    def kill(self, point: str, hit: int, steps: int) -> None:
        """A child restores, trains and is killed somewhere on the way; other writers live on."""
        if self.world.collected:  # what gc has opened for writing stays locked while a writer reads
            self.world.close_all()
            self.world.collected = False
        out = self.folder / "journal.jsonl"
        out.unlink(missing_ok=True)
        code = child.run(self.world.place, out, f"{point}:{hit}", steps, self.world.next_seed())
        said = self.world.learn(out)
        assert code in (0, -signal.SIGKILL), said
        assert not said or self.world.planted, said
        DONE["killed" if code else "unharmed"] += 1

    def teardown(self) -> None:
        """Leave nothing behind."""
        try:
            super().teardown()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


class BucketMachine(FileMachine):
    """The same with objects in S3: SeaweedFS, which every process reaches by HTTP."""

    every = 3

    def make(self) -> World:
        """A prefix of its own; LMDBs in a folder."""
        self.folder = Path(tempfile.mkdtemp(prefix="ada-stateful-"))
        return World(Bucket(server().url(), self.folder / "lmdb"))


def profile(examples: int, steps: int) -> settings:
    """How much to try. What fails is not made smaller: that takes minutes, and threads race.

    The short ones try the same every time: what they find is of the change that is tested.
    """
    return settings(
        derandomize=examples < 100,
        max_examples=examples, stateful_step_count=steps, deadline=None, print_blob=True,
        suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate),
    )  # fmt: skip


COMMON = {
    "checked", "restored", "went on", "forked", "exposed", "disowned", "pruned", "crashed",
    "compact folded", "compact present", "tagged", "untagged", "collected", "floor raised",
    "floor stands", "repair rebuilt", "whole again",
}  # fmt: skip
ON_DISK = COMMON | {
    "repair set aside",  # memory has no place aside
    "damaged lmdb", "damaged zarr", "dropped lmdb", "dropped zarr", "stumbled", "fenced",
    "compact copied", "killed", "unharmed", "outlived",
}  # fmt: skip


def attempt(machine: type[Machine], examples: int, steps: int, wanted: set[str]) -> None:
    """Run a machine, and see that everything wanted has happened."""
    before = Counter(DONE)
    run_state_machine_as_test(machine, settings=profile(examples, steps))
    done = DONE - before
    print(dict(done))
    assert wanted <= done.keys(), wanted - done.keys()


def test_memory_short() -> None:
    """A store in memory."""
    attempt(Machine, 30, 15, {"checked", "restored"})


def test_file_short() -> None:
    """LMDB and zarr in a folder."""
    attempt(FileMachine, 8, 12, {"checked", "restored"})


@pytest.fixture
def bucket() -> None:
    """Credentials for the server."""
    use(OWNER)


def test_bucket_short(bucket: None) -> None:
    """LMDB and S3."""
    attempt(BucketMachine, 2, 8, {"checked", "restored"})


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_bucket_long(bucket: None) -> None:
    """The long profile."""
    attempt(BucketMachine, 100, 40, ON_DISK)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_long() -> None:
    """The long profile."""
    attempt(Machine, 1500, 40, COMMON | {"damaged memory"})


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_file_long() -> None:
    """The long profile."""
    attempt(FileMachine, 400, 40, ON_DISK)


def test_a_run_goes_on_though_an_ancestors_manifest_is_gone(tmp_path: Path) -> None:
    """Each node's tier holds its own terms only; the objects and the first node are lost."""
    world = World(Folder(tmp_path / "store"))
    world.begin("a")
    world.append("a", 6)
    world.close("a")
    world.begin("b")
    world.append("b", 9)
    world.close("b")
    world.drop("lmdb")
    world.drop("zarr")
    world.begin("b")
    world.append("b", 5)
    world.close("b")
    world.check()


def test_what_an_outlived_writer_disowns_is_not_the_new_lines(tmp_path: Path) -> None:
    """It wakes after the fork, finds its last steps wrong, and says so in its own near tier."""
    world = World(Folder(tmp_path / "store"))
    world.begin("a")
    world.append("a", 2)
    world.begin("b")
    world.append("b", 1)
    before = world.promised_on_line()
    world.declare_gap("a", 2)
    assert world.parents[world.writers["b"].term][1] == 2
    world.promised |= before
    world.check()
    world.close_all()
    world.check()
