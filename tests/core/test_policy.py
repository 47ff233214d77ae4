"""Policies of retention: which steps stay, and that floors, tags and policies see each other."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adacheck_store.agent.control import _settings
from adacheck_store.config import Settings
from adacheck_store.format.errors import TierDamagedError, UsageError
from adacheck_store.format.keys import base_key, delta_key, extra_key, log_key
from adacheck_store.format.manifest import Claim, Floor, Tag
from adacheck_store.policy import Facts, Retention, chosen
from adacheck_store.retention import below
from adacheck_store.terms import (
    claim_term,
    last_index,
    put_floor,
    put_tag,
    read_log,
    remove_tag,
)
from adacheck_store.tiers.base import Source
from adacheck_store.tiers.object_local import LocalObjects
from adacheck_store.tiers.zarr import ZarrTier
from tests.core.kit import KeptTier


def facts(*steps: int, value: dict[int, float] | None = None) -> list[Facts]:
    """Steps whose bases came ten seconds apart each."""
    return [Facts(step=s, time_s=10.0 * s, value=(value or {}).get(s)) for s in steps]


def test_rules_compose() -> None:
    """Every rule keeps its own, and says so; without rules nothing is kept."""
    steps = facts(*range(0, 100, 8), value={16: 0.5, 24: 0.25, 32: 0.75, 40: math.nan})
    assert chosen(Retention(), steps) == {}
    assert chosen(Retention(every=20), steps) == dict.fromkeys((0, 24, 40, 64, 80), ("every",))
    assert list(chosen(Retention(every_s=300.0), steps)) == [0, 32, 64, 96]
    assert list(chosen(Retention(best="x", best_count=2), steps)) == [16, 24]
    assert list(chosen(Retention(best="x", best_largest=True), steps)) == [32]
    both = chosen(Retention(every=24, best="x", every_s=240.0), steps)
    assert both[24] == ("every", "every_s", "best")
    assert list(both) == [0, 24, 48, 72, 96]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_kept_stays_kept_as_steps_come(seed: int) -> None:
    """A floor drops what it does not keep; the next one chooses among what is left, and agrees."""
    choose = random.Random(seed)
    rules = Retention(every=choose.randrange(1, 60), every_s=choose.uniform(1.0, 500.0))
    left: list[int] = []
    for step in range(0, 400, 8):
        if choose.random() < 0.8:
            left.append(step)
        if choose.random() < 0.3:
            kept = chosen(rules, facts(*left))
            assert set(kept) == set(chosen(rules, facts(*kept)))
            left = list(kept)


@pytest.mark.parametrize("wrong", [
    {"last": 0}, {"every": -1}, {"every": True}, {"every_s": math.inf}, {"every_s": -1},
    {"best": 3}, {"best_count": 0},
])  # fmt: skip
def test_nonsense_is_refused(wrong: dict) -> None:
    """One error, which says what is meant."""
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Retention(**wrong)


def test_a_tag_is_a_floor() -> None:
    """Neither covers the other, whichever comes first; a name is given once."""
    far = KeptTier("far")
    term = str(claim_term(far, "run"))
    put_tag(far, "run", term=term, name="good", step=5)
    with pytest.raises(UsageError, match="'good' stands, for step 5"):
        put_tag(far, "run", term=term, name="good", step=6)
    assert put_floor(far, "run", term=term, terms=(term,), step=6, kept=()) is None
    assert put_floor(far, "run", term=term, terms=(term,), step=5, kept=()) is not None
    kept = put_floor(far, "run", term=term, terms=(term,), step=9, kept=(5,))
    assert kept is not None
    with pytest.raises(UsageError, match="below the floor of tier far, step 9"):
        put_tag(far, "run", term=term, name="late", step=4)
    assert put_tag(far, "run", term=term, name="same", step=5).step == 5
    assert [tag.name for tag in remove_tag(far, "run", "good")] == ["good"]
    assert remove_tag(far, "run", "good") == []
    assert put_floor(far, "run", term=term, terms=(term,), step=10, kept=()) is None
    remove_tag(far, "run", "same")
    assert put_floor(far, "run", term=term, terms=(term,), step=10, kept=()) is not None


def test_a_floor_that_kept_less_is_not_forgotten() -> None:
    """What an older floor gave up is gone, though a newer one would keep that step."""
    far = KeptTier("far")
    term = str(claim_term(far, "run"))
    put_floor(far, "run", term=term, terms=(term,), step=8, kept=(2, 4))
    put_floor(far, "run", term=term, terms=(term,), step=16, kept=(4, 12))
    floors = [entry for entry in read_log(far, "run") if isinstance(entry, Floor)]
    assert [floor.step for floor in floors] == [16]
    put_floor(far, "run", term=term, terms=(term,), step=24, kept=(2, 4, 12))
    floors = [entry for entry in read_log(far, "run") if isinstance(entry, Floor)]
    assert [floor.step for floor in floors] == [16, 24]
    assert any(floor.covers(term, "base", 2) for floor in floors)


def test_a_floor_that_was_chosen_before_another_is_chosen_anew() -> None:
    """The later one may keep what the earlier would not."""
    far = KeptTier("far")
    term = str(claim_term(far, "run"))
    put_tag(far, "run", term=term, name="good", step=9)
    seen = last_index(far, "run")
    kept = put_floor(far, "run", term=term, terms=(term,), step=8, kept=(4,), logged=seen)
    assert kept is not None
    late = put_floor(far, "run", term=term, terms=(term,), step=8, kept=(), logged=seen)
    assert late is None
    assert [e.kept for e in read_log(far, "run") if isinstance(e, Floor)] == [(4,)]
    seen = last_index(far, "run")
    again = put_floor(far, "run", term=term, terms=(term,), step=9, kept=(4,), logged=seen)
    assert again is not None


def test_no_floor_is_raised_by_a_log_that_cannot_be_read(tmp_path: Path) -> None:
    """The entry may be a tag, or a floor that keeps something."""
    objects = LocalObjects(tmp_path)
    far = ZarrTier(objects)
    term = str(claim_term(far, "run"))
    tag = put_tag(far, "run", term=term, name="good", step=5)
    name = f"{log_key('run', tag.index)}/zarr.json"
    text = objects.get(name)
    objects.put(name, [text.replace(b"good", b"gold")])
    fresh = ZarrTier(objects)
    with pytest.raises(TierDamagedError, match="what they keep is not known") as caught:
        put_floor(fresh, "run", term=term, terms=(term,), step=9, kept=())
    assert "fsck --repair" in caught.value.hint
    objects.put(name, [text])
    assert put_floor(ZarrTier(objects), "run", term=term, terms=(term,), step=9, kept=()) is None


def test_floors_and_tags_that_come_at_once() -> None:
    """Of a tag and a floor that covers it one is refused, in any order of their writes."""
    outcomes = set()
    for number in range(40):
        far = KeptTier("far")
        term = str(claim_term(far, "run"))

        def tag(far: KeptTier = far, term: str = term) -> bool:
            try:
                put_tag(far, "run", term=term, name="good", step=5)
            except UsageError:
                return False
            return True

        def floor(far: KeptTier = far, term: str = term) -> bool:
            return put_floor(far, "run", term=term, terms=(term,), step=9, kept=()) is not None

        calls = [tag, floor] if number % 2 else [floor, tag]
        with ThreadPoolExecutor(2) as pool:
            done = [future.result() for future in [pool.submit(call) for call in calls]]
        entries = read_log(far, "run")
        tags = [entry for entry in entries if isinstance(entry, Tag)]
        floors = [entry for entry in entries if isinstance(entry, Floor)]
        assert len(tags) + len(floors) == sum(done) == 1
        outcomes.add(bool(tags))
    assert outcomes  # which of them wins is not ours to say


class Meddled(KeptTier):
    """A tier in which something happens right before the next entry of a log is put."""

    before: Callable[[], None] | None = None

    def put(self, sources: Sequence[Source]) -> None:
        act, self.before = self.before, None
        if act is not None:
            act()
        super().put(sources)


def test_a_tag_in_the_place_of_one_taken_back() -> None:
    """It comes below the entry of a floor that has not seen it, and the floor is made anew."""
    far = Meddled("far")
    term = str(claim_term(far, "run"))
    put_tag(far, "run", term=term, name="first", step=20)

    def exchange() -> None:
        remove_tag(far, "run", "first")
        put_tag(far, "run", term=term, name="good", step=5)

    far.before = exchange
    assert put_floor(far, "run", term=term, terms=(term,), step=9, kept=()) is None
    (tag,) = [entry for entry in read_log(far, "run") if not isinstance(entry, Claim)]
    assert isinstance(tag, Tag)
    assert tag.name == "good"


def test_what_a_tag_names_is_not_deleted_whatever_floors_say() -> None:
    """A floor that died before it could be taken back deletes no tagged base or extra."""
    far = KeptTier("far")
    term = str(claim_term(far, "run"))
    put_tag(far, "run", term=term, name="good", step=5)
    floor = Floor(run="run", term=term, index=9, tier="far", terms=(term,), step=9)
    keys = [
        str(make("run", term, part, step))
        for step in (4, 5) for make, part in
        ((base_key, "p000000"), (delta_key, "p000000"), (extra_key, "r000000"))
    ]  # fmt: skip
    entries = [*read_log(far, "run"), floor]
    assert below(keys, [floor]) == keys
    assert below(keys, entries) == [*keys[:3], keys[4]]


def test_an_agent_is_told_the_rules() -> None:
    """Settings come through a call as they were, fields of a later version passed over."""
    settings = Settings(keep_bases=3, retention=Retention(last=3, every=100, best="a/b"))
    said = json.loads(json.dumps(dataclasses.asdict(settings)))
    said["retention"]["of a later version"] = 1
    assert _settings(said) == settings
    assert _settings(json.loads(json.dumps(dataclasses.asdict(Settings())))) == Settings()
