"""Key grammar: where a record lies. Fixed width, so lexicographic order is numeric order.

::

    <run>/log/<index:12>                                  claim, floor, tag
    <run>/layout/<id>
    <run>/<term>/manifest/<step:12>
    <run>/<term>/<part>/base/<step:12>-<token>
    <run>/<term>/<part>/delta/<step:12>
    <run>/<term>/<rank>/extra/<step:12>
    <run>/<term>/<part or rank>/pack/<first:12>-<last:12>-<token>    container of the zarr tier

``<term>`` is ``t<number:6>-<nonce>``, ``<part>`` is ``p<number:6>``, ``<rank>`` is ``r<number:6>``;
nonce and token are 16 lowercase hex digits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import MalformedError, NameRefusedError
from .ids import is_id, is_nonce, new_nonce

MARKER = "adacheck.json"
"""The object that marks a store as ours."""

MAX_STEP = 10**12 - 1
MAX_NUMBER = 10**6 - 1
"""Largest number of a part, rank or term."""

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TERM = re.compile(r"t([0-9]{6})-([0-9a-f]{16})")
_PART = re.compile(r"p[0-9]{6}")
_RANK = re.compile(r"r[0-9]{6}")
_STEP = re.compile(r"[0-9]{12}")
_BASE = re.compile(r"([0-9]{12})-([0-9a-f]{16})")
_PACK = re.compile(r"([0-9]{12})-([0-9]{12})-([0-9a-f]{16})")
_RESERVED_RUNS = frozenset({"adacheck.json", "zarr.json"})

_Fields = tuple[str, str, str, int, int, str]


def is_run(name: object) -> bool:
    """True for 1 to 128 of ``A-Z a-z 0-9 . _ -`` beginning with a letter or digit."""
    return isinstance(name, str) and bool(_RUN.fullmatch(name)) and name not in _RESERVED_RUNS


def check_run(name: object) -> str:
    """Return the run name if it is within the grammar, else raise `NameRefusedError`."""
    if not is_run(name):
        raise NameRefusedError(
            f"not a run name: {str(name)[:140]!r}",
            hint="use 1 to 128 of A-Z a-z 0-9 . _ - and begin with a letter or digit",
        )
    return str(name)


@dataclass(frozen=True, slots=True, order=True)
class Term:
    """A term: its fencing number and the nonce of the claim that opened it."""

    number: int
    nonce: str

    def __str__(self) -> str:
        return f"{_numbered('t', self.number)}-{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> Term:
        """Inverse of `str`; raises `MalformedError`."""
        match = _TERM.fullmatch(text)
        if not match:
            raise MalformedError(f"not a term: {text[:60]!r}", rule="key")
        return cls(int(match[1]), match[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """The parsed name of a record (or of a pack); ``str(key)`` is the name.

    ``part`` is the part (``p...``) or rank (``r...``); ``step`` is the step, or the index of a
    log entry, or a pack's first step; ``name`` is a layout's id or a base's or pack's token.
    A key outside the grammar cannot be made: it raises `NameRefusedError` for a run, else
    `MalformedError` (rule ``key``).
    """

    run: str
    kind: str
    term: str = ""
    part: str = ""
    step: int = 0
    last: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        check_run(self.run)
        if _fields(str(self).split("/")) != self._fields():
            raise MalformedError(f"not a key: {str(self)[:200]!r}", rule="key")

    def _fields(self) -> _Fields:
        return self.kind, self.term, self.part, self.step, self.last, self.name

    def __str__(self) -> str:
        match self.kind:
            case "log":
                return f"{self.run}/log/{self.step:012d}"
            case "layout":
                return f"{self.run}/layout/{self.name}"
            case "manifest":
                return f"{self.run}/{self.term}/manifest/{self.step:012d}"
            case "base":
                return f"{self.run}/{self.term}/{self.part}/base/{self.step:012d}-{self.name}"
            case "delta" | "extra":
                return f"{self.run}/{self.term}/{self.part}/{self.kind}/{self.step:012d}"
            case _:  # a pack, or refused
                place = f"{self.run}/{self.term}/{self.part}/pack"
                return f"{place}/{self.step:012d}-{self.last:012d}-{self.name}"


def log_key(run: str, index: int) -> Key:
    """Key of a log entry."""
    return Key(run=run, kind="log", step=index)


def layout_key(run: str, layout_id: str) -> Key:
    """Key of a layout, by its id."""
    return Key(run=run, kind="layout", name=layout_id)


def manifest_key(run: str, term: str, step: int) -> Key:
    """Key of the manifest revision that holds from ``step`` on."""
    return Key(run=run, kind="manifest", term=term, step=step)


def base_key(run: str, term: str, part: str, step: int, token: str = "") -> Key:
    """Key of a base; a fresh random token unless one is given."""
    return Key(run=run, kind="base", term=term, part=part, step=step, name=token or new_nonce())


def delta_key(run: str, term: str, part: str, step: int) -> Key:
    """Key of a delta."""
    return Key(run=run, kind="delta", term=term, part=part, step=step)


def extra_key(run: str, term: str, rank: str, step: int) -> Key:
    """Key of a rank's extra."""
    return Key(run=run, kind="extra", term=term, part=rank, step=step)


