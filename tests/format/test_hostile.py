"""Hostile heads: each is refused by its own error, though its id is right."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from adacheck_store.format.canonical import MAX_DEPTH
from adacheck_store.format.errors import (
    MalformedError,
    TooNewError,
)
from adacheck_store.format.record import decode_header
from tests.format.forge import (
    LONE,
    NAMES,
    Change,
    drop,
    forge,
    forge_text,
    frame,
    golden_bytes,
    golden_head,
    nested,
    put,
    sealed_of,
    spell,
)

ID = "0" * 64


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


def test_a_known_field_is_no_other_field() -> None:
    """A head cannot carry a field twice: as its own, and as one of a newer writer."""
    head = replace(sealed_of("claim").head, other={"kind": "floor"})
    with pytest.raises(MalformedError) as caught:
        head.encode()
    assert caught.value.rule == "fields"
