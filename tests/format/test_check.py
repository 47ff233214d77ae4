"""Deltas and bases against their layout."""

from dataclasses import replace
from typing import Any

import pytest

from adacheck_store.format.bodies import BaseBody, DeltaBody, Fingerprint, Grad, SetPiece, Update
from adacheck_store.format.check import check_base, check_delta
from adacheck_store.format.errors import MalformedError
from adacheck_store.format.head import Head
from tests.format.forge import sealed_of
from tests.golden.make_v1 import BASE, DELTA, LAYOUT, REPLAYED

FIRST, *OTHERS = DELTA.updates
BUFFER = DELTA.sets[0]


def grads(place: int, **fields: Any) -> DeltaBody:
    """The golden delta with another gradient in its first update."""
    found = list(FIRST.grads)
    found[place] = replace(found[place], **fields)
    return replace(DELTA, updates=(replace(FIRST, grads=tuple(found)), *OTHERS))


def first(**fields: Any) -> DeltaBody:
    """The golden delta with another first update."""
    return replace(DELTA, updates=(replace(FIRST, **fields), *OTHERS))


def fingerprint(**fields: Any) -> DeltaBody:
    """The golden delta with another fingerprint."""
    return replace(DELTA, fingerprints=(replace(DELTA.fingerprints[0], **fields),))


EMPTY = Update(optimizer=9, groups=(), grads=())
DELTAS: dict[str, DeltaBody] = {
    "optimizer out of range": first(optimizer=2),
    "optimizer out of range, without slices": replace(DELTA, updates=(*DELTA.updates, EMPTY)),
    "another optimizer's slices": first(optimizer=1),
    "group missing": first(groups=FIRST.groups[:1]),
    "boundary of one optimizer": replace(DELTA, boundary=DELTA.boundary[:1]),
    "boundary group missing": replace(DELTA, boundary=((), DELTA.boundary[1])),
    "arithmetic of one optimizer": replace(DELTA, arithmetic=DELTA.arithmetic[:1]),
    "section unknown": grads(0, section="other"),
    "slice unknown": grads(0, slice=4),
    "slice of a buffer": grads(0, section="buffers"),
    "encoding without array": grads(0, encoding="fp16", offset=64),
    "offset unaligned": grads(0, offset=1),
    "offset beyond the end": grads(0, offset=64),
    "offset huge": grads(0, offset=2**53 - 64),
    "gradient missing": first(grads=FIRST.grads[1:]),
    "gradient twice": first(grads=(FIRST.grads[0], *FIRST.grads)),
    "gradients out of order": first(grads=(*FIRST.grads[3:], *FIRST.grads[:3])),
    "absent missing": first(absent=()),
    "absent twice": first(absent=FIRST.absent * 2),
    "absent and given": first(absent=(("adamw.f32", 0), *FIRST.absent)),
    "absent unknown": first(absent=(*FIRST.absent, ("other", 0))),
    "absent negative": first(absent=(("adamw.f32", -1),)),
    "updates missing": replace(DELTA, updates=DELTA.updates[:2]),
    "set of an unknown section": replace(DELTA, sets=(replace(BUFFER, section="x"),)),
    "set of an unknown role": replace(DELTA, sets=(replace(BUFFER, role="param"),)),
    "set of an unknown slice": replace(DELTA, sets=(replace(BUFFER, slice=2),)),
    "set beyond the end": replace(DELTA, sets=(replace(BUFFER, offset=64),)),
    "set twice": replace(DELTA, sets=(BUFFER, BUFFER)),
    "sets out of order": replace(DELTA, sets=(replace(BUFFER, slice=1), BUFFER)),
    "set array of nobody": replace(DELTA, sets=()),
    "set without array": replace(
        DELTA, sets=(SetPiece(section="adamw.f32", role="param", slice=0, offset=0), BUFFER)
    ),
    "fingerprint of nothing": fingerprint(array="adamw.f32/other"),
    "fingerprint of a gradient": fingerprint(array="0/adamw.f32/grad.raw"),
    "fingerprint beyond the end": fingerprint(first=1),
    "fingerprints beyond the end": fingerprint(stride=1, sums=(1, 2)),
}


def refused(head: Head, body: DeltaBody | BaseBody) -> str:
    """The rule by which a body is refused against the golden layout."""
    check = check_delta if isinstance(body, DeltaBody) else check_base
    with pytest.raises(MalformedError) as caught:
        check(head, body, LAYOUT)
    assert caught.value.place["part"] == "p000000"
    return caught.value.rule