def pack_key(run: str, term: str, part: str, first: int, last: int, token: str = "") -> Key:
    """Key of a pack of the zarr tier holding the steps first..last."""
    name = token or new_nonce()
    return Key(run=run, kind="pack", term=term, part=part, step=first, last=last, name=name)


def parse_key(text: str) -> Key:
    """Parse a record's or pack's name; raises `MalformedError` (rule ``key``) for any other."""
    words = text.split("/")
    found = _fields(words)
    if found is None:
        raise MalformedError(f"not a key: {text[:200]!r}", rule="key")
    kind, term, part, step, last, name = found
    return Key(run=words[0], kind=kind, term=term, part=part, step=step, last=last, name=name)


def is_key(text: str) -> bool:
    """True if `parse_key` would accept the name."""
    return _fields(text.split("/")) is not None


def _fields(words: list[str]) -> _Fields | None:
    """Kind, term, part, step, last and name of a key cut at its slashes."""
    if not is_run(words[0]):
        return None
    match words[1:]:
        case ["log", index] if _STEP.fullmatch(index):
            return "log", "", "", int(index), 0, ""
        case ["layout", name] if is_id(name):
            return "layout", "", "", 0, 0, name
        case [term, "manifest", step] if _TERM.fullmatch(term) and _STEP.fullmatch(step):
            return "manifest", term, "", int(step), 0, ""
        case [term, part, kind, name] if _TERM.fullmatch(term):
            return _part_fields(term, part, kind, name)
        case _:
            return None


def _part_fields(term: str, part: str, kind: str, name: str) -> _Fields | None:
    of_part, of_rank = bool(_PART.fullmatch(part)), bool(_RANK.fullmatch(part))
    if kind == "base" and of_part and (base := _BASE.fullmatch(name)):
        return kind, term, part, int(base[1]), 0, base[2]
    if (kind == "delta" and of_part) or (kind == "extra" and of_rank):
        return (kind, term, part, int(name), 0, "") if _STEP.fullmatch(name) else None
    if kind == "pack" and (of_part or of_rank) and (pack := _PACK.fullmatch(name)):
        first, last = int(pack[1]), int(pack[2])
        return (kind, term, part, first, last, pack[3]) if first <= last else None
    return None


def part_name(number: int) -> str:
    """``p000003`` for 3."""
    return _numbered("p", number)


def rank_name(number: int) -> str:
    """``r000001`` for 1."""
    return _numbered("r", number)


def _numbered(letter: str, number: int) -> str:
    if not 0 <= number <= MAX_NUMBER:
        raise MalformedError(f"number {number} of a part, rank or term", rule="key")
    return f"{letter}{number:06d}"


def new_term(number: int) -> Term:
    """A term with a fresh nonce."""
    return Term(number, new_nonce())


def is_term(text: str) -> bool:
    """True for ``t<number:6>-<nonce>``."""
    match = _TERM.fullmatch(text)
    return match is not None and is_nonce(match[2])


def is_part(text: str) -> bool:
    """True for ``p<number:6>``."""
    return _PART.fullmatch(text) is not None


def is_rank(text: str) -> bool:
    """True for ``r<number:6>``."""
    return _RANK.fullmatch(text) is not None
