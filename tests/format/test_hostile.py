"""Hostile records: each is refused before memory is taken, by its own error."""

import hashlib
import json
import struct
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from adacheck_store.format.canonical import MAX_DEPTH
from adacheck_store.format.errors import (
    AdaCheckError,
    DigestMismatchError,
    MalformedError,
    NotOursError,
    TooNewError,
    TruncatedError,
)
from adacheck_store.format.head import MAX_HEAD_BYTES, MAX_INFO_BYTES, SealedHead
from adacheck_store.format.ids import BLOCK_BYTES, record_id
from adacheck_store.format.record import decode_header, decode_record, verify_record
from tests.format.forge import (
    NAMES,
    forge,
    forge_text,
    frame,
    golden_arrays,
    golden_bytes,
    golden_head,
    read,
    sealed_of,
    spell,
)

Change = Callable[[dict[str, Any]], object]
ID = "0" * 64
LONE = "\ud800"


def put(value: Any, *path: Any) -> Change:
    """A change that puts a value at a path of the head."""

    def change(head: dict[str, Any]) -> None:
        at: Any = head
        for name in path[:-1]:
            at = at[name]
        if isinstance(at, list) and path[-1] == len(at):
            at.append(value)
        else:
            at[path[-1]] = value

    return change


def drop(*path: Any) -> Change:
    """A change that removes what lies at a path of the head."""

    def change(head: dict[str, Any]) -> None:
        at: Any = head
        for name in path[:-1]:
            at = at[name]
        del at[path[-1]]

    return change


def nested(depth: int) -> Any:
    """A list in a list in a list."""
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


