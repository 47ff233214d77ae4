"""The planner against an oracle: random histories, random damage, every step asked for."""

import random
import re
import time
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adacheck_store.catalog import Catalog, Gaps, RecordRef
from adacheck_store.format.errors import NotProvableError, RestoreError
from adacheck_store.format.manifest import Manifest, PartEntry
from adacheck_store.format.redundancy import HeldPart, Redundancy
from adacheck_store.nearness import Nearness, nearer, seen_from
from adacheck_store.plan_json import decode_plan, encode_plan
from adacheck_store.recovery import Prover, RestorePlan, plan_restore, tolerant_line
from tests.core.histories import RUN, TIERS, Author, History, Oracle, damaged, digest

P, R = "p000000", "r000000"


def carry_out(plan: RestorePlan, history: History, ends: Mapping[str, float] | None) -> None:
    """Fold symbolically: every delta must start where the state is, and end in the truth.

    ``ends`` has the last step of each term of the line: what is disowned later is off it. None
    where bases that tell of gaps are lost.
    """
    for part in plan.parts:
        value = history.holds[part.base.key]
        for ref in part.deltas:
            before, after = history.edges[ref.key + ref.id]
            assert before == value, f"{ref.key} folded into another state"
            value = after
        for ref in (part.base, *part.deltas):
            told = history.disowned.get(ref.key, ())
            assert ends is None or not any(step <= ends[ref.term] for step in told)
        assert value == history.truth[plan.term, part.part, plan.step]
        assert part.layout == part.base.layout
    for refs in plan.extras.values():
        assert [ref.step for ref in refs] == [plan.step, *refs[0].refs]


def compare(catalog: Catalog, history: History, term: str = "") -> None:
    """Planner and oracle agree on every step and on the newest."""
    if not catalog.manifests:
        with pytest.raises(RestoreError, match="nothing of this run"):
            plan_restore(catalog)
        return
    oracle = Oracle(catalog, history, term)
    top = max((ref.step for ref in history.refs), default=0) + 2
    lost_gaps = any(
        ref.gap and ref not in catalog.bases.get((ref.term, ref.part), ()) for ref in history.refs
    ) or len(catalog.manifests) < len(history.manifests)
    ends = None if lost_gaps else oracle.ends
    provable = [step for step in range(top) if oracle.provable(step)]
    if provable:
        plan = plan_restore(catalog, term=term)
        assert plan.step == provable[-1]
        carry_out(plan, history, ends)
    else:
        with pytest.raises(NotProvableError, match="no step of the line can be proven"):
            plan_restore(catalog, term=term)
    for step in range(top):
        if step in provable:
            carry_out(plan_restore(catalog, step, term), history, ends)
            continue
        with pytest.raises(NotProvableError) as caught:
            plan_restore(catalog, step, term)
        named = [int(text) for text in re.findall(r"\d+", caught.value.hint)]
        below = [s for s in provable if s < step][-2:]
        above = [s for s in provable if s > step][:2]
        assert named == ([below[-1], above[0]] if below and above else below + above)
        assert caught.value.place["step"] == step


def test_rather_a_longer_fold_than_a_base_from_afar():
    """Each part comes from the nearest tiers that give it alone, and is the same state."""
    moved = 0
    for seed in range(600):
        rng = random.Random(seed)
        author = Author(rng)
        author.write(rng.randrange(5, 40))
        catalog = damaged(author.history, rng)
        try:
            plan = plan_restore(catalog)
        except RestoreError:
            continue
        near = (frozenset(rng.sample(TIERS, 1)), frozenset(rng.sample(TIERS, 2)))
        whole = nearer(plan, catalog, Nearness(here="here", places={"here": near}))
        assert decode_plan(encode_plan(whole)) == whole
        assert seen_from(whole, "elsewhere") == plan
        found = seen_from(whole, "here")
        assert {ref.key for ref in (*found.records, *plan.records)} == {
            ref.key for ref in whole.records
        }
        assert nearer(plan, catalog, Nearness(common=near)) == found
        carry_out(found, author.history, None)
        for before, part in zip(plan.parts, found.parts, strict=True):
            assert part.link == before.link
            moved += part != before
            place = (plan.term, part.part, plan.step, part.link)
            if any(catalog.gaps(place).spans for place in catalog.bases):
                continue  # what is blocked there the oracle cannot tell of tiers alone
            alone = [
                tiers for tiers in near
                if part.layout in
                Oracle(catalog.held_by(tiers, part.part), author.history).layouts(*place)
            ]  # fmt: skip
            if alone:
                records = (part.base, *part.deltas)
                assert all(alone[0] & set(ref.tiers) for ref in records)
            else:
                assert part == before
    assert moved > 20


