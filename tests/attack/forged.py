"""A small sound store in memory, and ways to put forged records with right ids into it."""

from __future__ import annotations

import copy
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from adacheck_store.catalog import read_catalog
from adacheck_store.format import canonical
from adacheck_store.format.errors import AdaCheckError
from adacheck_store.format.head import SealedHead
from adacheck_store.format.ids import record_id
from adacheck_store.recovery import plan_restore
from adacheck_store.restore import restore_state
from adacheck_store.store import Store
from adacheck_store.tiers.memory import MemoryTier
from adacheck_store.tools.compact import compact
from adacheck_store.tools.fsck import fsck
from tests.core.kit import Journal, KeptTier, begin, session_on, train
from tests.core.toy import Toy
from tests.stateful.trainers import adamw

LIMIT_S = 20.0
STEPS = 5

NONSENSE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 63, 64, 2**31, 2**53 - 1, -(2**53) + 1, 10**12 - 1, "", "0",
    "s0", "s1/param", "a" * 64, "0" * 64, "f" * 32, "captured", "replayed", "exact", "bounded",
    "p000000", "r000000", "t000009-0000000000000000", "3ff0000000000000", "7ff8000000000000",
    "F32", "I64", "BOOL", "torch.optim.sgd.SGD", "../..", "\u2603", [], {}, [[]], [0], [-1, 1],
    [None], ["s0", 0], {"": 0}, {"from": 0}, {"from": 10**11, "reason": "x"}, [0] * 300,
    {"t": "f64", "v": "7ff0000000000000"},
)  # fmt: skip


def sound(steps: int = STEPS, run: str = "run", seed: int = 0) -> tuple[KeptTier, Journal]:
    """A store of one tier with a base, some deltas and extras, a log; and what it must give."""
    tier, journal = KeptTier("memory"), Journal()
    toy = Toy([(3, 5), (), (7,)], adamw, seed=seed, absent=0.2, base_every=4)
    session = session_on(tier, tier, run=run)
    begin(session, toy, journal)
    train(session, toy, journal, steps)
    session.flush(30)
    session.close()
    return tier, journal


def copy_of(tier: MemoryTier) -> MemoryTier:
    """The same records in a tier of their own."""
    other = MemoryTier(tier.traits.name)
    other._records = dict(tier._records)
    return other


@contextmanager
def limited(seconds: float = LIMIT_S) -> Iterator[None]:
    """Fail instead of hanging."""

    def late(number: int, frame: object) -> None:
        raise AssertionError(f"still busy after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything inside a JSON value."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for name, item in items:
        yield (*path, name)
        yield from places(item, (*path, name))


def mutate(head: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A head with nonsense somewhere, mostly in its body."""
    head = copy.deepcopy(head)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        root = ("body",) if draw.random() < 0.8 and "body" in head else ()
        found = list(places(head["body"] if root else head))
        if not found:
            continue
        path = (*root, *draw.choice(found))
        at: Any = head
        for name in path[:-1]:
            at = at[name]
        match draw.randrange(5):
            case 0 if isinstance(at, dict):
                del at[path[-1]]
            case 0 | 1 if isinstance(at, list):
                at.insert(draw.randrange(len(at) + 1), copy.deepcopy(at[path[-1]]))
            case 2 if isinstance(at[path[-1]], int) and not isinstance(at[path[-1]], bool):
                at[path[-1]] += draw.choice((-1, 1, 64, -64, 1 << 40))
            case 3 if isinstance(at, list) and len(at) > 1:
                draw.shuffle(at)
            case _:
                at[path[-1]] = copy.deepcopy(draw.choice(NONSENSE))
    return head


def plant(tier: MemoryTier, key: str, head: dict[str, Any]) -> bool:
    """Put a head under its right id into a tier; False if the head alone is refused."""
    try:
        raw = canonical.dumps(head)
        sealed = SealedHead.open(raw, record_id(raw))
    except AdaCheckError:
        return False
    tier._records[key] = (sealed, tier._records[key][1])
    return True


def relink(tier: MemoryTier, key: str) -> None:
    """Make the later deltas follow the forged one, as one who forges a chain would."""
    prefix = key.rsplit("/", 1)[0] + "/"
    parent = tier._records[key][0].id
    for later in sorted(name for name in tier._records if name.startswith(prefix) and name > key):
        head = canonical.loads(tier._records[later][0].raw)
        assert isinstance(head, dict)
        plant(tier, later, {**head, "parent": parent})
        parent = tier._records[later][0].id


def everything(tier: MemoryTier, draw: random.Random) -> int:
    """What reads a store; only errors of ours may come out. Returns what restore gave.

    The newest step and fsck always, of the rest one: it mostly repeats what those did.
    """
    store = Store("memory://attack", tier, tier)
    rest = (
        lambda: restore_state([tier], "run", step=STEPS),
        lambda: plan_restore(read_catalog([tier], "run"), 2),
        lambda: list(compact(store, "run", to=3)),
    )
    step = -1
    for act in (lambda: restore_state([tier], "run"), lambda: list(fsck(store)), draw.choice(rest)):
        try:
            with limited():
                done = act()
        except AdaCheckError:
            continue
        step = max(step, getattr(done, "step", -1))
    return step
