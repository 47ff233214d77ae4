"""The head: canonical JSON that says what a record is. Its digest is the record's id."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from . import canonical, strict
from .dtypes import MAX_ARRAY_BYTES, item_bytes
from .errors import DigestMismatchError, MalformedError, NotOursError, TooNewError
from .ids import DIGEST_ALGORITHM, block_count, check_id, record_id
from .keys import MAX_STEP, Key, is_part, is_rank, is_run, is_term

FORMAT = "adacheck"
VERSION = 1
KINDS = ("manifest", "layout", "base", "delta", "extra", "claim", "floor", "tag")
LOG_KINDS = ("claim", "floor", "tag")
FEATURES: frozenset[str] = frozenset(("derived",))
"""Names this version understands in ``requires``: see `derived`."""

MAX_HEAD_BYTES = 32 << 20
"""Room for the digests of about a terabyte of arrays."""

MAX_INFO_BYTES = 64 << 10

_WORD = re.compile(r"[a-z0-9][a-z0-9_.-]*")
MAX_NAME = 200
"""Most characters of an array's name."""

_RESERVED_WORDS = frozenset({"zarr.json"})
_DIGEST = re.compile(r"[0-9a-f]{32}")
_LINKED = {
    "parent": ({"manifest", "layout", "extra", *LOG_KINDS}, {"manifest", "base", "delta"}),
    "manifest": ({"manifest", "layout", *LOG_KINDS}, {"base", "delta", "extra"}),
    "layout": ({"manifest", "layout", "extra", *LOG_KINDS}, {"base", "delta"}),
}
"""Link field -> kinds in which it is empty, kinds in which it is an id."""

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

    @property
    def order(self) -> tuple[int, str]:
        """Arrays ascend by this: wide elements first, so that each array lies aligned."""
        return -item_bytes(self.dtype), self.name


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
        """Put a head's arrays in order, encode it and compute its id.

        ``info`` is JSON about writer, time and host.
        """
        head = replace(head, arrays=tuple(sorted(head.arrays, key=lambda array: array.order)))
        raw = head.encode()
        _check_size(raw)
        text = canonical.dumps(dict(info or {})).decode()
        _check_info(text)
        return cls(head=head, raw=raw, id=record_id(raw), info=text)

    @classmethod
    def open(cls, raw: bytes, claimed_id: str, info: str = "{}") -> SealedHead:
        """Verify and parse the strings of a record.

        Order: ours? too new? damaged? Raises `NotOursError`, `TooNewError`,
        `DigestMismatchError` or `MalformedError`.
        """
        _check_size(raw)
        if record_id(raw) != claimed_id:
            refuse_foreign(raw)
            raise DigestMismatchError("the head does not have the id it comes with")
        head = decode_head(raw)
        _check_info(info)
        return cls(head=head, raw=raw, id=claimed_id, info=info)


def _check_size(raw: bytes) -> None:
    if len(raw) > MAX_HEAD_BYTES:
        raise MalformedError(f"a head of {len(raw)} bytes", rule="head-size")


def _check_info(text: str) -> None:
    if len(text) > MAX_INFO_BYTES:
        raise MalformedError(f"an info of {len(text)} characters", rule="info")
    try:
        value = canonical.loads(text.encode("utf-8"))
    except (MalformedError, UnicodeEncodeError) as exc:
        raise MalformedError(f"info is no canonical JSON: {exc}"[:200], rule="info") from exc
    if not isinstance(value, dict):
        raise MalformedError("info is no object", rule="info")