# What is wrong: golden record, change of its head, rule that refuses it.
HEADS: dict[str, tuple[str, Change, str]] = {
    "field missing": ("claim", drop("layout"), "fields"),
    "version 0": ("claim", put(0, "version"), "version"),
    "version true": ("claim", put(True, "version"), "version"),
    "version is text": ("claim", put("1", "version"), "version"),
    "unknown kind": ("claim", put("commit", "kind"), "kind"),
    "kind is a list": ("claim", put([], "kind"), "kind"),
    "run climbs": ("claim", put("../x", "run"), "run"),
    "run absolute": ("claim", put("/etc", "run"), "run"),
    "run hidden": ("claim", put(".x", "run"), "run"),
    "run with a slash": ("claim", put("a/b", "run"), "run"),
    "run reserved": ("claim", put("zarr.json", "run"), "run"),
    "run too long": ("claim", put("r" * 129, "run"), "run"),
    "run ends in a newline": ("claim", put("r\n", "run"), "run"),
    "run is an object": ("claim", put({}, "run"), "run"),
    "part climbs": ("delta", put("../../x", "part"), "place"),
    "part absolute": ("delta", put("/x", "part"), "place"),
    "part is a rank": ("delta", put("r000000", "part"), "place"),
    "part is a list": ("delta", put(["p000000"], "part"), "place"),
    "rank is a part": ("extra", put("p000000", "part"), "place"),
    "term climbs": ("delta", put("../t000001", "term"), "place"),
    "term in uppercase hex": ("delta", put("t000001-00112233445566AA", "term"), "place"),
    "term of a layout": ("layout", put("t000001-00112233445566aa", "term"), "place"),
    "step negative": ("delta", put(-1, "step"), "place"),
    "step true": ("delta", put(True, "step"), "place"),
    "step too large": ("delta", put(10**12, "step"), "place"),
    "step of a layout": ("layout", put(1, "step"), "place"),
    "step missing": ("claim", put(None, "step"), "place"),
    "delta without parent": ("delta", put("", "parent"), "links"),
    "delta without manifest": ("delta", put("", "manifest"), "links"),
    "base without layout": ("base", put("", "layout"), "links"),
    "extra with parent": ("extra", put(ID, "parent"), "links"),
    "claim with manifest": ("claim", put(ID, "manifest"), "links"),
    "layout with layout": ("layout", put(ID, "layout"), "links"),
    "manifest with arrays": (
        "manifest",
        put([{"name": "a", "dtype": "U8", "elements": 0, "digests": []}], "arrays"),
        "links",
    ),
    "parent too short": ("delta", put("00", "parent"), "id"),
    "parent in uppercase": ("delta", put("AB" * 32, "parent"), "id"),
    "parent is a number": ("delta", put(7, "parent"), "id"),
    "parent is null": ("delta", put(None, "parent"), "id"),
    "body is a list": ("claim", put([], "body"), "fields"),
    "requires is text": ("claim", put("x", "requires"), "fields"),
    "requires a number": ("claim", put([1], "requires"), "fields"),
    "arrays is an object": ("base", put({}, "arrays"), "fields"),
    "array is a list": ("base", put([], "arrays", 0), "fields"),
    "array with another field": ("base", put(1, "arrays", 0, "codec"), "fields"),
    "digests is text": ("base", put("00", "arrays", 0, "digests"), "fields"),
    "array climbs": ("base", put("../../x", "arrays", 0, "name"), "array-name"),
    "array climbs within": ("base", put("a/../x", "arrays", 0, "name"), "array-name"),
    "array absolute": ("base", put("/x", "arrays", 0, "name"), "array-name"),
    "array unnamed": ("base", put("", "arrays", 0, "name"), "array-name"),
    "array with an empty word": ("base", put("a//b", "arrays", 0, "name"), "array-name"),
    "array in uppercase": ("base", put("A", "arrays", 0, "name"), "array-name"),
    "array too deep": ("base", put("a/b/c/d/e", "arrays", 0, "name"), "array-name"),
    "array too long": ("base", put("a" * 201, "arrays", 0, "name"), "array-name"),
    "array is metadata": ("base", put("__metadata__", "arrays", 0, "name"), "array-name"),
    "array is a zarr file": ("base", put("x/zarr.json", "arrays", 0, "name"), "array-name"),
    "array named by a list": ("base", put([], "arrays", 0, "name"), "array-name"),
    "array twice": (
        "base", lambda head: head["arrays"].insert(0, head["arrays"][0]), "array-name"
    ),
    "array below another": ("base", put("buffers", "arrays", 1, "name"), "array-name"),
    "arrays out of order": ("base", lambda head: head["arrays"].reverse(), "order"),
    "dtype unknown": ("base", put("F33", "arrays", 0, "dtype"), "dtype"),
    "dtype is a list": ("base", put([], "arrays", 0, "dtype"), "dtype"),
    "elements negative": ("base", put(-1, "arrays", 0, "elements"), "array-size"),
    "elements true": ("base", put(True, "arrays", 0, "elements"), "array-size"),
    "elements overflow": ("base", put(2**53, "arrays", 0, "elements"), "array-size"),
    "elements wrap 64 bits": ("base", put(2**61, "arrays", 0, "elements"), "integer-range"),
    "elements without digests": ("base", put(2**40, "arrays", 0, "elements"), "array-digests"),
    "a digest too many": ("base", put("0" * 32, "arrays", 0, "digests", 1), "array-digests"),
    "a digest missing": ("base", put([], "arrays", 0, "digests"), "array-digests"),
    "digest in uppercase": ("base", put("A" * 32, "arrays", 0, "digests", 0), "array-digests"),
    "digest is a list": ("base", put([], "arrays", 0, "digests", 0), "array-digests"),
    "integer beyond 2^53": ("extra", put(2**53 + 1, "other"), "integer-range"),
    "integer of a million digits": ("extra", put(10**2000, "other"), "integer-range"),
    "float": ("extra", put(0.5, "other"), "float"),
    "NaN": ("extra", put(float("nan"), "other"), "float"),
    "infinity": ("extra", put(float("-inf"), "other"), "float"),
    "nested too deep": ("extra", put(nested(MAX_DEPTH), "other"), "depth"),
    "lone surrogate": ("extra", put(LONE, "other"), "utf-8"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADS)
def test_head_is_refused(case: str) -> None:
    """A head that breaks a rule is refused by that rule, though its id is right."""
    name, change, rule = HEADS[case]
    with pytest.raises(MalformedError) as caught:
        decode_header(forge(name, change))
    assert caught.value.rule == rule
    assert len(str(caught.value)) < 1000


def test_forge_forges_nothing_by_itself() -> None:
    """Without a change the forged record is the golden one, so the change is what is refused."""
    for name in NAMES:
        data = forge_text(name, spell(golden_head(name)), info=sealed_of(name).info)
        assert data == golden_bytes(name)


NEWER: dict[str, Change] = {
    "version": put(2, "version"),
    "required feature": put(["sparse"], "requires"),
    "digest": put("blake9", "digest"),
    "version of another shape": lambda head: (
        [head.pop(name) for name in list(head) if name != "format"], head.update(version=99)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NEWER)
def test_newer_head_is_too_new(case: str) -> None:
    """What a newer program wrote is named as such, and so is the way out."""
    with pytest.raises(TooNewError) as caught:
        decode_header(forge("claim", NEWER[case]))
    assert "upgrade" in caught.value.hint


def test_newer_metadata_is_too_new() -> None:
    """The version is looked at before the metadata's other keys, and before the id."""
    raw = spell({"format": "adacheck", "version": 2})
    for extra in ({}, {"id": ID, "info": "{}"}, {"id": ID, "info": "{}", "sign": "x"}):
        header = json.dumps({"__metadata__": {"adacheck": raw, **extra}}).encode()
        with pytest.raises(TooNewError):
            decode_header(frame(header))


TEXTS: dict[str, tuple[Callable[[str], str], str]] = {
    "space": (lambda raw: raw.replace(":", ": ", 1), "canonical"),
    "leading space": (lambda raw: " " + raw, "canonical"),
    "trailing newline": (lambda raw: raw + "\n", "canonical"),
    "escape not needed": (lambda raw: raw.replace("claim", "cl\\u0061im"), "canonical"),
    "escaped slash": (lambda raw: raw.replace('"body":{}', '"body":{"a":"\\/"}'), "canonical"),
    "minus zero": (lambda raw: raw.replace('"step":0', '"step":-0'), "canonical"),
    "keys out of order": (lambda raw: '{"version":1,' + raw[1:-13] + "}", "canonical"),
    "key twice": (lambda raw: raw[:-1] + ',"version":1}', "duplicate-key"),
    "key twice below": (
        lambda raw: raw.replace('"body":{}', '"body":{"a":[{"b":1,"b":1}]}'), "duplicate-key"
    ),
    "exponent": (lambda raw: raw.replace('"step":0', '"step":0e1'), "float"),
    "not JSON": (lambda raw: raw[:-1], "json"),
    "byte order mark": (lambda raw: "\ufeff" + raw, "json"),
    "two values": (lambda raw: raw + raw, "json"),
    "leading zero": (lambda raw: raw.replace('"step":0', '"step":00'), "json"),
    "depth 10^5": (lambda raw: raw.replace("{}", "[" * 10**5 + "]" * 10**5, 1), "depth"),
    "depth 10^5 of objects": (lambda raw: raw.replace("{}", '{"":' * 10**5, 1), "depth"),
    "depth behind escapes": (
        lambda raw: raw.replace("{}", '{"\\\\":"\\"","a":' + "[" * 10**5, 1), "depth"
    ),
    "lone surrogate in a key": (lambda raw: '{"' + LONE + '":1,' + raw[1:], "utf-8"),
}  # fmt: skip


@pytest.mark.parametrize("case", TEXTS)
@pytest.mark.parametrize("limit", [1000, 10**6])
def test_spelling_is_refused(case: str, limit: int) -> None:
    """A head has one spelling; nesting stays bounded whatever the interpreter would bear."""
    change, rule = TEXTS[case]
    raw = spell(golden_head("claim"))
    assert change(raw) != raw
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, before))
    try:
        with pytest.raises(MalformedError) as caught:
            decode_header(forge_text("claim", change(raw)))
    finally:
        sys.setrecursionlimit(before)
    assert caught.value.rule == rule


