"""Frames as bytes: what is written is read, and whatever else comes is a bounded error."""

import json
import os
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_store.format import errors
from adacheck_store.format.errors import (
    AdaCheckError,
    ForkError,
    FormatError,
    MalformedError,
    NotOursError,
    ReplayMismatchError,
    TierError,
    TooNewError,
)
from adacheck_store.tiers import wire
from adacheck_store.tiers.wire import Inbox, Kind

CALL = wire.encode(Kind.CALL, 0, {"verb": "hello"})


def header(**changes: object) -> bytes:
    """A header by the table of WIRE.md, written by hand."""
    fields: dict[str, object] = {
        "magic": b"AdaW", "version": 1, "kind": 1, "zero": 0, "sequence": 0, "head": 2,
        "payload": 0,
    }  # fmt: skip
    return struct.pack("<4sBBHIIQ", *{**fields, **changes}.values())


def test_header_is_as_in_wire_md() -> None:
    """Magic, version, kind, zero, sequence, two sizes, in little-endian order; then the head."""
    data = wire.encode(Kind.ANSWER, 7, {"a": "ü"}, 5)
    assert data == bytes.fromhex("41646157 01 04 0000 07000000 0a000000 0500000000000000") + (
        '{"a":"ü"}'.encode()
    )
    found = wire.decode_header(data[:24])
    assert (found.kind, found.sequence, found.head_bytes, found.payload_bytes) == (4, 7, 10, 5)
    assert wire.decode_head(data[24:]) == {"a": "ü"}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"magic": b"GET "}, NotOursError),
        ({"version": 2}, TooNewError),
        ({"version": 255, "kind": 77}, TooNewError),
        ({"version": 0}, MalformedError),
        ({"kind": 0}, MalformedError),
        ({"kind": 6}, MalformedError),
        ({"zero": 1}, MalformedError),
        ({"head": (1 << 20) + 1}, MalformedError),
        ({"head": (1 << 32) - 1}, MalformedError),
        ({"payload": (8 << 20) + 1}, MalformedError),
        ({"payload": 1 << 60}, MalformedError),
        ({"payload": (1 << 64) - 1}, MalformedError),
    ],
)
def test_headers_that_are_refused(changes: dict[str, object], error: type[AdaCheckError]) -> None:
    """By version before kind: a newer one may have kinds we do not know."""
    with pytest.raises(error):
        wire.decode_header(header(**changes))
    with pytest.raises(error):
        list(Inbox().feed(header(**changes)))


def test_the_largest_sizes_are_taken() -> None:
    """The bounds are the last good values."""
    found = wire.decode_header(header(head=1 << 20, payload=8 << 20))
    assert (found.head_bytes, found.payload_bytes) == (1 << 20, 8 << 20)
    with pytest.raises(MalformedError):
        wire.encode(Kind.PART, 0, {}, (8 << 20) + 1)
    with pytest.raises(MalformedError):
        wire.encode(Kind.PART, 0, {"a": "x" * (1 << 20)})


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"1", b"null", b'{"a":1', b'{"a":1,"a":2}', b"\xff\xfe", b"[" * 100_000,
        b'{"a":' * 5000, b'{"a":' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_heads_that_are_refused(data: bytes) -> None:
    """No JSON, no object, keys twice, too deep, numbers of any length: typed errors, in no time."""
    with pytest.raises(MalformedError):
        wire.decode_head(data)


@given(st.binary(max_size=300), st.booleans())
def test_garbage_is_a_typed_error(data: bytes, framed: bool) -> None:
    """Whatever comes, in one piece or byte by byte, ends in frames or in one typed error."""
    stream = (CALL + data) if framed else data
    outcomes = []
    for size in (1, len(stream) or 1):
        inbox, found = Inbox(), []
        try:
            for at in range(0, len(stream), size):
                for _, frame in inbox.feed(stream[at : at + size]):
                    found.append(frame.head)
        except FormatError as exc:
            found.append({"error": type(exc).__name__})
        outcomes.append(found)
    assert outcomes[0] == outcomes[1]
    assert not framed or outcomes[0][0] == {"verb": "hello"}


def test_inbox_keeps_little() -> None:
    """A large frame is refused by its header, before it comes."""
    tracemalloc.start()
    try:
        with pytest.raises(MalformedError, match="first frame"):
            list(Inbox().feed(header(head=16 << 10)))
        inbox = Inbox()
        assert not list(inbox.feed(header(head=16000) + b"{" * 15999))
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "name", [n for n, e in vars(errors).items() if isinstance(e, type) and issubclass(e, Exception)]
)
def test_errors_cross_the_wire(name: str) -> None:
    """Every class comes back as itself, with message, hint, place and what else it says."""
    error = getattr(errors, name)("it broke", hint="do this", run="r", step=3, key="a/b")
    if isinstance(error, MalformedError):
        error.rule = "place"
    if isinstance(error, ReplayMismatchError):
        error.last_match = 17
    found = wire.open_error(json.loads(json.dumps(wire.error_head(error))))
    assert type(found) is type(error)
    assert vars(found) == vars(error)
    assert str(found) == str(error)


def test_unknown_errors_become_the_nearest_known() -> None:
    """A newer agent may have finer classes; a bug of the agent is a `TierError`."""
    head = wire.error_head(ForkError("two ids"))
    head["error"] = ["FinerForkError", "exit", "FormatError.mro", 7, *head["error"]]
    assert type(wire.open_error(head)) is ForkError
    bug = wire.open_error(wire.error_head(ZeroDivisionError("by zero")))
    assert type(bug) is TierError
    assert "ZeroDivisionError: by zero" in str(bug)


NAMES = st.sampled_from(["error", "message", "hint", "place", "rule", "last_match", "step"])
ANY = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner),
)


@given(ANY)
def test_any_error_head_is_an_error(value: object) -> None:
    """Who reads an error does not fail over it."""
    head = value if isinstance(value, dict) else {"error": value, "place": value, "rule": value}
    assert isinstance(wire.open_error(head), AdaCheckError)


def test_long_texts_are_cut() -> None:
    """An error fits a frame, however long its message."""
    error = TierError("x" * 10**6, hint="y" * 10**6, path=os.fsdecode(b"\xff" * 10**5))
    assert len(wire.encode(Kind.ERROR, 0, wire.error_head(error))) < 20_000
