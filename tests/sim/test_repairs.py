"""Drains to a far tier, and its repairs beside living trainers and agents: the rules of both.

As in `test_rules`, a rule is switched off and histories are run until one breaks an invariant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

from adacheck_store import fetch
from adacheck_store.agent import core, drains
from adacheck_store.agent import events as ev
from adacheck_store.agent.replica import FAR
from adacheck_store.tiers import intake
from adacheck_store.tiers.zarr import ZarrTier
from adacheck_store.tools import agents, holes, repair
from tests.sim.histories import Plan, make_plan
from tests.sim.test_rules import Off, breaks

TRIES = 2000


def repaired(*kinds: str, first: int = 0) -> Iterable[Plan]:
    """Random histories with repairs, and faults of some kinds."""
    for plan in map(make_plan, range(first, first + TRIES)):
        found = {fault.kind for fault in plan.faults}
        if "repair" in found and found.issuperset(kinds):
            yield plan


def drained() -> Iterable[Plan]:
    """Random histories whose drains to the far tier fail, and nothing is damaged."""
    for plan in map(make_plan, range(TRIES)):
        kinds = {fault.kind for fault in plan.faults}
        if kinds & {"drains fail", "drains end unheard"}:
            if not kinds & {"far rots", "far loses", "holder rots"}:
                yield plan


# Drains ----------------------------------------------------------------------------------------


def test_what_a_drain_did_not_bring_is_drained_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain that fails may have brought nothing."""
    real = drains.Drains.done

    def done(self: drains.Drains, place: int, keys: Iterable[str], now: float) -> None:
        queue = next(queue for queue in self._queues if queue.place == place)
        real(self, place, (*keys, *queue.busy), now)

    off = lambda patch: patch.setattr(drains.Drains, "done", done)  # noqa: E731
    breaks(drained(), off, monkeypatch, "all is drained to")


def test_a_drain_that_failed_is_not_told_to_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent is not what is there."""
    real = core.AgentCore._drained

    def told(self: core.AgentCore, event: ev.Drained, now: float) -> Iterable[ev.Command]:
        if event.place == FAR and not event.keys:
            queue = next(queue for queue in self.drains._queues if queue.place == FAR)
            event = dataclasses.replace(event, keys=queue.busy)
        return real(self, event, now)

    off = lambda patch: patch.setattr(core.AgentCore, "_drained", told)  # noqa: E731
    breaks(drained(), off, monkeypatch, "drained, there is")


# Repairs ---------------------------------------------------------------------------------------


def blind(patch: pytest.MonkeyPatch) -> None:
    """Bytes are taken as they are read, and put as they come."""
    for module in (fetch, intake):
        patch.setattr(module, "verify_block", lambda info, index, data: None)


def sets_good_ones_aside(patch: pytest.MonkeyPatch) -> None:
    """What was rebuilt is taken for damaged."""
    patch.setattr(repair._TierRepair, "_sound", lambda self, unit: False)


def keeps_nothing_of_a_pack(patch: pytest.MonkeyPatch) -> None:
    """What else is in a pack is not put into another before it goes."""
    patch.setattr(repair._TierRepair, "_put", lambda self, sources: None)


def goes_below_floors(patch: pytest.MonkeyPatch) -> None:
    """What is not there is missing, though a floor says that it may be gone."""
    patch.setattr(holes, "_floor", lambda survey, tier, term: 0)


def forgets_the_silent(patch: pytest.MonkeyPatch) -> None:
    """Who does not answer when it begins has nothing."""
    real = repair.Survey.__init__

    def init(self: Any, store: Any, run: str, progress: Any, met: agents.Met, *rest: Any) -> None:
        real(self, store, run, progress, dataclasses.replace(met, silent={}), *rest)

    patch.setattr(repair.Survey, "__init__", init)


def gives_up_the_unread(patch: pytest.MonkeyPatch) -> None:
    """Who does not answer when it acts has nothing."""
    patch.setattr(repair, "_stop_if_unread", lambda failures: None)


def asks_its_own_node_alone(patch: pytest.MonkeyPatch) -> None:
    """Agents of other nodes have nothing."""
    real = repair.Survey.__init__

    def init(self: Any, store: Any, run: str, progress: Any, met: agents.Met, *rest: Any) -> None:
        real(self, store, run, progress, dataclasses.replace(met, others=[]), *rest)

    patch.setattr(repair.Survey, "__init__", init)


def deletes(patch: pytest.MonkeyPatch) -> None:
    """What is damaged goes first, with what is right in its pack."""
    real = repair._TierRepair._damaged

    def damaged(self: Any, unit: str) -> Any:
        if not self._sound(unit) and isinstance(self._tier, ZarrTier):
            self._tier.set_aside(unit)
        yield from real(self, unit)

    patch.setattr(repair._TierRepair, "_damaged", damaged)


SOON = {"gives_up_the_unread": 4500}
"""From where on one is found soon: one in two thousand needs the rule."""


@pytest.mark.parametrize(
    ("off", "kinds", "said"),
    [
        (blind, ("far rots", "holder rots"), "is told to be rebuilt"),
        (sets_good_ones_aside, ("far rots",), "was set aside"),
        (keeps_nothing_of_a_pack, ("far rots",), "was right in the far tier"),
        (goes_below_floors, ("far loses",), "is below a floor"),
        (forgets_the_silent, ("far rots",), "was set aside"),
        (gives_up_the_unread, ("far rots",), "was set aside"),
        (asks_its_own_node_alone, ("far rots",), "was set aside"),
        (deletes, ("far rots",), "was right in the far tier"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_a_broken_repair_is_found_out(
    off: Off, kinds: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rule of the tool, by the history that breaks without it."""
    first = SOON.get(off.__name__, 0)
    breaks(repaired(*kinds, first=first), off, monkeypatch, said)
