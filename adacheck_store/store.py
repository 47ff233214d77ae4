"""A store: the tiers behind one URL."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote, urlsplit

from adacheck_store.format.errors import (
    AdaCheckError,
    FormatError,
    NotOursError,
    RestoreError,
    TierDamagedError,
    TierError,
    TooNewError,
    UnsupportedError,
    UsageError,
)
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.lmdb import LmdbTier
from adacheck_store.tiers.lmdb_check import mentions, quarantine
from adacheck_store.tiers.medium import translate
from adacheck_store.tiers.memory import MemoryTier
from adacheck_store.tiers.object_local import LocalObjects
from adacheck_store.tiers.zarr import ZarrTier, open_marked

from .catalog import Trouble
from .config import local_rank, local_size, node_name
from .group import SOLO, Group, together

log = logging.getLogger(__name__)

_MEMORY: dict[str, MemoryTier] = {}


@dataclass(frozen=True, slots=True)
class Store:
    """Tiers nearest first. ``near`` takes what a trainer appends; ``far`` keeps the log.

    For ``memory://`` both are one. ``troubles`` are tiers of the store that could not be opened
    for reading: what they hold is unknown, not absent. ``aside`` are folders of LMDBs that were
    set aside as damaged. Close it when done.
    """

    url: str
    near: Tier
    far: Tier
    others: tuple[Tier, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    aside: tuple[Path, ...] = ()

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """All tiers, nearest first, each once."""
        pair = (self.near,) if self.near is self.far else (self.near, self.far)
        return (pair[0], *self.others, *pair[1:])

    @property
    def uppers(self) -> tuple[Tier, ...]:
        """All tiers but the far one, nearest first."""
        return tuple(tier for tier in self.tiers if tier is not self.far)

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


def refuse_set_aside(store: Store, run: str) -> None:
    """A run without history is not begun anew beside a damaged LMDB that tells of it.

    Raises `RestoreError`.
    """
    for folder in store.aside:
        if mentions(str(folder), run):
            raise RestoreError(
                "no history is found, and a damaged LMDB that was set aside has records of this "
                "run", run=run, path=str(folder),
                hint="bring the objects back; resume='never' begins the run anew",
            )  # fmt: skip


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
    lmdb_bytes: int = 0, group: Group = SOLO,
) -> Store:  # fmt: skip
    """Open a store; for writing it is made if absent, for reading it must exist.

    ``cache`` is the folder of the LMDB tiers (default ``lmdb`` inside a local store), one folder
    per node in it, and per rank where ``group`` has several, all of which open it. Raises
    `NotOursError` for a folder that is not a store, `TooNewError`, `TierReadOnlyError`,
    `TierBusyError` naming the process that holds this node's LMDB. A writer sets an LMDB whose
    structure is damaged aside, and begins a new one.
    """
    if url.startswith("memory://"):
        if group.size > 1:
            raise UnsupportedError(
                "memory:// stores are of one process, this run has several ranks",
                hint="use file:///folder",
            )
        memory = _MEMORY.setdefault(url, MemoryTier())
        return Store(url, memory, memory)
    root = local_folder(url)
    folder = Path(cache) if cache is not None else root / "lmdb"
    if not write:
        return _open_reading(url, root, folder)
    name = node_name() if group.size == 1 else f"{node_name()}.r{local_rank(group.rank)}"
    troubles: list[Trouble] = []
    opened: list[Tier] = []

    def own() -> None:
        _refuse_foreign(root)
        objects = LocalObjects(root / "objects")
        open_marked(objects, create=True)
        opened.append(ZarrTier(objects))
        capacity = lmdb_bytes or _disk_share(folder / name, local_size(group.size))
        opened.append(_open_near(folder / name, capacity, troubles))

    try:
        together(group, "open", own)  # before any looks at the others': they are whole then
        others = _other_nodes(folder, troubles, skip={name})
    except BaseException:
        for tier in opened:
            tier.close()
        raise
    far, near = opened
    aside = tuple(sorted(path.parent for path in folder.glob("*-damaged-*/data.mdb")))
    return Store(url, near, far, tuple(others), tuple(troubles), aside)


def agent_tiers(
    url: str, run: str, node: str, *, cache: str | os.PathLike[str] | None = None
) -> tuple[LmdbTier, ZarrTier]:
    """The tiers below an agent's memory: its node's LMDB of the run, which it alone writes, and
    the far tier; both made if absent. Raises what `open_store` raises."""
    root = local_folder(url)
    _refuse_foreign(root)
    objects = LocalObjects(root / "objects")
    open_marked(objects, create=True)
    far = ZarrTier(objects)
    try:
        folder = Path(cache) if cache is not None else root / "lmdb"
        path = folder / agent_lmdb(node, run)
        return _open_near(path, _disk_share(path, 1), []), far
    except BaseException:
        far.close()
        raise


def beside_agents(
    url: str, run: str, cache: str | os.PathLike[str] | None, nodes: set[str]
) -> tuple[Tier, tuple[list[Tier], tuple[Trouble, ...]]]:
    """The far tier for a trainer whose records agents keep; and the LMDBs of other nodes than
    those, found beside theirs, with what cannot be read."""
    root = local_folder(url)
    troubles: list[Trouble] = []
    folder = Path(cache) if cache is not None else root / "lmdb"
    known = {agent_lmdb(node, run) for node in nodes}
    others = _other_nodes(folder, troubles, skip=known)
    return ZarrTier(LocalObjects(root / "objects")), (others, tuple(troubles))


def _refuse_foreign(root: Path) -> None:
    """A writer makes a store in a new or empty folder, or in one that is a store already."""
    if root.is_dir() and not (root / "objects").is_dir():
        foreign = sorted(path.name for path in root.iterdir() if path.name != "lmdb")
        if foreign:
            raise NotOursError(
                f"a folder that is not ours: it holds {', '.join(foreign[:3])}", path=str(root),
                hint="give an empty folder, or one that does not exist yet",
            )  # fmt: skip


def _open_near(path: Path, capacity: int | None, troubles: list[Trouble]) -> LmdbTier:
    """This node's LMDB for writing; one whose structure is damaged is set aside and said so."""
    name = lmdb_name(path.name)
    try:
        return LmdbTier(path, capacity_bytes=capacity, name=name)
    except TierDamagedError as error:
        aside = quarantine(str(path))
        error.hint = f"set aside as {aside}; the other tiers go on, fsck tells what they hold"
        log.warning("%s", error)
        troubles.append(Trouble(tier=name, key="", error=error))
        return LmdbTier(path, capacity_bytes=capacity, name=name)


