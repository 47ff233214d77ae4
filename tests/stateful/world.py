"""A store, its writers, and a dictionary of what the trainers had: what the machine acts on.

The dictionary knows every (term, step) -> digest that was ever trained, and ``promised`` those
that were acknowledged and have not been pruned, disowned or lost to damage that was planted.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adacheck_store import duty as duty_module
from adacheck_store import session as session_module
from adacheck_store import writer as writer_module
from adacheck_store.arrays import byte_view
from adacheck_store.catalog import Catalog, RecordRef, read_catalog
from adacheck_store.config import Settings
from adacheck_store.format.errors import (
    AdaCheckError,
    RecordNotFoundError,
    TermError,
    TierError,
    TierFullError,
    TierReadOnlyError,
    UsageError,
)
from adacheck_store.format.keys import parse_key
from adacheck_store.format.manifest import Manifest
from adacheck_store.recovery import Prover, tolerant_line
from adacheck_store.restore import Restored, restore_state
from adacheck_store.session import RunSession
from adacheck_store.store import Store, open_store
from adacheck_store.tiers import failpoints
from adacheck_store.tiers.memory import MemoryTier
from adacheck_store.tools.compact import compact
from adacheck_store.tools.findings import DAMAGE, Finding, Provable
from adacheck_store.tools.fsck import fsck
from tests.core.kit import BrokenTier, load
from tests.core.toy import Toy

RUN = "run"
PART = "p000000"
BASE_EVERY = 4
WAIT_S = 30.0
SHAPES = [(3, 5), (), (17,)]
SETTINGS = Settings(
    base_every=BASE_EVERY, object_lag=3, grace_s=0.0, stall_timeout_s=5.0, lmdb_bytes=64 << 20,
    max_deaths=0,  # crashes here come in rows
)  # fmt: skip
NODES = ("a", "b")
QUICK: tuple[tuple[Any, str, Any], ...] = (
    (writer_module, "BACKOFF_S", (0.001, 0.01)),
    (duty_module, "BACKOFF_S", (0.001, 0.01)),
    (session_module, "CLOSE_S", 10.0),
)
"""Short pauses: module, name, value."""
DONE: Counter[str] = Counter()
"""How often what happened, in all worlds: so that one can see that a profile tries everything."""

Place = tuple[str, int]
"""Term and step."""
Pair = tuple[str, str]
"""Tier and key."""


def adamw(params: Any) -> torch.optim.Optimizer:
    """The toy's optimizer."""
    return torch.optim.AdamW(params, lr=1e-3)


def digest_of(arrays: dict[str, torch.Tensor], states: Any) -> str:
    """A digest over every bit of a state."""
    found = hashlib.blake2b(repr(sorted(dict(states).items())).encode(), digest_size=16)
    for name, tensor in sorted(arrays.items()):
        found.update(name.encode())
        found.update(byte_view(tensor))
    return found.hexdigest()


def digest_of_toy(toy: Toy) -> str:
    """Of a trainer's state now."""
    return digest_of(toy.arrays(), toy.states())


def digest_of_restored(restored: Restored) -> str:
    """Of a restored state."""
    state = restored.parts[PART]
    return digest_of(dict(state.arrays), state.states)


class Checked:
    """A boundary with a delta and a captured base beside it."""

    def __init__(self, toy: Toy) -> None:
        self.step = toy.step
        self._delta, self._base = toy.boundary(), toy.boundary({})
        self._base.saved["base"] = _frozen_base(toy)

    def delta(self, link: Any) -> Any:
        """The delta."""
        return self._delta.delta(link)

    def base(self, link: Any) -> Any:
        """The base."""
        return self._base.base(link)

    def extra(self, link: Any) -> Any:
        """The extra."""
        return self._delta.extra(link)

    def release(self) -> None:
        """Nothing."""


def _frozen_base(toy: Toy) -> Any:
    frozen = toy.boundary({"reason": "", "from": toy.step})
    head, arrays = frozen.saved["base"]
    body = {name: value for name, value in head.body.items() if name != "gap"}
    return replace(head, body={**body, "gap": None} if "gap" in head.body else body), arrays


