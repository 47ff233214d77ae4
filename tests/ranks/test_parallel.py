"""Further ways to train in parallel: each found out, kept once, and gone on with after a kill."""

from collections.abc import Iterable
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import nn

from adacheck_store.catalog import read_catalog
from adacheck_store.format.layout import whole_box
from adacheck_store.placement import Node
from adacheck_store.redundancy.assign import Topology
from adacheck_store.redundancy.costs import exchange_bytes
from adacheck_store.redundancy.shares import shares
from adacheck_store.redundancy.sighting import Box, Piece
from adacheck_store.redundancy.states import Holding, Side, kept_bytes, states
from adacheck_store.store import open_store
from adacheck_store.tools.restore import restore
from tests.ranks.parallel import bare
from tests.ranks.test_shared import count_exchanges, kept, revisions
from tests.ranks.worker import BASE_EVERY, STEPS, Launcher, build, check_against
from tests.waits import until

pytestmark = pytest.mark.fault

Ranks = Iterable[int]


def killed_and_restored(tmp_path, kind: str, ranks: int, **options):
    """Train, lose every rank by SIGKILL, go on: each step has the bits of the undisturbed run.

    The last attempt, started with ``options``, and the store.
    """
    launcher = Launcher(tmp_path, kind, ranks)
    reference = launcher.reference()
    store = tmp_path / "store"
    first = launcher.start(store, hold=10)
    first.until(10)
    until(lambda: folded(store, BASE_EVERY), "a base of every part")
    first.kill(ranks - 1)
    check_against(reference, first)
    second = launcher.start(store, before_attach=count_exchanges, **options)
    assert second.wait() == [0] * ranks
    check_against(reference, second)
    assert min(second.every("restored")) >= 8
    assert second.every("final", "digest") == [known[STEPS][0] for known in reference]
    assert second.every("stored", "mismatch") == [""] * ranks
    return second, store


def folded(store, step: int) -> bool:
    """Whether every part has a base of a step, or of a later one."""
    with open_store(store.as_uri()) as opened:
        bases = read_catalog(opened.tiers, "e2e").bases.values()
    return all(any(ref.step >= step for ref in refs) for refs in bases)


def held(
    name: str, tensor: Any, rank: int, param: Ranks, optimizer: Ranks, box: Box | None = None
) -> Holding:
    """What a rank has of a tensor or of a box of it, and who has the parameter, and moments."""
    piece = Piece((box or whole_box(tuple(tensor.shape)),))
    sides = [
        Side(
            piece=piece, copies=on, nbytes=count * piece.elements * tensor.element_size(),
            changes=tensor.requires_grad,
        )
        if rank in on else None
        for on, count in ((frozenset(param), 1), (frozenset(optimizer), 2))
    ]  # fmt: skip
    return Holding(
        scope="", name=name, shape=tuple(tensor.shape), param=sides[0], optimizer=sides[1]
    )


def check_bytes(
    attempt,
    store,
    run: dict[int, list[Holding]],
    *,
    sets: int = 0,
    half: str = "-",
    empty: int = 0,
) -> None:
    """A step keeps, and the ranks have sent each other, what the pure rules say of the strategy.

    ``run`` is what each rank holds. Besides sets of all ranks and of one, ranks have been told
    ``sets``, of neighbours. Tensors whose names begin with ``half`` have gradients of two bytes.
    Of pieces of nothing ``empty`` tensors are offered: moments, whose counters change, and frozen.
    """
    topology = Topology(nodes=[Node(name="n")], ranks=dict.fromkeys(run, "n"))
    sizes = kept(store, STEPS)
    for part in shares(states(run), topology).parts:
        assert {name: size for name, size in sizes[part.name].items() if size} == {
            state.name: kept_bytes(state, keep, 2 if state.name.startswith(half) else 4)
            for state, keep in zip(part.states, part.kept, strict=True) if state.changes
        }  # fmt: skip
    tokens = sum(
        (each.param is not None) + 2 * (each.optimizer is not None)
        for mine in run.values() for each in mine
    )  # fmt: skip
    told = exchange_bytes(tokens=tokens + empty, sets=sets, runs=sets)
    assert sent(attempt) == told.payload


def sent(attempt) -> int:
    """Bytes that all ranks have sent each other to find copies, at the first comparison."""
    return sum(sum(exchanged[:4]) for exchanged in attempt.every("stored", "exchanged"))


def dealt(groups: Iterable[Iterable[tuple[str, Any]]], ranks: int) -> dict[str, int]:
    """Who steps each parameter under ZeroRedundancyOptimizer: as torch deals them out."""
    load = dict.fromkeys(range(ranks), 0)
    stepped: dict[str, int] = {}
    for group in groups:
        for name, param in sorted(group, key=lambda each: -each[1].numel()):
            stepped[name] = min(load, key=load.__getitem__)
            load[stepped[name]] += param.numel()
    return stepped


