"""Bodies of deltas, bases and extras: typed, and checked on the way in and out.

Hyper-parameters, step counters and trees are *typed values* (`canonical.to_json`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import canonical, derived, strict
from .errors import MalformedError
from .head import Head

Groups = tuple[Mapping[str, Any], ...]
"""One mapping per parameter group: every key but ``params`` that has a typed value."""

ENCODINGS = ("raw", "bf16", "fp16")
"""How a gradient is kept: in its own dtype, or as half precision (times ``scale``, if given)."""

ORIGINS = ("captured", "replayed", "derived")
CLASSES = ("exact", "bounded", "unsupported")

BOUNDED_STEPS = 256
"""Steps that folds of class ``bounded`` may go on from a base that is exact."""

_SUMS = re.compile(r"(?:[0-9a-f]{16})+")
_INFINITY = 0x7F80_0000


@dataclass(frozen=True, slots=True, kw_only=True)
class Grad:
    """Where the gradient of a slice lies: array ``<update>/<section>/grad.<encoding>``.

    The gradient is ``float32(scale) * half`` rounded once to float32 where ``scale`` is given
    (IEEE-754 binary32 bits as an integer), else the kept value itself.
    """

    section: str
    slice: int
    encoding: str
    offset: int
    scale: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One applied ``optimizer.step()``.

    ``optimizer`` indexes the layout's; ``groups`` are the hyper-parameters it used; slices of
    the optimizer that are in ``absent`` (section, slice) had no gradient, which is not a zero
    gradient; all its other slices are in ``grads``.
    """

    optimizer: int
    groups: Groups
    grads: tuple[Grad, ...]
    absent: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPiece:
    """New bytes for a slice's role: array ``set/<section>/<role>``, from element ``offset``."""

    section: str
    role: str
    slice: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Position-weighted sums of blocks ``first, first + stride, ...`` of a base's array.

    The sum of a block is ``sum(w[i] * (2*i + 1)) mod 2^64`` over its little-endian 32-bit words
    taken as signed integers (a block whose size is no multiple of 4 is padded with zeros).
    """

    array: str
    first: int
    stride: int
    sums: tuple[int, ...]

    def blocks(self) -> dict[int, int]:
        """Block index -> sum."""
        return {self.first + i * self.stride: value for i, value in enumerate(self.sums)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaBody:
    """How a part's state at a step follows from the step before.

    Apply ``updates`` in order, then ``sets``. ``boundary`` holds, per optimizer, the groups'
    hyper-parameters as they stand at the boundary: what restore puts back. ``arithmetic`` is,
    per optimizer, the digest of its arithmetic vector. ``fingerprints`` are the trainer's, of
    the state *at* the step.
    """

    updates: tuple[Update, ...] = ()
    sets: tuple[SetPiece, ...] = ()
    boundary: tuple[Groups, ...] = ()
    arithmetic: tuple[str, ...] = ()
    fingerprints: tuple[Fingerprint, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The head's body."""
        return {
            "updates": [_update_json(update) for update in self.updates],
            "sets": [[s.section, s.role, s.slice, s.offset] for s in self.sets],
            "boundary": [canonical.to_json(list(groups)) for groups in self.boundary],
            "arithmetic": list(self.arithmetic),
            "fingerprints": [_fingerprint_json(f) for f in self.fingerprints],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionState:
    """Which optimizer state a section's slices have (absent is not zero), one entry per slice.

    ``present[i]`` says whether slice i has its state tensors; ``scalars`` maps the name of a
    per-slice counter (``step``) to its typed value or None.
    """

    present: tuple[bool, ...]
    scalars: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseBody:
    """What a base is besides its arrays.

    ``origin`` is one of `ORIGINS` (see `derived`), ``exactness`` one of `CLASSES`. ``gap``, where
    the spine starts anew for a reason other than a term: ``{"reason": str, "from": step}``;
    folding through steps ``from`` .. this base's is unprovable. ``since``, of a replayed base of
    class ``bounded``, is the step of the exact base it was folded from (None: not told).
    """

    origin: str
    exactness: str
    states: Mapping[str, SectionState]
    boundary: tuple[Groups, ...] = ()
    gap: Mapping[str, Any] | None = None
    since: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The head's body."""
        told = {} if self.since is None else {"since": self.since}
        return told | {
            "origin": self.origin,
            "class": self.exactness,
            "states": {
                name: {
                    "present": [int(flag) for flag in state.present],
                    "scalars": {
                        key: [canonical.to_json(value) for value in values]
                        for key, values in state.scalars.items()
                    },
                }
                for name, state in self.states.items()
            },
            "boundary": [canonical.to_json(list(groups)) for groups in self.boundary],
            "gap": None if self.gap is None else dict(self.gap),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraBody:
    """What is per rank and no tensor of the model: a typed tree.

    ``tree`` maps a name (``rng``, ``loader``, ``scheduler``, ...) to a typed value whose tensors
    are `ArrayRef` into the record's arrays. ``refs`` maps a name to the earlier step of the same
    term whose extra holds it.
    """

    tree: Mapping[str, Any]
    refs: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The head's body."""
        tree = {name: canonical.to_json(value) for name, value in self.tree.items()}
        return {"tree": tree, "refs": dict(self.refs)}


def _update_json(update: Update) -> dict[str, Any]:
    return {
        "optimizer": update.optimizer,
        "groups": canonical.to_json(list(update.groups)),
        "grads": [[g.section, g.slice, g.encoding, g.offset, g.scale] for g in update.grads],
        "absent": [[section, index] for section, index in update.absent],
    }


def _fingerprint_json(item: Fingerprint) -> list[Any]:
    sums = "".join(f"{value & (2**64 - 1):016x}" for value in item.sums)
    return [item.array, item.first, item.stride, sums]


def grad_array(update: int, section: str, encoding: str) -> str:
    """Name of the delta's array with the gradients of a section."""
    return f"{update}/{section}/grad.{encoding}"


def set_array(section: str, role: str) -> str:
    """Name of the delta's array with new bytes of a section's role."""
    return f"set/{section}/{role}"


def decode_delta(head: Head) -> DeltaBody:
    """A delta's body; raises `MalformedError` (rule ``delta``, or that of a typed value)."""
    body = _body_of(head, "delta")
    try:
        found = strict.fields(body, "updates", "sets", "boundary", "arithmetic", "fingerprints")
        return DeltaBody(
            updates=tuple(_decode_update(item) for item in strict.items(found["updates"])),
            sets=tuple(_decode_set(item) for item in strict.items(found["sets"])),
            boundary=tuple(_groups(item) for item in strict.items(found["boundary"])),
            arithmetic=tuple(strict.text(item) for item in strict.items(found["arithmetic"])),
            fingerprints=tuple(
                _decode_fingerprint(item) for item in strict.items(found["fingerprints"])
            ),
        )
    except (TypeError, ValueError) as exc:
        raise MalformedError(f"not a delta: {exc}"[:300], rule="delta").at(**head.place()) from exc


def decode_base(head: Head) -> BaseBody:
    """A base's body; raises `MalformedError` (rule ``base``, or that of a typed value)."""
    body = _body_of(head, "base")
    if body.get("origin") == derived.ORIGIN or derived.FEATURE in head.requires:
        derived.stood_for(head)
    try:
        found = strict.fields(body, "origin", "class", "states", "boundary", "gap")
        if found["origin"] not in ORIGINS or found["class"] not in CLASSES:
            raise ValueError("origin or class")
        states = strict.fields(found["states"])
        return BaseBody(
            origin=found["origin"],
            exactness=found["class"],
            states={strict.text(name): _decode_state(item) for name, item in states.items()},
            boundary=tuple(_groups(item) for item in strict.items(found["boundary"])),
            gap=_decode_gap(found["gap"], found["origin"], head.step or 0),
            since=_decode_since(found, head.step or 0),
        )
    except (TypeError, ValueError) as exc:
        raise MalformedError(f"not a base: {exc}"[:300], rule="base").at(**head.place()) from exc


def decode_extra(head: Head) -> ExtraBody:
    """An extra's body; raises `MalformedError` (rule ``extra``, or that of a typed value)."""
    body = _body_of(head, "extra")
    try:
        found = strict.fields(body, "tree", "refs")
        tree, refs = strict.fields(found["tree"]), strict.fields(found["refs"])
        extra = ExtraBody(
            tree={strict.text(name): canonical.from_json(value) for name, value in tree.items()},
            refs={strict.text(name): strict.count(step) for name, step in refs.items()},
        )
        _check_extra(head, extra)
        return extra
    except (TypeError, ValueError) as exc:
        raise MalformedError(f"not an extra: {exc}"[:300], rule="extra").at(**head.place()) from exc


def _body_of(head: Head, kind: str) -> Mapping[str, Any]:
    if head.kind != kind:
        raise MalformedError(f"a {head.kind}, not a {kind}", rule="kind").at(**head.place())
    return head.body


def _groups(item: Any) -> Groups:
    groups = canonical.from_json(strict.items(item))
    for group in groups:
        if not isinstance(group, dict) or not all(isinstance(key, str) for key in group):
            raise ValueError("a parameter group is no object")
    if any(True for _ in canonical.array_refs(groups)):
        raise ValueError("an array in a parameter group")
    return tuple(groups)


def _decode_update(item: Any) -> Update:
    found = strict.fields(item, "optimizer", "groups", "grads", "absent")
    absent = (strict.items(row, 2) for row in strict.items(found["absent"]))
    return Update(
        optimizer=strict.count(found["optimizer"]),
        groups=_groups(found["groups"]),
        grads=tuple(_decode_grad(row) for row in strict.items(found["grads"])),
        absent=tuple((strict.text(section), strict.count(index)) for section, index in absent),
    )


def _decode_grad(row: Any) -> Grad:
    section, index, encoding, offset, scale = strict.items(row, 5)
    if encoding not in ENCODINGS:
        raise ValueError(f"encoding {str(encoding)[:40]!r}")
    if scale is not None and (encoding == "raw" or strict.count(scale) >= _INFINITY):
        raise ValueError(f"scale {scale}: for a half encoding, and finite and not negative")
    return Grad(
        section=strict.text(section), slice=strict.count(index), encoding=encoding,
        offset=strict.count(offset), scale=scale,
    )  # fmt: skip


def _decode_set(row: Any) -> SetPiece:
    section, role, index, offset = strict.items(row, 4)
    return SetPiece(
        section=strict.text(section), role=strict.text(role),
        slice=strict.count(index), offset=strict.count(offset),
    )  # fmt: skip


def _decode_fingerprint(row: Any) -> Fingerprint:
    array, first, stride, text = strict.items(row, 4)
    if not isinstance(text, str) or not _SUMS.fullmatch(text) or strict.count(stride) < 1:
        raise ValueError("fingerprint: its sums or its stride")
    sums = tuple(int(text[i : i + 16], 16) for i in range(0, len(text), 16))
    return Fingerprint(
        array=strict.text(array), first=strict.count(first), stride=stride, sums=sums
    )


def _decode_state(item: Any) -> SectionState:
    found = strict.fields(item, "present", "scalars")
    flags = [strict.count(flag) for flag in strict.items(found["present"])]
    if any(flag > 1 for flag in flags):
        raise ValueError("present is 0 or 1")
    scalars = {
        strict.text(key): tuple(canonical.from_json(value) for value in strict.items(values))
        for key, values in strict.fields(found["scalars"]).items()
    }
    if any(len(values) != len(flags) for values in scalars.values()):
        raise ValueError("a counter for each slice")
    if any(True for values in scalars.values() for _ in canonical.array_refs(values)):
        raise ValueError("an array as a counter")
    return SectionState(present=tuple(bool(flag) for flag in flags), scalars=scalars)


def _decode_gap(item: Any, origin: str, step: int) -> dict[str, Any] | None:
    if item is None:
        return None
    found = strict.fields(item, "reason", "from")
    start = strict.count(found["from"])
    if origin != "captured" or start > step:
        raise ValueError("a gap ends in a captured base")
    return {"reason": strict.text(found["reason"]), "from": start}


def _decode_since(body: Mapping[str, Any], step: int) -> int | None:
    since = body.get("since")
    if since is None:
        return None
    if body["origin"] != "replayed" or body["class"] != "bounded":
        raise ValueError("since belongs to replayed bases of class bounded")
    if not 0 < step - strict.count(since) <= BOUNDED_STEPS:
        raise ValueError(f"folded from step {since} to step {step}")
    return int(since)


def _check_extra(head: Head, extra: ExtraBody) -> None:
    if extra.tree.keys() & extra.refs.keys():
        raise ValueError("a name both here and referred to")
    if any(step >= (head.step or 0) for step in extra.refs.values()):
        raise ValueError("refers to no earlier step")
    known = {info.name: info for info in head.arrays}
    used = set()
    for ref in canonical.array_refs(list(extra.tree.values())):
        info = known.get(ref.array)
        if info is None or (info.dtype, info.elements) != (ref.dtype, math.prod(ref.shape)):
            raise ValueError(f"array {ref.array[:80]!r} is missing or another")
        used.add(ref.array)
    if used != known.keys():
        raise ValueError(f"arrays nobody refers to: {sorted(known.keys() - used)[:3]}")
