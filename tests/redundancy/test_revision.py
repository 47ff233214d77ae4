"""Revisions: what a manifest says of redundancy comes back, and stays small."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_store.format.errors import MalformedError
from adacheck_store.format.manifest import Manifest, decode_manifest
from adacheck_store.format.redundancy import Redundancy
from adacheck_store.redundancy.assign import Assignment, Policy, assign
from adacheck_store.redundancy.revision import revise
from adacheck_store.redundancy.states import Holding, states
from tests.redundancy.kit import WHOLE, ddp, figure6, held, topology, zero1, zero3

LAYOUT = "ab" * 32


def first(size: int) -> Manifest:
    """The revision of a term that knows of no redundancy."""
    return Manifest(
        run="run", term="t000001-00112233445566aa", step=0, parts=(),
        ranks=tuple(f"r{rank:06d}" for rank in range(size)),
    )  # fmt: skip


def revised(found: Assignment, step: int = 12, agreed: int = 11) -> Manifest:
    """The revision that says what was found."""
    layouts = {part.name: LAYOUT for part in found.parts}
    before = first(len(found.topology.ranks))
    return revise(before, found, layouts, step=step, agreed=agreed)


def of(manifest: Manifest) -> Redundancy:
    """What a manifest says of redundancy."""
    assert manifest.redundancy is not None
    return manifest.redundancy


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("make", [ddp, zero1, zero3, figure6])
def test_a_revision_comes_back(
    make: Callable[[int], dict[int, list[Holding]]], policy: Policy
) -> None:
    """And follows the one before; the same findings give the same bytes, whatever their order."""
    by_rank = make(8)
    made = revised(assign(states(by_rank), topology(2, 2, 2, 2), policy=policy))
    sealed = made.seal()
    assert decode_manifest(sealed.head) == made
    assert made.previous == first(8).seal().id
    backwards = {rank: list(reversed(by_rank[rank])) for rank in reversed(range(8))}
    again = assign(reversed(states(backwards)), topology(2, 2, 2, 2), policy=policy)
    assert revised(again).seal().raw == sealed.raw


def test_what_it_says() -> None:
    """Figure 6 on two nodes, in tables."""
    found = of(revised(assign(states(figure6(2)), topology(1, 1))))
    assert (found.k, found.policy, found.agreed) == (1, "agent", 11)
    assert found.nodes == (("n0", "node n0"), ("n1", "node n1"))
    assert found.ranks == (0, 1)
    assert found.sets == ((0, 1, 1), (0, 1, 2), (1, 1, 1))
    assert found.names == ("attention", "expert0", "expert1")
    assert [(g.scope, g.param, g.optimizer, g.keep) for g in found.grounds] == [
        ("", 0, 0, "gradient"), ("", 1, 0, "gradient"), ("", 1, 2, "gradient"),
        ("", 2, 2, "gradient"),
    ]  # fmt: skip
    assert [(p.degree, p.holders, p.states) for p in found.parts] == [
        ("none", ((0, 0), (1, 0)), (0, 1, 1, 0)),
        ("none", ((1, 1), (0, 1)), (0, 2, 2, 3)),
    ]


@given(st.data())
def test_any_assignment_comes_back(data: st.DataObject) -> None:
    """Random sets of copies of random tensors."""
    by_rank: dict[int, list[Holding]] = {rank: [] for rank in range(4)}
    for number in range(data.draw(st.integers(0, 5))):
        ranks = data.draw(st.sets(st.integers(0, 3), min_size=1))
        why = data.draw(st.sampled_from(["", "never changed"])) if len(ranks) == 1 else ""
        for rank in ranks:
            by_rank[rank].append(held(f"w{number}", (WHOLE, ranks), (WHOLE, ranks), why))
    made = revised(assign(states(by_rank), topology(2, 2)))
    assert decode_manifest(made.seal().head) == made


def test_sources_must_be_ranks() -> None:
    """A manifest whose redundancy does not fit its parts cannot be written."""
    made = revised(assign(states(zero1(2)), topology(1, 1)))
    with pytest.raises(MalformedError):
        dataclasses.replace(made, parts=made.parts[:1]).seal()


@pytest.mark.parametrize(
    ("size", "tensors"), [(100, 100), pytest.param(1000, 1000, marks=pytest.mark.slow)]
)
def test_size_and_time_of_the_worst_case(size: int, tensors: int) -> None:
    """ZeRO-3: as many parts as ranks, and every tensor's shard a state: 20 MB and 10 s at most.

    Of a million states; of fewer, that much less. Processor time, for the machine may be busy.
    """
    by_rank = zero3(size, tensors, elements=8 * size)
    nodes = topology(*[8] * (size // 8), *([size % 8] if size % 8 else []))
    begun = time.process_time()
    found = assign(states(by_rank), nodes)
    sealed = revised(found).seal()
    took = time.process_time() - begun
    print(f"\n{size} ranks x {tensors} tensors: {len(sealed.raw) / 1e6:.2f} MB, {took:.2f} s")
    assert sum(len(part.states) for part in found.parts) == size * tensors
    assert {state.scope for part in found.parts for state in part.states} == {""}
    share = size * tensors / 1e6
    assert len(sealed.raw) < 20e6 * max(share, 0.005)
    assert took < 10 * max(share, 0.1)
