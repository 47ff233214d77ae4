"""Records that are each right, in a place where they are not: other steps, runs, terms, lr."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from adacheck_store.catalog import read_catalog
from adacheck_store.format import canonical
from adacheck_store.format.errors import AdaCheckError, RestoreError
from adacheck_store.restore import restore_state
from adacheck_store.store import Store
from adacheck_store.tiers.memory import MemoryTier
from adacheck_store.tools.findings import DAMAGE, Finding
from adacheck_store.tools.fsck import fsck
from tests.attack.forged import STEPS, copy_of, plant, relink, sound

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


def _scalars(tier: MemoryTier, values: dict[str, object], *, drop: tuple[str, ...] = ()) -> None:
    """Delta 3 with other scalars, and the later deltas linked to it, as a forger would."""
    key = deltas(tier)[2]
    head = head_of(tier, key)
    body = canonical.loads(canonical.dumps(head["body"]))
    for group in (*body["updates"][0]["groups"], *body["boundary"][0]):
        group.update(values)
        for name in drop:
            group.pop(name, None)
    assert plant(tier, key, {**head, "body": body})
    relink(tier, key)


def other_rate_linked(tier: MemoryTier) -> None:
    """Delta 3 with another lr, and a chain that follows it."""
    _scalars(tier, {"lr": {"$f": "3f60624dd2f1a9fc"}})


def other_optimizer(tier: MemoryTier) -> None:
    """Delta 3 with the scalars of SGD."""
    sgd = {"momentum": {"$f": "3feccccccccccccd"}, "dampening": 0, "nesterov": False}
    _scalars(tier, sgd, drop=("betas", "eps", "amsgrad"))


def _foreign(kind: str, number: int = 0, **how: Any) -> Callable[[MemoryTier], None]:
    """A record of another run or term under this run's key of the same step."""

    def attack(tier: MemoryTier) -> None:
        other, _ = sound(seed=5, **how)
        mine = sorted(key for key in tier._records if f"/{kind}/" in key)
        theirs = sorted(key for key in other._records if f"/{kind}/" in key)
        tier._records[mine[number]] = other._records[theirs[number]]

    attack.__name__ = f"{'other_run' if how else 'other_term'}_{kind}"
    return attack


FOREIGN = [_foreign("delta", 2), *(
    _foreign(kind, number, run="other")
    for kind, number in (("delta", 2), ("base", 0), ("extra", 2), ("manifest", 0), ("layout", 0),
                         ("log", 0))
)]  # fmt: skip
ATTACKS: list[Callable[[MemoryTier], None]] = [
    swap, replay, replay_in_disguise, other_rate, other_rate_linked, other_optimizer, *FOREIGN,
]  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_step_is_the_trainers_or_is_refused(attack: Callable[[MemoryTier], None]) -> None:
    whole, journal = sound()
    tier = copy_of(whole)
    attack(tier)
    assert damage(tier) or attack is other_rate_linked  # what it says it made is wrong, no more
    given = set()
    for step in (*range(STEPS + 1), None):
        try:
            restored = restore_state([tier], "run", step=step)
        except RestoreError:
            continue
        journal.assert_same(restored)
        given.add(restored.step)
    assert not given & {3, 4, 5} or attack.__name__ in ("other_run_extra", "other_run_log")
    whole_documents = not attack.__name__.endswith(("_base", "_manifest", "_layout"))
    assert {0, 1} <= given or not whole_documents


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_second_sound_copy_wins(attack: Callable[[MemoryTier], None]) -> None:
    """The tampered tier comes first, a sound one behind it."""
    whole, journal = sound()
    tier, far = copy_of(whole), copy_of(whole)
    attack(tier)
    far.traits = type(far.traits)(name="far", log=True)
    refused = set()
    for step in range(STEPS + 1):
        try:
            restored = restore_state([tier, far], "run", step=step)
        except AdaCheckError:
            refused.add(step)
        else:
            journal.assert_same(restored)
    forked = {other_rate: {3}, replay_in_disguise: {3}, other_rate_linked: {3, 4, 5},
              other_optimizer: {3, 4, 5}}  # fmt: skip
    assert refused == forked.get(attack, set())  # two ids for a step: nobody can say which


def test_a_record_exchanged_after_the_plan() -> None:
    """The store is read, then tampered with, then restored from."""
    whole, journal = sound()
    for key in sorted(whole._records):
        for other in sorted(whole._records):
            kind = key.rsplit("/", 2)[1]
            if key == other or other.rsplit("/", 2)[1] != kind or kind == "layout":
                continue
            tier = copy_of(whole)
            catalog = read_catalog([tier], "run")
            tier._records[key] = whole._records[other]
            with suppress(RestoreError):
                journal.assert_same(restore_state([tier], "run", catalog=catalog))
