"""Agreement: all ranks tell rank 0 what they hold, and rank 0 tells all what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

import adacheck_store
from adacheck_store.format import canonical, strict
from adacheck_store.format.errors import AdaCheckError, GroupError
from adacheck_store.format.rank_sets import ranks_of, runs_of

from . import sighting
from .exchange import Ranks, Rounds
from .sighting import Piece
from .states import Holding, Side
from .witness import Witness

LENGTH_BYTES = 8


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


def _version() -> str:
    """Ranks of different versions may see the same tensor and mean different things."""
    return f"{adacheck_store.__version__} (digests {sighting.VERSION})"


def encode_told(told: Told) -> bytes:
    """What the rank holds, as JSON with its length before it, then the rest, as JSON.

    Each set of ranks stands in it once, as runs: it is as long however many ranks there are.
    """
    sets: dict[Ranks, int] = {}

    def side(found: Side | None) -> Any:
        if found is None:
            return None
        at = sets.setdefault(found.copies, len(sets))
        piece = found.piece
        return [piece.boxes, piece.flat, at, found.nbytes, found.changes, found.why]

    rows = [[h.scope, h.name, h.shape, side(h.param), side(h.optimizer)] for h in told.held]
    held = canonical.dumps({"held": rows, "sets": [runs_of(each) for each in sets]})
    said = told.witness
    witness = said and [said.since, said.digests.hex(), said.trouble]
    own = {
        "version": _version(), "node": told.node, "updated": told.updated, "witness": witness,
        "by": told.by,
    }  # fmt: skip
    return len(held).to_bytes(LENGTH_BYTES, "little") + held + canonical.dumps(own)


@dataclass(frozen=True, slots=True)
class Known:
    """What was read at one look, so that what ranks say alike is one object, however many say it.

    ``held`` by its bytes, ``sets`` by their runs: where each rank holds a shard of its own all
    still name the same few sets, each of as many integers as there are ranks.
    """

    held: dict[bytes, tuple[Holding, ...]] = field(default_factory=dict)
    sets: dict[tuple[int, ...], Ranks] = field(default_factory=dict)

    def ranks(self, said: Any) -> Ranks:
        """The set that these runs are; raises `ValueError` as `ranks_of`."""
        runs = tuple(map(strict.count, strict.items(said)))
        if runs not in self.sets:
            self.sets[runs] = frozenset(ranks_of(runs))
        return self.sets[runs]


def decode_told(data: bytes, rank: int, known: Known) -> Told:
    """Inverse of `encode_told`; raises `GroupError` that names the rank.

    ``known`` has what was read before at this look, and gets what is read.
    """
    try:
        end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
        said = strict.fields(
            canonical.loads(data[end:]), "version", "node", "updated", "witness", "by"
        )
        if said["version"] != _version():
            raise ValueError(f"it runs version {said['version']}, rank 0 {_version()}"[:200])
        held = data[LENGTH_BYTES:end]
        if held not in known.held:
            known.held[held] = _decode_held(held, known)
        return Told(
            node=strict.text(said["node"]), updated=bool(said["updated"]), held=known.held[held],
            witness=None if said["witness"] is None else _witness(said["witness"]),
            by=strict.text(said["by"], empty=True),
        )  # fmt: skip
    except (AdaCheckError, ValueError, TypeError, IndexError) as error:
        raise GroupError(
            f"what rank {rank} says it holds cannot be read: {error}"[:400],
            hint="run the same version of adacheck-store on all ranks",
        ) from error


def _decode_held(data: bytes, known: Known) -> tuple[Holding, ...]:
    said = strict.fields(canonical.loads(data), "sets", "held")
    sets = [known.ranks(runs) for runs in strict.items(said["sets"])]

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
    return tuple(held)


def _witness(value: Any) -> Witness:
    since, digests, trouble = strict.items(value, 3)
    return Witness(
        since=int(since), digests=strict.octets(digests), trouble=strict.text(trouble, empty=True),
    )  # fmt: skip


def _pair(value: Any) -> tuple[int, int]:
    start, stop = strict.items(value, 2)
    return strict.count(start), strict.count(stop)
