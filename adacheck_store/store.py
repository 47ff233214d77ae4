"""A store: the tiers behind one URL."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote, urlsplit

from adacheck_store.format.errors import (
    AdaCheckError,
    NotOursError,
    TierError,
    UnsupportedError,
    UsageError,
)
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.lmdb import LmdbTier
from adacheck_store.tiers.memory import MemoryTier
from adacheck_store.tiers.object_local import LocalObjects
from adacheck_store.tiers.zarr import ZarrTier, open_marked

from .catalog import Trouble
from .config import node_name

_MEMORY: dict[str, MemoryTier] = {}


@dataclass(frozen=True, slots=True)
class Store:
    """Tiers nearest first. ``near`` takes what a trainer appends; ``far`` keeps the log.

    For ``memory://`` both are one. ``troubles`` are tiers of the store that could not be opened
    for reading: what they hold is unknown, not absent. Close it when done.
    """

    url: str
    near: Tier
    far: Tier
    others: tuple[Tier, ...] = ()
    troubles: tuple[Trouble, ...] = ()

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """All tiers, nearest first, each once."""
        pair = (self.near,) if self.near is self.far else (self.near, self.far)
        return (pair[0], *self.others, *pair[1:])

    def close(self) -> None:
        """Close every tier; a ``memory://`` store lives on under its URL."""
        for tier in self.tiers:
            if tier is not _MEMORY.get(self.url):
                tier.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


def local_folder(url: str) -> Path:
    """The folder a ``file://`` URL (or a plain path) names; raises `UsageError`."""
    if "://" not in url:
        if not url:
            raise UsageError("an empty store URL", hint="give file:///folder")
        return Path(url).absolute()
    parts = urlsplit(url)
    if parts.scheme == "s3":
        raise UnsupportedError(
            "s3:// stores are not supported yet", hint="use file:///folder for now"
        )
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise UsageError(f"not a store URL: {url!r}", hint="give file:///folder or memory://name")
    if not parts.path.startswith("/") or parts.query or parts.fragment:
        raise UsageError(f"not a store URL: {url!r}", hint="percent-encode ? and # in the path")
    return Path(unquote(parts.path))


def open_store(
    url: str, *, cache: str | os.PathLike[str] | None = None, write: bool = False,
    lmdb_bytes: int = 0,
) -> Store:  # fmt: skip
    """Open a store; for writing it is made if absent, for reading it must exist.

    ``cache`` is the folder of the LMDB tiers (default ``lmdb`` inside a local store), one folder
    per node in it. Raises `NotOursError` for a folder that is not a store, `TooNewError`,
    `TierReadOnlyError`, `TierBusyError` naming the process that holds this node's LMDB.
    """
    if url.startswith("memory://"):
        tier = _MEMORY.setdefault(url, MemoryTier())
        return Store(url, tier, tier)
    root = local_folder(url)
    folder = Path(cache) if cache is not None else root / "lmdb"
    far = _open_far(root, write=write)
    troubles: list[Trouble] = []
    try:
        if write:
            near: Tier = LmdbTier(folder / node_name(), capacity_bytes=lmdb_bytes or None)
        else:
            near = far
        others = _other_nodes(folder, troubles, skip=node_name() if write else "")
    except AdaCheckError:
        far.close()
        raise
    if not write and others:
        near, others = others[0], others[1:]
    return Store(url, near, far, tuple(others), tuple(troubles))


def _open_far(root: Path, *, write: bool) -> Tier:
    if not write and not (root / "objects").is_dir():
        raise NotOursError(
            "no store here", path=str(root), hint="check the URL; a writer makes a new store"
        )
    objects = LocalObjects(root / "objects")
    open_marked(objects, create=write)
    return ZarrTier(objects)


def _other_nodes(folder: Path, troubles: list[Trouble], *, skip: str) -> list[Tier]:
    """The LMDB tiers of other nodes found beside ours, opened read-only."""
    tiers: list[Tier] = []
    if not folder.is_dir():
        return tiers
    names = sorted(path.name for path in folder.iterdir() if (path / "data.mdb").exists())
    first = node_name()
    for name in sorted(names, key=lambda name: (name != first, name)):
        if name == skip or "-damaged-" in name:
            continue
        try:
            tiers.append(LmdbTier(folder / name, readonly=True, name=lmdb_name(name)))
        except TierError as error:
            place = error.at(tier=lmdb_name(name), path=str(folder / name))
            troubles.append(Trouble(tier=lmdb_name(name), key="", error=place))
    return tiers


def lmdb_name(node: str) -> str:
    """Tier name of a node's LMDB."""
    return "lmdb" if node == node_name() else f"lmdb:{node}"
