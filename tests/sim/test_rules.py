"""Rules of the agents, each by the history that breaks without it; others are in `test_core`.

A rule is switched off, and histories of the kind that it is for are run until one breaks an
invariant; with the rule that history is sound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import pytest

from adacheck_store.agent import acks, core, replica, view
from adacheck_store.agent import events as ev
from adacheck_store.agent.budget import Budget, _Account
from adacheck_store.agent.far import Far
from adacheck_store.agent.leases import Lease
from adacheck_store.agent.marks import NOTHING, Mark
from adacheck_store.agent.replica import FAR, LMDB, ExtraReplica, PartReplica
from adacheck_store.agent.view import View
from adacheck_store.catalog import Catalog, RecordRef
from adacheck_store.proof import Proof, Segment
from adacheck_store.retention import FloorChoice, choose_floor
from tests.sim import floors, trainers
from tests.sim.histories import Fault, Plan, build, make_plan, run
from tests.sim.truth import Violation

Off = Callable[[pytest.MonkeyPatch], None]
TRIES = 400


def breaks(plans: Iterable[Plan], off: Off, monkeypatch: pytest.MonkeyPatch, said: str) -> Plan:
    """The first history that breaks an invariant without the rule, and does not with it."""
    for plan in plans:
        with monkeypatch.context() as patch:
            off(patch)
            try:
                run(plan)
                continue
            except Violation as error:
                if said not in str(error):
                    continue
        run(plan)
        return plan
    pytest.fail("no history needs the rule")


def anything() -> Iterable[Plan]:
    """Random histories."""
    return map(make_plan, range(TRIES))


def of_kind(*kinds: str, **settings: object) -> Iterable[Plan]:
    """Random histories whose faults are of some kinds."""
    for plan in anything():
        faults = tuple(
            dataclasses.replace(fault, kind=kinds[i % len(kinds)])
            for i, fault in enumerate(plan.faults)
        )
        yield dataclasses.replace(plan, faults=faults, **settings)  # type: ignore[arg-type]


def directed(homes: tuple[int, ...], faults: tuple[Fault, ...], **settings: object) -> list[Plan]:
    """Histories of three nodes with these faults, and probes all along."""
    plain: dict[str, object] = {
        "nodes": 3, "k": 1, "window": 2, "fold_every": 1, "places": 0, "slack": 3.0,
        "steps": 12, "step_s": 0.1, "probes": tuple(0.3 + 0.15 * i for i in range(50)),
    }  # fmt: skip
    return [
        Plan(seed=seed, homes=homes, faults=faults, **{**plain, **settings})  # type: ignore[arg-type]
        for seed in range(60)
    ]


# Acknowledgement -------------------------------------------------------------------------------


def stored_is_enough(patch: pytest.MonkeyPatch) -> None:
    """A holder acknowledges what it has stored."""

    def make_mark(self: PartReplica) -> Mark:
        steps = sorted({ref.step for ref in self.refs.values() if self.on_line(ref)})
        if not steps:
            return Mark(self._line[-1].term, (), "", -1)
        return Mark(self._line[-1].term, ((steps[0], steps[-1]),), "", steps[-1] - 1)

    patch.setattr(PartReplica, "_make_mark", make_mark)


def test_agent_restarted_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder that has lost everything stores the next delta: that proves nothing."""
    plans = of_kind("lose node", "kill agent", places=0, slack=3.0)
    breaks(plans, stored_is_enough, monkeypatch, "was acknowledged by")


