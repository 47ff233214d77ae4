"""Canonical JSON and typed values: one spelling for one meaning."""

import collections
import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_store.format import canonical
from adacheck_store.format.canonical import (
    MAX_DEPTH,
    MAX_OPENINGS,
    MAX_VALUE_DEPTH,
    ArrayRef,
    Scalar,
)
from adacheck_store.format.dtypes import ITEM_BYTES
from adacheck_store.format.errors import MalformedError

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda items: st.lists(items, max_size=4) | st.dictionaries(TEXT, items, max_size=4),
    max_leaves=12,
)
SCALARS = st.sampled_from(sorted(ITEM_BYTES)).flatmap(
    lambda dtype: st.binary(min_size=ITEM_BYTES[dtype], max_size=ITEM_BYTES[dtype]).map(
        lambda data: Scalar(dtype, data)
    )
)
ATOMS = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | TEXT
    | st.floats(allow_nan=False) | st.binary(max_size=5) | SCALARS
)  # fmt: skip
KEYS = st.recursive(ATOMS, lambda items: st.lists(items, max_size=2).map(tuple), max_leaves=4)
TYPED = st.recursive(
    ATOMS,
    lambda items: (
        st.lists(items, max_size=3)
        | st.lists(items, max_size=3).map(tuple)
        | st.dictionaries(KEYS, items, max_size=3)
    ),
    max_leaves=10,
)


