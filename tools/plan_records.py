"""What records of a plan have besides tensors: heads, and the extras of ranks.

Stand-ins of these records are encoded by the format's own code. Of what grows with the part one
more is encoded too, and the difference counted as often as there is more of it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from adacheck_store.config import writer_info
from adacheck_store.fingerprint import ROTATION, rotation
from adacheck_store.format.bodies import (
    BaseBody,
    DeltaBody,
    ExtraBody,
    Fingerprint,
    Grad,
    Groups,
    SectionState,
    Update,
    grad_array,
)
from adacheck_store.format.canonical import ArrayRef, Scalar
from adacheck_store.format.head import ArrayInfo, Head, SealedHead
from adacheck_store.format.ids import BLOCK_BYTES, block_count
from adacheck_store.format.keys import part_name, rank_name
from adacheck_store.redundancy.witness import DIGEST_BYTES

SECTION = "trained.f32"
GROUP: Mapping[str, Any] = {
    "amsgrad": False, "betas": (0.9, 0.95), "capturable": False, "decoupled_weight_decay": True,
    "differentiable": False, "eps": 1e-8, "foreach": None, "fused": None, "lr": 1e-4,
    "maximize": False, "weight_decay": 0.1,
}  # fmt: skip
"""What AdamW has in a group. One group is counted: further ones take some 600 bytes each."""

GROUPS: Groups = (GROUP,)
STEP = 10**6
ID, DIGEST = "0" * 64, "0" * 32


def delta_head(tensors: int, kept: int, roles: Sequence[int]) -> int:
    """Bytes of a delta's head: so many tensors' gradients, ``kept`` bytes of them.

    ``roles`` are the bytes of parameters, and of each array of the optimizer's state: of these
    arrays some blocks are fingerprinted.
    """
    marks = sum(-(-blocks // rotation(blocks)) for blocks in map(block_count, roles))
    return (
        _delta((), 1, 1, len(roles))
        + tensors * _row(len(str(tensors)), len(str(kept // 2)))
        + max(block_count(kept) - 1, 0) * (_delta((), 2, 1, 1) - _delta((), 1, 1, 1))
        + max(marks - len(roles), 0) * (_delta((), 1, 2, 1) - _delta((), 1, 1, 1))
    )


def base_head(tensors: int, roles: Sequence[int]) -> int:
    """Bytes of a base's head: so many tensors with their counters, and a digest for each block."""
    blocks = sum(map(block_count, roles))
    return (
        _base(0, 1, len(roles))
        + tensors * (_base(2, 1, 1) - _base(1, 1, 1))
        + max(blocks - len(roles), 0) * (_base(1, 2, 1) - _base(1, 1, 1))
    )


@cache
def extra(shared: int) -> int:
    """Bytes of a rank's extra: generators, a loader's place, a witness of so many shared states.

    The generators are those of Python, torch and numpy, as they stand and as they stood when the
    loader began. Those of devices and of the loader, and what else a loop tracks come on top.
    """
    arrays: dict[str, ArrayInfo] = {}

    def ref(dtype: str, elements: int, width: int) -> ArrayRef:
        name = f"x/{len(arrays)}"
        digests = (DIGEST,) * block_count(elements * width)
        arrays[name] = ArrayInfo(name=name, dtype=dtype, elements=elements, digests=digests)
        return ArrayRef(name, dtype, (elements,))

    def rng() -> dict[str, Any]:
        words = ref("U32", len(random.getstate()[1]), 4)
        return {
            "python": {"version": 3, "words": words, "gauss": None},
            "torch": ref("U8", torch.get_rng_state().numel(), 1),
            "numpy": {"words": ref("U32", 624, 4), "position": 624, "has_gauss": 0, "gauss": 0.0},
        }

    start = {"rng": rng(), "generators": {}}
    loader = {"start": start, "consumed": STEP, "state": None, "generators": {}}
    tree: dict[str, Any] = {
        "held": [], "loader": loader, "modules": {}, "rng": rng(), "tracked": {}
    }  # fmt: skip
    if shared:
        tree["witness"] = {"since": STEP, "digests": ref("U8", DIGEST_BYTES * shared, 1)}
    head = _encoded("extra", rank_name(0), tuple(arrays.values()), ExtraBody(tree=tree).to_json())
    return head + sum(info.nbytes for info in arrays.values())


@cache
def _row(number: int, offset: int) -> int:
    """What a gradient's number and offset of so many digits take."""
    at = Grad(section=SECTION, slice=10**number - 1, encoding="bf16", offset=10**offset - 1)
    return _delta((at, at), 1, 1, 1) - _delta((at,), 1, 1, 1)


@cache
def _delta(grads: tuple[Grad, ...], blocks: int, marks: int, roles: int) -> int:
    """A delta's head with these gradients, so many blocks of them, roles, and sums for each."""
    name = grad_array(0, SECTION, "bf16")
    body = DeltaBody(
        updates=(Update(optimizer=0, groups=GROUPS, grads=grads),),
        boundary=(GROUPS,), arithmetic=(DIGEST,),
        fingerprints=tuple(
            Fingerprint(array=each, first=0, stride=ROTATION, sums=(0,) * marks)
            for each in _roles(roles)
        ),
    )  # fmt: skip
    return _encoded("delta", part_name(0), (_array(name, "BF16", 2, blocks),), body.to_json())


@cache
def _base(tensors: int, blocks: int, roles: int) -> int:
    """A base's head with so many tensors, and roles of so many blocks each."""
    counter = Scalar("F32", bytes(4))
    state = SectionState(present=(True,) * tensors, scalars={"step": (counter,) * tensors})
    body = BaseBody(
        origin="replayed", exactness="exact", states={SECTION: state}, boundary=(GROUPS,)
    )
    arrays = tuple(_array(name, "F32", 4, blocks) for name in _roles(roles))
    return _encoded("base", part_name(0), arrays, body.to_json())


def _roles(count: int) -> list[str]:
    return [f"{SECTION}/{role}" for role in ("param", "exp_avg", "exp_avg_sq", "max")[:count]]


def _array(name: str, dtype: str, width: int, blocks: int) -> ArrayInfo:
    elements = blocks * BLOCK_BYTES // width
    return ArrayInfo(name=name, dtype=dtype, elements=elements, digests=(DIGEST,) * blocks)


def _encoded(kind: str, part: str, arrays: tuple[ArrayInfo, ...], body: Mapping[str, Any]) -> int:
    """Bytes of a head with what stands beside it, as agents and tiers are given them."""
    link = "" if kind == "extra" else ID
    head = Head(
        kind=kind, run="run", term=f"t000001-{ID[:16]}", part=part, step=STEP, parent=link,
        manifest=ID, layout=link, arrays=arrays, body=body,
    )  # fmt: skip
    sealed = SealedHead.seal(head, writer_info())
    return len(sealed.raw) + len(sealed.info)