def test_fork_state_on_one_holder_that_then_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new term's first delta follows the fork state; without that it proves nothing."""
    real = replica.opening

    def blind(segment: Segment, parent: replica.Proofs, part: str) -> replica.Proofs:
        found = real(segment, parent, part)
        if found or not segment.manifest.parent_term:
            return found
        starts = {name: Proof(name, "layout") for name, _ in segment.revisions}
        return {segment.first: starts}

    def off(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(replica, "opening", blind)
        patch.setattr(PartReplica, "doomed", lambda self, watermark: [])
        patch.setattr(PartReplica, "fold_plan", lambda self, *limits: None)

    breaks(of_kind("lose node", "kill trainers"), off, monkeypatch, "was acknowledged by")


def test_all_holders_acknowledge(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer is not told of k+1 holders before each of them has it."""

    def producers(view: View, chain: str, step: int, now: float) -> set[str] | None:
        own = view.mark(view.node, chain).covers(step)
        return set(view.seats[chain].holders) if own else None

    off = lambda patch: patch.setattr(acks, "_producers", producers)  # noqa: E731
    breaks(anything(), off, monkeypatch, "was acknowledged by")


def test_a_mark_is_of_its_term(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a peer that has not heard of the term says is about another line."""
    real = View.mark

    def mark(self: View, name: str, chain: str) -> Mark:
        peer = self.peers.get(name)
        if peer is None or peer.report is None:
            return real(self, name, chain)
        return peer.report.marks.get(chain, NOTHING)

    off = lambda patch: patch.setattr(View, "mark", mark)  # noqa: E731
    breaks(of_kind("zombie", "cut", "kill trainers"), off, monkeypatch, "was acknowledged by")


# Watermark -------------------------------------------------------------------------------------


def test_a_part_exposed_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder that is silent still counts for the watermark: it may be all that is left."""

    def advance(self: View, now: float) -> None:
        chains = [
            [self.mark(name, chain) for name in seat.holders if self.live(name, now)]
            for chain, seat in self.seats.items()
        ]
        self.watermark = max(self.watermark, view.newest_common(filter(None, chains)))

    off = lambda patch: patch.setattr(View, "advance", advance)  # noqa: E731
    away = Fault(1.5, "pause", 1, 12.0)  # a spare node: its trainers would stop with it
    plans = directed((0, 2), (away,), step_s=0.4, steps=12, probes=(6.0, 7.0, 8.0, 9.0))
    breaks(plans, off, monkeypatch, "was acknowledged by")


def test_steps_in_a_gap_are_no_watermark(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watermark is a step that all can produce, not the least of the newest."""

    def newest(chains: Iterable[Iterable[Mark]]) -> int:
        return min((mark.settled for marks in chains for mark in marks), default=-1)

    off = lambda patch: patch.setattr(view, "newest_common", newest)  # noqa: E731
    plans = directed((0, 1), (Fault(0.8, "late answer", 0, 0), Fault(1.0, "cut holders", 1, 1.0)))
    breaks(plans, off, monkeypatch, "was acknowledged by")


def test_one_holder_times_out_on_one_rank_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is settled once the trainer builds on it: until then a failed save disowns it."""
    real = PartReplica._make_mark

    def make_mark(self: PartReplica) -> Mark:
        return dataclasses.replace(real(self), settled=real(self).newest)

    off = lambda patch: patch.setattr(PartReplica, "_make_mark", make_mark)  # noqa: E731
    plans = directed((0, 1), (Fault(0.8, "late answer", 0, 0), Fault(1.6, "late answer", 1, 0)))
    breaks(plans, off, monkeypatch, "was acknowledged by")


def test_the_watermark_is_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all holders of a part have may still be ahead of another part."""

    def advance(self: View, now: float) -> None:
        marks = [found.mark().settled for name, found in self.replicas.items() if self.holds(name)]
        self.watermark = max(self.watermark, min(marks, default=-1))

    off = lambda patch: patch.setattr(View, "advance", advance)  # noqa: E731
    plans = directed((0, 1), (Fault(0.8, "cut holders", 1, 2.0),))
    breaks(plans, off, monkeypatch, "was acknowledged by")


def test_extras_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's extra is as much a part of a step as its tensors are."""

    def make_mark(self: ExtraReplica) -> Mark:
        return Mark(self._line[-1].term, ((0, 10**6),), "", 10**6)

    off = lambda patch: patch.setattr(ExtraReplica, "_make_mark", make_mark)  # noqa: E731
    breaks(of_kind("lose node", "kill agent"), off, monkeypatch, "was acknowledged by")


def cut_off_and_back() -> list[Plan]:
    """A node with a trainer hears nobody until it gives all others' seats up, and then all."""
    probes = tuple(round(7.9 + 0.03 * i, 2) for i in range(40))
    return directed(
        (0, 2), (Fault(2.0, "pause", 0, 6.0),), step_s=0.4, steps=30, away_s=4.0, probes=probes
    )  # fmt: skip


def test_a_holder_that_has_lost_its_seat_may_be_all_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node cut off goes on alone. When it is heard again the others must not follow at once:

    what it alone can produce is gone if it dies before the holder that is back has that too.
    """
    off = lambda patch: patch.setattr(View, "_unseated", lambda *_: [])  # noqa: E731
    breaks(cut_off_and_back(), off, monkeypatch, "was acknowledged by")


def test_what_the_watermark_needs_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes from which its step is folded, though this holder can produce newer ones."""
    real = PartReplica.doomed
    newest = lambda self, watermark: real(self, self.mark().newest)  # noqa: E731
    off = lambda patch: patch.setattr(PartReplica, "doomed", newest)  # noqa: E731
    breaks(anything(), off, monkeypatch, "was acknowledged by")


def test_so_do_its_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extra of the watermark's step may be the last one of a step that all parts have."""
    real = ExtraReplica.doomed
    newest = lambda self, watermark: real(self, self.mark().newest)  # noqa: E731
    off = lambda patch: patch.setattr(ExtraReplica, "doomed", newest)  # noqa: E731
    breaks(anything(), off, monkeypatch, "was acknowledged by")


def test_a_gap_disowns_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a save that failed has left is no way to a later step."""
    real = replica.gaps_of
    unheeded = lambda bases, last: real([], last)  # noqa: E731
    off = lambda patch: patch.setattr(replica, "gaps_of", unheeded)  # noqa: E731
    plans = of_kind("late answer", "kill trainers", places=LMDB | FAR)
    breaks(plans, off, monkeypatch, "drained, there is")


def test_so_it_does_in_the_far_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a gap disowns is not said to be drained, though it has got there."""
    off = lambda patch: patch.setattr(Far, "disown", lambda self, refs: None)  # noqa: E731
    plans = of_kind("late answer", "kill trainers", places=LMDB | FAR)
    breaks(plans, off, monkeypatch, "drained, there is")


# Leases and terms --------------------------------------------------------------------------------


def test_catalog_while_folding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a planner has seen stays until it has read it."""
    off = lambda patch: patch.setattr(Lease, "frozen", lambda self, now: False)  # noqa: E731
    breaks(of_kind("zombie", "slow plan", "zombie"), off, monkeypatch, "has dropped it")


def test_agents_are_read_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A zombie trains on while agents are read: what the first has said must not lag behind.

    Else the plan is of a step that those read later have folded over, and one node alone has it.
    """
    off = lambda patch: patch.setattr(View, "freeze", lambda self, frozen: None)  # noqa: E731
    for seed, histories in READ_BESIDE_A_ZOMBIE.items():
        breaks(
            [_varied(seed, *each) for each in histories], off, monkeypatch, "was acknowledged by"
        )


READ_BESIDE_A_ZOMBIE = {
    226927: (
        (303458, 1.221, 4.891, (1.4, 1.719, 1.764)), (163547, 1.18, 4.375, (1.545, 1.898, 1.863)),
        (473057, 1.174, 2.524, (1.348, 1.573, 1.872)),
        (988850, 1.294, 1.514, (1.364, 1.543, 1.933)),
        (1014784, 1.144, 2.57, (1.202, 1.829, 1.92)),
        (402852, 1.23, 3.939, (1.122, 1.659, 1.657)),
    ),
    392906: (
        (864682, 1.141, 0.185, (1.016, 1.721, 2.179)), (36414, 1.185, 0.419, (1.202, 1.528, 1.817)),
        (230316, 1.122, 0.133, (1.287, 1.604, 2.236)),
    ),
}  # fmt: skip
"""Of a history's seed others like it: their seed, when the zombie wakes, for how long, and when a
restore is tried. One in four hundred needs the rule; which ones changes with any message."""


def _varied(of: int, seed: int, at: float, lasts: float, probes: tuple[float, ...]) -> Plan:
    plan = make_plan(of)
    fault = dataclasses.replace(plan.faults[0], at=at, lasts=lasts)
    return dataclasses.replace(plan, seed=seed, faults=(fault,), probes=probes, steps=10)


def test_a_lease_ends_with_the_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """The term that a planner has claimed has begun: until its lease ran out nothing would go."""
    off = lambda patch: patch.setattr(Lease, "opened", lambda self, term: None)  # noqa: E731
    breaks(anything(), off, monkeypatch, "deadlock")


def _unfenced_puts(patch: pytest.MonkeyPatch) -> None:
    """Offers of any term are let in."""
    real = core.AgentCore._offered

    def offered(self: core.AgentCore, event: ev.Offered, now: float) -> Iterable[ev.Command]:
        return real(self, dataclasses.replace(event, term=""), now)

    patch.setattr(core.AgentCore, "_offered", offered)


def _unfenced_syncs(patch: pytest.MonkeyPatch) -> None:
    """Syncs of any term are answered by what marks say of the newest."""
    real = acks.Acks.note

    def note(self: acks.Acks, conn: str, refs: Iterable[RecordRef]) -> None:
        real(self, conn, [dataclasses.replace(ref, term="~") for ref in refs])

    patch.setattr(acks.Acks, "note", note)


def test_a_zombie_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent refuses the trainers of a term that another one has followed."""

    def off(patch: pytest.MonkeyPatch) -> None:
        _unfenced_puts(patch)
        _unfenced_syncs(patch)

    breaks(of_kind("zombie"), off, monkeypatch, "its term is past")


def test_a_zombie_is_not_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync that waits when a newer term begins is not about that term's steps."""
    breaks(of_kind("zombie", "cut holders"), _unfenced_syncs, monkeypatch, "its term is past")


# The budget --------------------------------------------------------------------------------------


def test_what_others_have_reserved_is_not_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the deltas of one chain fill the memory in which another one would be folded."""
    used = lambda self, beside=False: self.used - self.total  # noqa: E731
    off = lambda patch: patch.setattr(Budget, "missing", used)  # noqa: E731
    plans = directed((1, 2), (), window=1, slack=0.0, steps=10, probes=())
    breaks(plans, off, monkeypatch, "deadlock")


def behind(pause: float, patch: pytest.MonkeyPatch) -> int:
    """Steps that are not saved when a holder is back for long that has stood still for a while.

    The trainer's disk is full, memory no more than what is reserved; puts are not given up sooner
    than the agent refuses them.
    """
    patch.setattr(trainers, "PUT_S", core.HOLD_S + 5.0)
    plan = dataclasses.replace(
        make_plan(0), nodes=2, homes=(0,), k=1, window=2, fold_every=1, places=LMDB, slack=0.0,
        steps=10**6, step_s=0.1, away_s=90.0, faults=(), probes=(),
    )  # fmt: skip
    world = build(plan)
    world.agents["n0"].disk_fails = True
    world.run(lambda: False, 3.5)
    world.agents["n1"].busy_until = world.now + pause
    world.run(lambda: False, 90.0)
    (rank,) = world.job.ranks
    return rank.step - rank.acked


def test_the_base_that_closes_a_gap_leaves_room_for_what_settles_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes the room in which a fold frees all else, so the next delta must find its own."""
    pauses = (6.0, 13.0, 20.0, 25.0, 31.0)
    assert max(behind(pause, monkeypatch) for pause in pauses) <= 3
    monkeypatch.setattr(_Account, "within", lambda self, more: True)
    assert max(behind(pause, monkeypatch) for pause in pauses) > 100


# Floors ----------------------------------------------------------------------------------------


def with_floors() -> Iterable[Plan]:
    """Random histories of a far tier whose garbage is collected now and then."""
    plans = [plan for plan in map(make_plan, range(TRIES)) if plan.places & FAR]
    return [plan for plan in plans if any(fault.kind == "gc" for fault in plan.faults)]


def test_a_floor_is_a_step_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest base of any part may be all there is of its step."""
    real = floors.choose_floor

    def choose(catalog: Catalog, keep: int, cap: int | None) -> FloorChoice | None:
        found = real(catalog, keep, cap)
        steps = [ref.step for refs in catalog.bases.values() for ref in refs]
        return found and dataclasses.replace(found, step=max(steps))

    off = lambda patch: patch.setattr(floors, "choose_floor", choose)  # noqa: E731
    breaks(with_floors(), off, monkeypatch, "the floor is")


def far_floor(homes: tuple[int, ...], seed: int, **settings: object) -> int:
    """The floor that the far tier bears after sixteen steps without a fault."""
    plan = dataclasses.replace(
        make_plan(seed), nodes=3, homes=homes, k=1, window=2, places=LMDB | FAR, slack=1.0,
        steps=16, step_s=0.1, faults=(), probes=(), **settings,
    )  # fmt: skip
    world = build(plan)
    world.run(lambda: False, 12.0)
    assert {rank.acked for rank in world.job.ranks} == {16}
    choice = choose_floor(world.truth.catalog([("far", world.far)]), 2)
    return -1 if choice is None else choice.step


@pytest.mark.parametrize("fold_every", [1, 3, 8])
@pytest.mark.parametrize("homes", [(0, 1, 2), (0, 0, 1)])
def test_parts_pass_through_bases_of_one_step(
    homes: tuple[int, ...], fold_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A floor needs bases of all parts at one step, which their watermarks need not have been.

    Here bases are of each fourth step; the watermark ends at 15.
    """
    monkeypatch.setattr(floors, "KEEP", 2)
    seeds = range(4)
    assert {far_floor(homes, seed, fold_every=fold_every) for seed in seeds} == {8}
    real = PartReplica.fold_plan
    straight = lambda self, step, every, most: real(self, step, 0, most)  # noqa: E731
    monkeypatch.setattr(PartReplica, "fold_plan", straight)
    assert min(far_floor(homes, seed, fold_every=fold_every) for seed in seeds) < 8
