"""Hostile bodies: heads and ids are right, and what they say is not."""

from typing import Any

import pytest

from adacheck_store.format import bodies, layout, manifest
from adacheck_store.format.canonical import MAX_VALUE_DEPTH
from adacheck_store.format.errors import AdaCheckError, MalformedError
from tests.format.forge import (
    DECODERS,
    Change,
    Json,
    drop,
    forge,
    golden_head,
    nested,
    put,
    read,
    sealed_of,
)

HUGE = 2**53


def grad(place: int, value: Json) -> Change:
    """Change a field of the delta's second gradient: it has a scale."""
    return put(value, "body", "updates", 0, "grads", 1, place)


def piece(value: Json, *path: Any) -> Change:
    """Change a field of the layout's first slice."""
    return put(value, "body", "sections", 0, "slices", 0, *path)


def at_flat(head: dict[str, Json]) -> dict[str, Json]:
    """The layout's only flat slice, which has no boxes."""
    found: dict[str, Json] = head["body"]["sections"][0]["slices"][1]
    return found


def value(item: Json) -> Change:
    """Put a typed value into the extra's tree."""
    return put(item, "body", "tree", "values")


DELTAS: dict[str, Change] = {
    "updates missing": drop("body", "updates"),
    "updates is text": put("", "body", "updates"),
    "update is a list": put([], "body", "updates", 0),
    "update without grads": drop("body", "updates", 0, "grads"),
    "optimizer negative": put(-1, "body", "updates", 0, "optimizer"),
    "optimizer true": put(True, "body", "updates", 0, "optimizer"),
    "groups is an object": put({}, "body", "updates", 0, "groups"),
    "group is a list": put([[]], "body", "updates", 0, "groups"),
    "group with other keys": put(
        [{"$d": [[1, 2]]}], "body", "updates", 0, "groups"
    ),
    "group with an array": put(
        [{"a": {"$a": ["x", "U8", [1]]}}], "body", "updates", 0, "groups"
    ),
    "group with an array in a dict": put(
        [{"a": {"$d": [[{"$a": ["x", "U8", [1]]}, 1]]}}], "body", "updates", 0, "groups"
    ),
    "grads is an object": put({}, "body", "updates", 0, "grads"),
    "grad is text": put("abcde", "body", "updates", 0, "grads", 0),
    "grad too short": put(["adamw.f32", 0, "raw", 0], "body", "updates", 0, "grads", 0),
    "grad section a list": grad(0, ["adamw.f32"]),
    "grad slice negative": grad(1, -1),
    "encoding unknown": grad(2, "int4"),
    "encoding a list": grad(2, ["raw"]),
    "offset negative": grad(3, -64),
    "offset a float in disguise": grad(3, {"$f": "0" * 16}),
    "scale negative": grad(4, -1),
    "scale infinite": grad(4, 0x7F800000),
    "scale beyond 32 bits": grad(4, 2**32),
    "scale text": grad(4, "1"),
    "scale of raw": put(1, "body", "updates", 0, "grads", 0, 4),
    "absent is a list of text": put(["ab"], "body", "updates", 0, "absent"),
    "set too long": put([["s", "r", 0, 0, 0]], "body", "sets"),
    "set offset true": put([["s", "r", 0, True]], "body", "sets"),
    "boundary is null": put(None, "body", "boundary"),
    "arithmetic is a number": put([1], "body", "arithmetic"),
    "fingerprint short": put([["a", 0, 1]], "body", "fingerprints"),
    "fingerprint stride 0": put([["a", 0, 0, "0" * 16]], "body", "fingerprints"),
    "fingerprint without sums": put([["a", 0, 1, ""]], "body", "fingerprints"),
    "fingerprint cut": put([["a", 0, 1, "0" * 15]], "body", "fingerprints"),
    "fingerprint uppercase": put([["a", 0, 1, "A" * 16]], "body", "fingerprints"),
    "fingerprint signed": put([["a", 0, 1, "-" + "0" * 15]], "body", "fingerprints"),
    "fingerprint grouped": put([["a", 0, 1, "0_0" + "0" * 13]], "body", "fingerprints"),
    "fingerprint spaced": put([["a", 0, 1, " " + "0" * 15]], "body", "fingerprints"),
    "fingerprint of lists": put([["a", 0, 1, ["0"] * 16]], "body", "fingerprints"),
}  # fmt: skip