def _disk_share(path: Path, ranks: int) -> int | None:
    """Nine tenths of what the disk has for this LMDB: its own file, and a rank's share of the rest.

    ``ranks`` of the run are on this host.
    """
    place = next((folder for folder in (path, *path.parents) if folder.is_dir()), None)
    if place is None:
        return None
    data = path / "data.mdb"
    own = data.stat().st_blocks * 512 if data.exists() else 0
    return (shutil.disk_usage(place).free // ranks + own) * 9 // 10


def _open_reading(url: str, root: Path, folder: Path) -> Store:
    """Every tier that can be read. One that cannot is a trouble, unless nothing else is there.

    A damaged or missing marker does not hide the objects: what they hold verifies by itself.
    """
    troubles: list[Trouble] = []
    far: Tier | None
    try:
        far = _open_far(root)
    except TooNewError:
        raise
    except AdaCheckError as error:
        place = error.at(tier="zarr", path=str(root))
        troubles.append(Trouble(tier="zarr", key="", error=place))
        far = _open_unmarked(root)
    tiers = [*_other_nodes(folder, troubles, skip=set()), *([far] if far else [])]
    if not tiers:
        raise troubles[-1].error
    return Store(url, tiers[0], tiers[-1], tuple(tiers[1:-1]), tuple(troubles))


def _open_far(root: Path) -> Tier:
    try:
        found = (root / "objects").is_dir()
        file = root.is_file()
    except OSError as error:
        raise translate(error, "zarr", str(root)) from error
    if not found:
        what = "a file, not the folder of a store" if file else "no store here"
        raise NotOursError(what, path=str(root), hint="check the URL; a writer makes a new store")
    objects = LocalObjects(root / "objects")
    if not open_marked(objects, create=False):
        raise NotOursError(
            "no store here: the folder of objects is empty", path=str(root),
            hint="check the URL; a writer makes a new store",
        )  # fmt: skip
    return ZarrTier(objects)


def _open_unmarked(root: Path) -> Tier | None:
    """The objects without a good marker, if there are records of ours among them."""
    tier = ZarrTier(LocalObjects(root / "objects"))
    try:
        if next(tier.list(""), None) is not None:
            return tier
    except AdaCheckError:
        pass
    return None


def _other_nodes(folder: Path, troubles: list[Trouble], *, skip: set[str]) -> list[Tier]:
    """The LMDB tiers of other nodes found beside ours, opened read-only."""
    tiers: list[Tier] = []
    try:
        if not folder.is_dir():
            return tiers
        names = sorted(path.name for path in folder.iterdir() if (path / "data.mdb").exists())
    except OSError as error:
        troubles.append(Trouble(tier="lmdb", key="", error=translate(error, "lmdb", str(folder))))
        return tiers
    first = node_name()
    for name in sorted(names, key=lambda name: (not name.startswith(first), name)):
        if name in skip or "-damaged-" in name:
            continue
        try:
            tiers.append(LmdbTier(folder / name, readonly=True, name=lmdb_name(name)))
        except (TierError, FormatError) as error:
            place = error.at(tier=lmdb_name(name), path=str(folder / name))
            troubles.append(Trouble(tier=lmdb_name(name), key="", error=place))
    return tiers


def agent_lmdb(node: str, run: str) -> str:
    """Name of the folder of an agent's LMDB: one process writes there, and serves one run."""
    return f"{node}.{run}"


def lmdb_name(node: str) -> str:
    """Tier name of a node's LMDB."""
    return "lmdb" if node == node_name() else f"lmdb:{node}"


def open_for_reading(url: str, cache: str | os.PathLike[str] | None = None) -> Store:
    """Open a store read-only; claims nothing."""
    try:
        return open_store(url, cache=cache)
    except AdaCheckError as error:
        raise error.at(path=url) from error.__cause__
