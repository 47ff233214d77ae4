"""Every kind: what is encoded is decoded again, and encoded into the same bytes."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adacheck_store.format import bodies, derived
from adacheck_store.format.canonical import ArrayRef
from adacheck_store.format.dtypes import ITEM_BYTES
from adacheck_store.format.errors import MalformedError
from adacheck_store.format.head import ArrayInfo, Head, SealedHead
from adacheck_store.format.ids import BLOCK_BYTES, block_digests
from adacheck_store.format.layout import Layout, Section, Slice, align, whole_box
from adacheck_store.format.manifest import Claim, Entry, Floor, Manifest, PartEntry, Tag
from adacheck_store.format.record import Record, block_nbytes, decode_record, verify_record
from tests.format.forge import DECODERS, Json
from tests.format.test_canonical import ATOMS, PLAIN, TEXT, TYPED
from tests.format.test_keys import IDS, RANKS, RUNS, STEPS, TERMS

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
WORDS = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,10}", fullmatch=True).filter("zarr.json".__ne__)
DTYPES = st.sampled_from(sorted(ITEM_BYTES))
COUNTS = st.integers(0, 2**53)
GROUPS = st.lists(st.dictionaries(TEXT, ATOMS, max_size=3), max_size=2).map(tuple)
INFOS = st.dictionaries(TEXT, PLAIN, max_size=2)
PARTS = st.from_regex(r"p[0-9]{6}", fullmatch=True)


def tuples(items: st.SearchStrategy[Any], size: int = 3) -> st.SearchStrategy[tuple[Any, ...]]:
    """Tuples of up to ``size`` items."""
    return st.lists(items, max_size=size).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """A layout in which any rule may come to bear."""
    optimizers = draw(tuples(NAMES))
    sections = []
    for name in draw(st.lists(WORDS, max_size=3, unique=True)):
        optimizer = draw(st.integers(-1, len(optimizers) - 1))
        states = draw(st.lists(WORDS, max_size=2, unique=True)) if optimizer >= 0 else []
        roles = [draw(st.sampled_from(["param", "buffer"])), *states]
        slices, end = [], 0
        for number in range(draw(st.integers(0, 3))):
            shape = draw(tuples(st.integers(0, 9)))
            total = math.prod(shape)
            flat = draw(st.none() | st.tuples(st.integers(0, total), st.integers(0, total)))
            flat = None if flat is None else (min(flat), max(flat))
            flat = None if flat == (0, total) else flat
            piece = Slice(
                name=f"{name}.{number}.{draw(TEXT)}", shape=shape, flat=flat, offset=end,
                boxes=(whole_box(shape),) if flat is None else (), scope=draw(TEXT),
                group=-1 if optimizer < 0 else draw(st.integers(0, 3)),
                aliases=tuple(f"alias {number} {name}" for _ in range(draw(st.integers(0, 1)))),
            )  # fmt: skip
            slices.append(piece)
            end = align(piece.offset + piece.elements)
        sections.append(
            Section(
                name=name, optimizer=optimizer, slices=tuple(slices),
                roles=tuple((role, draw(DTYPES)) for role in dict.fromkeys(roles)),
            )
        )  # fmt: skip
    return Layout(optimizers=optimizers, sections=tuple(sections))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """A revision, with or without a parent term."""
    parts = []
    for name in sorted(draw(st.sets(PARTS, max_size=3))):
        sources = sorted(draw(st.sets(st.integers(0, 2000), min_size=1, max_size=4)))
        parts.append(
            PartEntry(
                name=name, layout=draw(IDS), sources=tuple(sources),
                owner=draw(st.sampled_from(sources)),
            )
        )  # fmt: skip
    step, term, parent = draw(STEPS), draw(TERMS), draw(st.just("") | TERMS)
    parent = "" if parent == term else parent
    return Manifest(
        run=draw(RUNS), term=term, step=step, parts=tuple(parts),
        ranks=tuple(sorted(draw(st.sets(RANKS, max_size=3)))),
        parent_term=parent, fork_step=draw(st.integers(0, step)) if parent else 0,
        tips=draw(st.dictionaries(PARTS, IDS, max_size=2)) if parent else {},
        previous=draw(st.just("") | IDS), settings=draw(st.dictionaries(TEXT, PLAIN, max_size=2)),
    )  # fmt: skip


@st.composite
def floors(draw: st.DrawFn) -> Floor:
    """A floor with the steps kept below it."""
    step = draw(STEPS)
    kept = draw(st.sets(st.integers(0, step - 1), max_size=3)) if step else set()
    return Floor(
        run=draw(RUNS), term=draw(TERMS), index=draw(STEPS), tier=draw(NAMES), step=step,
        terms=tuple(draw(st.lists(TERMS, min_size=1, max_size=3, unique=True))),
        kept=tuple(sorted(kept)),
    )  # fmt: skip


@st.composite
def grads(draw: st.DrawFn) -> bodies.Grad:
    """A gradient's place, with a scale where the encoding has one."""
    encoding = draw(st.sampled_from(bodies.ENCODINGS))
    scale = None if encoding == "raw" else draw(st.none() | st.integers(0, 0x7F7FFFFF))
    return bodies.Grad(
        section=draw(NAMES), slice=draw(COUNTS), encoding=encoding, offset=draw(COUNTS),
        scale=scale,
    )  # fmt: skip