BASES: dict[str, Change] = {
    "origin unknown": put("invented", "body", "origin"),
    "origin a list": put([], "body", "origin"),
    "class unknown": put("surely", "body", "class"),
    "states is a list": put([], "body", "states"),
    "state is text": put("x", "body", "states", "sgd.c64"),
    "present 2": put([2], "body", "states", "sgd.c64", "present"),
    "present true": put([True], "body", "states", "sgd.c64", "present"),
    "present is text": put("1", "body", "states", "sgd.c64", "present"),
    "scalars a list": put([], "body", "states", "sgd.c64", "scalars"),
    "a counter too many": put({"step": [1, 2]}, "body", "states", "sgd.c64", "scalars"),
    "counters are text": put({"step": "1"}, "body", "states", "sgd.c64", "scalars"),
    "counter is an array": put(
        {"step": [{"$a": ["x", "U8", [1]]}]}, "body", "states", "sgd.c64", "scalars"
    ),
    "gap is a list": put([], "body", "gap"),
    "gap without reason": put({"from": 0}, "body", "gap"),
    "gap from later": put({"reason": "x", "from": 13}, "body", "gap"),
    "gap of a replayed base": put("replayed", "body", "origin"),
    "since of a captured base": put(0, "body", "since"),
}

BOUNDED: dict[str, Change] = {
    "since itself": put(16, "body", "since"),
    "since later": put(17, "body", "since"),
    "since negative": put(-1, "body", "since"),
    "since true": put(True, "body", "since"),
    "since text": put("0", "body", "since"),
    "since too long ago": lambda head: head.update(step=257),
    "since of an exact base": put("exact", "body", "class"),
}

EXTRAS: dict[str, Change] = {
    "tree is a list": put([], "body", "tree"),
    "tree missing": drop("body", "tree"),
    "refs is a list": put([], "body", "refs"),
    "ref to itself": put(12, "body", "refs", "loader"),
    "ref negative": put(-1, "body", "refs", "loader"),
    "ref and value": put(0, "body", "refs", "rng"),
    "array missing": put(["t/9", "F64", [6]], "body", "tree", "tensors", "matrix", "$a"),
    "array of another dtype": put(["t/0", "I64", [6]], "body", "tree", "tensors", "matrix", "$a"),
    "array of another size": put(["t/0", "F64", [5]], "body", "tree", "tensors", "matrix", "$a"),
    "array nobody refers to": put(None, "body", "tree", "tensors", "flags"),
}

