"""Deaths: which attempts count, and where the next one begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from adacheck_store.catalog import Catalog, RecordRef
from adacheck_store.deaths import ceiling_of
from adacheck_store.format.manifest import Claim, Manifest, PartEntry
from adacheck_store.recovery import plan_restore
from tests.core.histories import RUN, digest
from tests.core.test_recovery import chain

PARTS, RANKS = ("p000000", "p000001"), ("r000000", "r000001")
NOW = "t000099-" + "0" * 16


@dataclass
class Attempt:
    """An attempt that began at a step (None: it died before) and of which a step was written last.

    ``far`` is of the second rank, where it differs; ``root`` has no parent.
    """

    start: int | None
    got: int = -1
    far: int = -1
    excuse: str = ""
    root: bool = False


def dead(start: int | None, got: int = -1) -> Attempt:
    """An attempt that leaves no word."""
    return Attempt(start, got)


def well(start: int | None, got: int = -1) -> Attempt:
    """An attempt that ended as it should, or was refused."""
    return Attempt(start, got, excuse="ended")


def first(got: int, start: int = 0) -> Attempt:
    """The run's first attempt."""
    return Attempt(start, got, root=True)


def catalog_of(attempts: list[Attempt]) -> Catalog:
    """What they leave in the store: two parts, two ranks; and the claim of the one that asks."""
    manifests: dict[str, Manifest] = {}
    deltas: dict[tuple[str, str], tuple[RecordRef, ...]] = {}
    extras: dict[tuple[str, str], tuple[RecordRef, ...]] = {}
    claims = []
    for number, attempt in enumerate(attempts, 1):
        term = f"t{number:06d}-" + "0" * 16
        claims.append(Claim(run=RUN, term=term, index=len(claims)))
        if attempt.excuse:
            claims.append(Claim(run=RUN, term=term, index=len(claims), excuse=attempt.excuse))
        if attempt.start is None:
            continue
        parent = {} if attempt.root else {"parent_term": "t000000-" + "0" * 16, "fork_step": 0}
        manifests[digest(term)] = Manifest(
            run=RUN, term=term, step=attempt.start, ranks=RANKS, **parent,
            parts=tuple(PartEntry(name=name, layout=digest("l")) for name in PARTS),
        )  # fmt: skip
        for table, names in ((deltas, PARTS), (extras, RANKS)):
            for index, name in enumerate(names):
                last = attempt.far if index and attempt.far >= 0 else attempt.got
                table[term, name] = tuple(
                    RecordRef(kind="delta", key="", term=term, part=name, step=step, id="",
                              parent="", manifest="", layout="", tiers=("near",), nbytes=1)
                    for step in range(attempt.start + 1, last + 1)
                )  # fmt: skip
    claims.append(Claim(run=RUN, term=NOW, index=len(claims)))
    return Catalog(run=RUN, manifests=manifests, deltas=deltas, extras=extras, claims=tuple(claims))


