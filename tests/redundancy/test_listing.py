"""A manifest's redundancy as people read it, and what a changed topology makes unsafe."""

from __future__ import annotations

import json

import pytest

from adacheck_store.format.manifest import Manifest
from adacheck_store.redundancy.assign import Policy, assign
from adacheck_store.redundancy.listing import Change, diff, spelled, summary, tolerances, under
from adacheck_store.redundancy.states import states
from adacheck_store.tools.show import body_of
from tests.redundancy.kit import WHOLE, ddp, figure6, held, topology, zero3
from tests.redundancy.test_revision import first, revised

APART = {f"n{node}": f"host {node}" for node in range(4)}


def make(policy: Policy = Policy.AGENT) -> Manifest:
    """HSDP over four nodes of two ranks: shard i on ranks i and i + 4; and a layer not proven."""
    by_rank = zero3(8, replicas=2)
    for rank in range(8):
        by_rank[rank].append(held("norm", (WHOLE, {rank}), (WHOLE, {rank}), "never changed"))
    return revised(assign(states(by_rank), topology(2, 2, 2, 2), policy=policy))


def test_summary() -> None:
    """Parts in words, holders by name, what is unproven by reason; all of it JSON."""
    said = summary(make(Policy.LIVE))
    assert json.loads(json.dumps(said)) == said
    part = next(part for part in said["parts"] if part["sources"] == "0-4 by 4")
    assert part.pop("part").startswith("p00000")
    assert part == {
        "class": "partial", "sources": "0-4 by 4",
        "owner": 0, "holders": [], "states": 1, "keep": {"nothing": 1},
    }  # fmt: skip
    own = next(part for part in said["parts"] if part["sources"] == "5")
    assert own["class"] == "none"
    assert own["holders"][0].endswith("(rank 5, by network)")
    assert said["unproven"] == {"never changed": ["norm"]}
    assert summary(first(2)) == {}


def test_show_says_it() -> None:
    """The body that `show` prints has the summary in place of the tables."""
    made = make()
    body = body_of(made.seal().head)
    assert body["redundancy"] == summary(made)
    assert "redundancy" not in body_of(first(2).seal().head)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((3,), "3"), (range(8), "0-7"), (range(0, 64, 8), "0-56 by 8"), ((0, 1, 5), "0-1, 5")],
)
def test_spelled(ranks: range | tuple[int, ...], text: str) -> None:
    """Sets of ranks in short."""
    assert spelled(tuple(ranks)) == text


@pytest.mark.parametrize("policy", Policy)
def test_a_rack_makes_copies_unsafe(policy: Policy) -> None:
    """Two nodes that turn out to share a rack: which tensors would a loss of it take?"""
    made = make(policy)
    assert set(tolerances(made).values()) == {1}
    assert list(diff(made, under(made, APART))) == []
    racks = {**APART, "n2": "host 0"}  # n0 and n2, where shards 0 and 1 have both their copies
    found = list(diff(made, under(made, racks)))
    assert Change(scope="", name="w0", before=1, after=0, unsafe=True) in found
    assert all(change.unsafe for change in found)


def test_trainers_count_where_they_are_what_is_relied_on() -> None:
    """Copies on four nodes: two agents hold them, or all four trainers do."""
    for policy, least in ((Policy.AGENT, 1), (Policy.LIVE, 3)):
        made = revised(assign(states(ddp(4)), topology(1, 1, 1, 1), policy=policy))
        assert tolerances(made) == {("", "w0"): least}


def test_a_node_that_is_gone() -> None:
    """Fewer copies are left, and of what had none elsewhere none."""
    made = revised(assign(states(figure6(2)), topology(1, 1)))
    gone = under(made, {"n0": "host 0"})
    assert {change.after for change in diff(made, gone)} == {0}
    lost = {change.after for change in diff(made, under(made, {}))}
    assert lost == {-1}


def test_tensors_that_come_and_go() -> None:
    """None where a revision does not have it; a revision without redundancy promises nothing."""
    one, two = (revised(assign(states(ddp(2, tensors=n)), topology(1, 1))) for n in (1, 2))
    assert list(diff(one, two)) == [Change(scope="", name="w1", before=None, after=1, unsafe=False)]
    assert [c.after for c in diff(two, first(2))] == [None, None]