@settings(max_examples=200)
@example(511, 20)  # a parent term tells of a gap after the step at which it was left
@given(st.integers(0, 2**32), st.integers(1, 50))
def test_planner_equals_oracle(seed: int, actions: int) -> None:
    rng = random.Random(seed)
    history = Author(rng).write(actions)
    catalog = damaged(history, rng)
    compare(catalog, history)
    terms = sorted({m.term for m in catalog.manifests.values()})
    if terms:
        compare(catalog, history, rng.choice(terms))


@pytest.mark.slow
@settings(max_examples=8000)
@given(st.integers(0, 2**64), st.integers(1, 120))
def test_planner_equals_oracle_at_length(seed: int, actions: int) -> None:
    rng = random.Random(seed)
    history = Author(rng).write(actions)
    compare(damaged(history, rng), history)


@settings(max_examples=50)
@given(st.integers(0, 2**32), st.integers(1, 50))
def test_an_undamaged_store_gives_no_disowned_step(seed: int, actions: int) -> None:
    author = Author(random.Random(seed))
    history = author.write(actions)
    compare(author.catalog(), history)


def chain(steps: int, base_every: int, *, extras: bool = True) -> Catalog:
    """One term, one part, a base every so many steps."""
    term = "t000001-" + "0" * 16
    manifest = Manifest(run=RUN, term=term, step=0, ranks=(R,),
                        parts=(PartEntry(name=P, layout=digest("l")),))  # fmt: skip
    identity, link = digest("m"), digest("m")
    bases, deltas, found = [], [], []
    for step in range(steps + 1):
        place = {"term": term, "part": P, "step": step, "manifest": identity,
                 "layout": digest("l"), "tiers": ("near",), "nbytes": 1}  # fmt: skip
        if step:
            deltas.append(RecordRef(kind="delta", key=f"d{step}", id=digest(step), parent=link,
                                    **place))  # fmt: skip
            link = digest(step)
        if step % base_every == 0:
            bases.append(RecordRef(kind="base", key=f"b{step}", id=digest("b", step), parent=link,
                                   origin="replayed" if step else "captured", **place))  # fmt: skip
        place["part"] = R
        found.append(RecordRef(kind="extra", key=f"e{step}", id=digest("e", step), parent="",
                               **place))  # fmt: skip
    return Catalog(
        run=RUN, manifests={identity: manifest}, layouts={digest("l"): ("near",)},
        bases={(term, P): tuple(bases)}, deltas={(term, P): tuple(deltas)},
        extras={(term, R): tuple(found)} if extras else {},
    )  # fmt: skip


@pytest.mark.parametrize("base_every", [64, 20_000])
def test_ten_thousand_steps_plan_fast(base_every: int) -> None:
    """Best, and worst: nothing provable at all, and every step asked about."""
    good, bad = chain(10_000, base_every), chain(10_000, base_every, extras=False)
    before = time.process_time()
    assert plan_restore(good).step == 10_000
    assert plan_restore(good, 3).step == 3
    with pytest.raises(NotProvableError):
        plan_restore(bad)
    with pytest.raises(NotProvableError, match="nearest provable steps: 9999 and 10000"):
        plan_restore(good, 10_001)
    assert len(Prover(good, tolerant_line(good)).provable_steps()) == 10_001
    assert time.process_time() - before < 3.0