CASES: dict[str, tuple[list[Attempt], int | None]] = {
    "nothing": ([], None),
    "a run that died once": ([first(50)], None),
    "two deaths": ([first(50), dead(50), dead(50)], None),
    "three deaths": ([first(50), dead(50), dead(50), dead(50)], 49),
    "twice as far each time": ([first(50), *[dead(50)] * 3, dead(49, 50)], 47),
    "and again": ([first(50), *[dead(50)] * 3, dead(49, 50), dead(47, 50)], 43),
    "below the first step": ([first(5), *[dead(5)] * 3, dead(4), dead(2)], -2),
    "before they began": ([first(50), dead(None), dead(None), dead(None)], 49),
    "before they began, below a ceiling": ([first(50), *[dead(50)] * 3, dead(None)], 47),
    "before they began, and after": ([first(50), dead(None), dead(50), dead(None)], 49),
    "reached again, not passed": ([first(50), *[dead(50)] * 3, dead(49, 50)], 47),
    "passed": ([first(50), *[dead(50)] * 3, dead(49, 51)], None),
    "passed, and poisoned anew": ([first(50), *[dead(50)] * 3, dead(49, 60), *[dead(60)] * 3], 59),
    "one step each time": ([first(50), dead(50, 51), dead(51, 52), dead(52, 53)], None),
    "one of two ranks writes a step": (
        [first(50), *[Attempt(50, got=51, far=50)] * 3], 49),
    "one of two ranks writes nothing": ([first(50), *[Attempt(50, got=60, far=0)] * 3], 49),
    "finished, started again": ([first(50), *[well(50)] * 9], None),
    "a good end clears": ([first(50), dead(50), dead(50), well(50), dead(50)], None),
    "a refusal before it began": ([first(50), well(None), well(None), well(None)], None),
    "a refusal neither counts nor clears": (
        [first(50), dead(50), dead(50), well(None), dead(50)], 49),
    "a step was asked for": ([first(50), *[dead(50)] * 3, well(20)], None),
    "a step was asked for, and poisoned": (
        [first(90), well(20, 40), dead(40), dead(40), dead(40)], 39),
    "long after a step was asked for": (
        [first(999), well(20, 40), *[dead(at, at + 20) for at in range(40, 400, 20)]], None),
    "the newest were lost": (
        [first(999), *[dead(at, at + 20) for at in range(40, 400, 20)]], None),
    "the newest were lost meanwhile": ([first(50), dead(50), dead(50), dead(40)], None),
    "what came before is pruned": ([first(-1), dead(50), dead(50), dead(50)], 49),
    "what passed is pruned": ([first(-1), *[dead(50)] * 3, dead(49), dead(80, 99)], None),
    "the first step": ([first(-1), *[dead(0)] * 9], None),
    "the first step, of another number": ([first(-1, start=7), *[dead(7)] * 9], None),
    "begun anew": ([first(50), *[dead(50)] * 3, first(-1), *[dead(0)] * 9], None),
    "begun anew, and trained": ([first(50), *[dead(50)] * 3, first(5), *[dead(5)] * 3], 4),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_where_the_next_begins(case: str) -> None:
    """Three deaths are the most; the claim of the one that asks is none."""
    attempts, step = CASES[case]
    found = ceiling_of(catalog_of(attempts), NOW, 3)
    assert (None if found is None else found.step) == step


@pytest.mark.parametrize("most", [0, 1, 2, 3, 4])
def test_how_many_is_told(most: int) -> None:
    """0 is never."""
    for deaths in range(5):
        found = ceiling_of(catalog_of([first(50), *[dead(50)] * deaths]), NOW, most)
        assert (found is not None) == (0 < most <= deaths)
        if found is not None:
            assert (found.deaths, found.reached) == (deaths, 50)


@pytest.mark.parametrize("short", [*PARTS, *RANKS])
def test_what_one_part_or_rank_has_not_written_is_not_reached(short: str) -> None:
    """All others have written ten steps more, each time."""
    catalog = catalog_of([first(50), *[dead(50, 60)] * 3])
    assert ceiling_of(catalog, NOW, 3) is None

    def cut(table: Mapping[tuple[str, str], tuple[RecordRef, ...]]) -> dict[Any, Any]:
        late = {place for place in table if place[1] == short and place[0] > "t000002"}
        return {place: () if place in late else refs for place, refs in table.items()}

    catalog = replace(catalog, deltas=cut(catalog.deltas), extras=cut(catalog.extras))
    found = ceiling_of(catalog, NOW, 3)
    assert found is not None
    assert found.step == 49


def test_a_poisoned_step_is_left_behind_further_and_further() -> None:
    """Whatever an attempt below the ceiling gets back to, the next one begins lower."""
    attempts = [first(1000)]
    starts = []
    while (ceiling := ceiling_of(catalog_of(attempts), NOW, 3)) is None or ceiling.step > 0:
        starts.append(1000 if ceiling is None else ceiling.step)
        attempts.append(dead(starts[-1], 1000))
    assert starts == [1000, 1000, 1000, 999, 997, 993, 985, 969, 937, 873, 745, 489]


def test_the_plan_is_below_the_ceiling() -> None:
    """It says why; where no older step is left it is the oldest there is, and that is said."""
    catalog = chain(50, 8)
    ceiling = ceiling_of(catalog_of([first(50), *[dead(50)] * 3, dead(49, 50)]), NOW, 3)
    plan = plan_restore(catalog, ceiling=ceiling)
    assert (plan.step, plan.newest) == (47, 50)
    assert plan.passed_over == plan.reasons[0] == (
        "steps after 47 are passed over: 4 attempts in a row have died without getting past step 50"
    )  # fmt: skip
    gap = catalog.without([("near", "d47"), ("near", "b48")])
    assert plan_restore(gap, ceiling=ceiling).step == 46
    assert plan_restore(catalog, 50, ceiling=ceiling).step == 50
    unreached = plan_restore(chain(40, 8), ceiling=ceiling)
    assert (unreached.step, unreached.passed_over, unreached.reasons) == (40, "", ())

    pruned = catalog.without(("near", f"b{step}") for step in range(0, 48, 8))
    assert plan_restore(pruned).step == 50
    oldest = plan_restore(pruned, ceiling=ceiling)
    assert (oldest.step, oldest.newest) == (48, 50)
    assert oldest.passed_over == oldest.reasons[0]
    assert oldest.passed_over.startswith(
        "4 attempts in a row have died without getting past step 50"
    )
    assert "begins at the oldest that can, 48 (newest: 50); find out why" in oldest.passed_over
