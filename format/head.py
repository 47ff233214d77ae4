"""The head: canonical JSON that says what a record is. Its digest is the record's id."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import canonical
from .dtypes import item_bytes
from .errors import DigestMismatchError, MalformedError, NotOursError, TooNewError
from .ids import DIGEST_ALGORITHM, block_count, check_id, record_id
from .keys import MAX_STEP, Key, check_run, is_part, is_rank, is_term

FORMAT = "adacheck"
VERSION = 1
KINDS = ("manifest", "layout", "base", "delta", "extra", "claim", "floor")
FEATURES: frozenset[str] = frozenset()
"""Names this version understands in ``requires``."""

MAX_HEAD_BYTES = 64 << 20
MAX_ARRAY_BYTES = 1 << 48

_ARRAY_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*(/[a-z0-9][a-z0-9_.-]*){0,3}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_FIELDS = frozenset(
    ("format", "version", "kind", "run", "term", "part", "step", "parent", "manifest", "layout",
     "arrays", "body", "digest", "requires")
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayInfo:
    """One array of a record.

    ``name`` is ``<section>/<role>`` or for a delta ``<update>/<section>/grad.<encoding>``;
    ``dtype`` a name of `dtypes.ITEM_BYTES`; ``elements`` its length (arrays are flat);
    ``digests`` the block digests of its logical bytes, one per MiB.
    """

    name: str
    dtype: str
    elements: int
    digests: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Logical size in bytes."""
        return self.elements * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a record is.

    ``term``, ``part`` and ``step`` are empty (``""`` or ``None``) where the kind has none;
    ``parent``, ``manifest`` and ``layout`` are ids or ``""``. ``body`` is JSON by kind, see
    FORMAT.md. ``other`` holds optional fields of newer writers, kept and covered by the id.
    """

    kind: str
    run: str
    term: str = ""
    part: str = ""
    step: int | None = None
    parent: str = ""
    manifest: str = ""
    layout: str = ""
    arrays: tuple[ArrayInfo, ...] = ()
    body: Mapping[str, Any] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    other: Mapping[str, Any] = field(default_factory=dict)

    def array(self, name: str) -> ArrayInfo:
        """The array of that name; raises `MalformedError` (rule ``array-missing``)."""
        for info in self.arrays:
            if info.name == name:
                return info
        raise MalformedError(f"no array {name!r}", rule="array-missing").at(**self.place())

    def place(self) -> dict[str, Any]:
        """Keyword arguments for an error's place."""
        return {"run": self.run, "term": self.term, "part": self.part, "step": self.step}

    def encode(self) -> bytes:
        """Canonical bytes of the head; raises `MalformedError` if a rule is broken."""
        check_head(self)
        return canonical.dumps(
            {
                **self.other,
                "format": FORMAT,
                "version": VERSION,
                "kind": self.kind,
                "run": self.run,
                "term": self.term,
                "part": self.part,
                "step": self.step,
                "parent": self.parent,
                "manifest": self.manifest,
                "layout": self.layout,
                "arrays": [
                    {"name": a.name, "dtype": a.dtype, "elements": a.elements,
                     "digests": list(a.digests)}
                    for a in self.arrays
                ],
                "body": self.body,
                "digest": DIGEST_ALGORITHM,
                "requires": list(self.requires),
            }
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedHead:
    """A head with its canonical bytes, its id, and the ``info`` beside it (never in the id)."""

    head: Head
    raw: bytes
    id: str
    info: str = "{}"

    @classmethod
    def seal(cls, head: Head, info: Mapping[str, Any] | None = None) -> SealedHead:
        """Encode a head and compute its id; ``info`` is JSON about writer, time and host."""
        raw = head.encode()
        text = canonical.dumps(dict(info or {})).decode()
        return cls(head=head, raw=raw, id=record_id(raw), info=text)

    @classmethod
    def open(cls, raw: bytes, claimed_id: str, info: str = "{}") -> SealedHead:
        """Verify and parse the strings of a record.

        Order: ours? too new? damaged? Raises `NotOursError`, `TooNewError`,
        `DigestMismatchError` or `MalformedError`.
        """
        if len(raw) > MAX_HEAD_BYTES:
            raise MalformedError(f"a head of {len(raw)} bytes", rule="head-size")
        if record_id(raw) != claimed_id:
            _refuse_foreign(raw)
            raise DigestMismatchError("the head does not have the id it comes with")
        return cls(head=decode_head(raw), raw=raw, id=claimed_id, info=info)


def _refuse_foreign(raw: bytes) -> None:
    """A head whose id is wrong may simply not be ours, or be of a newer format: say so."""
    try:
        value = canonical.loads(raw)
    except MalformedError:
        return
    if isinstance(value, dict):
        _check_version(value)


def _check_version(value: dict[str, Any]) -> None:
    if value.get("format") != FORMAT:
        raise NotOursError("no head of adacheck-store")
    version = value.get("version")
    if type(version) is not int or version < 1:
        raise MalformedError(f"format version {version!r}", rule="version")
    if version > VERSION:
        raise TooNewError(
            f"format version {version}, this program reads up to {VERSION}",
            hint="upgrade adacheck-store",
        )


def decode_head(raw: bytes) -> Head:
    """Parse canonical head bytes; the inverse of `Head.encode`."""
    value = canonical.loads(raw)
    if not isinstance(value, dict):
        raise NotOursError("no head of adacheck-store")
    _check_version(value)
    missing = _FIELDS - value.keys()
    if missing:
        raise MalformedError(f"fields missing: {sorted(missing)}", rule="fields")
    requires = value["requires"]
    if not isinstance(requires, list) or not all(isinstance(name, str) for name in requires):
        raise MalformedError("requires is no list of names", rule="fields")
    unknown = sorted(set(requires) - FEATURES)
    if unknown:
        raise TooNewError(
            f"requires features unknown here: {unknown}", hint="upgrade adacheck-store"
        )
    if value["digest"] != DIGEST_ALGORITHM:
        raise TooNewError(f"block digests by {str(value['digest'])[:40]!r}, unknown here")
    arrays = value["arrays"]
    if not isinstance(arrays, list):
        raise MalformedError("arrays is no list", rule="fields")
    head = Head(
        **{name: value[name] for name in
           ("kind", "run", "term", "part", "step", "parent", "manifest", "layout", "body")},
        arrays=tuple(_decode_array(item) for item in arrays),
        requires=tuple(requires),
        other={name: item for name, item in value.items() if name not in _FIELDS},
    )  # fmt: skip
    check_head(head)
    return head


def _decode_array(item: Any) -> ArrayInfo:
    if not isinstance(item, dict) or item.keys() != {"name", "dtype", "elements", "digests"}:
        raise MalformedError("an array's fields", rule="fields")
    if not isinstance(item["digests"], list):
        raise MalformedError("digests is no list", rule="fields")
    return ArrayInfo(
        name=item["name"], dtype=item["dtype"], elements=item["elements"],
        digests=tuple(item["digests"]),
    )  # fmt: skip


def check_head(head: Head) -> None:
    """Check the rules of a head that need nothing but the head; raises `MalformedError`."""
    if head.kind not in KINDS:
        raise MalformedError(f"unknown kind {str(head.kind)[:40]!r}", rule="kind")
    check_run(head.run)
    for name in ("parent", "manifest", "layout"):
        if getattr(head, name) != "":
            check_id(getattr(head, name), name)
    if not isinstance(head.body, Mapping):
        raise MalformedError("body is no object", rule="fields")
    _check_place(head)
    seen: set[str] = set()
    for info in head.arrays:
        _check_array(info)
        if info.name in seen:
            raise MalformedError(f"two arrays {info.name!r}", rule="array-name")
        seen.add(info.name)


def _check_place(head: Head) -> None:
    """Which of term, part and step a kind has (for a claim or floor, step is the log index)."""
    kind, step = head.kind, head.step
    if kind == "layout":
        right = head.term == "" and head.part == "" and step is None
    else:
        right = isinstance(head.term, str) and is_term(head.term)
        right = right and type(step) is int and 0 <= step <= MAX_STEP
        if kind in ("base", "delta"):
            right = right and isinstance(head.part, str) and is_part(head.part)
        elif kind == "extra":
            right = right and isinstance(head.part, str) and is_rank(head.part)
        else:
            right = right and head.part == ""
    if not right:
        raise MalformedError(
            f"a {kind} at term={head.term!r} part={head.part!r} step={step!r}", rule="place"
        )


def _check_array(info: ArrayInfo) -> None:
    if not isinstance(info.name, str) or len(info.name) > 200:
        raise MalformedError("an array's name", rule="array-name")
    if not _ARRAY_NAME.fullmatch(info.name):
        raise MalformedError(f"an array named {info.name[:80]!r}", rule="array-name")
    size = item_bytes(info.dtype)
    if type(info.elements) is not int or not 0 <= info.elements <= MAX_ARRAY_BYTES // size:
        raise MalformedError(f"{info.elements!r} elements in {info.name}", rule="array-size")
    if len(info.digests) != block_count(info.nbytes):
        raise MalformedError(
            f"{len(info.digests)} digests for {block_count(info.nbytes)} blocks of {info.name}",
            rule="array-digests",
        )
    for digest in info.digests:
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise MalformedError(f"not a digest in {info.name}", rule="array-digests")


def check_key(key: Key, head: Head) -> None:
    """Check that a record lies where its head says; raises `MalformedError` (rule ``swapped``)."""
    kind = "log" if head.kind in ("claim", "floor") else head.kind
    same = (key.run, key.kind) == (head.run, kind)
    if kind == "log":
        same = same and key.step == head.step
    elif kind != "layout":
        same = same and (key.term, key.part, key.step) == (head.term, head.part, head.step)
    if not same:
        raise MalformedError(
            f"the record under this key is a {head.kind} of another place", rule="swapped"
        ).at(key=str(key), **head.place())