UPDATES = st.builds(
    bodies.Update, optimizer=COUNTS, groups=GROUPS, grads=tuples(grads()),
    absent=tuples(st.tuples(NAMES, COUNTS)),
)  # fmt: skip
SETS = st.builds(bodies.SetPiece, section=NAMES, role=NAMES, slice=COUNTS, offset=COUNTS)
PRINTS = st.builds(
    bodies.Fingerprint, array=NAMES, first=COUNTS, stride=st.integers(1, 2**53),
    sums=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=3).map(tuple),
)  # fmt: skip
DELTAS = st.builds(
    bodies.DeltaBody, updates=tuples(UPDATES), sets=tuples(SETS), boundary=tuples(GROUPS),
    arithmetic=tuples(NAMES), fingerprints=tuples(PRINTS),
)  # fmt: skip


@st.composite
def states(draw: st.DrawFn) -> bodies.SectionState:
    """State of a section's slices."""
    present = draw(tuples(st.booleans()))
    values = st.tuples(*(st.none() | ATOMS for _ in present))
    scalars = draw(st.dictionaries(NAMES, values, max_size=2))
    return bodies.SectionState(present=present, scalars=scalars)


@st.composite
def bases(draw: st.DrawFn, step: int = 7) -> bodies.BaseBody:
    """A base's body."""
    gap = {"reason": draw(NAMES), "from": draw(st.integers(0, step))}
    origin = draw(st.sampled_from([name for name in bodies.ORIGINS if name != derived.ORIGIN]))
    exactness = draw(st.sampled_from(bodies.CLASSES))
    folded = (origin, exactness) == ("replayed", "bounded")
    return bodies.BaseBody(
        origin=origin, exactness=exactness,
        since=draw(st.none() | st.integers(0, step - 1)) if folded else None,
        states=draw(st.dictionaries(NAMES, states(), max_size=2)), boundary=draw(tuples(GROUPS)),
        gap=draw(st.sampled_from([None, gap])) if origin == "captured" else None,
    )  # fmt: skip


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, tuple[str, bytes]]:
    """Arrays of every dtype, empty ones too, none of them below another."""
    found = {}
    for name in draw(st.lists(WORDS, max_size=4, unique=True)):
        dtype, count = draw(DTYPES), draw(st.integers(0, 5))
        data = draw(st.binary(min_size=count, max_size=count)) * ITEM_BYTES[dtype]
        found[f"{name}/{draw(WORDS)}"] = (dtype, data)
    return found


def record_of(head: dict[str, Any], data: dict[str, tuple[str, bytes]], info: Json) -> Record:
    """A record with these arrays."""
    infos = tuple(
        ArrayInfo(
            name=name, dtype=dtype, elements=len(content) // ITEM_BYTES[dtype],
            digests=block_digests(memoryview(content)),
        )
        for name, (dtype, content) in data.items()
    )  # fmt: skip
    sealed = SealedHead.seal(Head(**head, arrays=infos), info)
    return Record(sealed, {name: memoryview(content) for name, (_, content) in data.items()})


def check(record: Record, value: Any) -> None:
    """Encode, decode, compare, encode again."""
    data = b"".join(record.buffers())
    back = decode_record(data)
    verify_record(back)
    assert back.sealed == record.sealed
    assert back.arrays == record.arrays
    assert DECODERS[back.sealed.head.kind](back.sealed.head) == value
    assert b"".join(back.buffers()) == data
    assert SealedHead.seal(back.sealed.head).id == record.sealed.id


PLACE = st.fixed_dictionaries({"run": RUNS, "term": TERMS})
STATE = st.fixed_dictionaries(
    {"part": PARTS, "step": st.integers(7, 10**12 - 1), "parent": IDS, "manifest": IDS,
     "layout": IDS}
)  # fmt: skip