INFOS: dict[str, str] = {
    "not JSON": "x",
    "empty": "",
    "no object": "[]",
    "float": '{"t":1.5}',
    "not canonical": '{ "a":1}',
    "key twice": '{"a":1,"a":1}',
    "too deep": '{"a":' + "[" * 10**5 + "]" * 10**5 + "}",
    "huge": spell({"a": "x" * MAX_INFO_BYTES}),
    "lone surrogate": '{"a":"' + LONE + '"}',
}


@pytest.mark.parametrize("case", INFOS)
def test_info_is_refused(case: str) -> None:
    """The info beside a head is a small canonical object."""
    with pytest.raises(MalformedError) as caught:
        decode_header(forge_text("claim", spell(golden_head("claim")), INFOS[case]))
    assert caught.value.rule == "info"


HEADERS: dict[str, tuple[bytes, type[AdaCheckError], str]] = {
    "length 2^60": (struct.pack("<Q", 2**60) + b"{}", MalformedError, "header-size"),
    "length 2^64-1": (struct.pack("<Q", 2**64 - 1) + b"{}", MalformedError, "header-size"),
    "length over the limit": (struct.pack("<Q", 10**8 + 1), MalformedError, "header-size"),
    "length without bytes": (struct.pack("<Q", 10**8), TruncatedError, ""),
    "no bytes": (b"", TruncatedError, ""),
    "seven bytes": (b"\0" * 7, TruncatedError, ""),
    "empty header": (struct.pack("<Q", 0), NotOursError, ""),
    "not UTF-8": (frame(b"\xff\xfe"), NotOursError, ""),
    "not JSON": (frame(b"{"), NotOursError, ""),
    "a list": (frame(b"[]"), NotOursError, ""),
    "no metadata": (frame(b"{}"), NotOursError, ""),
    "metadata is a list": (frame(b'{"__metadata__":[]}'), NotOursError, ""),
    "metadata of others": (frame(b'{"__metadata__":{"format":"pt"}}'), NotOursError, ""),
    "head is a number": (frame(b'{"__metadata__":{"adacheck":1}}'), NotOursError, ""),
    "head alone": (frame(b'{"__metadata__":{"adacheck":"{}"}}'), NotOursError, ""),
    "integer of 10^4 digits": (frame(b'{"a":' + b"9" * 10**4 + b"}"), NotOursError, ""),
    "depth 10^5": (frame(b"[" * 10**5 + b"]" * 10**5), MalformedError, "depth"),
    "depth 10^5 of objects": (frame(b'{"a":' * 10**5), MalformedError, "depth"),
    "key twice": (frame(b'{"a":1,"a":1}'), MalformedError, "duplicate-key"),
    "key twice below": (frame(b'{"a":{"b":1,"b":1}}'), MalformedError, "duplicate-key"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_header_is_refused_before_memory_is_taken(case: str) -> None:
    """What a header announces is not believed."""
    data, kind, rule = HEADERS[case]
    tracemalloc.start()
    try:
        with pytest.raises(kind) as caught:
            decode_record(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert type(caught.value) is kind
    assert getattr(caught.value, "rule", "") == rule
    assert peak < 20 * len(data) + 100_000


def test_memory_is_bounded_by_the_bytes() -> None:
    """The worst JSON there is takes a fixed multiple of its own size."""
    data = frame(b'{"__metadata__":[' + b"{}," * 10**5 + b"{}]}")
    tracemalloc.start()
    try:
        with pytest.raises(NotOursError):
            decode_record(data)
        assert tracemalloc.get_traced_memory()[1] < 64 * len(data)
    finally:
        tracemalloc.stop()


def entries_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header entries and array bytes of a record."""
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def dump(entries: dict[str, Any], **style: Any) -> bytes:
    """Header entries as the encoder spells them."""
    style = {"separators": (",", ":"), "ensure_ascii": False} | style
    return json.dumps(entries, **style).encode()


ENTRIES: dict[str, Change] = {
    "negative shape": put([-1], "buffers/buffer", "shape"),
    "shape that overflows": put([2**40, 2**40], "buffers/buffer", "shape"),
    "dtype": put("F64", "buffers/buffer", "dtype"),
    "offsets": put([0, 2**62], "buffers/buffer", "data_offsets"),
    "offsets negative": put([-8, 504], "buffers/buffer", "data_offsets"),
    "array missing": drop("buffers/buffer"),
    "array added": put({"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "zz"),
    "array absolute": put({"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "/etc/x"),
    "array climbs": put({"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "../x"),
    "entry unhashable": put([], "buffers/buffer"),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_header_must_follow_from_the_head(case: str) -> None:
    """The rest of the header is a function of the head: any difference is refused."""
    entries, arrays = entries_of(golden_bytes("base"))
    ENTRIES[case](entries)
    with pytest.raises(MalformedError) as caught:
        decode_record(frame(dump(entries), arrays))
    assert caught.value.rule == "header"


def test_header_has_one_spelling() -> None:
    """Spaces, escapes, order of keys and padding are fixed, too."""
    entries, arrays = entries_of(golden_bytes("base"))
    assert frame(dump(entries), arrays) == golden_bytes("base")
    text = dump(entries)
    padded = struct.pack("<Q", len(text) + 8 + -len(text) % 8) + text.ljust(
        len(text) + 8 + -len(text) % 8
    )
    unpadded = struct.pack("<Q", len(text)) + text
    zeros = frame(text).replace(b"  ", b" \t")
    turned = frame(dump(dict(reversed(entries.items()))))
    spaced = frame(dump(entries, separators=(", ", ":")))
    for header in (padded, unpadded, zeros, turned, spaced):
        if header != frame(text):
            with pytest.raises(MalformedError) as caught:
                decode_record(header + arrays)
            assert caught.value.rule == "header"


METADATA: dict[str, Change] = {
    "id missing": drop("__metadata__", "id"),
    "info missing": drop("__metadata__", "info"),
    "id is a number": put(7, "__metadata__", "id"),
    "a fourth key": put("x", "__metadata__", "sign"),
}


@pytest.mark.parametrize("case", METADATA)
def test_metadata_is_refused(case: str) -> None:
    """The metadata is three strings."""
    entries, arrays = entries_of(golden_bytes("claim"))
    METADATA[case](entries)
    with pytest.raises(MalformedError) as caught:
        decode_record(frame(dump(entries), arrays))
    assert caught.value.rule == "metadata"


@pytest.mark.parametrize("identity", [ID, "", "x", sealed_of("floor").id, ID.upper()])
def test_swapped_id_is_refused(identity: str) -> None:
    """An id of another record, or none, is not the head's."""
    entries, arrays = entries_of(golden_bytes("claim"))
    entries["__metadata__"]["id"] = identity
    with pytest.raises(DigestMismatchError):
        decode_record(frame(dump(entries), arrays))


def test_swapped_head_is_refused() -> None:
    """The head of another record does not fit this one's id."""
    other = sealed_of("floor")
    with pytest.raises(DigestMismatchError):
        SealedHead.open(other.raw, sealed_of("claim").id)


def test_head_of_others_is_not_ours() -> None:
    """Canonical JSON that is no head of ours, whether or not it comes with its id."""
    for raw in (b"{}", b"[]", b"null", b'{"format":"other","version":1}'):
        for identity in (record_id(raw), ID):
            with pytest.raises((NotOursError, DigestMismatchError)) as caught:
                SealedHead.open(raw, identity)
            assert isinstance(caught.value, NotOursError) or not raw.startswith(b"{")


def test_huge_head_is_refused() -> None:
    """A head beyond the limit is not even hashed."""
    with pytest.raises(MalformedError) as caught:
        SealedHead.open(b" " * (MAX_HEAD_BYTES + 1), ID)
    assert caught.value.rule == "head-size"


@pytest.mark.parametrize("name", NAMES)
def test_truncation_anywhere_is_refused(name: str) -> None:
    """A record cut short after any byte is no record."""
    data = golden_bytes(name)
    for length in range(len(data)):
        with pytest.raises(TruncatedError):
            decode_record(data[:length])


@pytest.mark.parametrize("name", NAMES)
def test_trailing_bytes_are_refused(name: str) -> None:
    """A byte after the record is refused."""
    with pytest.raises(MalformedError) as caught:
        decode_record(golden_bytes(name) + b"\0")
    assert caught.value.rule == "trailing"
    assert caught.value.place["run"] == "golden-run"


def test_every_byte_of_the_arrays_is_verified() -> None:
    """A flipped bit anywhere in the arrays is found by the blocks' digests."""
    data = bytearray(golden_bytes("delta"))
    start = len(data) - len(golden_arrays("delta"))
    for at in range(start, len(data)):
        data[at] ^= 0x10
        with pytest.raises(DigestMismatchError):
            verify_record(decode_record(data))
        data[at] ^= 0x10
    read(bytes(data))


def test_blocks_are_a_mebibyte() -> None:
    """An array's count of digests follows from its bytes."""
    elements = BLOCK_BYTES // 8 + 1
    digest = hashlib.blake2b(digest_size=16).hexdigest()

    def change(head: dict[str, Any], count: int) -> None:
        head["arrays"][0] |= {"elements": elements, "digests": [digest] * count}

    with pytest.raises(MalformedError) as caught:
        decode_header(forge("base", lambda head: change(head, 3)))
    assert caught.value.rule == "array-digests"
    with pytest.raises(MalformedError) as caught:
        decode_header(forge("base", lambda head: change(head, 2)))
    assert caught.value.rule == "header"  # the count is right; the header is the golden one's
