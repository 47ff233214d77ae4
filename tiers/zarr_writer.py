"""How the zarr tier writes: chunks first, then documents, the record's own group last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adacheck_store.format.errors import FormatError, RecordNotFoundError
from adacheck_store.format.head import SealedHead
from adacheck_store.format.ids import Buffer
from adacheck_store.format.keys import Key, pack_key, parse_key

from .base import Source
from .flight import Batch
from .intake import Intake, check_same, placed, sizes_of
from .objects import Objects
from .zarr_chunks import ChunkWriter
from .zarr_meta import (
    DOCUMENT,
    STREAM_CHUNK_BYTES,
    GroupHead,
    array_document,
    chunk_bytes,
    group_document,
)
from .zarr_packs import DATA, MAX_RECORDS, Pack, PackShelf, pack_document, place_of

_GAPS = 16
"""A gap before a record of a pack is at most one of so many parts of it."""

_RANKS = {"layout": 0, "manifest": 1, "base": 2, "pack": 3, "log": 4}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A group whose chunks are written and whose document is to follow.

    ``stands`` says that its document is there and good; ``replaces`` that a damaged one is.
    """

    key: Key
    heads: tuple[SealedHead, ...]
    document: bytes
    has_chunks: bool = False
    stands: bool = False
    replaces: bool = False

    @property
    def rank(self) -> int:
        """Place in the order in which documents are written."""
        return _RANKS[self.key.kind]


def plan(sources: Sequence[Source], keys: Sequence[Key]) -> tuple[list[Source], list[list[Source]]]:
    """Part sources into those with a group of their own, and runs of consecutive steps."""
    own = [s for s, key in zip(sources, keys, strict=True) if key.kind not in ("delta", "extra")]
    stepped = [(k, s) for s, k in zip(sources, keys, strict=True) if k.kind in ("delta", "extra")]
    stepped.sort(key=lambda pair: (place_of(pair[0]), pair[0].step))
    runs: list[list[Source]] = []
    last: Key | None = None
    for key, source in stepped:
        follows = last is not None and (place_of(key), key.step) == (place_of(last), last.step + 1)
        if not follows or len(runs[-1]) == MAX_RECORDS:
            runs.append([])
        runs[-1].append(source)
        last = key
    return own, runs


def take_group(batch: Batch, source: Source, begun: list[Key]) -> Arrival:
    """Write the arrays of a record that has a group of its own."""
    key = parse_key(source.key)
    held, damaged = _held(batch.objects, source)
    intake = Intake(source, held.sealed if held else None)
    if held is None and not damaged:
        begun.append(key)
    known = sizes_of(source) or {}
    writers: dict[str, ChunkWriter] = {}
    for block in intake.blocks():
        if block.array not in writers:
            writers[block.array] = _chunk_writer(batch, key, block.array, held, known)
        writers[block.array].add(block.data)
    ends = {name: writer.end() for name, writer in writers.items()}
    sealed = intake.seal()
    group = GroupHead(sealed, {info.name: ends.get(info.name, 0) for info in sealed.head.arrays})
    _write_documents(batch, key, group, fresh=key in begun)
    return Arrival(
        key, (sealed,), group.document(), has_chunks=bool(sealed.head.arrays),
        stands=held is not None, replaces=damaged,
    )  # fmt: skip


def _chunk_writer(
    batch: Batch, key: Key, array: str, held: GroupHead | None, known: dict[str, int]
) -> ChunkWriter:
    """The writer of one array: cut as it stands, or by its size where that is known."""
    name, size = f"{key}/{array}", known.get(array)
    if held is not None:
        size = held.sealed.head.array(array).nbytes
        return ChunkWriter(batch, name, held.chunks[array], expected=size, repair=True)
    chunk = chunk_bytes(size) if size else STREAM_CHUNK_BYTES
    return ChunkWriter(batch, name, chunk, expected=size or None)


def _held(objects: Objects, source: Source) -> tuple[GroupHead | None, bool]:
    """The record that stands under a source's key, or whether a damaged document does."""
    try:
        held = GroupHead.parse(objects.get(f"{source.key}/{DOCUMENT}"))
    except RecordNotFoundError:
        return None, False
    except FormatError:
        # What a damaged log entry said cannot be known, so it is never written over.
        if parse_key(source.key).kind == "log":
            raise
        return None, True
    check_same(source, held.sealed)
    return held, False


