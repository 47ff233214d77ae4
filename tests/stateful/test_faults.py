"""The machine's oracles have teeth: each fault that is planted here is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from adacheck_store import retention
from adacheck_store.format.errors import AdaCheckError
from adacheck_store.format.manifest import Floor
from adacheck_store.tools import gc as gc_module
from adacheck_store.tools import repair as repair_module
from tests.stateful import verbs
from tests.stateful.places import Folder, Memory
from tests.stateful.test_machine import _quick
from tests.stateful.world import World

_ = _quick
Plant = Callable[[pytest.MonkeyPatch], None]


def floors_are_too_high(patch: pytest.MonkeyPatch) -> None:
    """One base fewer stays than was asked for."""
    real = retention._choose

    def choose(catalog: Any, terms: Any, plans: Any, keep: int, cap: Any) -> Any:
        return real(catalog, terms, plans, max(1, keep - 1), cap)

    patch.setattr(retention, "_choose", choose)


def all_below_goes(patch: pytest.MonkeyPatch) -> None:
    """What a floor keeps is deleted too."""
    real = gc_module.below

    def below(keys: Iterable[str], log: list[Any]) -> list[str]:
        floors = [replace(entry, kept=()) for entry in log if isinstance(entry, Floor)]
        return real(keys, floors)

    patch.setattr(gc_module, "below", below)


@pytest.mark.parametrize(
    ("plant", "every", "said"),
    [
        (floors_are_too_high, 0, "stay, and the floor is"),
        (all_below_goes, 8, "provable"), (all_below_goes, 0, "provable"),
    ],
)  # fmt: skip
def test_a_fault_of_gc_is_found(
    plant: Plant, every: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without it all is well."""

    def history() -> None:
        world = World(Memory())
        try:
            world.begin(keep_bases=5)
            world.append("a", 22)
            verbs.tag(world, lambda steps: steps[-9])
            world.append("a", 2)
            verbs.collect(world, 2, every)
            world.check()
        finally:
            world.close_all()
            world.place.end()

    history()
    plant(monkeypatch)
    with pytest.raises((AssertionError, AdaCheckError), match=said):
        history()


def test_a_repair_that_sets_too_much_aside_is_found(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not give up what another tier could rebuild."""
    for planted in (False, True):
        world = World(Folder(tmp_path / str(planted)))
        world.begin()
        world.append("a", 9)
        world.flush("a")
        world.close_all()
        damaged = world.corrupt(lambda items: items[-1])
        assert damaged is not None
        if not planted:
            verbs.mend(world)
            assert not world.planted
            world.check()
            continue

        def source(self: Any, text: str) -> Any:
            raise repair_module.RecordNotFoundError("no tier has it right", key=text)

        monkeypatch.setattr(repair_module.Survey, "source", source)
        with pytest.raises(AssertionError, match="whole in another tier"):
            verbs.mend(world)
