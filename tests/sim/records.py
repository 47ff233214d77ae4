"""Real records for the references of a simulated world, and places that hold them.

The simulator knows records by their references alone. Tools read bytes: here a reference has a
record of one small block, whose bytes are made of what it holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from adacheck_store.catalog import RecordRef
from adacheck_store.format.bodies import (
    BaseBody,
    DeltaBody,
    ExtraBody,
    SectionState,
    SetPiece,
    set_array,
)
from adacheck_store.format.canonical import ArrayRef
from adacheck_store.format.errors import RecordNotFoundError, UnsupportedError
from adacheck_store.format.head import ArrayInfo, Head, SealedHead
from adacheck_store.format.ids import Buffer, block_digest
from adacheck_store.format.keys import Key, layout_key, manifest_key
from adacheck_store.format.layout import Layout, Section, Slice
from adacheck_store.format.manifest import Floor
from adacheck_store.format.record import Record
from adacheck_store.tiers.base import RecordSource, Source, Tier, TierTraits
from tests.sim.truth import RUN, Truth

ELEMENTS = 64
LAYOUT = Layout(
    optimizers=(),
    sections=(
        Section(
            name="s0", optimizer=-1, roles=(("param", "F32"),),
            slices=(Slice(name="w", shape=(ELEMENTS,), boxes=(((0, ELEMENTS),),), offset=0),),
        ),
    ),
).seal(RUN)  # fmt: skip
_BODIES: dict[str, tuple[str, Callable[[RecordRef], Any]]] = {
    "base": ("s0/param", lambda ref: BaseBody(
        origin=ref.origin, exactness="exact", states={"s0": SectionState(present=(False,))},
        gap=ref.gap,
    )),
    "delta": (set_array("s0", "param"), lambda ref: DeltaBody(
        sets=(SetPiece(section="s0", role="param", slice=0, offset=0),),
    )),
    "extra": ("x", lambda ref: ExtraBody(tree={"x": ArrayRef("x", "F32", (ELEMENTS,))})),
}  # fmt: skip
"""Kind -> its array, and its body."""


def flipped(data: Buffer) -> bytes:
    """The bytes, one bit of them another."""
    return bytes([data[0] ^ 1]) + bytes(data[1:])


def _id(name: str) -> str:
    """An id in the place of a simulated one."""
    return hashlib.sha256(name.encode()).hexdigest()


class Library:
    """The record of every reference. ``refs`` has them by their real keys."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self.refs: dict[str, RecordRef] = {}
        self._keys: dict[str, str] = {}
        self._records: dict[str, Record] = {}
        self._documents: dict[str, SealedHead] = {str(layout_key(RUN, LAYOUT.id)): LAYOUT}
        self._ids: dict[str, str] = {}

    def key(self, ref: RecordRef) -> str:
        """Where its record lies."""
        if ref.key not in self._keys:
            name = _id(ref.key)[:16] if ref.kind == "base" else ""
            key = Key(run=RUN, kind=ref.kind, term=ref.term, part=ref.part, step=ref.step,
                      name=name)  # fmt: skip
            self._keys[ref.key] = str(key)
            self.refs[str(key)] = ref
        return self._keys[ref.key]

    def record(self, ref: RecordRef) -> Record:
        """Its record."""
        key = self.key(ref)
        if key not in self._records:
            self._records[key] = self._make(ref)
        return self._records[key]

    def _make(self, ref: RecordRef) -> Record:
        held = {"base": self._truth.holds, "delta": self._truth.edges, "extra": {ref.id: ref.id}}
        data = hashlib.sha256(repr(held[ref.kind][ref.id]).encode()).digest() * 8  # type: ignore[index]
        name, body = _BODIES[ref.kind]
        info = ArrayInfo(name=name, dtype="F32", elements=ELEMENTS, digests=(block_digest(data),))
        extra = ref.kind == "extra"
        self.documents()
        head = Head(
            kind=ref.kind, run=RUN, term=ref.term, part=ref.part, step=ref.step,
            parent="" if extra else _id(ref.parent), manifest=self._ids[ref.manifest],
            layout="" if extra else LAYOUT.id, arrays=(info,), body=body(ref).to_json(),
        )  # fmt: skip
        return Record(SealedHead.seal(head), {name: memoryview(data)})

    def documents(self) -> Mapping[str, SealedHead]:
        """The layout, and all manifests there are by now."""
        for name, manifest in self._truth.manifests.items():
            if name not in self._ids:
                real = replace(
                    manifest, tips={part: _id(tip) for part, tip in manifest.tips.items()},
                    parts=tuple(replace(part, layout=LAYOUT.id) for part in manifest.parts),
                )  # fmt: skip
                sealed = real.seal()
                self._documents[str(manifest_key(RUN, real.term, real.step))] = sealed
                self._ids[name] = sealed.id
        return self._documents

    def source(self, key: str) -> Source:
        """A record or document by its real key, to be put."""
        if key in self._documents:
            return document(key, self._documents[key])
        return RecordSource(key, self.record(self.refs[key]))