def test_an_unknown_term_is_named() -> None:
    with pytest.raises(RestoreError, match="no such term"):
        plan_restore(chain(3, 2), term="t000009-" + "0" * 16)


def test_a_gap_outlives_the_blocks_of_the_base_that_tells_it() -> None:
    """The base's blocks are lost, its head is not: what it disowned is not restored."""
    sound = chain(12, 4)
    (place,) = sound.bases
    gap = {"reason": "a fold differs", "from": 6}
    bases = tuple(
        replace(ref, origin="captured", gap=gap) if ref.step == 8 else ref
        for ref in sound.bases[place]
    )
    catalog = replace(sound, bases={place: bases})
    left = catalog.without({("near", "b8")})
    assert plan_restore(catalog).step == 12
    for found in (left, left.without({("near", "b12")}).without({("near", "b0")})):
        for step in (6, 7, 8):
            with pytest.raises(NotProvableError, match="a gap, re-based later"):
                plan_restore(found, step)
    assert plan_restore(left, 5).step == 5


def test_a_gap_of_any_length_is_planned_in_no_time() -> None:
    """A record may name any step."""
    gaps = Gaps([(5, 10**12), (1, 2), (2, 3), (7, 8)])
    assert gaps.spans == ((1, 3), (5, 10**12))
    found = [step for step in (0, 1, 3, 4, 5, 10**9, 10**12, 10**12 + 1) if step in gaps]
    assert found == [1, 3, 5, 10**9, 10**12]


def shared(catalog: Catalog, layout: str, *, step: int, agreed: int) -> Catalog:
    """The catalog with a revision that says who writes what, from a step on."""
    ((identity, first),) = catalog.manifests.items()
    found = Redundancy(
        k=0, policy="agent", agreed=agreed, nodes=(("n", "n"),), ranks=(0,), sets=(),
        names=(), grounds=(), parts=(HeldPart(degree="none", holders=(), states=()),),
    )  # fmt: skip
    parts = (PartEntry(name=P, layout=layout),)
    revision = replace(first, step=step, previous=identity, parts=parts, redundancy=found)
    return replace(catalog, manifests={identity: first, digest("m", step): revision})


def test_a_part_that_has_not_followed_a_revision_proves_nothing() -> None:
    """Its records hold other tensors than the others rely on; before the revision all is well."""
    assert plan_restore(shared(chain(12, 4), digest("l"), step=6, agreed=6)).step == 12
    catalog = shared(chain(12, 4), digest("other"), step=6, agreed=6)
    assert plan_restore(catalog).step == 5
    with pytest.raises(NotProvableError, match="holds other tensors than the manifest says"):
        plan_restore(catalog, 8)


def test_a_stale_manifest_is_no_manifest_of_what_came_after_it() -> None:
    """The revision in force is lost: steps written under it are not read by the older one."""
    catalog = shared(chain(12, 4), digest("l"), step=6, agreed=6)
    revision = digest("m", 6)

    def under(refs: tuple[RecordRef, ...]) -> tuple[RecordRef, ...]:
        return tuple(replace(r, manifest=revision) if r.step >= 6 else r for r in refs)

    tables = {
        name: {place: under(refs) for place, refs in getattr(catalog, name).items()}
        for name in ("bases", "deltas", "extras")
    }
    whole = replace(catalog, **tables)
    assert plan_restore(whole).step == 12
    stale = {key: each for key, each in whole.manifests.items() if key != revision}
    plan = plan_restore(replace(whole, manifests=stale))
    assert plan.step == 5
    assert any("a manifest revision that is missing" in reason for reason in plan.reasons)


def test_steps_at_which_copies_may_have_differed_are_given_by_name_alone() -> None:
    """One of them was kept, and nobody knows for how long all had it."""
    whole = shared(chain(8, 4), digest("l"), step=8, agreed=5)
    assert plan_restore(whole).step == 8
    left = whole.without({("near", "b8"), ("near", "d8")})
    plan = plan_restore(left)
    assert plan.step == 5
    assert any("equal at step 5, and no longer at step 8" in reason for reason in plan.reasons)
    assert plan_restore(left, 7).step == 7