@given(layouts(), RUNS)
def test_layout(layout: Layout, run: str) -> None:
    """Layouts come back."""
    check(Record(layout.seal(run), {}), layout)


@given(manifests(), INFOS)
def test_manifest(manifest: Manifest, info: Json) -> None:
    """Manifests come back."""
    check(Record(manifest.seal(info), {}), manifest)


TAGS = st.builds(Tag, run=RUNS, term=TERMS, index=STEPS, name=RUNS, step=STEPS)


@given(st.builds(Claim, run=RUNS, term=TERMS, index=STEPS) | floors() | TAGS, INFOS)
def test_log(entry: Entry, info: Json) -> None:
    """Claims, floors and tags come back."""
    check(Record(entry.seal(info), {}), entry)


@given(PLACE, STATE, DELTAS, arrays(), INFOS)
def test_delta(place: Json, state: Json, body: bodies.DeltaBody, data: Json, info: Json) -> None:
    """Deltas come back."""
    head = {"kind": "delta", **place, **state, "body": body.to_json()}
    check(record_of(head, data, info), body)


@given(PLACE, STATE, bases(), arrays(), INFOS)
def test_base(place: Json, state: Json, body: bodies.BaseBody, data: Json, info: Json) -> None:
    """Bases come back."""
    if body.since is not None:
        body = dataclasses.replace(body, since=max(0, state["step"] - 1 - body.since))
    head = {"kind": "base", **place, **state, "body": body.to_json()}
    check(record_of(head, data, info), body)


@given(PLACE, RANKS, IDS, st.dictionaries(NAMES, TYPED, max_size=3), arrays(), INFOS)
def test_extra(place: Json, rank: str, of: str, tree: Json, data: Json, info: Json) -> None:
    """Extras come back, with a reference to each of their arrays."""
    refs = [
        ArrayRef(name, dtype, (len(content) // ITEM_BYTES[dtype],))
        for name, (dtype, content) in data.items()
    ]
    body = bodies.ExtraBody(tree={**tree, "refs ": refs}, refs={"earlier ": 3})
    head = {
        "kind": "extra", **place, "part": rank, "step": 7, "manifest": of, "body": body.to_json(),
    }  # fmt: skip
    check(record_of(head, data, info), body)


@given(st.permutations(["b/x", "a/x", "c/x"]), st.permutations(["F64", "U8", "C128"]))
@settings(max_examples=20)
def test_order_of_arrays_has_no_meaning(names: list[str], dtypes: list[str]) -> None:
    """The same arrays give the same id, in whatever order they are handed over."""
    head = {
        "kind": "delta", "run": "r", "term": "t000001-" + "0" * 16, "part": "p000000", "step": 1,
        "parent": "0" * 64, "manifest": "0" * 64, "layout": "0" * 64,
    }  # fmt: skip
    sizes = dict(zip(sorted(names), sorted(dtypes), strict=True))
    data = {name: (sizes[name], b"\0" * ITEM_BYTES[sizes[name]]) for name in names}
    first = record_of(head, data, {})
    again = record_of(head, {name: data[name] for name in sorted(data)}, {})
    assert first.sealed == again.sealed


def test_blocks_of_a_large_array() -> None:
    """An array of more than a block has a digest for each, the last one shorter."""
    content = bytes(BLOCK_BYTES) + b"\1" * 4
    head = {
        "kind": "delta", "run": "r", "term": "t000001-" + "0" * 16, "part": "p000000", "step": 1,
        "parent": "0" * 64, "manifest": "0" * 64, "layout": "0" * 64,
        "body": bodies.DeltaBody().to_json(),
    }  # fmt: skip
    record = record_of(head, {"a": ("F32", content), "b": ("U8", b"")}, {})
    check(record, bodies.DeltaBody())
    infos = {info.name: info for info in record.sealed.head.arrays}
    assert [block_nbytes(infos["a"], index) for index in (0, 1)] == [BLOCK_BYTES, 4]
    assert [(block.array, block.index, len(block.data)) for block in record.blocks()] == [
        ("a", 0, BLOCK_BYTES), ("a", 1, 4),
    ]  # fmt: skip


@given(st.integers(0, 10**12 - 1), st.sampled_from(["base", "delta"]))
def test_links_are_needed(step: int, kind: str) -> None:
    """Whatever the step, a state without links cannot be sealed."""
    head = Head(kind=kind, run="r", term="t000001-" + "0" * 16, part="p000000", step=step)
    with pytest.raises(MalformedError) as caught:
        SealedHead.seal(head)
    assert caught.value.rule == "links"