def scopes(store) -> dict[str, list[str]]:
    """The scopes of each tensor's states in the newest revision."""
    found = revisions(store)[-1].redundancy
    told: dict[str, list[str]] = {}
    for part in found.parts:
        for name, ground in part.pairs():
            told.setdefault(found.names[name], []).append(found.grounds[ground].scope)
    return told


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_zero_redundancy_optimizer(tmp_path, ranks):
    """Each gradient is kept by the rank that steps by it; the others read the parameter alone."""
    attempt, store = killed_and_restored(tmp_path, "zero", ranks)
    model = bare("zero", 0, ranks)
    groups = [*model[:-1].named_parameters()], [("5.weight", model[-1].weight)]
    stepped = dealt(groups, ranks)
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


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_experts_with_an_attention_under_zero(tmp_path, ranks):
    """The paper's Figure 6: the attention's parameters are on all ranks, its moments on one."""
    attempt, store = killed_and_restored(tmp_path, "moe", ranks)
    every = range(ranks)
    models = [bare("moe", rank, ranks) for rank in every]
    shared = {n: p for n, p in models[0].named_parameters() if not n.startswith("expert")}
    stepped = dealt([shared.items()], ranks)
    run = {
        rank: [
            held(name, p, rank, every, [stepped[name]])
            if name in shared else held(name, p, rank, [rank], [rank])
            for name, p in model.named_parameters()
        ]
        for rank, model in zip(every, models, strict=True)
    }  # fmt: skip
    check_bytes(attempt, store, run)
    own = [f"r{rank:06d}" for rank in every]
    assert scopes(store) == {
        name: [""] if name in shared else own for name, _ in models[0].named_parameters()
    }
    for text in attempt.every("stored", "redundancy"):
        assert f"0 of {8 + 4 * ranks} states have copies on several ranks" in text
        assert "; 8 more have of their parameter or optimizer alone" in text


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_stages_of_a_pipeline(tmp_path, ranks):
    """Each stage has a ``layers.1``: no copies, though they have one name; replicas of it are."""
    attempt, store = killed_and_restored(tmp_path, "stages", ranks)
    width = ranks // 2
    run = {}
    for rank in range(ranks):
        replicas = range(rank // width * width, rank // width * width + width)
        run[rank] = [
            held(name, p, rank, replicas, replicas) if p.requires_grad
            else held(name, p, rank, range(ranks), [])
            for name, p in bare("stages", rank, ranks).named_parameters()
        ]  # fmt: skip
    check_bytes(attempt, store, run, sets=ranks if width > 1 else 0)
    own = ["r000000", f"r{width:06d}"]
    assert {name: sorted(each) for name, each in scopes(store).items()} == {
        "layers.0.weight": [""], "layers.0.bias": [""],
        "layers.1.weight": own, "layers.1.bias": own,  # of one shape
        "layers.2.weight": own, "layers.2.bias": own,  # and of two
    }  # fmt: skip


def chunk(size: int, at: int, of: int) -> tuple[int, int]:
    """Rows of one of so many shards, as torch cuts them: the last may have fewer, or none."""
    each = -(-size // of)
    return min(at * each, size), min((at + 1) * each, size)


def cut(
    name: str, tensor: Any, rank: int, copies: Ranks, rows: tuple[int, int], dim: int
) -> Holding:
    """What a rank has of a tensor that is cut in one dimension: both sides, or the parameter."""
    box = list(whole_box(tuple(tensor.shape)))
    box[dim] = rows
    return held(name, tensor, rank, copies, copies if tensor.requires_grad else [], tuple(box))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_uneven_and_empty_shards(tmp_path, ranks):
    """FSDP2 shards five rows, and one: nothing is on two ranks, and each keeps its own."""
    attempt, store = killed_and_restored(tmp_path, "fsdp", ranks)
    rest = {2: {"empty": 3}, 4: {"empty": 13, "sets": 3}}[ranks]  # three have of one row nothing
    check_bytes(attempt, store, _sharded(ranks, ranks), **rest)
    said = {2: "0 of 12 states", 4: "1 of 22 states"}[ranks]  # that of nothing, frozen
    assert all(said in text for text in attempt.every("stored", "redundancy"))


def test_shards_that_lie_on_two_ranks_each(tmp_path):
    """HSDP on a mesh of two by two: each shard is kept by one of the two that have it."""
    attempt, store = killed_and_restored(tmp_path, "hsdp", 4)
    # On two ranks the last layer has nothing; placements call even that replicated.
    check_bytes(attempt, store, _sharded(4, 2), sets=4, empty=8)
    for text in attempt.every("stored", "redundancy"):
        assert "12 of 12 states have copies on several ranks" in text


def _sharded(ranks: int, shards: int) -> dict[int, list[Holding]]:
    """What ranks have under FSDP2: shard after shard, and all of them again; no empty ones."""
    whole = build("whole", 0, 1)[0]
    whole[-1].bias.requires_grad_(False)
    run: dict[int, list[Holding]] = {}
    for rank in range(ranks):
        copies = range(rank % shards, ranks, shards)
        run[rank] = [
            cut(name, param, rank, copies, rows, 0)
            for name, param in whole.named_parameters()
            if (rows := chunk(len(param), rank % shards, shards))[0] < rows[1]
        ]  # fmt: skip
    return run


def test_tensor_parallelism(tmp_path):
    """Two layers are cut by columns and rows; what is around them is on both, and kept once."""
    attempt, store = killed_and_restored(tmp_path, "tp", 2)
    dims = {"0.weight": 0, "0.bias": 0, "3.weight": 1}
    run = {
        rank: [
            cut(name, p, rank, [rank], chunk(p.shape[dims[name]], rank, 2), dims[name])
            if name in dims else held(name, p, rank, range(2), range(2))
            for name, p in whole_of_tp().named_parameters()
        ]
        for rank in range(2)
    }  # fmt: skip
    check_bytes(attempt, store, run)
    for text in attempt.every("stored", "redundancy"):
        assert "5 of 11 states have copies on several ranks" in text


def whole_of_tp(width: int = 37) -> nn.Module:
    """What `worker` cuts as ``tp``."""
    return nn.Sequential(
        nn.Linear(9, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 5), nn.Linear(5, 1)
    )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tensor_parallelism_sharded_again(tmp_path, ranks):
    """FSDP2 cuts what tensor parallelism has cut: each piece is where torch itself has it."""
    file = tmp_path / "whole.safetensors"
    unpruned = {rank: {"keep": 100} for rank in range(ranks)}
    attempt, store = killed_and_restored(tmp_path, "tp_fsdp", ranks, dump=str(file), given=unpruned)
    (step,) = set(attempt.every("restored"))
    with open_store(store.as_uri()) as opened:
        restore(opened, tmp_path / "restored.safetensors", "e2e", step=step)
    ours, theirs = load_file(tmp_path / "restored.safetensors"), load_file(file)
    for name, tensor in theirs.items():
        assert tensor.equal(ours[f"model/{name}"])
    elements = sum(tensor.numel() for tensor in theirs.values())
    assert sum(sum(part.values()) for part in kept(store, STEPS).values()) == 4 * elements
    empty = 0 if ranks == 2 else 4  # the last layer has one row
    tokens = 3 * len(theirs) * ranks - empty
    neighbours = 0 if ranks == 2 else ranks
    assert sent(attempt) == exchange_bytes(tokens=tokens, sets=neighbours, runs=neighbours).payload
    shared = "5 of 11" if ranks == 2 else "8 of 24"
    for text in attempt.every("stored", "redundancy"):
        assert f"{shared} states have copies on several ranks" in text
    assert {scope for name, each in scopes(store).items() if name[0] != "4" for scope in each} == {
        ""
    }


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_plan_that_treats_each_operator_in_its_own_way(tmp_path, ranks):
    """Copies, cuts, halves, what one rank steps and sends, what each has alone: each found out."""
    attempt, store = killed_and_restored(tmp_path, "mixed", ranks)
    every = range(ranks)
    run = {rank: _of_a_plan(rank, ranks) for rank in every}
    check_bytes(attempt, store, run, sets=0 if ranks == 2 else ranks, half="narrow")
    own = [f"r{rank:06d}" for rank in every]
    assert {name for name, each in scopes(store).items() if each == own} == {
        "own.weight", "own.bias"
    }  # fmt: skip
    for text in attempt.every("restored", "certificate"):
        assert "exact" in text, "folded by another arithmetic than that of the part's own dtypes"


def _of_a_plan(rank: int, ranks: int) -> list[Holding]:
    """What a rank has of the operators of ``mixed``; their cuts are on every other rank."""
    every, column = range(ranks), range(rank % 2, ranks, 2)
    found = []
    for name, p in bare("mixed", rank, ranks).named_parameters():
        operator = name.split(".")[0]
        box = None
        if operator == "columns" or name == "rows.weight":
            low, high = [(0, 7), (7, 13)][rank % 2]
            whole = whole_box(tuple(p.shape))
            box = (*whole[:1], (low, high)) if operator == "rows" else ((low, high), *whole[1:])
        param = [rank] if operator == "own" else column if box else every
        optimizer = [0] if operator == "sent" else column if box else every
        found.append(held(name, p, rank, param, optimizer, box))
    return found
