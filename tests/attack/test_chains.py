"""Records that are each right, in a place where they are not: other steps, runs, terms, lr."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from adacheck_store.format import canonical
from adacheck_store.format.errors import AdaCheckError, NotProvableError
from adacheck_store.restore import restore_state
from adacheck_store.store import Store
from adacheck_store.tiers.memory import MemoryTier
from adacheck_store.tools.findings import DAMAGE, Finding
from adacheck_store.tools.fsck import fsck
from tests.attack.forged import STEPS, copy_of, plant, sound

pytestmark = pytest.mark.fault


def deltas(tier: MemoryTier) -> list[str]:
    """Keys of the deltas, in order."""
    return sorted(key for key in tier._records if "/delta/" in key)


def damage(tier: MemoryTier) -> set[str]:
    """Kinds of damage that fsck finds."""
    rows = fsck(Store("memory://attack", tier, tier))
    return {row.kind for row in rows if isinstance(row, Finding) and row.severity == DAMAGE}


def head_of(tier: MemoryTier, key: str) -> dict[str, object]:
    """A record's head as JSON."""
    found = canonical.loads(tier._records[key][0].raw)
    assert isinstance(found, dict)
    return found


def swap(tier: MemoryTier) -> None:
    """Deltas 2 and 3 change places."""
    keys, records = deltas(tier), tier._records
    records[keys[1]], records[keys[2]] = records[keys[2]], records[keys[1]]


def replay(tier: MemoryTier) -> None:
    """Delta 2 comes again under the key of step 3."""
    keys = deltas(tier)
    tier._records[keys[2]] = tier._records[keys[1]]


def replay_in_disguise(tier: MemoryTier) -> None:
    """Delta 2's content with the step and parent that delta 3 must have."""
    keys = deltas(tier)
    old = head_of(tier, keys[2])
    tier._records[keys[2]] = tier._records[keys[1]]
    assert plant(tier, keys[2], {**head_of(tier, keys[1]), "step": 3, "parent": old["parent"]})


def other_rate(tier: MemoryTier) -> None:
    """Delta 3 as if it had been made with another lr: a new id, to which nobody is linked."""
    key = deltas(tier)[2]
    head = head_of(tier, key)
    body = canonical.loads(canonical.dumps(head["body"]))
    body["updates"][0]["groups"][0]["lr"] = {"$f": "3f60624dd2f1a9fc"}
    assert plant(tier, key, {**head, "body": body})


def other_run(tier: MemoryTier) -> None:
    """Another run's delta under this run's key."""
    other, _ = sound(run="other", seed=5)
    tier._records[deltas(tier)[2]] = other._records[deltas(other)[2]]


def other_term(tier: MemoryTier) -> None:
    """The delta that another term of the run has for the step."""
    other, _ = sound(seed=5)
    tier._records[deltas(tier)[2]] = other._records[deltas(other)[2]]


ATTACKS: list[Callable[[MemoryTier], None]] = [
    swap, replay, replay_in_disguise, other_rate, other_run, other_term,
]  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_step_is_the_trainers_or_is_refused(attack: Callable[[MemoryTier], None]) -> None:
    whole, journal = sound()
    tier = copy_of(whole)
    attack(tier)
    assert damage(tier) & {"swapped", "link", "gap", "base-link"}
    given = set()
    for step in range(STEPS + 1):
        try:
            restored = restore_state([tier], "run", step=step)
        except NotProvableError:
            continue
        given.add(step)
        if attack is not other_rate or step != 3:
            if attack is not replay_in_disguise or step != 3:
                journal.assert_same(restored)
    assert {0, 1} <= given
    assert not given & {3, 4, 5} or attack in (other_rate, replay_in_disguise) or 4 in given
    newest = restore_state([tier], "run")
    if newest.step == STEPS:
        journal.assert_same(newest)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_second_sound_copy_wins(attack: Callable[[MemoryTier], None]) -> None:
    """The tampered tier comes first, a sound one behind it."""
    whole, journal = sound()
    tier, far = copy_of(whole), copy_of(whole)
    attack(tier)
    far.traits = type(far.traits)(name="far", log=True)
    for step in range(STEPS + 1):
        try:
            restored = restore_state([tier, far], "run", step=step)
        except AdaCheckError:
            assert attack in (other_rate, replay_in_disguise)
            assert step == 3
        else:
            journal.assert_same(restored)