@dataclass
class Writer:
    """A live session with its trainer."""

    node: str
    session: RunSession
    toy: Toy
    term: str
    broken: list[BrokenTier]
    keep_bases: int
    acknowledged: list[RecordRef] = field(default_factory=list)
    noted: int = 0


class World:
    """One store under test. ``log`` (if given) is told what is trained and acknowledged."""

    def __init__(self, root: Path | None, log: Callable[..., None] | None = None) -> None:
        self.root = root
        self.url = f"memory://stateful-{secrets.token_hex(8)}" if root is None else root.as_uri()
        self.truth: dict[Place, str] = {}
        self.promised: set[Place] = set()
        self.parents: dict[str, Place] = {}
        self.writers: dict[str, Writer] = {}
        self.damaged: set[Pair] = set()
        self.planted = False
        self.trust_truth = True
        self.stumbling = False
        self.seed = 0
        self._log = log or (lambda **row: None)
        os.environ["ADACHECK_NODE"] = NODES[0]

    # Writers ---------------------------------------------------------------------------------

    def _open(self, node: str, keep_bases: int) -> tuple[RunSession, list[BrokenTier]]:
        os.environ["ADACHECK_NODE"] = node
        try:
            store = open_store(self.url, write=True, lmdb_bytes=SETTINGS.lmdb_bytes)
        finally:
            os.environ["ADACHECK_NODE"] = NODES[0]
        near = BrokenTier(store.near)
        if self.root is None:  # a memory store outlives its writers
            near.close = lambda: None  # type: ignore[method-assign]
        far = near if store.near is store.far else BrokenTier(store.far)
        wrapped = replace(store, near=near, far=far)
        settings = replace(SETTINGS, keep_bases=keep_bases)
        try:
            return RunSession(wrapped, RUN, settings), [near, far]
        except BaseException:
            store.close()
            raise

    def begin(self, node: str = "a", *, step: int | None = None, keep_bases: int = 2) -> Place:
        """Restore (the newest, or a step) and start a term; returns where it begins."""
        session, broken = self._open(node, keep_bases)
        toy = Toy(SHAPES, adamw, seed=self.next_seed(), absent=0.2, base_every=BASE_EVERY)
        try:
            restored = session.restore(step=step)
            if restored is not None:
                if self.trust_truth:
                    self.check_restored(restored)
                load(toy, restored.parts[PART], None, self.seed)  # type: ignore[arg-type]
            else:
                self._log(fresh=digest_of_toy(toy))
            session.start(toy.layout, start_step=toy.step, base=toy.base, extra=toy.extra)
        except BaseException:
            session.close()
            raise
        term = session.status().term
        if restored is not None:
            DONE["forked" if step is not None else "went on"] += 1
            self._born(term, restored.plan.term, restored.step)
        writer = self.writers[node] = Writer(node, session, toy, term, broken, keep_bases)
        self._note(writer)
        self._watch(writer)
        if restored is None:
            self.promise(term, toy.step)
        if broken[0] is not broken[1]:
            session.flush(WAIT_S)
        return term, toy.step

    def _born(self, term: str, parent: str, step: int) -> None:
        self.parents[term] = (parent, step)
        self._log(born=[term, parent, step])

    def next_seed(self) -> int:
        """A seed that no trainer has had."""
        self.seed += 1
        return self.seed

    def learn(self, journal_file: Path) -> str:
        """Take over what a child that may have been killed has written down; its errors."""
        fresh, said = "", ""
        for line in journal_file.read_text().splitlines() if journal_file.exists() else ():
            row = json.loads(line)
            if "fresh" in row:
                fresh = row["fresh"]
            elif "trained" in row:
                term, step, digest = row["trained"]
                self.truth[term, step] = digest
            elif "born" in row:
                term, parent, step = row["born"]
                self.parents[term] = (parent, step)
            elif "acknowledged" in row:
                term, step = row["acknowledged"]
                self.promised.add((term, step))
            else:
                said += str(row)
        with self.read() as store:
            for manifest in self.catalog(store).manifests.values():
                self._adopt(manifest, fresh)
        return said

    def _adopt(self, manifest: Manifest, fresh: str) -> None:
        """A term that began, of which the child had no time to tell."""
        if manifest.parent_term:
            self.parents.setdefault(manifest.term, (manifest.parent_term, manifest.fork_step))
        elif not any(term == manifest.term for term, _ in self.truth):
            self.truth[manifest.term, manifest.step] = fresh

    def _watch(self, writer: Writer) -> None:
        """Hear of every record that becomes durable."""
        inner = writer.session._writer
        assert inner is not None
        hand_on = inner._on_stored

        def heard(step: int, refs: list[RecordRef]) -> None:
            hand_on(step, refs)
            writer.acknowledged += refs
            self.promise(writer.term, step)

        inner._on_stored = heard

    def promise(self, term: str, step: int) -> None:
        """A step was acknowledged."""
        self.promised.add((term, step))
        self._log(acknowledged=[term, step])

    def _note(self, writer: Writer) -> None:
        self.truth[writer.term, writer.toy.step] = digest = digest_of_toy(writer.toy)
        self._log(trained=[writer.term, writer.toy.step, digest])

    def append(self, node: str, steps: int, *, checked: bool = False) -> bool:
        """So many boundaries; False if a newer term has taken over, and the writer is gone."""
        writer = self.writers[node]
        try:
            for _ in range(steps):
                writer.session.check()
                gap = writer.session.wants_base()
                writer.toy.train()
                self._note(writer)
                boundary = Checked(writer.toy) if checked and gap is None else None
                writer.session.append(boundary or writer.toy.boundary(gap))
            self.settle(writer)
            writer.session.check()
        except TermError:
            DONE["fenced"] += 1
            self.close(node)
            return False
        return True

    def settle(self, writer: Writer) -> None:
        """Wait until all that is due has been done."""
        session = writer.session
        assert session._writer is not None
        assert session._upkeep is not None
        assert session._writer.wait_stored(WAIT_S)
        upkeep, deadline = session._upkeep, time.monotonic() + WAIT_S
        while not self.planted and not self.stumbling and upkeep.error and not upkeep.fenced:
            assert time.monotonic() < deadline, f"it never succeeds: {upkeep.error}"
            time.sleep(0.001)
        while upkeep.fenced is None and not upkeep.resting:
            assert time.monotonic() < deadline, f"upkeep never rests: {upkeep.error}"
            time.sleep(0.001)
        if not self.planted and not self.stumbling:
            assert upkeep.error is None or isinstance(upkeep.error, TermError), upkeep.error

    def flush(self, node: str) -> bool:
        """Everything to the far tier; False if fenced."""
        writer = self.writers[node]
        try:
            writer.session.flush(WAIT_S)
        except TermError:
            self.close(node)
            return False
        self.settle(writer)
        return True

    def skip(self, node: str, steps: int, fault: Exception | None = None) -> bool:
        """The near tier fails for so many steps; then a captured base closes the gap."""
        writer = self.writers[node]
        error = fault or TierFullError("planned")
        writer.broken[0].fault = lambda keys: (
            error if any("/delta/" in key or "/extra/" in key for key in keys) else None
        )
        there = self.append(node, steps)
        DONE["exposed"] += there and writer.session.status().exposed
        writer.broken[0].fault = lambda keys: None
        return there and self._close_gap(node)

    def declare_gap(self, node: str, back: int) -> bool:
        """Something finds the last steps wrong: they are disowned, a captured base follows."""
        DONE["disowned"] += 1
        writer = self.writers[node]
        first = max(self._begun(writer.term) + 1, writer.toy.step - back + 1)
        inner = writer.session._writer
        assert inner is not None
        inner.ask_for_base("planned", first)
        upkeep = writer.session._upkeep
        assert upkeep is not None
        with upkeep._changed:
            upkeep._tail.base = None
            upkeep._tail.deltas = []
        self.promised = {
            place for place in self.promised if place[0] != writer.term or place[1] < first
        }
        return self._close_gap(node)

    def prune(self, node: str) -> bool:
        """Train until what lies before the last bases can be deleted, and see that it is."""
        writer = self.writers[node]
        for _ in range(writer.keep_bases + 2):  # upkeep that is behind makes only the newest base
            if not self.append(node, BASE_EVERY):
                return False
        if not self.flush(node):
            return False
        if not self.planted:
            low = writer.toy.step - (writer.keep_bases + 2) * BASE_EVERY
            deadline = time.monotonic() + WAIT_S
            while late := self._kept_below(writer.term, low):
                assert time.monotonic() < deadline, (late, low)
                time.sleep(0.005)
            DONE["pruned"] += 1
        return True

    def _kept_below(self, term: str, low: int) -> list[str]:
        """Tiers that hold a delta of a term at a step or below it."""
        with self.read() as store:
            return [
                tier.traits.name for tier in store.tiers
                if any(key.kind == "delta" and key.step <= low
                       for key in map(parse_key, tier.list(f"{RUN}/{term}/")))
            ]  # fmt: skip

    def _begun(self, term: str) -> int:
        return min(step for name, step in self.truth if name == term)

    def stumble(self, node: str, steps: int, failpoint: str) -> None:
        """One call of the medium fails while a writer trains; it goes on by itself."""
        failpoints.arm(failpoint)
        self.stumbling = True
        try:
            there = self.append(node, steps)
            if there:
                with suppress(TierError):  # it says what is not saved
                    there = self.flush(node)
            there = there and self._close_gap(node)
            DONE["stumbled"] += not failpoints._armed
        finally:
            failpoints.disarm()
            self.stumbling = False
        if there:
            self.flush(node)

    def _close_gap(self, node: str) -> bool:
        session, deadline = self.writers[node].session, time.monotonic() + WAIT_S
        while session.status().exposed:
            if not self.append(node, 1):
                return False
            assert time.monotonic() < deadline, "the gap stays open"
        return True

    def close(self, node: str) -> None:
        """End a writer in order."""
        self.writers.pop(node).session.close()

    def crash(self, node: str, pending: int) -> None:
        """A writer whose last steps never arrive; nothing it does from here on has an effect."""
        DONE["crashed"] += 1
        writer = self.writers[node]

        def dead(keys: list[str]) -> Exception:
            return TierError("the process is dead")

        for tier in writer.broken:
            tier.fault = dead
            tier.delete = lambda keys: None  # type: ignore[method-assign]
        for _ in range(pending):
            writer.toy.train()
            self._note(writer)
            writer.session.append(writer.toy.boundary(writer.session.wants_base()))
        self.close(node)

    def close_all(self) -> None:
        """End all writers."""
        for node in list(self.writers):
            self.close(node)

    # Tools -----------------------------------------------------------------------------------

    def read(self) -> Store:
        """The store for reading."""
        return open_store(self.url)

    def exists(self) -> bool:
        """Whether there is anything to read."""
        return bool(self.truth)

    def compact(self, choose: Callable[[list[int]], int]) -> None:
        """The verb, at some provable step."""
        with self.read() as store:
            steps = self.provable(self.catalog(store))
            if not steps:
                return
            if store.far.traits.name != "zarr" and self.root is not None:
                with pytest.raises(TierReadOnlyError):
                    list(compact(store, RUN))
                return
            step = choose(steps)
            try:
                rows = list(compact(store, RUN, to=step))
            except UsageError:  # retention has passed it there, and another tier still has it
                assert step < max(floor.step for floor in self.catalog(store).floors["zarr"])
                return
            again = list(compact(store, RUN, to=rows[0].step))
        DONE[f"compact {rows[0].done}"] += 1
        assert {row.done for row in again} == {"present"}

    def catalog(self, store: Store) -> Catalog:
        """What an open store holds of the run."""
        return read_catalog(store.tiers, RUN)

    def promised_on_line(self) -> set[Place]:
        """What was promised and lies on the line, as far as floors have not passed it."""
        with self.read() as store:
            catalog = self.catalog(store)
        if catalog.empty:
            return set()
        line = Prover(catalog, tolerant_line(catalog)).line
        floors = self._floors(catalog)
        return {
            (term, step) for term, step in self.promised
            if step >= floors.get(term, 0)
            and any(segment.term == term and segment.covers(step) for segment in line)
        }  # fmt: skip

    def provable(self, catalog: Catalog) -> list[int]:
        """Steps of the line that can be proven without what was damaged on purpose."""
        sound = catalog.without(self.damaged)
        if sound.empty:
            return []
        return Prover(sound, tolerant_line(sound)).provable_steps()

    def places(self, catalog: Catalog) -> dict[Place, int]:
        """(term, step) -> step for every provable step, under each term that covers it."""
        sound = catalog.without(self.damaged)
        if sound.empty:
            return {}
        prover = Prover(sound, tolerant_line(sound))
        good = prover.provable_steps()
        return {
            (segment.term, step): step
            for segment in prover.line for step in good if segment.covers(step)
        }  # fmt: skip

    # Damage ----------------------------------------------------------------------------------

    def files(self, tier: str) -> list[Path]:
        """Files of a tier."""
        assert self.root is not None
        if tier == "zarr":
            return [path for path in sorted((self.root / "objects").rglob("*")) if path.is_file()]
        node = tier.partition(":")[2] or NODES[0]
        return [self.root / "lmdb" / node / "data.mdb"]

    def corrupt(self, choose: Callable[[list[Any]], Any]) -> tuple[str, str] | None:
        """Flip a bit of a block of a record, in every record of the tier that holds such a block.

        Returns the tier and key, None if there is nothing to flip.
        """
        with self.read() as store:
            catalog = read_catalog(store.tiers, RUN)
            tier = choose(list(store.tiers))
            name = tier.traits.name
            blocks = list(_blocks(catalog, tier))
            if not blocks:
                return None
            key, _, data = choose(blocks)
            bit = choose(list(range(8 * len(data))))
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            if self.root is None:
                _change_memory(tier, data, bytes(changed))
            keys = {held for held, _, other in blocks if data in other}
        if self.root is not None and not self._change_files(name, data, bytes(changed)):
            return None
        self.damaged |= {(name, held) for held in keys}
        DONE[f"damaged {name.partition(':')[0]}"] += 1
        self._cut()
        return name, key

    def _change_files(self, tier: str, data: bytes, changed: bytes) -> bool:
        found = False
        for path in self.files(tier):
            content = path.read_bytes()
            if data in content:
                found = True
                path.write_bytes(content.replace(data, changed))
        return found

    def drop(self, tier: str, *, flushed: bool = False) -> None:
        """Lose a tier: a node's LMDB, or all objects. What was ``flushed`` outlives an LMDB."""
        assert self.root is not None
        DONE[f"dropped {tier.partition(':')[0]}"] += 1
        if tier == "zarr":
            shutil.rmtree(self.root / "objects")
        else:
            shutil.rmtree(self.root / "lmdb" / (tier.partition(":")[2] or NODES[0]))
            if flushed and not self.planted:
                self.check()
                DONE["outlived"] += 1
        self._cut()

    def _cut(self) -> None:
        """Damage was planted: promised is what the rest can still prove."""
        self.planted = True
        try:
            with self.read() as store:
                left = self.places(read_catalog(store.tiers, RUN))
        except AdaCheckError:
            left = {}
        self.promised &= left.keys()

    # Truth -----------------------------------------------------------------------------------

    def check_restored(self, restored: Restored) -> None:
        """What was restored is what the trainer had."""
        place = (restored.plan.term, restored.step)
        while place not in self.truth:  # a fork step is the parent's too
            parent = self.parents[place[0]]
            assert parent[1] == place[1], f"nobody ever trained {place}"
            place = parent
        assert digest_of_restored(restored) == self.truth[place], f"{place} is not the trainer's"
        assert restored.extras["r000000"] == {"n": restored.step}

    def check(self, choose: Callable[[list[int]], int] | None = None) -> list[Finding]:
        """Fsck is clean or truthful; what it calls provable is true; what was promised is there.

        A live writer may prune meanwhile (where damage made it fail before): then once more.
        """
        for _ in range(4):
            for writer in self.writers.values():
                self.settle(writer)
            before = self._all_floors()
            try:
                return self._check(choose)
            except (AdaCheckError, AssertionError):
                if not self.writers or before == self._all_floors():
                    raise
        return self._check(choose)

    def _all_floors(self) -> dict[str, int]:
        with self.read() as store:
            return self._floors(self.catalog(store))

    def _check(self, choose: Callable[[list[int]], int] | None) -> list[Finding]:
        with self.read() as store:
            rows = list(fsck(store, ""))
            DONE["checked"] += 1
            findings = [row for row in rows if isinstance(row, Finding)]
            if not self.planted:
                assert not [row for row in findings if row.severity == DAMAGE], findings
                assert not [row for row in findings if row.unchecked], findings
            said = [row for row in rows if isinstance(row, Provable) and row.tier == "all"]
            if not said:
                assert self.planted
                return findings
            steps = _steps(said[0].steps)
            catalog = read_catalog(store.tiers, RUN)
            assert set(steps) >= set(self.provable(catalog))
            self._keep_promises(catalog, set(steps))
            wanted = steps if choose is None or not steps else {steps[-1], choose(steps)}
            DONE["nothing provable"] += not steps
            for step in sorted(wanted):
                DONE["restored"] += 1
                self.check_restored(restore_state(store.tiers, RUN, step=step))
            if steps:  # restore mends a record from two damaged copies, fsck does not say so
                newest = restore_state(store.tiers, RUN)
                assert newest.step >= steps[-1] if self.planted else newest.step == steps[-1]
                self.check_restored(newest)
        return findings

    def _keep_promises(self, catalog: Catalog, steps: set[int]) -> None:
        line = Prover(catalog, tolerant_line(catalog)).line
        floors = self._floors(catalog)
        if self.planted:
            self._forget_disowned(catalog)
        for term, step in sorted(self.promised):
            if not any(segment.term == term and segment.covers(step) for segment in line):
                continue  # another branch
            if step not in steps:
                assert step < floors.get(term, 0), f"{(term, step)} was acknowledged, and is lost"

    def _floors(self, catalog: Catalog) -> dict[str, int]:
        """Per term the floor below which some tier has deleted."""
        found: dict[str, int] = {}
        for floors in catalog.floors.values():
            for floor in floors:
                for term in floor.terms:
                    found[term] = max(found.get(term, 0), floor.step)
        return found

    def _forget_disowned(self, catalog: Catalog) -> None:
        """After damage a writer may find its chain wrong and say from where on."""
        gone: set[Place] = set()
        for (term, _), refs in catalog.bases.items():
            for ref in refs:
                if ref.gap is not None:
                    gone |= {(term, step) for step in range(ref.gap["from"], ref.step)}
        self.promised -= gone


