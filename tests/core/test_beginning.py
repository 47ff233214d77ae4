"""What a term of another topology begins with in the far tier: a reference, or a base."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from adacheck_store import beginning, derived
from adacheck_store.catalog import Catalog, read_catalog
from adacheck_store.config import Settings
from adacheck_store.drain import missing_below
from adacheck_store.format.bodies import decode_base
from adacheck_store.format.derived import FEATURE, derived_head, stood_for
from adacheck_store.format.errors import MalformedError, TierError
from adacheck_store.format.head import decode_head
from adacheck_store.format.keys import parse_key, part_name, rank_name
from adacheck_store.plan_json import decode_plan, encode_plan
from adacheck_store.recovery import Prover, RestorePlan, tolerant_line
from adacheck_store.restore import restore_state
from adacheck_store.retention import plan_floor, standing
from adacheck_store.session import RunSession
from adacheck_store.store import Store
from adacheck_store.topology import Need
from tests.core.kit import KeptTier, load
from tests.core.ranks import on_ranks
from tests.core.test_topology import (
    SHAPES,
    STEPS,
    ShardToy,
    assert_right,
    columns,
    layout_of,
    nbytes,
    pieces,
    read,
    rows,
    whole,
    written,
)

SPARSE = Settings(base_every=1000, object_lag=100, grace_s=0.0)


def go_on(
    far: Any, cut: Any, ranks: int, *, nears: Any = None, steps: int = 2, edit: float = 0.0,
    others: Any = (), settings: Settings = SPARSE,
) -> list[ShardToy]:  # fmt: skip
    """A term of so many ranks, which have nothing but the far tier (and ``nears``, each its own,
    and all of them ``others``)."""
    toys = [ShardToy(cut, rank, ranks, seed=rank) for rank in range(ranks)]
    nears = nears or [KeptTier(f"new{rank}") for rank in range(ranks)]

    def live(group: Any) -> None:
        toy = toys[group.rank]
        store = Store("memory://x", nears[group.rank], far, tuple(others))
        session = RunSession(store, "run", settings, group)
        restored = session.restore(layout=toy.layout)
        assert restored is not None
        (state,) = restored.parts.values()
        load(toy, state, None, seed=group.rank)  # type: ignore[arg-type]
        with torch.no_grad():
            toy.params[1].add_(edit)
        session.start(toy.layout, start_step=0, base=toy.base, extra=toy.extra)
        for _ in range(steps):
            toy.train()
            session.append(toy.boundary(session.wants_base()))
        session.flush(120)
        session.close()

    assert on_ranks(ranks, live) == [None] * ranks
    return toys


def last_of(far: Any, number: int) -> list[str]:
    """Keys of a rank's last step."""
    keys = [parse_key(key) for key in far.list("run/")]
    names = (part_name(number), rank_name(number))
    return [str(key) for key in keys if key.step == STEPS and key.part in names]


def newest(catalog: Catalog) -> str:
    """The newest term."""
    return max(manifest.term for manifest in catalog.manifests.values())


def of_newest(far: Any) -> tuple[list[Any], list[Any]]:
    """Bases, and derived ones, of the newest term in the far tier."""
    catalog = read_catalog([far], "run")
    tables = (catalog.bases, catalog.derived)
    found = [
        [ref for (term, _), refs in table.items() for ref in refs if term == newest(catalog)]
        for table in tables
    ]
    return found[0], found[1]


def assert_back(far: Any, toys: list[ShardToy], cut: Any, ranks: int) -> None:
    """The far tier alone gives each of so many ranks the newest state, bit for bit."""
    for rank in range(ranks):
        need = Need(rank=rank, ranks=ranks, layout=layout_of(toys[0], pieces(cut, rank, ranks)))
        restored, _ = read(far, need)
        assert restored.step == toys[0].step
        assert_right(restored, toys)
        assert restored.certificate.exactness == "exact"


def test_forks_of_forks():
    """Three topologies after each other within one interval of bases, and then a base after all."""
    far, _, _ = written(rows, 2)
    for number, (cut, ranks) in enumerate([(whole, 1), (columns, 2), (rows, 3)], 1):
        toys = go_on(far, cut, ranks)
        based, referring = of_newest(far)
        assert not based
        assert {ref.part for ref in referring} == {part_name(rank) for rank in range(ranks)}
        catalog = read_catalog([far], "run")
        plan = Prover(catalog, tolerant_line(catalog)).prove(toys[0].step)
        assert isinstance(plan, RestorePlan)
        assert len(plan.levels) == number + 1
        told = decode_plan(encode_plan(plan))
        assert (told.parts, len(told.levels)) == (plan.parts, number + 1)
        assert len({id(part.origin) for part in told.parts}) == 1
        assert_back(far, toys, cut, ranks)
        assert_back(far, toys, rows, 2)
    toys = go_on(far, whole, 1)
    based, referring = of_newest(far)
    assert (len(based), len(referring)) == (1, 0)
    assert_back(far, toys, rows, 2)


def test_a_rank_that_needs_a_part_reads_a_part(monkeypatch):
    """Of a derived base of all that there is, the blocks that hold what is needed."""
    monkeypatch.setitem(SHAPES, "w0", (6000, 601))
    far, _, _ = written(rows, 4)
    toys = go_on(far, whole, 1)
    layout = layout_of(toys[0], pieces(rows, 3, 8))
    restored, blocks = read(far, Need(rank=3, ranks=8, layout=layout))
    assert_right(restored, toys)
    _, everything = read(far, Need(rank=0, ranks=1, layout=toys[0].layout))
    assert len(blocks) == len(set(blocks))
    assert nbytes(far, blocks) < nbytes(far, everything) / 2


