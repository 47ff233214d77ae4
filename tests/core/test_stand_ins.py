"""What follows a beginning by reference: the reference fails, floors rise, ranks come back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from adacheck_store import beginning
from adacheck_store.agent.drainer import Drainer
from adacheck_store.agent.replica import FAR
from adacheck_store.agent.shell import Shell
from adacheck_store.catalog import read_catalog
from adacheck_store.config import Settings
from adacheck_store.engines import StepEngine
from adacheck_store.format.keys import manifest_key, parse_key, part_name
from adacheck_store.format.manifest import Floor, Manifest, PartEntry
from adacheck_store.format.record import Record
from adacheck_store.recovery import Prover, RestorePlan, tolerant_line
from adacheck_store.restore import restore_state
from adacheck_store.retention import below, plan_floor
from adacheck_store.store import Store
from adacheck_store.terms import claim_term, put_floor, put_tag, read_log
from adacheck_store.tiers.base import RecordSource, Source, Tier
from adacheck_store.tiers.wrappers import WrapperTier
from adacheck_store.tools.compact import compact
from adacheck_store.tools.fsck_chain import check_links
from adacheck_store.tools.repair import repair
from tests.core.kit import KeptTier
from tests.core.ranks import BlindTier, NotingTier
from tests.core.test_beginning import (
    assert_back,
    go_on,
    newest,
    of_newest,
)
from tests.core.test_topology import STEPS, columns, rows, whole, written


def held(tier: Any, kind: str, term: str = "", step: int = -1) -> list[str]:
    """Keys of a kind, of a term or of a step."""
    keys = [parse_key(key) for key in tier.list("run/")]
    return [
        str(key) for key in keys
        if key.kind == kind and term in ("", key.term) and step in (-1, key.step)
    ]  # fmt: skip


def forked() -> tuple[Any, list[Any], str, str]:
    """A term of two ranks and one of one that refers to it: far and near tiers, both terms."""
    far, _, _ = written(rows, 2)
    parent = newest(read_catalog([far], "run"))
    nears = [KeptTier("new0")]
    go_on(far, whole, 1, nears=nears)
    return far, nears, parent, newest(read_catalog([far], "run"))


@pytest.mark.parametrize(("kind", "step"), [("delta", STEPS), ("base", -1)])
def test_what_no_longer_gives_a_beginning_does_not_stand_in_for_it(kind, step):
    """A record of the parent is lost in the far tier: the next term drains what the near has."""
    far, nears, parent, term = forked()
    far.delete(held(far, kind, parent, step))
    toys = go_on(far, whole, 1, nears=nears)
    assert set(held(nears[0], "base", term)) < set(held(far, "base", term))
    assert_back(far, toys, rows, 2)


def test_a_repair_brings_the_base_that_nothing_stands_in_for():
    """And leaves it where it lies while the parent's records give it."""
    far, nears, parent, term = forked()
    store = Store("memory://x", nears[0], far)
    assert list(repair(store, "run")) == []
    far.delete(held(far, "delta", parent, STEPS)[:1])
    done = [(row.tier, row.key, row.done) for row in repair(store, "run")]
    assert done == [("far", key, "rebuilt") for key in held(nears[0], "base", term)]
    catalog = read_catalog([far], "run")
    assert isinstance(Prover(catalog, tolerant_line(catalog)).prove(STEPS + 2), RestorePlan)


def test_a_base_that_rots_in_the_near_tier_is_folded_from_the_parent():
    """The far tier has the reference alone: no step is disowned that it proves."""
    far, _, _ = written(rows, 2)
    near = KeptTier("new0")
    blind = [BlindTier(near, f"/base/{STEPS:012d}")]
    often = Settings(base_every=4, object_lag=100, grace_s=0.0, keep_bases=100)
    toys = go_on(far, whole, 1, nears=blind, steps=7, settings=often)
    term = newest(read_catalog([far], "run"))
    catalog = read_catalog([near], "run")
    told = {(ref.step, ref.origin) for ref in catalog.bases[term, part_name(0)]}
    told.discard((4, "replayed"))  # upkeep that comes late folds to the newest alone
    assert told == {(STEPS, "captured"), (8, "replayed")}
    assert_back(far, toys, rows, 2)