def _steps(text: str) -> list[int]:
    """``0..8, 10`` as numbers."""
    found: list[int] = []
    for piece in filter(None, text.split(", ")):
        low, _, high = piece.partition("..")
        found += range(int(low), int(high or low) + 1)
    return found


def _blocks(catalog: Catalog, tier: Any) -> Iterator[tuple[str, str, bytes]]:
    """Every block a tier holds of bases and deltas: key, array, bytes."""
    for table in (catalog.bases, catalog.deltas):
        for refs in table.values():
            for ref in refs:
                if tier.traits.name not in ref.tiers:
                    continue
                try:
                    for info in tier.head(ref.key).head.arrays:
                        for index in range(len(info.digests)):
                            data = bytes(tier.read(ref.key, info.name, index, 1))
                            if len(data) >= 16:
                                yield ref.key, info.name, data
                except RecordNotFoundError:
                    continue


def _change_memory(tier: Any, data: bytes, changed: bytes) -> None:
    assert isinstance(tier, MemoryTier)
    for _, blocks in tier._records.values():
        for place, held in blocks.items():
            if data in held:
                blocks[place] = held.replace(data, changed)


def journal(path: Path) -> Callable[..., None]:
    """A log of JSON lines that survives SIGKILL."""
    file = path.open("a", encoding="utf-8")

    def write(**row: Any) -> None:
        file.write(json.dumps(row) + "\n")
        file.flush()

    return write
