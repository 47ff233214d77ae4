"""The detector: what counts as a copy, and everything that must not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from adacheck_store.format.errors import UsageError
from adacheck_store.format.layout import whole_box
from adacheck_store.redundancy.detector import (
    NEVER_CHANGED,
    NO_UPDATE,
    SEEN_ONCE,
    Detector,
    Finding,
)
from adacheck_store.redundancy.sighting import Piece, Sighting, Standing, sight
from tests.redundancy.loop import carry_all

ALL = frozenset((0, 1))


def see(name: str, value: float, standing: Standing = Standing.TRAINED, **how: Any) -> Sighting:
    """A tensor of four equal elements."""
    role, piece = how.pop("role", "param"), how.pop("piece", Piece((whole_box((4,)),)))
    return sight(
        torch.full((4,), value), name=name, role=role, shape=(4,), piece=piece, standing=standing,
        **how,
    )  # fmt: skip


class Ranks:
    """The detectors of all ranks, looking together."""

    def __init__(self, size: int = 2) -> None:
        self.detectors = [Detector(rank, size) for rank in range(size)]

    def look(self, updates: Sequence[int], *seen: Sequence[Sighting]) -> list[dict[str, Finding]]:
        """Findings by name of every rank; empty at the first look."""
        rounds = [d.look(u, s) for d, u, s in zip(self.detectors, updates, seen, strict=True)]
        if rounds[0] is None:
            assert not any(rounds)
            return []
        return [{f.identity.name: f for f in each} for each in carry_all(rounds)[0]]


def pair(first: float, second: float, **how: Any) -> list[Finding]:
    """Findings of two ranks about a tensor that both see go from ``first`` to ``second``."""
    ranks = Ranks()
    assert ranks.look([0, 0], [see("w", first, **how)], [see("w", first, **how)]) == []
    found = ranks.look([1, 1], [see("w", second, **how)], [see("w", second, **how)])
    return [each["w"] for each in found]


def test_changed_and_still_equal_is_a_copy() -> None:
    """On both ranks."""
    assert [(f.copies, f.why) for f in pair(0, 1)] == [(ALL, "")] * 2


def test_never_changed_is_unproven() -> None:
    """LayerNorms of ones, zero moments, idle experts, a learning rate of 0: saved on each rank."""
    for rank, found in enumerate(pair(1, 1)):
        assert (found.copies, found.why) == (frozenset((rank,)), NEVER_CHANGED)


@pytest.mark.parametrize("standing", [Standing.FROZEN, Standing.DECLARED])
def test_frozen_or_declared_and_equal_is_a_copy(standing: Standing) -> None:
    """Something else than its bytes says why it does not change."""
    assert [f.copies for f in pair(1, 1, standing=standing)] == [ALL] * 2


@pytest.mark.parametrize("standing", [Standing.FROZEN, Standing.DECLARED])
def test_declared_and_not_equal_is_none(standing: Standing) -> None:
    """Placements propose, content confirms."""
    ranks = Ranks()
    ranks.look([0, 0], [see("w", 1, standing)], [see("w", 2, standing)])
    found = ranks.look([1, 1], [see("w", 1, standing)], [see("w", 2, standing)])
    assert [each["w"].copies for each in found] == [{0}, {1}]


def test_frozen_here_and_trained_there_is_none() -> None:
    """The other rank offers nothing that it has not seen change."""
    ranks = Ranks()
    ranks.look([0, 0], [see("w", 1, Standing.FROZEN)], [see("w", 1)])
    found = ranks.look([1, 1], [see("w", 1, Standing.FROZEN)], [see("w", 1)])
    assert [each["w"].copies for each in found] == [{0}, {1}]
    assert [each["w"].why for each in found] == ["", NEVER_CHANGED]


def test_a_change_without_update_proves_nothing() -> None:
    """Skipped steps, a broadcast of initial values, a lazy initialisation."""
    ranks = Ranks()
    ranks.look([0, 0], [see("w", 0)], [see("w", 0)])
    found = ranks.look([0, 0], [see("w", 1)], [see("w", 1)])
    assert [(each["w"].copies, each["w"].why) for each in found] == [
        ({0}, NO_UPDATE),
        ({1}, NO_UPDATE),
    ]
    found = ranks.look([1, 1], [see("w", 2)], [see("w", 2)])
    assert [each["w"].copies for each in found] == [ALL] * 2


def test_equal_at_one_look_alone_is_none() -> None:
    """Copies were equal before and after: what became equal, or came apart, is no copy."""
    for first, second in (((0, 9), (1, 1)), ((0, 0), (1, 2))):
        ranks = Ranks()
        ranks.look([0, 0], [see("w", first[0])], [see("w", first[1])])
        found = ranks.look([1, 1], [see("w", second[0])], [see("w", second[1])])
        assert [(each["w"].copies, each["w"].why) for each in found] == [({0}, ""), ({1}, "")]


def test_other_names_roles_scopes_and_boxes_are_no_copies() -> None:
    """Equal and untied weights; the same local name in two stages; two shards with equal bytes."""
    kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"name": "a"}, {"name": "b"}),
        ({"name": "a", "role": "exp_avg"}, {"name": "a", "role": "exp_avg_sq"}),
        ({"name": "a", "scope": "stage0"}, {"name": "a", "scope": "stage1"}),
        ({"name": "a", "piece": Piece(flat=(0, 4))}, {"name": "a", "piece": Piece(flat=(4, 8))}),
    ]
    for one, other in kinds:
        ranks = Ranks()
        for step in (0, 1):
            found = ranks.look([step] * 2, [see(value=step, **one)], [see(value=step, **other)])
        assert [f.copies for each in found for f in each.values()] == [{0}, {1}]


def test_a_late_change_gets_its_turn() -> None:
    """An expert that is idle at first is a copy once it was seen to change, and stays one."""
    ranks = Ranks()
    seen = []
    for step, (expert, dense) in enumerate([(0, 0), (0, 1), (1, 2), (1, 3)]):
        both = [see("expert", expert), see("dense", dense)]
        seen.append(ranks.look([step] * 2, both, both))
    assert [each["expert"].copies for each in seen[1]] == [{0}, {1}]
    assert [each["dense"].copies for each in seen[1]] == [ALL] * 2
    assert [each["expert"].copies for each in seen[2]] == [ALL] * 2
    assert [each["expert"].copies for each in seen[3]] == [ALL] * 2


def test_a_rank_that_skipped_an_update_joins_later() -> None:
    """It has proven nothing at that look; at the next the set is whole."""
    ranks = Ranks(3)
    ranks.look([0, 0, 0], *[[see("w", 0)]] * 3)
    found = ranks.look([1, 1, 0], *[[see("w", 1)]] * 3)
    assert [each["w"].copies for each in found] == [{0, 1}, {0, 1}, {2}]
    found = ranks.look([2, 2, 1], *[[see("w", 2)]] * 3)
    assert [each["w"].copies for each in found] == [{0, 1, 2}] * 3


def test_copies_that_come_apart_are_found_out() -> None:
    """Experts with equal initial values, dense at first: every look compares anew."""
    ranks = Ranks()
    ranks.look([0, 0], [see("w", 0)], [see("w", 0)])
    assert ranks.look([1, 1], [see("w", 1)], [see("w", 1)])[0]["w"].copies == ALL
    found = ranks.look([2, 2], [see("w", 2)], [see("w", 3)])
    assert [each["w"].copies for each in found] == [{0}, {1}]


def test_a_tensor_that_comes_later_has_to_be_seen_twice() -> None:
    """And one that goes and comes back begins anew."""
    ranks = Ranks()
    for step, there in enumerate([True, True, False, True, True]):
        seen = [see("x", 0), *([see("w", step)] if there else [])]
        found = ranks.look([step] * 2, seen, seen)
        if step == 1:
            assert found[0]["w"].copies == ALL
        if step == 3:
            assert [each["w"].why for each in found] == [SEEN_ONCE] * 2
    assert found[0]["w"].copies == ALL


def test_a_tensor_that_comes_back_has_to_change_again() -> None:
    """What it did before it went is no evidence of what stands in its place now."""
    ranks = Ranks()
    for step, value in enumerate([0, 1, None, 5, 5]):
        seen = [see("x", step), *([] if value is None else [see("w", value)])]
        found = ranks.look([step] * 2, seen, seen)
    assert [each["w"].why for each in found] == [NEVER_CHANGED] * 2


@pytest.mark.parametrize("standing", [Standing.FROZEN, Standing.TRAINED])
def test_what_could_not_be_seen_at_first_was_seen_once(standing: Standing) -> None:
    """Nothing and then something is no change, and no copy of a tensor's bytes."""
    ranks = Ranks()
    whole = Piece((whole_box((4,)),))
    tensors = [torch.empty(4, dtype=torch.uint8, device="meta")] + [
        torch.ones(4, dtype=torch.uint8)
    ] * 2
    found = []
    for step, tensor in enumerate(tensors):
        seen = [sight(tensor, name="w", role="buffer", shape=(4,), piece=whole, standing=standing)]
        found.append(ranks.look([step] * 2, seen, seen))
    assert [each["w"].why for each in found[1]] == [SEEN_ONCE] * 2
    trained = standing is Standing.TRAINED
    assert [each["w"].why for each in found[2]] == [NEVER_CHANGED if trained else ""] * 2