def _write_documents(batch: Batch, key: Key, group: GroupHead, *, fresh: bool) -> None:
    """Write the documents of a record's arrays, and of the groups above them."""
    documents: dict[str, bytes] = {}
    for info in group.sealed.head.arrays:
        parts = info.name.split("/")
        for depth in range(1, len(parts)):
            documents["/".join(parts[:depth])] = group_document({})
        text = array_document(info.dtype, info.nbytes, group.chunks[info.name])
        documents[info.name] = text
    for name, text in documents.items():
        batch.put(f"{key}/{name}/{DOCUMENT}", text, if_differs=not fresh)


def take_pack(batch: Batch, shelf: PackShelf, sources: list[Source], begun: list[Key]) -> Arrival:
    """Write the arrays of consecutive steps one after another into one pack.

    Where a pack of the same records stands, its chunks are repaired instead.
    """
    first, last = parse_key(sources[0].key), parse_key(sources[-1].key)
    held = _same_pack(shelf, sources, first, last)
    key = held.key if held else pack_key(first.run, first.term, first.part, first.step, last.step)
    if held is None:
        begun.append(key)
        chunk, total = _cut(sources)
        writer = ChunkWriter(batch, f"{key}/{DATA}", chunk, expected=total)
    else:
        writer = ChunkWriter(batch, f"{key}/{DATA}", max(1, held.chunk), repair=True)
    records = []
    for source in sources:
        with placed(key=source.key):
            records.append((source.key, *_take_packed(writer, source, held)))
    chunk = writer.end()
    text = array_document("U8", writer.nbytes, chunk)
    batch.put(f"{key}/{DATA}/{DOCUMENT}", text, if_differs=held is not None)
    heads = tuple(sealed for _, sealed, _ in records)
    document = pack_document(writer.nbytes, chunk, records)
    return Arrival(key, heads, document, has_chunks=writer.nbytes > 0, stands=held is not None)


def _cut(sources: list[Source]) -> tuple[int, int | None]:
    """How a pack of some sources is cut: bytes of a chunk, and of all together, gaps included
    (None where a source does not know its sizes)."""
    sizes: list[int] = []
    for source in sources:
        known = sizes_of(source)
        if known is None:
            return STREAM_CHUNK_BYTES, None
        sizes.append(sum(known.values()))
    chunk, end = chunk_bytes(sum(sizes)) or STREAM_CHUNK_BYTES, 0
    for nbytes in sizes:
        end = begin_of(end, nbytes, chunk) + nbytes
    return chunk, end or None


def begin_of(end: int, nbytes: int, chunk: int) -> int:
    """Where in a pack a record of so many bytes begins after one that ends at ``end``.

    With a chunk of its own, if the gap before is short beside it: whoever reads a long record from
    its beginning on, in runs as long as chunks, then reads whole objects and not parts of two.
    """
    gap = -end % chunk
    return end + gap if gap * _GAPS <= nbytes else end


def _take_packed(writer: ChunkWriter, source: Source, held: Pack | None) -> tuple[SealedHead, int]:
    """Append a record's arrays in the head's order; unless they come in it they wait in memory.

    Returns the head, and where in the pack they begin: in ``held``, which is repaired, where they
    do there.
    """
    step = parse_key(source.key).step
    intake = Intake(source, held.head(step) if held else None)

    def begin(nbytes: int) -> int:
        at = begin_of(writer.nbytes, nbytes, writer.chunk)
        at = at if held is None else max(writer.nbytes, held.records[step].offset)
        writer.add(memoryview(bytes(at - writer.nbytes)))
        return at

    sizes = sizes_of(source)
    if sizes is not None and getattr(source, "in_order", False):
        at = begin(sum(sizes.values()))
        for block in intake.blocks():
            writer.add(block.data)
        return intake.seal(), at
    lasting = getattr(source, "lasting", False)
    arrays: dict[str, list[Buffer]] = {}
    for block in intake.blocks():
        kept: Buffer = block.data if lasting else bytes(block.data)
        arrays.setdefault(block.array, []).append(kept)
    sealed = intake.seal()
    at = begin(sum(info.nbytes for info in sealed.head.arrays))
    for info in sealed.head.arrays:
        for data in arrays.get(info.name, ()):
            writer.add(memoryview(data))
    return sealed, at


def _same_pack(shelf: PackShelf, sources: list[Source], first: Key, last: Key) -> Pack | None:
    """A pack of exactly these records, if one stands."""
    expected = {parse_key(s.key).step: s.expected_id for s in sources}
    for key in shelf.listing(place_of(first)).packs:
        if (key.step, key.last) != (first.step, last.step):
            continue
        try:
            pack = shelf.load(key)
            if all(pack.head(step).id == name for step, name in expected.items()):
                return pack
        except (FormatError, RecordNotFoundError):
            continue
    return None
