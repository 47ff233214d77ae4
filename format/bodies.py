"""Bodies of deltas, bases and extras: typed, and checked on the way in and out.

Hyper-parameters, step counters and trees are *typed values* (`canonical.to_json`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import canonical
from .errors import MalformedError
from .head import Head

Groups = tuple[Mapping[str, Any], ...]
"""One mapping per parameter group: every key but ``params`` that has a typed value."""

ENCODINGS = ("raw", "bf16", "fp16")
"""How a gradient is kept: in its own dtype, or as half precision (times ``scale``, if given)."""

ORIGINS = ("captured", "replayed")
CLASSES = ("exact", "bounded", "unsupported")


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

    ``origin`` is ``captured`` or ``replayed``, ``exactness`` one of `CLASSES`. ``gap``, where
    the spine starts anew for a reason other than a term: ``{"reason": str, "from": step}``;
    folding through steps ``from`` .. this base's is unprovable.
    """

    origin: str
    exactness: str
    states: Mapping[str, SectionState]
    boundary: tuple[Groups, ...] = ()
    gap: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """The head's body."""
        return {
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


def decode_delta(head: Head) -> DeltaBody:
    """A delta's body; raises `MalformedError` (rule ``delta``)."""
    body = _body_of(head, "delta")
    try:
        return DeltaBody(
            updates=tuple(_decode_update(item) for item in body["updates"]),
            sets=tuple(
                SetPiece(section=_text(s), role=_text(r), slice=_count(i), offset=_count(o))
                for s, r, i, o in body["sets"]
            ),
            boundary=tuple(_groups(item) for item in body["boundary"]),
            arithmetic=tuple(_text(item) for item in body["arithmetic"]),
            fingerprints=tuple(_decode_fingerprint(item) for item in body["fingerprints"]),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise MalformedError(f"not a delta: {exc!r}"[:300], rule="delta") from exc


def decode_base(head: Head) -> BaseBody:
    """A base's body; raises `MalformedError` (rule ``base``)."""
    body = _body_of(head, "base")
    try:
        gap = body["gap"]
        if gap is not None:
            gap = {"reason": _text(gap["reason"]), "from": _count(gap["from"])}
        if body["origin"] not in ORIGINS or body["class"] not in CLASSES:
            raise ValueError("origin or class")
        return BaseBody(
            origin=body["origin"],
            exactness=body["class"],
            states={name: _decode_state(item) for name, item in body["states"].items()},
            boundary=tuple(_groups(item) for item in body["boundary"]),
            gap=gap,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise MalformedError(f"not a base: {exc!r}"[:300], rule="base") from exc


def decode_extra(head: Head) -> ExtraBody:
    """An extra's body; raises `MalformedError` (rule ``extra``)."""
    body = _body_of(head, "extra")
    try:
        return ExtraBody(
            tree={_text(name): canonical.from_json(v) for name, v in body["tree"].items()},
            refs={_text(name): _count(step) for name, step in body["refs"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise MalformedError(f"not an extra: {exc!r}"[:300], rule="extra") from exc


def _body_of(head: Head, kind: str) -> Mapping[str, Any]:
    if head.kind != kind:
        raise MalformedError(f"a {head.kind}, not a {kind}", rule="kind")
    return head.body


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"no string: {value!r}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"no count: {value!r}")
    return value


def _groups(item: Any) -> Groups:
    groups = canonical.from_json(item)
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise ValueError("groups")
    return tuple(groups)


def _decode_update(item: Mapping[str, Any]) -> Update:
    grads = []
    for section, index, encoding, offset, scale in item["grads"]:
        if encoding not in ENCODINGS or not (scale is None or 0 <= _count(scale) < 2**32):
            raise ValueError(f"encoding {encoding!r} or scale")
        grads.append(
            Grad(
                section=_text(section), slice=_count(index), encoding=encoding,
                offset=_count(offset), scale=scale,
            )
        )  # fmt: skip
    return Update(
        optimizer=_count(item["optimizer"]),
        groups=_groups(item["groups"]),
        grads=tuple(grads),
        absent=tuple((_text(section), _count(index)) for section, index in item["absent"]),
    )


def _decode_fingerprint(item: Any) -> Fingerprint:
    array, first, stride, text = item
    if len(text) % 16 or _count(stride) < 1:
        raise ValueError("fingerprint")
    sums = tuple(int(text[i : i + 16], 16) for i in range(0, len(text), 16))
    return Fingerprint(array=_text(array), first=_count(first), stride=stride, sums=sums)


def _decode_state(item: Mapping[str, Any]) -> SectionState:
    present = tuple(bool(_count(flag)) for flag in item["present"])
    scalars = {
        _text(key): tuple(canonical.from_json(value) for value in values)
        for key, values in item["scalars"].items()
    }
    if any(len(values) != len(present) for values in scalars.values()):
        raise ValueError("scalars")
    return SectionState(present=present, scalars=scalars)
