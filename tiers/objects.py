"""Objects are named runs of bytes: the seam below the zarr tier, local folder or S3."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from adacheck_store.format.errors import (
    MalformedError,
    NameRefusedError,
    NotOursError,
    RecordNotFoundError,
    TooNewError,
)
from adacheck_store.format.ids import Buffer
from adacheck_store.format.keys import MARKER

FORMAT = "adacheck-store"
VERSION = 1

_PART = re.compile(r"[^/\x00-\x1f\x7f\ud800-\udfff]+")
_PART_BYTES_MAX = 255
_NAME_BYTES_MAX = 1024


class Objects(Protocol):
    """A flat, strongly consistent store of named objects; thread-safe."""

    path: str
    """Where it lies, for messages."""
    parallel: int
    """How many calls under way at once pay."""

    def put(self, name: str, buffers: Sequence[Buffer], if_absent: bool = False) -> bool:
        """Store an object, whole or not at all. False if ``if_absent`` and the name is taken."""
        ...

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of an object, fewer where it ends before; raises `RecordNotFoundError`."""
        ...

    def list(self, prefix: str, most: int | None = None) -> Iterator[str]:
        """Names that begin with a prefix (empty, or ending in ``/``), sorted.

        At most ``most`` of them, whichever.
        """
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; missing ones are passed over."""
        ...

    def sync(self) -> None:
        """Return when all that was put is durable."""
        ...

    def written_at(self, name: str) -> float:
        """When an object was put, by the place's own clock, in seconds since 1970.

        Raises `RecordNotFoundError`."""
        ...

    def probe(self, name: str) -> None:
        """Raise `UnsupportedError` if ``if_absent`` is not heeded; ``name`` is an object."""
        ...

    def dated(self, prefix: str) -> Iterator[tuple[str, float]]:
        """What `list` gives, each with the time (s) at which it was put, by the store's clock."""
        ...

    def now(self) -> float:
        """The store's clock, in seconds: not this machine's, which may be wrong."""
        ...

    def unfinished(self, age_s: float = 0.0) -> int:
        """How many objects were begun that long ago, by the store's clock, and never named."""
        ...

    def sweep(self, age_s: float = 86_400.0) -> int:
        """Remove those that are older, by the store's clock; returns how many."""
        ...

    def requests(self) -> Mapping[str, int]:
        """Requests made so far, by kind, and bytes; empty where none are paid for."""
        ...


def check_name(name: str) -> list[str]:
    """The parts of an object's name; raises `NameRefusedError`."""
    parts = name.split("/")
    strange = any(not _PART.fullmatch(part) or part in (".", "..") for part in parts)
    sizes = [len(part.encode("utf-8", "surrogatepass")) for part in parts]
    if strange or max(sizes) > _PART_BYTES_MAX or sum(sizes) + len(parts) > _NAME_BYTES_MAX:
        raise NameRefusedError(f"not the name of an object: {name[:100]!r}")
    return parts


def open_marked(objects: Objects, create: bool) -> bool:
    """See whether a store is ours: True if it is marked, False if it is empty.

    With ``create`` an empty one is marked. Raises `NotOursError` for what holds other things,
    `TooNewError` for a store of a newer version.
    """
    for _ in range(2):
        try:
            _check_marker(objects, objects.get(MARKER))
            return True
        except RecordNotFoundError:
            pass
        if next(objects.list("", most=1), None) is not None and _unmarked(objects):
            raise NotOursError(
                "a place of something else: it is not empty and has no adacheck.json",
                hint="check the URL, or name an empty or new folder or prefix", path=objects.path,
            )  # fmt: skip
        if not create:
            return False
        marker = json.dumps({"format": FORMAT, "version": VERSION}, sort_keys=True)
        objects.put(MARKER, [marker.encode()], if_absent=True)
        objects.sync()
    return True


def _unmarked(objects: Objects) -> bool:
    """True unless another process has marked the store meanwhile."""
    try:
        objects.get(MARKER)
    except RecordNotFoundError:
        return True
    return False


def _check_marker(objects: Objects, text: bytes) -> None:
    try:
        marker = json.loads(text)
    except ValueError as exc:
        raise MalformedError("adacheck.json is damaged", rule="marker", path=objects.path) from exc
    if not isinstance(marker, dict) or marker.get("format") != FORMAT:
        raise NotOursError("adacheck.json is of something else", path=objects.path)
    version = marker.get("version")
    if type(version) is not int or version > VERSION:
        raise TooNewError(
            f"a store of version {version!r}, this program knows {VERSION}",
            hint="upgrade adacheck-store", path=objects.path,
        )  # fmt: skip