LAYOUTS: dict[str, tuple[Change, str]] = {
    "optimizers is text": (put("ab", "body", "optimizers"), "layout"),
    "optimizer is a number": (put([1, 2], "body", "optimizers"), "layout"),
    "sections is an object": (put({}, "body", "sections"), "layout"),
    "section named by a list": (put([], "body", "sections", 0, "name"), "layout"),
    "section climbs": (put("..", "body", "sections", 0, "name"), "layout"),
    "section with a slash": (put("a/b", "body", "sections", 0, "name"), "layout"),
    "section twice": (put("adamw.bf16", "body", "sections", 0, "name"), "layout"),
    "optimizer out of range": (put(2, "body", "sections", 0, "optimizer"), "layout"),
    "optimizer -2": (put(-2, "body", "sections", 0, "optimizer"), "layout"),
    "no roles": (put([], "body", "sections", 0, "roles"), "layout"),
    "roles are objects": (put([{"param": 1, "F32": 2}], "body", "sections", 0, "roles"), "layout"),
    "role unhashable": (put([[[], "F32"]], "body", "sections", 0, "roles"), "layout"),
    "role climbs": (put([["param", "F32"], ["../x", "F32"]], "body", "sections", 0, "roles"),
                    "layout"),
    "role twice": (put([["param", "F32"]] * 2, "body", "sections", 0, "roles"), "layout"),
    "first role is state": (put([["exp_avg", "F32"]], "body", "sections", 0, "roles"), "layout"),
    "role dtype unknown": (put([["param", "F33"]], "body", "sections", 0, "roles"), "dtype"),
    "state without optimizer": (
        put([["buffer", "I64"], ["exp_avg", "F32"]], "body", "sections", 3, "roles"), "layout"),
    "slices is text": (put("", "body", "sections", 0, "slices"), "layout"),
    "slice is a list": (put([], "body", "sections", 0, "slices", 0), "layout"),
    "slice unnamed": (piece("", "name"), "layout"),
    "slice named by a number": (piece(1, "name"), "layout"),
    "slice name of 5000": (piece("w" * 5000, "name"), "layout"),
    "slice twice": (
        lambda head: head["body"]["sections"][1]["slices"].append(
            head["body"]["sections"][1]["slices"][0] | {"offset": 64}), "layout"),
    "alias is a slice": (
        lambda head: head["body"]["sections"][0]["slices"][0].update(aliases=["embed.weight"]),
        "layout"),
    "shape negative": (piece([-3, -2], "shape"), "shape"),
    "shape overflows": (piece([HUGE, HUGE], "shape"), "shape"),
    "shape overflows to zero": (piece([2**32, 2**32], "shape"), "shape"),
    "flat of a negative shape": (
        lambda head: at_flat(head).update(shape=[-3, -2], flat=[0, 5]), "shape"),
    "flat of 40 dimensions": (
        lambda head: at_flat(head).update(shape=[1] * 40, flat=[0, 0]), "shape"),
    "array too large": (
        lambda head: at_flat(head).update(shape=[2**48], flat=[0, 2**47]), "shape"),
    "shape true": (piece([True, 2], "shape"), "layout"),
    "shape is text": (piece("32", "shape"), "layout"),
    "40 dimensions": (piece([1] * 40, "shape"), "shape"),
    "box outside": (piece([[[0, 4], [0, 2]]], "boxes"), "shape"),
    "box backwards": (piece([[[2, 1], [0, 2]]], "boxes"), "shape"),
    "box of one dimension": (piece([[[0, 3]]], "boxes"), "shape"),
    "boxes overlap": (piece([[[0, 3], [0, 2]], [[1, 2], [0, 2]]], "boxes"), "shape"),
    "boxes twice": (piece([[[0, 1], [0, 1]]] * 2, "boxes"), "layout"),
    "boxes out of order": (piece([[[1, 2], [0, 1]], [[0, 1], [0, 1]]], "boxes"), "layout"),
    "box side of three": (piece([[[0, 3, 3], [0, 2]]], "boxes"), "layout"),
    "box side is text": (piece([["03", "02"]], "boxes"), "layout"),
    "flat and boxes": (piece([0, 1], "flat"), "shape"),
    "flat of three": (piece([0, 1, 2], "flat"), "layout"),
    "flat outside": (put([10, 101], "body", "sections", 0, "slices", 1, "flat"), "shape"),
    "flat backwards": (put([10, 9], "body", "sections", 0, "slices", 1, "flat"), "shape"),
    "flat negative": (put([-1, 9], "body", "sections", 0, "slices", 1, "flat"), "shape"),
    "flat is whole": (put([0, 100], "body", "sections", 0, "slices", 1, "flat"), "shape"),
    "group missing": (piece(-1, "group"), "layout"),
    "group -2": (piece(-2, "group"), "layout"),
    "group -2 of a buffer": (put(-2, "body", "sections", 3, "slices", 0, "group"), "layout"),
    "group of a buffer": (put(0, "body", "sections", 3, "slices", 0, "group"), "layout"),
    "offset unaligned": (piece(1, "offset"), "layout"),
    "offset negative": (piece(-64, "offset"), "layout"),
    "offset with a hole": (piece(64, "offset"), "layout"),
    "slices overlap": (put(0, "body", "sections", 0, "slices", 1, "offset"), "layout"),
    "alias is a number": (piece([1], "aliases"), "layout"),
}  # fmt: skip