@pytest.mark.parametrize("case", DELTAS)
def test_delta_is_refused(case: str) -> None:
    """A delta that does not fit its layout is refused."""
    assert refused(sealed_of("delta").head, DELTAS[case]) == "delta-layout"


def test_pieces_do_not_overlap() -> None:
    """Two slices may share an array, and each has its own elements."""
    given = Grad(section="adamw.f32", slice=1, encoding="raw", offset=0)
    body = first(grads=(FIRST.grads[0], given, *FIRST.grads[2:]))
    head = sealed_of("delta").head
    arrays = tuple(
        replace(info, elements=256) if info.name == "0/adamw.f32/grad.raw" else info
        for info in head.arrays
        if info.name != "0/adamw.f32/grad.bf16"
    )
    head = replace(head, arrays=arrays)
    assert refused(head, body) == "delta-layout"
    moved = replace(given, offset=64)
    check_delta(head, first(grads=(FIRST.grads[0], moved, *FIRST.grads[2:])), LAYOUT)


def test_gradient_of_another_optimizer_is_refused() -> None:
    """An update is of one optimizer's slices, though the array of another's is there."""
    head = sealed_of("delta").head
    more = replace(head.array("2/sgd.c64/grad.raw"), name="0/sgd.c64/grad.raw")
    other = Grad(section="sgd.c64", slice=0, encoding="raw", offset=0)
    body = first(grads=(*FIRST.grads, other))
    assert refused(replace(head, arrays=(*head.arrays, more)), body) == "delta-layout"


def test_delta_of_step_0_is_refused() -> None:
    """Nothing comes before the first boundary."""
    assert refused(replace(sealed_of("delta").head, step=0), DELTA) == "delta-layout"


@pytest.mark.parametrize("place", range(6))
def test_delta_arrays_have_their_dtype(place: int) -> None:
    """Every array of a delta has the dtype of its encoding or role."""
    head = sealed_of("delta").head
    arrays = list(head.arrays)
    arrays[place] = replace(arrays[place], dtype="I32")
    assert refused(replace(head, arrays=tuple(arrays)), DELTA) == "delta-layout"


BASES: dict[str, BaseBody] = {
    "boundary of one optimizer": replace(BASE, boundary=BASE.boundary[:1]),
    "boundary group missing": replace(BASE, boundary=(BASE.boundary[0][:1], BASE.boundary[1])),
    "state missing": replace(BASE, states={"adamw.f32": BASE.states["adamw.f32"]}),
    "state of an unknown section": replace(
        BASE, states={**BASE.states, "other": BASE.states["sgd.c64"]}
    ),
    "present too short": replace(
        BASE, states={**BASE.states, "adamw.f32": BASE.states["adamw.bf16"]}
    ),
    "present without array": replace(
        BASE, states={**BASE.states, "sgd.c64": REPLAYED.states["sgd.c64"]}
    ),
}


@pytest.mark.parametrize("case", BASES)
def test_base_is_refused(case: str) -> None:
    """A base that does not fit its layout is refused."""
    assert refused(sealed_of("base").head, BASES[case]) == "base-layout"


@pytest.mark.parametrize("place", range(7))
def test_base_arrays_follow_from_the_layout(place: int) -> None:
    """Every array of a base has the dtype and length of its section, and none is missing."""
    head = sealed_of("base").head
    arrays = head.arrays
    for other in (
        (replace(arrays[place], dtype="I32"),),
        (replace(arrays[place], elements=64 * 9),),
        (replace(arrays[place], name="adamw.f32/other"),),
        (),
        (arrays[place], replace(arrays[place], name="more/param")),
    ):
        changed = replace(head, arrays=(*arrays[:place], *other, *arrays[place + 1 :]))
        assert refused(changed, BASE) == "base-layout"


def test_state_without_any_slice_needs_no_array() -> None:
    """Absent state is not zero: its array is left out."""
    check_base(sealed_of("base-replayed").head, REPLAYED, LAYOUT)
    assert "adamw.f32/exp_avg" not in {a.name for a in sealed_of("base-replayed").head.arrays}


def test_fingerprint_of_the_last_block() -> None:
    """The last block of an array may be named, whatever the stride."""
    body = replace(
        DELTA, fingerprints=(Fingerprint(array="buffers/buffer", first=0, stride=99, sums=(1,)),)
    )
    check_delta(sealed_of("delta").head, body, LAYOUT)
