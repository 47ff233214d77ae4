"""A store: the tiers behind one URL."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from adacheck_store.format.errors import (
    AccessRefusedError,
    AdaCheckError,
    FormatError,
    RestoreError,
    TierDamagedError,
    TierError,
    TierUnavailableError,
    TooNewError,
    UnsupportedError,
)
from adacheck_store.format.keys import is_key
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.lmdb import LmdbTier
from adacheck_store.tiers.lmdb_check import mentions, quarantine
from adacheck_store.tiers.medium import translate
from adacheck_store.tiers.memory import MemoryTier
from adacheck_store.tiers.zarr import ZarrTier

from .catalog import Trouble
from .config import local_rank, local_size, node_name
from .group import SOLO, Group, together
from .location import HINT, Location, locate

log = logging.getLogger(__name__)

_LOOKED_AT = 10_000
"""Objects of a place without a good marker that are looked at: it may be somebody else's."""

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
                hint=HINT,
            )
        memory = _MEMORY.setdefault(url, MemoryTier())
        return Store(url, memory, memory)
    location = locate(url)
    folder = location.lmdb_folder(cache)
    if not write:
        return _open_reading(url, location, folder)
    name = node_name() if group.size == 1 else f"{node_name()}.r{local_rank(group.rank)}"
    troubles: list[Trouble] = []
    opened: list[Tier] = []

    def own() -> None:
        opened.append(ZarrTier(location.make()))
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
    location = locate(url)
    far = ZarrTier(location.make())
    try:
        path = location.lmdb_folder(cache) / agent_lmdb(node, run)
        return _open_near(path, _disk_share(path, 1), []), far
    except BaseException:
        far.close()
        raise


def beside_agents(
    url: str, run: str, cache: str | os.PathLike[str] | None, nodes: set[str]
) -> tuple[Tier, tuple[list[Tier], tuple[Trouble, ...]]]:
    """The far tier for a trainer whose records agents keep; and the LMDBs of other nodes than
    those, found beside theirs, with what cannot be read."""
    location = locate(url)
    troubles: list[Trouble] = []
    folder = location.lmdb_folder(cache)
    known = {agent_lmdb(node, run) for node in nodes}
    others = _other_nodes(folder, troubles, skip=known)
    return ZarrTier(location.objects()), (others, tuple(troubles))


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


def writing(tier: LmdbTier) -> LmdbTier:
    """An LMDB that was opened for reading, for a tool that writes there; close it when done.

    Raises `TierBusyError` naming the process that holds it.
    """
    path = Path(tier.path)
    return LmdbTier(path, capacity_bytes=_disk_share(path, 1), name=tier.traits.name)


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


def _open_reading(url: str, location: Location, folder: Path) -> Store:
    """Every tier that can be read. One that cannot is a trouble, unless nothing else is there.

    A damaged or missing marker does not hide the objects: what they hold verifies by itself.
    """
    troubles: list[Trouble] = []
    far: Tier | None
    try:
        far = ZarrTier(location.found())
    except TooNewError:
        raise
    except AdaCheckError as error:
        place = error.at(tier="zarr", path=location.path)
        troubles.append(Trouble(tier="zarr", key="", error=place))
        unreached = isinstance(error, (TierUnavailableError, AccessRefusedError))
        far = None if unreached else _open_unmarked(location)
    tiers = [*_other_nodes(folder, troubles, skip=set()), *([far] if far else [])]
    if not tiers:
        raise troubles[-1].error
    return Store(url, tiers[0], tiers[-1], tuple(tiers[1:-1]), tuple(troubles))


def _open_unmarked(location: Location) -> Tier | None:
    """The objects without a good marker, if there are records of ours among the first of them."""
    objects = location.objects()
    try:
        names = objects.list("", most=_LOOKED_AT)
        if any(is_key(name.removesuffix("/zarr.json")) for name in names):
            return ZarrTier(objects)
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


def open_for_saving(url: str, cache: str | os.PathLike[str] | None = None) -> Store:
    """Open a store to put records into its far tier, which is made if absent; LMDBs are read."""
    if url.startswith("memory://"):
        return open_store(url, write=True)
    try:
        locate(url).make()
    except AdaCheckError as error:
        raise error.at(path=url) from error.__cause__
    return open_for_reading(url, cache)


def open_for_reading(url: str, cache: str | os.PathLike[str] | None = None) -> Store:
    """Open a store read-only; claims nothing."""
    try:
        return open_store(url, cache=cache)
    except AdaCheckError as error:
        raise error.at(path=url) from error.__cause__
