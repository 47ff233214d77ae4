"""What the trainers of a store had, and what must therefore come back, whatever has happened.

A dictionary of every (term, step) that was ever trained, ``promised`` those that were acknowledged
and have not been pruned, disowned or lost to damage that was planted, ``tagged`` those that a tag
holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from adacheck_store.catalog import Catalog, read_catalog
from adacheck_store.format.errors import AdaCheckError, RecordNotFoundError
from adacheck_store.format.manifest import Floor, Manifest
from adacheck_store.proof import Segment
from adacheck_store.recovery import Prover, RestorePlan, tolerant_line
from adacheck_store.restore import Restored, restore_state
from adacheck_store.retention import tier_catalog
from adacheck_store.store import Store, open_store
from adacheck_store.tools.findings import DAMAGE, Finding, Provable
from adacheck_store.tools.fsck import fsck
from tests.stateful.places import Place, replacing
from tests.stateful.trainers import DONE, NODES, RUN, digest_of_restored

At = tuple[str, int]
"""Term and step."""
Pair = tuple[str, str]
"""Tier and key."""


class Truth:
    """A store at a place, and what is known of it. ``log`` is told what is acknowledged."""

    def __init__(self, place: Place, log: Callable[..., None] | None = None) -> None:
        self.place = place
        self.truth: dict[At, str] = {}
        self.promised: set[At] = set()
        self.tagged: dict[str, At] = {}
        self.parents: dict[str, At] = {}
        self.damaged: set[Pair] = set()
        self.planted = False
        self.lost = False
        self.collected = False
        self.trust_truth = True
        self._log = log or (lambda **row: None)
        os.environ["ADACHECK_NODE"] = NODES[0]

    # What is known -----------------------------------------------------------------------------

    def promise(self, term: str, step: int) -> None:
        """A step was acknowledged."""
        self.promised.add((term, step))
        self._log(acknowledged=[term, step])

    def _born(self, term: str, parent: str, step: int) -> None:
        self.parents[term] = (parent, step)
        self._log(born=[term, parent, step])

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

    def read(self) -> Store:
        """The store for reading."""
        return open_store(self.place.url, cache=self.place.cache)

    def exists(self) -> bool:
        """Whether there is anything to read."""
        return bool(self.truth)

    def catalog(self, store: Store) -> Catalog:
        """What an open store holds of the run."""
        return read_catalog(store.tiers, RUN)

    def promised_on_line(self) -> set[At]:
        """What was promised and lies on the line, as far as floors have not passed it."""
        with self.read() as store:
            catalog = self.catalog(store)
        floors = self._floors(catalog)
        found = {at for at in self.promised if at[1] >= floors.get(at[0], 0)}
        return _on_line(found, catalog)

    def tagged_on_line(self) -> set[At]:
        """What tags hold of the line."""
        with self.read() as store:
            return _on_line(self.tagged.values(), self.catalog(store))

    def provable(self, catalog: Catalog) -> list[int]:
        """Steps of the line that can be proven without what was damaged on purpose."""
        sound = catalog.without(self.damaged)
        if sound.empty:
            return []
        return Prover(sound, tolerant_line(sound)).provable_steps()

    def places(self, catalog: Catalog) -> dict[At, int]:
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
            keys = {held for held, _, other in blocks if data in other}
            if self.place.one:
                self.place.flip(tier, replacing(data, bytes(changed)))
        if not self.place.one and not self.place.flip(tier, replacing(data, bytes(changed))):
            return None
        self.damaged |= {(name, held) for held in keys}
        DONE[f"damaged {name.partition(':')[0]}"] += 1
        self._cut()
        return name, key

    def drop(self, tier: str, *, flushed: bool = False) -> None:
        """Lose a tier: a node's LMDB, or all objects. What was ``flushed`` outlives an LMDB."""
        DONE[f"dropped {tier.partition(':')[0]}"] += 1
        self.place.lose(tier)
        self.lost = True
        if tier != "zarr" and not self.planted:
            assert self.tagged_on_line() <= self._left(), "a tagged step was in that LMDB alone"
            if flushed:
                self.check()
                DONE["outlived"] += 1
        self._cut()
        if tier == "zarr":
            self.tagged.clear()  # they stand in its log

    def _cut(self) -> None:
        """Damage was planted: promised is what the rest can still prove."""
        self.planted = True
        left = self._left()
        self.promised &= left
        self.tagged = {name: at for name, at in self.tagged.items() if at in left}

    def _left(self) -> set[At]:
        try:
            with self.read() as store:
                return set(self.places(self.catalog(store)))
        except AdaCheckError:
            return set()

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
        """Fsck is clean or truthful; what it calls provable is true; what was promised is there."""
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
            if not self.planted:
                self._floors_stand(store)
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
        floors = self._floors(catalog)
        if self.planted:
            self._forget_disowned(catalog)
        for at in sorted(_on_line(self.tagged.values(), catalog)):
            assert at[1] in steps, f"{at} is tagged, and is lost"
        for term, step in sorted(_on_line(self.promised, catalog)):
            if step not in steps:
                assert step < floors.get(term, 0), f"{(term, step)} was acknowledged, and is lost"
        if not self.planted:
            kept = {(term, step) for floor in self._newest("zarr", catalog)
                    for term in floor.terms for step in floor.kept}  # fmt: skip
            named = {step for _, step in _on_line(kept, catalog)}
            # Told by number: it may be that of a branch that has been left.
            bases = {(term, ref.step) for (term, _), refs in catalog.bases.items() for ref in refs}
            elsewhere = {step for _, step in bases - _on_line(bases, catalog)}
            assert named - elsewhere <= steps, "a floor keeps it"

    def _floors_stand(self, store: Store) -> None:
        """What is below its floor a tier can do without: it has the floor's step by itself."""
        for tier in store.tiers:
            catalog = tier_catalog(tier, RUN)
            for floor in self._newest(tier.traits.name, catalog):
                # Where an older step was restored since, it is a step of the branch that was left.
                plan = Prover(catalog, tolerant_line(catalog, floor.terms[-1])).prove(floor.step)
                assert isinstance(plan, RestorePlan), (tier.traits.name, floor, plan)
                assert not plan.parts[0].deltas, (tier.traits.name, floor)

    def _newest(self, tier: str, catalog: Catalog) -> list[Floor]:
        """The last floor of a tier that speaks of the line; none if there is none."""
        terms = {segment.term for segment in _line(catalog)}
        floors = [floor for floor in catalog.floors.get(tier, ()) if terms & set(floor.terms)]
        return sorted(floors, key=lambda floor: floor.index)[-1:]

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
        gone: set[At] = set()
        for (term, _), refs in catalog.bases.items():
            for ref in refs:
                if ref.gap is not None:
                    gone |= {(term, step) for step in range(ref.gap["from"], ref.step)}
        self.promised -= gone


def _line(catalog: Catalog) -> tuple[Segment, ...]:
    return () if catalog.empty else tolerant_line(catalog)


def _on_line(found: Iterable[At], catalog: Catalog) -> set[At]:
    """Those that a restore of the newest term may come to."""
    line = _line(catalog)
    return {
        (term, step) for term, step in found
        if any(segment.term == term and segment.covers(step) for segment in line)
    }  # fmt: skip


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


def journal(path: Path) -> Callable[..., None]:
    """A log of JSON lines that survives SIGKILL."""
    file = path.open("a", encoding="utf-8")

    def write(**row: Any) -> None:
        file.write(json.dumps(row) + "\n")
        file.flush()

    return write