FIRST = ("body", "parts", 0)
WHO, FOUND = "manifest-redundancy", ("body", "redundancy")
MANIFESTS: dict[str, tuple[str, Change, str]] = {
    "parts is an object": ("manifest", put({}, "body", "parts"), "manifest"),
    "part is text": ("manifest", put("x", *FIRST), "manifest"),
    "part climbs": ("manifest", put("../p", *FIRST, "name"), "manifest"),
    "part is a number": ("manifest", put(0, *FIRST, "name"), "manifest"),
    "part twice": ("manifest", put("p000001", *FIRST, "name"), "manifest"),
    "layout is no id": ("manifest", put("x", *FIRST, "layout"), "id"),
    "sources is text": ("manifest", put("", *FIRST, "sources"), "manifest"),
    "sources out of order": ("manifest", put([1, 0], *FIRST, "sources"), "manifest"),
    "source negative": ("manifest", put([-1, 0], *FIRST, "sources"), "manifest"),
    "no source": ("manifest", put([], *FIRST, "sources"), "manifest"),
    "owner is no source": ("manifest", put(1, *FIRST, "owner"), "manifest"),
    "ranks is text": ("manifest", put("", "body", "ranks"), "manifest"),
    "rank climbs": ("manifest", put(["../r"], "body", "ranks"), "manifest"),
    "rank twice": ("manifest", put(["r000000"] * 2, "body", "ranks"), "manifest"),
    "parent_term climbs": ("manifest-fork", put("../t", "body", "parent_term"), "manifest"),
    "parent_term is itself": (
        "manifest-fork", put("t000002-bb77889900aabbcc", "body", "parent_term"), "manifest"),
    "fork after the step": ("manifest-fork", put(49, "body", "fork_step"), "manifest"),
    "fork negative": ("manifest-fork", put(-1, "body", "fork_step"), "manifest"),
    "fork without parent": ("manifest", put(1, "body", "fork_step"), "manifest"),
    "tips without parent": ("manifest", put({"p000000": "0" * 64}, "body", "tips"), "manifest"),
    "tips are pairs": ("manifest-fork", put([["p000000", "0" * 64]], "body", "tips"), "manifest"),
    "tip of a rank": ("manifest-fork", put("0" * 64, "body", "tips", "r000000"), "manifest"),
    "tip is no id": ("manifest-fork", put("x", "body", "tips", "p000000"), "id"),
    "settings is a list": ("manifest", put([], "body", "settings"), "manifest"),
    "redundancy is null": (WHO, put(None, *FOUND), "manifest"),
    "redundancy without k": (WHO, drop(*FOUND, "k"), "manifest"),
    "tolerance negative": (WHO, put(-1, *FOUND, "k"), "manifest"),
    "unknown policy": (WHO, put("both", *FOUND, "policy"), "manifest"),
    "unknown keep": (WHO, put("all", *FOUND, "grounds", 0, "keep"), "manifest"),
    "unknown class": (WHO, put("some", *FOUND, "parts", 0, "class"), "manifest"),
    "nodes out of order": (WHO, put([["n1", "a"], ["n0", "b"]], *FOUND, "nodes"), "manifest"),
    "node of a rank": (WHO, put([0, 2], *FOUND, "ranks"), "manifest"),
    "a source that is no rank": (WHO, put([0], *FOUND, "ranks"), "manifest"),
    "set out of order": (WHO, put([[0, 1, 2], [0, 1, 1]], *FOUND, "sets"), "manifest"),
    "set of nobody": (WHO, put([[], [0, 1, 2]], *FOUND, "sets"), "manifest"),
    "set of strangers": (WHO, put([[0, 1, 1], [0, 1, 3]], *FOUND, "sets"), "manifest"),
    "set spelled otherwise": (
        WHO, put([[0, 1, 1], [0, 1, 1, 1, 1, 1]], *FOUND, "sets"), "manifest"),
    "set unused": (WHO, put([[0, 1, 1], [0, 1, 2], [1, 1, 1]], *FOUND, "sets"), "manifest"),
    "set beyond": (WHO, put(2, *FOUND, "grounds", 1, "param"), "manifest"),
    "state of nothing": (WHO, put(-1, *FOUND, "grounds", 0, "param"), "manifest"),
    "grounds out of order": (WHO, put("s", *FOUND, "grounds", 0, "scope"), "manifest"),
    "name twice": (WHO, put(["head.bias"] * 2, *FOUND, "names"), "manifest"),
    "name unused": (WHO, put(["a", "b", "c"], *FOUND, "names"), "manifest"),
    "name beyond": (WHO, put([0, 1, 2, 1], *FOUND, "parts", 0, "states"), "manifest"),
    "name negative": (WHO, put([-1, 1, 0, 1, 1, 2], *FOUND, "parts", 0, "states"), "manifest"),
    "ground unused": (WHO, put([0, 1, 1, 1], *FOUND, "parts", 0, "states"), "manifest"),
    "half a state": (WHO, put([0, 1, 1, 1, 1, 2, 1], *FOUND, "parts", 0, "states"), "manifest"),
    "states out of order": (
        WHO, put([1, 1, 0, 1, 1, 2], *FOUND, "parts", 0, "states"), "manifest"),
    "states of text": (WHO, put(["0", 1, 1, 1, 1, 2], *FOUND, "parts", 0, "states"), "manifest"),
    "holder beyond": (WHO, put([[2, 0]], *FOUND, "parts", 0, "holders"), "manifest"),
    "holder of a stranger": (WHO, put([[1, 1]], *FOUND, "parts", 0, "holders"), "manifest"),
    "holder twice": (WHO, put([[0, 0], [0, 0]], *FOUND, "parts", 0, "holders"), "manifest"),
    "a part too few": (
        WHO, put([{"class": "none", "holders": [], "states": [0, 0, 0, 1, 1, 2]}],
                 *FOUND, "parts"), "manifest"),
    "excuse empty": ("claim-excused", put("", "body", "excuse"), "log"),
    "excuse is a list": ("claim-excused", put(["ended"], "body", "excuse"), "log"),
    "tag without name": ("tag", drop("body", "name"), "log"),
    "tag name climbs": ("tag", put("../x", "body", "name"), "log"),
    "tag name is a list": ("tag", put(["x"], "body", "name"), "log"),
    "tag negative": ("tag", put(-1, "body", "step"), "log"),
    "tag true": ("tag", put(True, "body", "step"), "log"),
    "tag beyond every step": ("tag", put(10**12, "body", "step"), "log"),
    "floor without tier": ("floor", drop("body", "tier"), "log"),
    "floor tier empty": ("floor", put("", "body", "tier"), "log"),
    "floor without terms": ("floor", put([], "body", "terms"), "log"),
    "floor terms is text": ("floor", put("t", "body", "terms"), "log"),
    "floor term climbs": ("floor", put(["../t"], "body", "terms"), "log"),
    "floor term twice": ("floor", put(["t000001-00112233445566aa"] * 2, "body", "terms"), "log"),
    "floor negative": ("floor", put(-1, "body", "step"), "log"),
    "floor true": ("floor", put(True, "body", "step"), "log"),
    "floor beyond every step": ("floor", put(10**12, "body", "step"), "log"),
    "kept above": ("floor", put([64], "body", "kept"), "log"),
    "kept out of order": ("floor", put([2, 1], "body", "kept"), "log"),
    "kept is text": ("floor", put("", "body", "kept"), "log"),
}  # fmt: skip