def test_what_the_parent_left_goes_first():
    """The last steps of the parent lie in a near tier alone: they are drained before the start."""
    far, nears, _ = written(rows, 2)
    far.delete(last_of(far, 0))
    toys = go_on(far, whole, 1, nears=nears)
    based, referring = of_newest(far)
    assert toys[0].step == STEPS + 2
    assert (len(based), len(referring)) == (0, 1)
    assert_back(far, toys, rows, 2)


@pytest.mark.parametrize("fault", ["drain", "time", "proof", "put"])
def test_where_the_far_tier_cannot_there_is_a_base(fault, monkeypatch, caplog):
    """The parent's records do not arrive in time, do not prove, or there is no reference."""
    far, nears, _ = written(rows, 2)
    far.delete(last_of(far, 0))

    def refuse(*of: Any) -> int:
        raise TierError("no")

    if fault == "drain":
        monkeypatch.setattr(beginning, "copy_records", refuse)
    elif fault == "time":
        monkeypatch.setattr(beginning, "DRAIN_S", -1.0)
    elif fault == "proof":
        monkeypatch.setattr(beginning, "copy_records", lambda *of: 0)
    else:
        monkeypatch.setattr(beginning.Beginning, "_put", lambda self, base: False)
    with caplog.at_level(logging.WARNING):
        toys = go_on(far, whole, 1, nears=nears)
    based, referring = of_newest(far)
    assert (len(based), len(referring)) == (1, 0)
    assert_back(far, toys, rows, 2)


def test_what_was_changed_before_the_start_is_kept():
    """The live state is not what was put together: no reference can stand for it."""
    far, _, _ = written(rows, 2)
    toys = go_on(far, whole, 1, edit=1.0)
    based, referring = of_newest(far)
    assert (len(based), len(referring)) == (1, 0)
    assert_back(far, toys, rows, 2)


def test_a_block_that_is_not_what_it_was_is_damage(monkeypatch):
    """What is put together does not have the digest: an older step, and the reason."""
    far, _, parents = written(rows, 2)
    toys = go_on(far, whole, 1)
    prepare = derived.DerivedReader.prepare

    def wrong(self: Any, only: Any) -> None:
        prepare(self, only)
        self._made.arrays["s0/exp_avg"].view(torch.uint8)[1 << 20] ^= 1

    monkeypatch.setattr(derived.DerivedReader, "prepare", wrong)
    restored, _ = read(far, Need(rank=0, ranks=1, layout=toys[0].layout))
    assert restored.step == STEPS
    assert "it is not what the term began with" in " ".join(restored.reasons)
    assert_right(restored, parents)


def test_a_floor_stands_on_bytes():
    """The parent's extras of the fork step are gone: what is left there is a reference, no base."""
    far, _, _ = written(rows, 2)
    go_on(far, whole, 1)
    extras = [key for key in far.list("run/") if parse_key(key).kind == "extra"]
    catalog = read_catalog([far], "run")
    far.delete([key for key in extras if parse_key(key).term != newest(catalog)])
    catalog = read_catalog([far], "run")
    plan = Prover(catalog, tolerant_line(catalog)).prove(STEPS)
    assert isinstance(plan, RestorePlan)
    assert len(plan.levels) == 2
    assert not any(part.deltas for part in plan.parts)
    assert standing(catalog)[1] == []
    assert plan_floor(far, "run", 1, cap=None) is None


def test_a_captured_base_that_a_reference_stands_for_is_not_missing():
    """It lies in the near tier for the next fold; the term after this does not drain it."""
    far, _, _ = written(rows, 2)
    nears = [KeptTier("new0")]
    go_on(far, whole, 1, nears=nears)
    bases = [key for key in nears[0].list("run/") if parse_key(key).kind == "base"]
    assert len(bases) == 1
    line = {parse_key(bases[0]).term: (0, None)}
    catalog = read_catalog([far], "run")
    stand_ins = beginning.stood_in(catalog, tolerant_line(catalog))
    assert missing_below(nears, far, "run", line, stand_ins) == []
    assert missing_below(nears, far, "run", line) == bases


def test_the_near_tier_folds_on():
    """The same ranks again, with their near tier: nothing of it refers, and nothing is captured."""
    far, _, _ = written(rows, 2)
    nears = [KeptTier("new0")]
    go_on(far, whole, 1, nears=nears)
    toys = go_on(far, whole, 1, nears=nears)
    based, referring = of_newest(far)
    assert (based, referring) == ([], [])
    assert_back(far, toys, columns, 2)
    restored = restore_state(nears, "run")
    assert all(part.origin is None for part in restored.plan.parts)


def test_a_derived_base_says_what_it_stands_for():
    """Its head gives the captured base's back; older readers are told, and nonsense is refused."""
    far, _, _ = written(rows, 2)
    go_on(far, whole, 1)
    (ref,) = of_newest(far)[1]
    head = far.head(ref.key).head
    assert head.requires == (FEATURE,)
    assert decode_base(head).origin == "derived"
    assert decode_head(head.encode()) == head
    captured, ranks = stood_for(head)
    assert (ranks, captured.requires, decode_base(captured).origin) == (1, (), "captured")
    assert derived_head(captured, 1) == head
    gap = {"reason": "none", "from": STEPS}
    for field, value in (
        ("arrays", []), ("ranks", 0), ("class", "bounded"), ("origin", "base"), ("gap", gap),
    ):  # fmt: skip
        changed = {**head.body, field: value}
        with pytest.raises(MalformedError):
            stood_for(type(head)(**{
                name: changed if name == "body" else getattr(head, name)
                for name in head.__dataclass_fields__
            }))  # fmt: skip
