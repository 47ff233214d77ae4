"""Agreement: all ranks tell rank 0 what they hold, and rank 0 tells all what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from adacheck_store.format import canonical, strict
from adacheck_store.format.errors import AdaCheckError, GroupError

from .exchange import Ranks, Rounds
from .sighting import Piece
from .states import Holding, Side
from .witness import Witness


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a rank tells of itself: its node, whether it has made an update between its two looks,
    what it holds, its witness of a step lately (None: it has none), and by which assignment it
    writes, as `name_of` it (empty: by none, all that it holds).
    """

    node: str
    updated: bool
    held: tuple[Holding, ...]
    witness: Witness | None = None
    by: str = ""


def name_of(assignment: bytes) -> str:
    """A short name for an assignment as rank 0 has sent it."""
    return xxhash.xxh3_128_hexdigest(assignment)


def encode_told(told: Told) -> bytes:
    """As JSON, in which each set of ranks stands once."""
    sets: dict[Ranks, int] = {}

    def side(found: Side | None) -> Any:
        if found is None:
            return None
        at = sets.setdefault(found.copies, len(sets))
        piece = found.piece
        return [piece.boxes, piece.flat, at, found.nbytes, found.changes, found.why]

    rows = [[h.scope, h.name, h.shape, side(h.param), side(h.optimizer)] for h in told.held]
    said = told.witness
    witness = said and [said.since, said.digests.hex(), said.trouble]
    return canonical.dumps(
        {"node": told.node, "updated": told.updated, "held": rows, "witness": witness,
         "by": told.by, "sets": [sorted(each) for each in sets]}
    )  # fmt: skip


def decode_told(data: bytes, rank: int) -> Told:
    """Inverse of `encode_told`; raises `GroupError` that names the rank."""
    try:
        said = strict.fields(
            canonical.loads(data), "node", "updated", "sets", "held", "witness", "by"
        )
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
        return Told(
            node=strict.text(said["node"]), updated=bool(said["updated"]), held=tuple(held),
            witness=None if said["witness"] is None else _witness(said["witness"]),
            by=strict.text(said["by"], empty=True),
        )  # fmt: skip
    except (AdaCheckError, ValueError, TypeError, IndexError) as error:
        raise GroupError(
            f"what rank {rank} says it holds cannot be read: {error}"[:400],
            hint="run the same version of adacheck-store on all ranks",
        ) from error


def _witness(value: Any) -> Witness:
    since, digests, trouble = strict.items(value, 3)
    return Witness(
        since=int(since), digests=bytes.fromhex(strict.text(digests, empty=True)),
        trouble=strict.text(trouble, empty=True),
    )  # fmt: skip


def _pair(value: Any) -> tuple[int, int]:
    start, stop = strict.items(value, 2)
    return strict.count(start), strict.count(stop)