def test_what_cannot_be_digested_is_saved_and_said() -> None:
    """On the ranks that cannot, and there is nobody to be equal to on those that can."""
    ranks = Ranks()
    bad = sight(torch.empty(4, device="meta"), name="w", role="param", shape=(4,),
                piece=Piece((whole_box((4,)),)))  # fmt: skip
    ranks.look([0, 0], [see("w", 0)], [bad])
    found = ranks.look([1, 1], [see("w", 1)], [bad])
    assert found[0]["w"].copies == {0}
    assert found[1]["w"].copies == {1}
    assert "cannot be digested" in found[1]["w"].why


def test_a_failed_exchange_makes_everything_ones_own() -> None:
    """A rank died: what was last seen is found alone, and why is said."""
    detector = Detector(1, 2)
    assert detector.give_up("rank 0 died") == ()
    detector.look(0, [see("w", 0)])
    (found,) = detector.give_up("rank 0 died")
    assert (found.identity.name, found.copies, found.why) == ("w", frozenset((1,)), "rank 0 died")


def test_an_identity_seen_twice_is_misuse() -> None:
    """Two stages' tensors of one name on one rank need scopes."""
    with pytest.raises(UsageError, match="twice"):
        Detector(0, 2).look(0, [see("w", 0), see("w", 1)])


def test_a_real_step_with_learning_rate_zero() -> None:
    """Real tensors: with lr 0 the moments are copies and the weights unproven; then both are."""
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.0) for m in models]
    batch = torch.randn(5, 3)
    ranks = Ranks()
    found = []
    for step in range(4):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.0 if step < 3 else 0.1
        for model, optimizer in zip(models, optimizers, strict=True):
            model(batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = Piece((whole_box((2, 3)),))
        seen = [
            [sight(t, name=role, role=role, shape=(2, 3), piece=whole)
             for role, t in (("param", m.weight), ("exp_avg", o.state[m.weight]["exp_avg"]))]
            for m, o in zip(models, optimizers, strict=True)
        ]  # fmt: skip
        found.append(ranks.look([step] * 2, *seen))
    assert [each["exp_avg"].copies for each in found[2]] == [ALL] * 2
    assert [each["param"].why for each in found[2]] == [NEVER_CHANGED] * 2
    assert [each["param"].copies for each in found[3]] == [ALL] * 2