def test_where_the_parent_is_lost_too_nothing_before_the_fork_is_disowned():
    """What the fold meets last is a base of the parent; the gap begins with the term."""
    far, _, _ = written(rows, 2)
    blind = BlindTier(far, "nothing")

    class Rotting(BlindTier):
        def read(self, key: str, *more: Any) -> bytes | memoryview:
            if self._lost in key:
                blind._lost = "/base/00000000000"
            return super().read(key, *more)

    near = KeptTier("new0")
    nears = [Rotting(near, f"/base/{STEPS:012d}")]
    often = Settings(base_every=4, object_lag=100, grace_s=0.0, keep_bases=100)
    go_on(blind, whole, 1, nears=nears, steps=40, settings=often)
    catalog = read_catalog([near], "run")
    gaps = [ref.gap for refs in catalog.bases.values() for ref in refs if ref.gap is not None]
    assert [gap["from"] for gap in gaps] == [STEPS]
    restored = restore_state([far], "run", step=STEPS)
    assert restored.certificate.exactness == "exact"


def test_what_is_below_a_floor_does_not_go_there_again():
    """Near tiers of ranks that are no more are pruned by nobody."""
    far, nears, _ = written(rows, 2)
    choice = plan_floor(far, "run", 1, cap=None)
    assert choice is not None
    assert choice.step == 2
    put_floor(far, "run", term=choice.terms[-1], terms=choice.terms, step=2, kept=())
    far.delete(below(far.list("run/"), read_log(far, "run")))
    before = set(far.list("run/"))
    assert any(key not in before for key in held(nears[1], "delta"))
    toys = go_on(far, whole, 1, nears=[KeptTier("new0")], others=nears)
    came = [parse_key(key) for key in set(far.list("run/")) - before]
    assert not [key for key in came if key.kind in ("base", "delta") and key.step <= STEPS
                and key.term == choice.terms[-1]]  # fmt: skip
    assert_back(far, toys, rows, 2)


def test_a_start_looks_at_the_time_after_each_record(monkeypatch):
    """Of large records a few take longer than ranks wait for each other."""
    far, nears, _ = written(rows, 2)
    gone = [*held(far, "delta", step=1), *held(far, "delta", step=2), *held(far, "delta", step=3)]
    far.delete(gone)
    copied: list[int] = []
    real = beginning.copy_records

    def copy(uppers: Any, lower: Any, keys: Any) -> int:
        copied.append(len(keys))
        return real(uppers, lower, keys)

    monkeypatch.setattr(beginning, "copy_records", copy)
    toys = go_on(far, whole, 1, nears=[KeptTier("new0")], others=nears)
    assert copied == [1] * len(gone)
    assert [len(found) for found in of_newest(far)] == [0, 1]
    assert_back(far, toys, rows, 2)


@pytest.mark.parametrize("fault", ["", "rot", "time"])
def test_what_near_tiers_gave_is_read_back(fault, monkeypatch):
    """That the far tier has the bytes says nobody but it: what it has lost nothing refers to."""
    far, nears, _ = written(rows, 2)
    lost = held(far, "delta", step=STEPS)[1] if fault == "rot" else "nothing"
    if fault == "time":
        monkeypatch.setattr(beginning, "DRAIN_S", -1.0)
    toys = go_on(BlindTier(far, lost), columns, 2, others=nears)
    assert toys[0].step == STEPS + 2
    assert [len(found) for found in of_newest(far)] == ([2, 0] if fault else [0, 2])


def test_what_the_far_tier_gave_is_not_read_again(monkeypatch):
    """The restore has verified it."""
    far, _, _ = written(rows, 2)
    monkeypatch.setattr(beginning, "DRAIN_S", -1.0)
    go_on(far, columns, 2)
    assert [len(found) for found in of_newest(far)] == [0, 2]


def test_a_parent_that_folds_otherwise_gives_an_older_step(monkeypatch):
    """The newest step is a beginning without a delta; what differs is the parent's fold."""
    far, _, parent, term = forked()
    later = [key for step in (STEPS + 1, STEPS + 2) for key in held(far, "extra", term, step)]
    far.delete([*later, *held(far, "delta", term), *held(far, "extra", parent, STEPS)])
    assert restore_state([far], "run").step == STEPS
    right = StepEngine.apply

    def wrong(self: StepEngine, params: Any, groups: Any) -> None:
        right(self, params, groups)
        for each in params:
            each.param.add_(1.0)

    monkeypatch.setattr(StepEngine, "apply", wrong)
    restored = restore_state([far], "run")
    assert restored.step == 2
    assert "is not what the trainer had" in " ".join(restored.reasons)