def document(key: str, sealed: SealedHead) -> Source:
    """What has no arrays, to be put."""
    return RecordSource(key, Record(sealed, {}))


def floor_source(floor: Floor, index: int) -> Source:
    """A floor's entry of the log."""
    return document(f"{RUN}/log/{index:012d}", replace(floor, index=index).seal())


class Held(Tier):
    """What somebody holds at this moment, to be read.

    ``look`` gives that by the simulator's keys, and which of it is rotten; it may raise.
    """

    def __init__(
        self, name: str, library: Library,
        look: Callable[[], tuple[Mapping[str, RecordRef], Callable[[str], bool]]],
    ) -> None:  # fmt: skip
        self.traits = TierTraits(name=name)
        self._library, self._look = library, look

    def list(self, prefix: str) -> Iterator[str]:
        """Keys of documents and records."""
        held, _ = self._look()
        keys = {*self._library.documents(), *map(self._library.key, held.values())}
        return iter(sorted(key for key in keys if key.startswith(prefix)))

    def head(self, key: str) -> SealedHead:
        """A head; rot is in blocks."""
        held, _ = self._look()
        documents = self._library.documents()
        return documents[key] if key in documents else self._record(held, key).sealed

    def read(self, key: str, array: str, first: int, count: int) -> bytes:
        """The block."""
        held, rotten = self._look()
        data = self._record(held, key).arrays[array]
        return flipped(data) if rotten(self._library.refs[key].key) else bytes(data)

    def _record(self, held: Mapping[str, RecordRef], key: str) -> Record:
        ref = self._library.refs.get(key)
        if ref is None or ref.key not in held:
            raise RecordNotFoundError("no such record", tier=self.traits.name, key=key)
        return self._library.record(ref)

    def put(self, sources: Sequence[Source]) -> NoReturn:
        """A repair writes nothing to agents."""
        raise UnsupportedError("it is only read", tier=self.traits.name)

    def delete(self, keys: Iterable[str]) -> NoReturn:
        """Nor does it delete there."""
        raise UnsupportedError("it is only read", tier=self.traits.name)

    def sync(self) -> None:
        """Nothing was put."""

    def close(self) -> None:
        """Nothing is open."""


class MemoryObjects:
    """Objects in memory, below a zarr tier. ``touched`` names those that were changed.

    After ``left`` more changes the process that makes them dies: it changes nothing any more.
    """

    path = "memory"
    parallel = 1

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.touched: set[str] = set()
        self.left: int | None = None
        self._sorted: list[str] | None = None

    def _change(self, name: str) -> None:
        if self.left is not None:
            if not self.left:
                raise Killed
            self.left -= 1
        self.touched.add(name)
        self._sorted = None

    def put(self, name: str, buffers: Sequence[Buffer], if_absent: bool = False) -> bool:
        """Store an object."""
        if if_absent and name in self.held:
            return False
        self._change(name)
        self.held[name] = b"".join(bytes(buffer) for buffer in buffers)
        return True

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of an object."""
        if name not in self.held:
            raise RecordNotFoundError("no such object", path=name)
        return self.held[name][start : None if length is None else start + length]

    def list(self, prefix: str, most: int | None = None) -> Iterator[str]:
        """Names, sorted."""
        if self._sorted is None:
            self._sorted = sorted(self.held)
        return iter([name for name in self._sorted if name.startswith(prefix)][:most])

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects."""
        for name in names:
            if name in self.held:
                self._change(name)
                del self.held[name]

    def sync(self) -> None:
        """Memory."""

    def written_at(self, name: str) -> float:
        """No clock."""
        return 0.0

    def probe(self, name: str) -> None:
        """Conditions are heeded."""

    def dated(self, prefix: str) -> Iterator[tuple[str, float]]:
        """No clock."""
        return ((name, 0.0) for name in self.list(prefix))

    def now(self) -> float:
        """No clock."""
        return 0.0

    def unfinished(self, age_s: float = 0.0) -> int:
        """None."""
        return 0

    def sweep(self, age_s: float = 86_400.0) -> int:
        """None."""
        return 0

    def requests(self) -> Mapping[str, int]:
        """Not counted."""
        return {}


class Killed(BaseException):
    """The process that changes objects is dead."""
