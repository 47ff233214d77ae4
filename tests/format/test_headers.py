"""Hostile headers: what a file announces, and everything around its head."""

import hashlib
import json
import struct
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from adacheck_store.format.errors import (
    AdaCheckError,
    DigestMismatchError,
    MalformedError,
    NotOursError,
    RecordNotFoundError,
    TruncatedError,
)
from adacheck_store.format.head import MAX_HEAD_BYTES, MAX_INFO_BYTES, SealedHead
from adacheck_store.format.ids import BLOCK_BYTES, record_id
from adacheck_store.format.record import (
    Record,
    decode_header,
    decode_record,
    encode_header,
    verify_block,
    verify_record,
)
from tests.format.forge import (
    LONE,
    NAMES,
    Change,
    drop,
    forge,
    forge_text,
    frame,
    golden_arrays,
    golden_bytes,
    golden_head,
    put,
    read,
    sealed_of,
    spell,
)

ID = "0" * 64


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
    "brackets 10^7": (frame(b"[" + b"{}," * 10**7 + b"{}]"), MalformedError, "openings"),
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


@pytest.mark.parametrize(
    ("text", "rule"), [("[" * 2**22, "openings"), ("x" * 10**8, "header-size")]
)
def test_header_no_reader_would_take_is_not_written(text: str, rule: str) -> None:
    """What a reader refuses for its size is refused by the encoder, too."""
    sealed = replace(sealed_of("claim"), info=text)
    with pytest.raises(MalformedError) as caught:
        encode_header(sealed)
    assert caught.value.rule == rule


def test_head_no_reader_would_take_is_not_sealed() -> None:
    """A head or info beyond its limit is refused before it is stored."""
    head = sealed_of("claim").head
    with pytest.raises(MalformedError) as caught:
        SealedHead.seal(replace(head, body={"a": "x" * MAX_HEAD_BYTES}))
    assert caught.value.rule == "head-size"
    with pytest.raises(MalformedError) as caught:
        SealedHead.seal(head, {"a": "x" * MAX_INFO_BYTES})
    assert caught.value.rule == "info"


def test_short_arrays_are_refused() -> None:
    """Bytes that are fewer than the head says are truncated, whatever their digest."""
    whole = decode_record(golden_bytes("delta"))
    info = whole.sealed.head.arrays[0]
    data = whole.arrays[info.name]
    verify_block(info, 0, data)
    for short in (data[:-1], data[:0]):
        with pytest.raises(TruncatedError):
            verify_block(info, 0, short)
        with pytest.raises(TruncatedError):
            verify_record(Record(whole.sealed, {**whole.arrays, info.name: short}))
    with pytest.raises(RecordNotFoundError):
        verify_block(info, 1, data)
    with pytest.raises(MalformedError) as caught:
        whole.sealed.head.array("no/such")
    assert caught.value.rule == "array-missing"