VALUES: dict[str, tuple[Json, str]] = {
    "unknown tag": ({"$z": 1}, "typed-value"),
    "two tags": ({"$f": "0" * 16, "$i": "1"}, "typed-value"),
    "tag beside a key": ({"$f": "0" * 16, "a": 1}, "typed-value"),
    "float is a number": ({"$f": 1}, "hex"),
    "float cut": ({"$f": "3ff0"}, "float"),
    "float spaced": ({"$f": "3ff00000 0000000"}, "hex"),
    "float uppercase": ({"$f": "3FF0000000000000"}, "hex"),
    "float with a newline": ({"$f": "3ff000000000000\n"}, "hex"),
    "bytes odd": ({"$b": "0"}, "hex"),
    "bytes uppercase": ({"$b": "FF"}, "hex"),
    "bytes with spaces": ({"$b": "ff ff"}, "hex"),
    "bytes is a list": ({"$b": []}, "hex"),
    "int small": ({"$i": "7"}, "typed-value"),
    "int just small": ({"$i": str(2**53)}, "typed-value"),
    "int with zeros": ({"$i": "0" + str(2**60)}, "typed-value"),
    "int with plus": ({"$i": "+" + str(2**60)}, "typed-value"),
    "int with other digits": ({"$i": "٩" * 30}, "typed-value"),
    "int is a number": ({"$i": 7}, "typed-value"),
    "int is no number": ({"$i": "x"}, "typed-value"),
    "int is a list": ({"$i": []}, "typed-value"),
    "int of 10^5 digits": ({"$i": "9" * 10**5}, "typed-value"),
    "int of 2049 bits": ({"$i": str(2**2048)}, "typed-value"),
    "tuple is text": ({"$t": "ab"}, "typed-value"),
    "tuple is an object": ({"$t": {"a": 1}}, "typed-value"),
    "dict is an object": ({"$d": {}}, "typed-value"),
    "dict empty": ({"$d": []}, "typed-value"),
    "dict with plain keys": ({"$d": [["a", 1]]}, "typed-value"),
    "dict of text": ({"$d": ["ab"]}, "typed-value"),
    "dict of three": ({"$d": [[1, 2, 3]]}, "typed-value"),
    "dict key twice": ({"$d": [[1, 2], [1, 3]]}, "typed-value"),
    "dict key twice in Python": ({"$d": [[1, 2], [True, 3]]}, "typed-value"),
    "dict NaN twice": ({"$d": [[{"$f": "7ff8" + "0" * 12}, 1]] * 2}, "typed-value"),
    "dict key a list": ({"$d": [[[], 1]]}, "typed-value"),
    "dict key an object": ({"$d": [[{}, 1]]}, "typed-value"),
    "scalar is text": ({"$x": "ab"}, "typed-value"),
    "scalar short": ({"$x": ["F32"]}, "typed-value"),
    "scalar too small": ({"$x": ["F32", "0000"]}, "typed-value"),
    "scalar dtype unknown": ({"$x": ["F33", "00000000"]}, "dtype"),
    "scalar dtype a list": ({"$x": [[], "00000000"]}, "dtype"),
    "scalar not hex": ({"$x": ["U8", "zz"]}, "hex"),
    "array short": ({"$a": ["x", "U8"]}, "typed-value"),
    "array dtype unknown": ({"$a": ["x", "F33", []]}, "dtype"),
    "array shape is an object": ({"$a": ["x", "U8", {}]}, "typed-value"),
    "array shape negative": ({"$a": ["x", "U8", [-1]]}, "typed-value"),
    "array shape overflows": ({"$a": ["x", "U8", [HUGE, HUGE]]}, "typed-value"),
    "array of 40 dimensions": ({"$a": ["x", "U8", [1] * 40]}, "typed-value"),
    "array named by a number": ({"$a": [1, "U8", []]}, "typed-value"),
    "too deep": (nested(MAX_VALUE_DEPTH + 2), "depth"),
}