def test_a_tag_of_a_beginning_keeps_what_gives_it():
    """The step has no base with bytes and no delta: the parent's records are all that it is."""
    far, _, parent, term = forked()
    far.delete(held(far, "extra", parent, STEPS))
    rows_of = list(compact(Store("memory://x", far, far), "run", to=STEPS + 2))
    assert [row.done for row in rows_of] == ["folded"]
    choice = plan_floor(far, "run", 1, cap=None)
    assert choice is not None
    assert choice.step == STEPS + 2
    put_tag(far, "run", term=term, name="begun", step=STEPS)
    choice = plan_floor(far, "run", 1, cap=None)
    assert choice is not None
    assert choice.step == 2
    rotten = BlindTier(far, f"{parent}/{part_name(0)}/base/{2:012d}")
    choice = plan_floor(rotten, "run", 1, cap=None)
    assert choice is not None
    assert choice.step == 0


def test_each_rank_folds_on_from_its_own_base():
    """Rank 0, which plans, sees no near tier but its own: of the others the references."""
    far, _, _ = written(rows, 2)
    nears = [KeptTier("new0"), KeptTier("new1")]
    go_on(far, columns, 2, nears=nears)
    toys = go_on(far, columns, 2, nears=nears)
    term = newest(read_catalog([far], "run"))
    assert not [key for tier in (*nears, far) for key in held(tier, "base", term)]
    assert_back(far, toys, whole, 1)
    often = Settings(base_every=4, object_lag=100, grace_s=0.0)
    toys = go_on(far, columns, 2, nears=nears, steps=3, settings=often)
    assert len(of_newest(far)[0]) == 2
    assert_back(far, toys, whole, 1)


def test_a_start_that_nothing_explains_is_one_beside_a_reference_too():
    """A derived base explains the start at the term's first step, and no other."""
    far, _, _, term = forked()
    catalog = read_catalog([far], "run")
    (ref,) = catalog.derived[term, part_name(0)]
    kinds = []
    for step in (STEPS, STEPS + 1):
        base = dataclasses.replace(ref, step=step, origin="replayed", key=f"of step {step}")
        bases = {**catalog.bases, (term, part_name(0)): (base,)}
        found = check_links(dataclasses.replace(catalog, bases=bases))
        kinds.append({row.kind for row in found})
    assert "unbased-start" not in kinds[0]
    assert "unbased-start" in kinds[1]


def test_an_agent_counts_no_reference():
    """What it stands for hangs on other parts, of which an agent looks at none."""
    far, _, _, term = forked()
    shell: Any = SimpleNamespace(places={FAR: far}, run="run", ref_of=partial(Shell.ref_of, None))
    drainer = Drainer(shell, FAR)
    drainer.work.end()
    found = drainer._look((part_name(0),))
    assert {ref.origin for ref in found if ref.term != term} == {"captured", "replayed", ""}
    assert {ref.kind for ref in found if ref.term == term} == {"delta"}


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_claim_that_was_given_up_and_has_begun_holds_floors_up(when):
    """Its restore hung for long; the older term's writer lives, and must delete nothing of it."""
    tier = KeptTier("far")
    old, late = claim_term(tier, "run"), claim_term(tier, "run")
    part = PartEntry(name=part_name(0), layout="0" * 64, sources=(0,), owner=0)
    head = Manifest(run="run", term=str(late), step=4, parts=(part,), ranks=("r000000",)).seal()
    begun = RecordSource(str(manifest_key("run", str(late), 4)), Record(head, {}))

    class Racing(WrapperTier):
        def put(self, sources: Sequence[Source]) -> None:
            super().put(sources)
            tier.put([begun])

    def floor(far: Tier) -> Floor | None:
        return put_floor(
            far, "run", term=str(old), terms=(str(old),), step=5, kept=(), ignore={str(late)}
        )

    keys: list[str] = []
    if when == "before":
        tier.put([begun])
    assert floor(NotingTier(tier, keys) if when == "before" else Racing(tier)) is None
    assert keys == []
    assert not [entry for entry in read_log(tier, "run") if isinstance(entry, Floor)]
    tier.delete([begun.key])
    assert floor(tier) is not None
