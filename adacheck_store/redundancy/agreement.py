"""Agreement: all ranks tell rank 0 what they hold, and rank 0 tells all what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from adacheck_store.format import canonical, strict
from adacheck_store.format.errors import AdaCheckError, GroupError

from .exchange import Ranks, Rounds
from .sighting import Piece
from .states import Holding, Side


def agreed(
    rank: int, size: int, told: bytes, decide: Callable[[Sequence[bytes]], bytes]
) -> Rounds[bytes]:
    """What rank 0 decides from what all ranks tell, on all of them; two rounds.

    Where ``decide`` raises, that is raised on rank 0, and a `GroupError` with its text on the
    others.
    """
    heard = yield [told, *[b""] * (size - 1)]
    answer, failure = b"", None
    if rank == 0:
        try:
            answer = b"+" + decide(heard)
        except AdaCheckError as error:
            answer, failure = b"-" + str(error).encode(), error
    said = yield [answer] * size
    if failure is not None:
        raise failure
    if said[0][:1] != b"+":
        raise GroupError(f"rank 0: {said[0][1:].decode(errors='replace') or 'says nothing'}"[:2000])
    return bytes(said[0][1:])


def encode_holdings(node: str, updated: bool, held: Iterable[Holding]) -> bytes:
    """What a rank holds, its node, and whether it has made an update between its two looks.

    As JSON, in which each set of ranks stands once.
    """
    sets: dict[Ranks, int] = {}

    def side(found: Side | None) -> Any:
        if found is None:
            return None
        at = sets.setdefault(found.copies, len(sets))
        piece = found.piece
        return [piece.boxes, piece.flat, at, found.nbytes, found.changes, found.why]

    rows = [[h.scope, h.name, h.shape, side(h.param), side(h.optimizer)] for h in held]
    return canonical.dumps(
        {"node": node, "updated": updated, "held": rows, "sets": [sorted(each) for each in sets]}
    )


def decode_holdings(data: bytes, rank: int) -> tuple[str, bool, tuple[Holding, ...]]:
    """Inverse of `encode_holdings`; raises `GroupError` that names the rank."""
    try:
        said = strict.fields(canonical.loads(data), "node", "updated", "sets", "held")
        sets = [
            frozenset(strict.count(one) for one in strict.items(ranks))
            for ranks in strict.items(said["sets"])
        ]

        def side(value: Any) -> Side | None:
            if value is None:
                return None
            boxes, flat, at, nbytes, changes, why = strict.items(value, 6)
            piece = Piece(
                tuple(tuple(_pair(edge) for edge in strict.items(box)) for box in boxes),
                None if flat is None else _pair(flat),
            )
            return Side(
                piece=piece, copies=sets[strict.count(at)], nbytes=strict.count(nbytes),
                changes=bool(changes), why=strict.text(why, empty=True),
            )  # fmt: skip

        held = []
        for row in strict.items(said["held"]):
            scope, name, shape, param, optimizer = strict.items(row, 5)
            held.append(
                Holding(
                    scope=strict.text(scope, empty=True), name=strict.text(name),
                    shape=tuple(strict.count(size) for size in strict.items(shape)),
                    param=side(param), optimizer=side(optimizer),
                )
            )  # fmt: skip
        return strict.text(said["node"]), bool(said["updated"]), tuple(held)
    except (AdaCheckError, ValueError, TypeError, IndexError) as error:
        raise GroupError(
            f"what rank {rank} says it holds cannot be read: {error}"[:400],
            hint="run the same version of adacheck-store on all ranks",
        ) from error


def _pair(value: Any) -> tuple[int, int]:
    start, stop = strict.items(value, 2)
    return strict.count(start), strict.count(stop)