def refuse_foreign(raw: bytes) -> None:
    """A damaged head may simply not be ours, or be of a newer format: say that instead."""
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
    _check_size(raw)
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
            f"requires features unknown here: {str(unknown)[:200]}", hint="upgrade adacheck-store"
        )
    if value["digest"] != DIGEST_ALGORITHM:
        raise TooNewError(
            f"block digests by {str(value['digest'])[:40]!r}, unknown here",
            hint="upgrade adacheck-store",
        )
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
    if not is_run(head.run):
        raise MalformedError(f"not a run name: {str(head.run)[:140]!r}", rule="run")
    if not isinstance(head.body, Mapping) or not _FIELDS.isdisjoint(head.other):
        raise MalformedError("body is no object, or a field stands twice", rule="fields")
    _check_place(head)
    _check_links(head)
    for info in head.arrays:
        _check_array(info)
    _check_array_names([info.name for info in head.arrays])
    try:
        strict.ascending([info.order for info in head.arrays], "arrays")
        strict.ascending(head.requires, "requires")
    except ValueError as exc:
        raise MalformedError(str(exc), rule="order") from exc


def _check_links(head: Head) -> None:
    """Which of parent, manifest and layout a kind has, and whether it has arrays."""
    for name in ("parent", "manifest", "layout"):
        value, allowed = getattr(head, name), _LINKED[name]
        if value != "":
            check_id(value, name)
        if head.kind not in allowed[value != ""]:
            word = "with" if value else "without"
            raise MalformedError(f"a {head.kind} {word} {name}", rule="links").at(**head.place())
    if head.arrays and head.kind not in ("base", "delta", "extra"):
        raise MalformedError(f"a {head.kind} with arrays", rule="links").at(**head.place())


def _check_place(head: Head) -> None:
    """Which of term, part and step a kind has (of the log's kinds, step is the index)."""
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
        raise MalformedError(f"a {kind} at {str((head.term, head.part, step))[:100]}", rule="place")


def _check_array(info: ArrayInfo) -> None:
    words = info.name.split("/") if isinstance(info.name, str) else []
    if not 1 <= len(words) <= 4 or not all(is_array_word(word) for word in words):
        raise MalformedError(f"an array named {str(info.name)[:80]!r}", rule="array-name")
    if len(info.name) > MAX_NAME:
        raise MalformedError(f"an array's name of {len(info.name)} letters", rule="array-name")
    size = item_bytes(info.dtype)
    if type(info.elements) is not int or not 0 <= info.elements <= MAX_ARRAY_BYTES // size:
        raise MalformedError(
            f"{str(info.elements)[:40]} elements in {info.name}", rule="array-size"
        )
    if len(info.digests) != block_count(info.nbytes):
        raise MalformedError(
            f"{len(info.digests)} digests for {block_count(info.nbytes)} blocks of {info.name}",
            rule="array-digests",
        )
    for digest in info.digests:
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise MalformedError(f"not a digest in {info.name}", rule="array-digests")


def is_array_word(text: object) -> bool:
    """True for what stands between the slashes of an array's name."""
    return isinstance(text, str) and bool(_WORD.fullmatch(text)) and text not in _RESERVED_WORDS


def _check_array_names(names: list[str]) -> None:
    """Each once, and none of them lies below another (in zarr an array has no children)."""
    known = set(names)
    if len(known) != len(names):
        raise MalformedError("two arrays of one name", rule="array-name")
    for name in names:
        words = name.split("/")
        if any("/".join(words[:depth]) in known for depth in range(1, len(words))):
            raise MalformedError(f"array {name!r} lies below another", rule="array-name")


def check_key(key: Key, head: Head, record_id: str = "") -> None:
    """Check that a record lies where its head says; raises `MalformedError` (rule ``swapped``).

    A layout can be checked only if its ``record_id`` is given.
    """
    kind = "log" if head.kind in LOG_KINDS else head.kind
    same = (key.run, key.kind) == (head.run, kind)
    if kind == "log":
        same = same and key.step == head.step
    elif kind == "layout":
        same = same and record_id in ("", key.name)
    else:
        same = same and (key.term, key.part, key.step) == (head.term, head.part, head.step)
    if not same:
        raise MalformedError(
            f"the record under this key is a {head.kind} of another place", rule="swapped"
        ).at(key=str(key), **head.place())
