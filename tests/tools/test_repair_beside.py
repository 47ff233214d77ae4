"""Repair beside others: what it has surveyed does not answer any more, or has gone since."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from adacheck_store.format.errors import RecordNotFoundError, TierUnavailableError
from adacheck_store.format.head import SealedHead
from adacheck_store.store import open_for_reading
from adacheck_store.tiers.base import Source, Tier
from adacheck_store.tiers.wrappers import WrapperTier
from adacheck_store.tools import repair
from tests.tools.stores import findings, objects
from tests.tools.test_repair import (
    SECOND,
    cut_pack,
    flip_block,
    flip_packed,
    lose_documents,
    lose_pack,
)

pytestmark = pytest.mark.fault


class Leaving(WrapperTier):
    """A tier whose holder goes, whole or with some records, when ``acting`` has begun."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.acting = self.silent = False
        self.gone: Callable[[str], bool] = lambda key: False
        self._read: set[tuple[str, str, int]] = set()

    def head(self, key: str) -> SealedHead:
        """Not if it is silent."""
        self._answer()
        return super().head(key)

    def read(self, key: str, array: str, first: int, count: int) -> bytes | memoryview:
        """What goes is read once, by who looks whether it is right, and not a second time."""
        self._answer()
        if self.acting and self.gone(key):
            if (key, array, first) in self._read:
                raise RecordNotFoundError("folded over", tier=self.traits.name, key=key)
            self._read.add((key, array, first))
        return super().read(key, array, first, count)

    def put(self, sources: Sequence[Source]) -> None:
        """Nothing is wrong with it."""
        raise AssertionError

    def _answer(self) -> None:
        if self.acting and self.silent:
            raise TierUnavailableError("does not answer", tier=self.traits.name)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[repair.RepairRow]]:
    """Repair a store whose LMDB is such a tier; it changes after the survey."""

    def mend(store: Path, **how: object) -> list[repair.RepairRow]:
        with open_for_reading(str(store)) as opened:
            near = Leaving(opened.near)
            for name, value in how.items():
                setattr(near, name, value)
            real = repair._TierRepair.rows

            def rows(self: repair._TierRepair) -> Iterator[repair.RepairRow]:
                near.acting = True
                return real(self)

            monkeypatch.setattr(repair._TierRepair, "rows", rows)
            return list(repair.repair(dataclasses.replace(opened, near=near)))

    return mend


@pytest.mark.parametrize(
    "damage", [flip_block, flip_packed, cut_pack, lose_pack, lose_documents],
    ids=lambda damage: damage.__name__,
)  # fmt: skip
def test_who_does_not_answer_any_more_may_have_it(
    store: Path, beside: Callable[..., list[repair.RepairRow]], damage: Callable[[Path], None]
) -> None:
    """What only that one has is left, and not set aside; when it answers again all is rebuilt."""
    damage(store)
    rows = beside(store, silent=True)
    assert rows
    assert {row.done for row in rows} == {repair.LEFT}
    assert all("not all could be read: does not answer" in row.why for row in rows)
    assert not (store / "objects" / "_aside").exists()
    with open_for_reading(str(store)) as opened:
        again = list(repair.repair(opened))
    assert {row.done for row in again} == {repair.REBUILT}
    assert findings(store)[0] == 0


@pytest.mark.parametrize("damage", [flip_packed, lose_pack], ids=lambda damage: damage.__name__)
def test_what_goes_between_a_look_and_the_put(
    store: Path, beside: Callable[..., list[repair.RepairRow]], damage: Callable[[Path], None]
) -> None:
    """An agent folds over a record that was right a moment ago: that one is left, others not."""
    packs = [path for path in objects(store, f"{SECOND}/pack/*") if path.is_dir()]
    first = int(packs[0 if damage is lose_pack else -1].name[:12])  # how they are cut is by chance
    damage(store)
    rows = beside(store, gone=lambda key: "/delta/" in key and int(key[-12:]) % 2 == first % 2)
    left = [row for row in rows if row.done == repair.LEFT]
    assert left
    assert all("folded over" in row.why for row in left)
    rebuilt = {row.key for row in rows if row.done == repair.REBUILT}
    if damage is lose_pack:
        assert rebuilt
        assert not {row.key for row in left} & rebuilt
    with open_for_reading(str(store)) as opened:
        again = list(repair.repair(opened))
    assert {row.done for row in again} == {repair.REBUILT}
    assert findings(store)[0] == 0
