"""Further ways to train in parallel: each found out, kept once, and gone on with after a kill."""

from collections.abc import Iterable
from typing import Any

import pytest

from adacheck_store.format.layout import whole_box
from adacheck_store.placement import Node
from adacheck_store.redundancy.assign import Topology
from adacheck_store.redundancy.costs import exchange_bytes
from adacheck_store.redundancy.shares import shares
from adacheck_store.redundancy.sighting import Piece
from adacheck_store.redundancy.states import Holding, Side, states
from tests.ranks.test_shared import count_exchanges, kept, revisions
from tests.ranks.worker import STEPS, Launcher, build, check_against

pytestmark = pytest.mark.fault

Ranks = Iterable[int]


def killed_and_restored(tmp_path, kind: str, ranks: int):
    """Train, lose every rank by SIGKILL, go on: each step has the bits of the undisturbed run.

    The last attempt, and the store.
    """
    launcher = Launcher(tmp_path, kind, ranks)
    reference = launcher.reference()
    store = tmp_path / "store"
    first = launcher.start(store, pause_s=0.02)
    first.until(10)
    first.kill(ranks - 1)
    check_against(reference, first)
    second = launcher.start(store, before_attach=count_exchanges)
    assert second.wait() == [0] * ranks
    check_against(reference, second)
    assert min(second.every("restored")) >= 8
    assert second.every("final", "digest") == [known[STEPS][0] for known in reference]
    assert second.every("stored", "mismatch") == [""] * ranks
    return second, store


def held(name: str, tensor: Any, rank: int, param: Ranks, optimizer: Ranks) -> Holding:
    """What a rank has of a whole tensor in fp32, by which ranks have the parameter and moments."""
    piece = Piece((whole_box(tuple(tensor.shape)),))
    sides = [
        Side(
            piece=piece, copies=on, nbytes=count * tensor.numel() * 4, changes=tensor.requires_grad
        )
        if rank in on else None
        for on, count in ((frozenset(param), 1), (frozenset(optimizer), 2))
    ]  # fmt: skip
    return Holding(
        scope="", name=name, shape=tuple(tensor.shape), param=sides[0], optimizer=sides[1]
    )


def check_bytes(attempt, store, run: dict[int, list[Holding]]) -> None:
    """A step keeps, and the ranks have sent each other, what the pure rules say of the strategy.

    ``run`` is what each rank holds; nothing is on several ranks that are not all.
    """
    topology = Topology(nodes=[Node(name="n")], ranks=dict.fromkeys(run, "n"))
    parts = shares(states(run), topology).parts
    sizes = kept(store, STEPS)
    assert [sum(sizes[part.name].values()) for part in parts] == [
        part.step_bytes(gradient_bytes=4) for part in parts
    ]
    tokens = sum(
        (each.param is not None) + 2 * (each.optimizer is not None)
        for mine in run.values() for each in mine
    )  # fmt: skip
    sent = [sum(exchanged[:4]) for exchanged in attempt.every("stored", "exchanged")]
    assert sum(sent) == exchange_bytes(tokens=tokens, sets=0, runs=0).payload


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_zero_redundancy_optimizer(tmp_path, ranks):
    """Each gradient is kept by the rank that steps by it; the others read the parameter alone."""
    attempt, store = killed_and_restored(tmp_path, "zero", ranks)
    model = build("zero_whole", 0, 1)[0]
    load = dict.fromkeys(range(ranks), 0)
    stepped: dict[str, int] = {}
    for group in (list(model[:-1].named_parameters()), [("5.weight", model[-1].weight)]):
        for name, param in sorted(group, key=lambda each: -each[1].numel()):
            stepped[name] = min(load, key=load.__getitem__)  # as torch deals them out
            load[stepped[name]] += param.numel()
    run = {
        rank: [
            held(name, param, rank, range(ranks), [stepped[name]] if name in stepped else [])
            for name, param in model.named_parameters()
        ]
        for rank in range(ranks)
    }  # fmt: skip
    check_bytes(attempt, store, run)
    for text in attempt.every("stored", "redundancy"):
        assert "1 of 8 states have copies on several ranks and are kept once; 7 more" in text
    assert revisions(store)[-1].redundancy is not None
