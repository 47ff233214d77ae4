"""Holdings of whole runs under common strategies, in few words."""

from __future__ import annotations

from adacheck_store.format.layout import whole_box
from adacheck_store.placement import Node
from adacheck_store.redundancy.assign import Topology
from adacheck_store.redundancy.exchange import Ranks
from adacheck_store.redundancy.sighting import Piece
from adacheck_store.redundancy.states import Holding, Side

ELEMENTS = 96
SHAPE = (ELEMENTS,)
WHOLE = Piece((whole_box(SHAPE),))


def shard(at: int, of: int, elements: int = ELEMENTS) -> Piece:
    """The ``at``-th of ``of`` equal shards of a tensor."""
    width = elements // of
    assert width
    return Piece((((at * width, (at + 1) * width),),))


def side(piece: Piece, copies: Ranks | set[int], item: int, why: str = "") -> Side:
    """A side of ``item`` bytes an element."""
    return Side(piece=piece, copies=frozenset(copies), nbytes=piece.elements * item, why=why)


def held(
    name: str, param: tuple[Piece, Ranks | set[int]] | None = None,
    optimizer: tuple[Piece, Ranks | set[int]] | None = None, why: str = "",
    shape: tuple[int, ...] = SHAPE,
) -> Holding:  # fmt: skip
    """A half parameter of 2 bytes, and 12 of its optimizer: master copy and two moments."""
    return Holding(
        scope="", name=name, shape=shape,
        param=side(*param, 2, why) if param else None,
        optimizer=side(*optimizer, 12, why) if optimizer else None,
    )  # fmt: skip


def topology(*nodes: int, boot: bool = False) -> Topology:
    """Ranks in order on nodes with so many each; with ``boot`` all nodes are one host."""
    ranks = {}
    for node, count in enumerate(nodes):
        for _ in range(count):
            ranks[len(ranks)] = f"n{node}"
    names = [Node(name=f"n{node}", boot_id="one" if boot else "") for node in range(len(nodes))]
    return Topology(nodes=names, ranks=ranks)


def everyone(size: int) -> Ranks:
    """All ranks."""
    return frozenset(range(size))


def ddp(size: int, tensors: int = 1) -> dict[int, list[Holding]]:
    """Everything everywhere."""
    both = (WHOLE, everyone(size))
    return {r: [held(f"w{i}", both, both) for i in range(tensors)] for r in range(size)}


def zero1(size: int, tensors: int = 1) -> dict[int, list[Holding]]:
    """Parameters everywhere, of the optimizer a shard each."""
    return {
        r: [held(f"w{i}", (WHOLE, everyone(size)), (shard(r, size), {r})) for i in range(tensors)]
        for r in range(size)
    }


def zero3(
    size: int, tensors: int = 1, replicas: int = 1, elements: int = ELEMENTS
) -> dict[int, list[Holding]]:
    """Shards of both, each on ``replicas`` ranks (HSDP, MiCS)."""
    shards = size // replicas
    found = {}
    for r in range(size):
        copies = frozenset(range(r % shards, size, shards))
        both = (shard(r % shards, shards, elements), copies)
        found[r] = [held(f"w{i}", both, both, shape=(elements,)) for i in range(tensors)]
    return found


def figure6(size: int) -> dict[int, list[Holding]]:
    """The paper's case: attention under ZeRO-1, an expert of its own on every rank."""
    return {
        r: [
            held("attention", (WHOLE, everyone(size)), (shard(r, size), {r})),
            held(f"expert{r}", (WHOLE, {r}), (WHOLE, {r})),
        ]
        for r in range(size)
    }