CASES: dict[str, tuple[str, Change, str]] = {
    **{f"delta: {case}": ("delta", change, "delta") for case, change in DELTAS.items()},
    **{f"base: {case}": ("base", change, "base") for case, change in BASES.items()},
    **{
        f"bounded base: {case}": ("base-bounded", change, "base")
        for case, change in BOUNDED.items()
    },
    **{f"extra: {case}": ("extra", change, "extra") for case, change in EXTRAS.items()},
    **{f"layout: {case}": ("layout", *item) for case, item in LAYOUTS.items()},
    **MANIFESTS,
    **{f"value: {case}": ("extra", value(item), rule) for case, (item, rule) in VALUES.items()},
}


@pytest.mark.parametrize("case", CASES)
def test_body_is_refused(case: str) -> None:
    """A body that breaks a rule is refused by that rule, though head and blocks are right."""
    name, change, rule = CASES[case]
    with pytest.raises(MalformedError) as caught:
        read(forge(name, change))
    assert caught.value.rule == rule, caught.value
    assert len(str(caught.value)) < 1000


def spots(item: Json, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value within a body."""
    found = [path]
    if isinstance(item, dict | list):
        for key, below in item.items() if isinstance(item, dict) else enumerate(item):
            found += spots(below, (*path, key))
    return found


JUNK: list[Json] = [None, True, -1, 2**53, "", "x", "../x", [], [[]], {}, {"$d": [[[], 1]]}, [{}]]


@pytest.mark.parametrize(
    "name",
    [
        "delta",
        "base",
        "extra",
        "layout",
        "manifest-fork",
        "manifest-redundancy",
        "floor",
        "tag",
        "claim-excused",
    ],
)
def test_only_our_errors_leave_a_decoder(name: str) -> None:
    """Whatever stands at whatever place, a decoder answers or raises one of ours."""
    for path in spots(golden_head(name)["body"])[1:]:
        for junk in JUNK:
            try:
                read(forge(name, put(junk, "body", *path)))
            except AdaCheckError:
                continue


@pytest.mark.parametrize("name", ["delta", "base", "extra", "layout", "manifest", "tag"])
def test_decoder_takes_its_own_kind_only(name: str) -> None:
    """A head of another kind is refused before its body is looked at."""
    for kind, decode in DECODERS.items():
        if decode is not DECODERS[name]:
            with pytest.raises(MalformedError) as caught:
                decode(sealed_of(name).head)
            assert caught.value.rule == "kind", kind


def test_writers_are_held_to_the_same_rules() -> None:
    """What a reader would refuse cannot be sealed."""
    bad = layout.Layout(
        optimizers=(), sections=(
            layout.Section(name="../x", optimizer=-1, roles=(("param", "F32"),), slices=()),
        ),
    )  # fmt: skip
    with pytest.raises(MalformedError):
        bad.seal("run")
    term = "t000001-00112233445566aa"
    with pytest.raises(MalformedError):
        manifest.Manifest(run="run", term=term, step=0, parts=(), ranks=("x",)).seal()
    with pytest.raises(MalformedError):
        manifest.Floor(run="run", term=term, index=0, tier="", terms=(), step=0).seal()


def test_fingerprint_names_its_blocks() -> None:
    """Every stride-th block from the first has its sum."""
    item = bodies.Fingerprint(array="a/param", first=3, stride=16, sums=(5, 6))
    assert item.blocks() == {3: 5, 19: 6}