def same(left: Any, right: Any) -> bool:
    """Equal in value, type and order."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left), list(right)) and same(list(left.values()), list(right.values()))
    return bool(left == right)


@given(PLAIN)
def test_json_round_trip(value: Any) -> None:
    """What is spelled is read back, and has no other canonical spelling."""
    data = canonical.dumps(value)
    assert canonical.loads(data) == value
    for other in (
        json.dumps(value, sort_keys=True, separators=(",", ":")).encode(),
        json.dumps(value, sort_keys=True, ensure_ascii=False).encode(),
        data + b" ",
    ):
        if other != data:
            with pytest.raises(MalformedError):
                canonical.loads(other)


@given(TYPED)
def test_typed_round_trip(value: Any) -> None:
    """A typed value comes back with its types, and is spelled the same again."""
    spelled = canonical.to_json(value)
    back = canonical.from_json(canonical.loads(canonical.dumps(spelled)))
    assert same(back, value)
    assert canonical.dumps(canonical.to_json(back)) == canonical.dumps(spelled)


@given(PLAIN)
def test_any_json_is_typed_or_refused(value: Any) -> None:
    """A typed value read from any JSON is spelled as that very JSON."""
    try:
        back = canonical.from_json(value)
    except MalformedError:
        return
    assert canonical.dumps(canonical.to_json(back)) == canonical.dumps(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (2**53, "9007199254740992"),
        (2**53 + 1, '{"$i":"9007199254740993"}'),
        (1.0, '{"$f":"3ff0000000000000"}'),
        (-0.0, '{"$f":"8000000000000000"}'),
        (math.inf, '{"$f":"7ff0000000000000"}'),
        ((1, [2]), '{"$t":[1,[2]]}'),
        (bytearray(b"\x00\xff"), '{"$b":"00ff"}'),
        ({"a": (), "b": 1}, '{"a":{"$t":[]},"b":1}'),
        ({"b": 1, "a": ()}, '{"$d":[["b",1],["a",{"$t":[]}]]}'),
        (collections.OrderedDict(a=1), '{"a":1}'),
        ({2: "x", 1: "y"}, '{"$d":[[2,"x"],[1,"y"]]}'),
        ({"$": 1, "a": 2}, '{"$d":[["$",1],["a",2]]}'),
        (Scalar("BF16", b"\x80\x3f"), '{"$x":["BF16","803f"]}'),
        (ArrayRef("t/0", "F32", (2, 3)), '{"$a":["t/0","F32",[2,3]]}'),
    ],
)
def test_spelling(value: Any, text: str) -> None:
    """Each type has its spelling."""
    assert canonical.dumps(canonical.to_json(value)).decode() == text


@pytest.mark.parametrize("bits", ["7ff8000000000001", "7ff0000000000001", "fff8dead0000beef"])
def test_nan_keeps_its_bits(bits: str) -> None:
    """A NaN is its bits."""
    assert canonical.float_hex(canonical.float_from_hex(bits)) == bits


def nest(depth: int, wrap: Any) -> Any:
    """A value within ``depth`` wraps."""
    value: Any = 0
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    ("wrap", "levels"),
    [(lambda v: [v], 1), (lambda v: {"a": v}, 1), (lambda v: (v,), 2), (lambda v: {0: v}, 3)],
)
def test_depth_of_typed_values(wrap: Any, levels: int) -> None:
    """What may be spelled may be read; one level more has no spelling."""
    deepest = nest(MAX_VALUE_DEPTH // levels, wrap)
    assert canonical.from_json(canonical.loads(canonical.dumps(canonical.to_json(deepest))))
    with pytest.raises(TypeError, match="nested"):
        canonical.to_json(wrap(deepest))


def test_depth_of_json() -> None:
    """Writer and reader draw the line at the same depth."""
    data = canonical.dumps(nest(MAX_DEPTH, lambda value: [value]))
    assert canonical.dumps(canonical.loads(data)) == data
    for value in (nest(MAX_DEPTH + 1, lambda v: [v]), nest(10**5, lambda v: {"a": v})):
        with pytest.raises(MalformedError) as caught:
            canonical.dumps(value)
        assert caught.value.rule == "depth"
    with pytest.raises(MalformedError) as caught:
        canonical.loads(b"[" + data + b"]")
    assert caught.value.rule == "depth"


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, 1j, [object()], {"a": object()}, 2**2048, {float("nan"): 1, math.nan: 2}],
)
def test_no_spelling(value: Any) -> None:
    """A type without a spelling is named, not guessed."""
    with pytest.raises(TypeError):
        canonical.to_json(value)


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (0.5, "json"), (b"", "json"), ({1: 2}, "json"), (object(), "json"),
        (2**53 + 1, "integer-range"), ("\ud800", "utf-8"), ({"\udfff": 1}, "utf-8"),
    ],
)  # fmt: skip
def test_no_json(value: Any, rule: str) -> None:
    """Only JSON values have canonical bytes."""
    with pytest.raises(MalformedError) as caught:
        canonical.dumps(value)
    assert caught.value.rule == rule


def test_openings_are_bounded() -> None:
    """Writer and reader draw the line at the same number of brackets."""
    most = ["[{"] * (MAX_OPENINGS // 2 - 1) + ["["]
    data = canonical.dumps(most)
    assert len(canonical.loads(data)) == len(most)
    with pytest.raises(MalformedError) as caught:
        canonical.dumps([*most, []])
    assert caught.value.rule == "openings"
    with pytest.raises(MalformedError) as caught:
        canonical.loads(data[:-1] + b",[]]")
    assert caught.value.rule == "openings"


def test_any_mapping_is_an_object() -> None:
    """Other mappings than dict are spelled like dict."""
    proxy = type(object.__dict__)({"a": 1, "b": collections.ChainMap({"c": 2})})
    assert canonical.dumps(proxy) == b'{"a":1,"b":{"c":2}}'
    assert canonical.to_json(proxy) == {"a": 1, "b": {"c": 2}}


def test_array_refs_are_found_anywhere() -> None:
    """References are found in keys, tuples and lists."""
    one, two = ArrayRef("a", "U8", ()), ArrayRef("b", "U8", ())
    assert list(canonical.array_refs({"x": [(one,)], "y": {two: one}})) == [one, two, one]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("9007199254740993", "integer-range"), ("-9007199254740993", "integer-range"),
        ("99999999999999999", "integer-range"), ("9" * 5000, "integer-range"), ("1.0", "float"),
        ("NaN", "float"), ("-Infinity", "float"), ("1e3", "float"), ("[1,]", "json"),
    ],
)  # fmt: skip
def test_numbers_of_json(text: str, rule: str) -> None:
    """Integers end at 2^53, and there are no other numbers."""
    with pytest.raises(MalformedError) as caught:
        canonical.loads(text.encode())
    assert caught.value.rule == rule


@given(st.binary(max_size=40))
def test_loads_answers_or_refuses(data: bytes) -> None:
    """Any bytes are canonical JSON or malformed."""
    try:
        assert canonical.dumps(canonical.loads(data)) == data
    except MalformedError:
        return
