"""Records to put: small worlds of one run, and sources that misbehave."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from adacheck_store.format import keys
from adacheck_store.format.head import ArrayInfo, Head, SealedHead
from adacheck_store.format.ids import BLOCK_BYTES, block_digests
from adacheck_store.format.record import Block, Record, verify_record
from adacheck_store.tiers.base import RecordSource, Source, Tier

MIB = 1 << 20
Arrays = dict[str, tuple[str, bytes]]


def sealed(kind: str, arrays: Arrays | None = None, **fields: object) -> Record:
    """Seal a record of any kind; arrays are name -> (dtype, bytes)."""
    arrays = dict(sorted((arrays or {}).items()))
    infos = []
    for name, (dtype, data) in arrays.items():
        one = ArrayInfo(name=name, dtype=dtype, elements=0, digests=())
        size = ITEM[one.dtype]
        infos.append(
            ArrayInfo(
                name=name, dtype=dtype, elements=len(data) // size,
                digests=block_digests(memoryview(data)),
            )
        )  # fmt: skip
    head = Head(kind=kind, arrays=tuple(infos), **fields)  # type: ignore[arg-type]
    return Record(
        SealedHead.seal(head, {"writer": "tests"}),
        {name: memoryview(data) for name, (_, data) in arrays.items()},
    )


ITEM = {
    "BOOL": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8,
    "C64": 8, "C128": 16, "I64": 8,
}  # fmt: skip


@dataclass
class World:
    """A run with one term: its layout and manifest, and records that fit them."""

    run: str = "gpt-small"
    term: str = field(default_factory=lambda: str(keys.new_term(1)))

    def __post_init__(self) -> None:
        self.layout = sealed("layout", run=self.run)
        self.manifest = sealed("manifest", run=self.run, term=self.term, step=0)
        self.part, self.rank = keys.part_name(0), keys.rank_name(0)

    def roots(self) -> list[RecordSource]:
        """Layout and manifest."""
        layout = keys.layout_key(self.run, self.layout.sealed.id)
        manifest = keys.manifest_key(self.run, self.term, 0)
        return [
            RecordSource(str(layout), self.layout),
            RecordSource(str(manifest), self.manifest),
        ]

    def base(self, step: int, arrays: Arrays, token: str = "") -> RecordSource:
        """A base."""
        record = sealed(
            "base", arrays, run=self.run, term=self.term, part=self.part, step=step, body={},
            **self._links(),
        )  # fmt: skip
        key = keys.base_key(self.run, self.term, self.part, step, token)
        return RecordSource(str(key), record)

    def delta(self, step: int, arrays: Arrays | None = None, part: str = "") -> RecordSource:
        """A delta."""
        part = part or self.part
        record = sealed(
            "delta", arrays, run=self.run, term=self.term, part=part, step=step, **self._links()
        )
        return RecordSource(str(keys.delta_key(self.run, self.term, part, step)), record)

    def extra(self, step: int, arrays: Arrays | None = None) -> RecordSource:
        """An extra."""
        record = sealed(
            "extra", arrays, run=self.run, term=self.term, part=self.rank, step=step,
            manifest=self.manifest.sealed.id,
        )  # fmt: skip
        return RecordSource(str(keys.extra_key(self.run, self.term, self.rank, step)), record)

    def claim(self, index: int, term: str = "") -> RecordSource:
        """A claim in the log."""
        record = sealed("claim", run=self.run, term=term or self.term, step=index)
        return RecordSource(str(keys.log_key(self.run, index)), record)

    def _links(self) -> dict[str, str]:
        manifest = self.manifest.sealed.id
        return {"layout": self.layout.sealed.id, "manifest": manifest, "parent": manifest}


def noise(size: int) -> bytes:
    """Random bytes."""
    return os.urandom(size)


def grads(size: int = 3 * MIB + 1000) -> Arrays:
    """A delta's arrays: one of several blocks, a small and an empty one."""
    return {
        "0/layers/grad.bf16": ("BF16", noise(size)),
        "0/norms/grad.raw": ("F32", noise(4096)),
        "0/spare/grad.raw": ("F32", b""),
    }


def state(size: int = 9 * MIB + 400) -> Arrays:
    """A base's arrays: more than one page and chunk, one block, and none."""
    return {
        "layers/exp_avg": ("F32", noise(size)),
        "layers/param": ("F32", noise(size)),
        "norms/param": ("BF16", noise(2000)),
        "spare/param": ("F32", b""),
    }


@dataclass
class StreamSource:
    """A source whose id is unknown beforehand, whose blocks interleave and reuse one buffer.

    ``change`` may alter the stream of blocks; ``failure`` is raised after ``fail_after`` blocks.
    """

    inner: RecordSource
    announce: bool = False
    change: Callable[[Iterable[Block]], Iterable[Block]] = iter
    fail_after: int | None = None
    seals: int = 0

    @property
    def key(self) -> str:
        """The record's key."""
        return self.inner.key

    @property
    def expected_id(self) -> str | None:
        """The id, if it is to be known."""
        return self.inner.expected_id if self.announce else None

    def blocks(self) -> Iterator[Block]:
        """Blocks of all arrays in turn, each in the same buffer."""
        buffer = bytearray(BLOCK_BYTES)
        ordered = sorted(self.inner.blocks(), key=lambda block: block.index)
        for count, block in enumerate(self.change(ordered)):
            if count == self.fail_after:
                raise InterruptedError("the writer died")
            view = memoryview(buffer)[: block.data.nbytes]
            view[:] = block.data
            yield Block(block.array, block.index, view)
            buffer[:] = b"\xee" * BLOCK_BYTES

    def seal(self) -> SealedHead:
        """The head."""
        self.seals += 1
        return self.inner.seal()


def fetch(tier: Tier, key: str) -> Record:
    """Read a record by the tier, block by block and in one go, twice, and verify it."""
    head = tier.head(key)
    arrays: dict[str, memoryview] = {}
    for info in head.head.arrays:
        whole = bytes(tier.read(key, info.name, 0, len(info.digests)))
        single = [bytes(tier.read(key, info.name, i, 1)) for i in range(len(info.digests))]
        into = bytearray(len(whole))
        tier.read_into(key, info.name, 0, len(info.digests), memoryview(into))
        assert b"".join(single) == whole == into
        arrays[info.name] = memoryview(whole)
    record = Record(head, arrays)
    verify_record(record)
    return record


def same(tier: Tier, sources: Sequence[Source]) -> bool:
    """Whether a tier gives back just what the sources are."""
    for source in sources:
        inner = source.inner if isinstance(source, StreamSource) else source
        assert isinstance(inner, RecordSource)
        got = fetch(tier, source.key)
        if got.sealed.raw != inner.record.sealed.raw or got.sealed.info != inner.record.sealed.info:
            return False
        if got.arrays != inner.record.arrays:
            return False
    return True
