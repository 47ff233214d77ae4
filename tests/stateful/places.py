"""Where a store under test lies, and what may happen to it there: bits flip, tiers are lost.

A place is memory, a folder, or a prefix of a bucket with the LMDBs in a folder. It is named by a
pair of strings, so that a child can open it too.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adacheck_store.store import _MEMORY
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.memory import MemoryTier
from adacheck_store.tiers.object_s3 import S3Objects
from tests.stateful.trainers import NODES

Change = Callable[[bytes], bytes]
"""What becomes of the bytes of a file or object; the same bytes: nothing."""


class Memory:
    """A ``memory://`` store: one tier, which lives on under its URL."""

    one = True
    """True where near and far tier are one."""

    def __init__(self) -> None:
        self.url = f"memory://stateful-{secrets.token_hex(8)}"
        self.cache: Path | None = None

    def flip(self, tier: Tier, change: Change) -> bool:
        """Change what a tier holds; False if nothing was."""
        assert isinstance(tier, MemoryTier)
        found = False
        for _, blocks in tier._records.values():
            for place, held in blocks.items():
                blocks[place] = change(held)
                found = found or blocks[place] != held
        return found

    def lose(self, tier: str) -> None:
        """Nothing is lost but with the process."""
        raise NotImplementedError

    def end(self) -> None:
        """Leave nothing behind."""
        _MEMORY.pop(self.url, None)


class Folder:
    """A store in a local folder, its LMDBs in ``cache``."""

    one = False

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = root.as_uri()
        self.cache: Path | None = root / "lmdb"

    def flip(self, tier: Tier, change: Change) -> bool:
        """Change what a tier holds; False if nothing was."""
        name = tier.traits.name
        return (
            self._flip_objects(change) if name == "zarr" else _flip_files(self._node(name), change)
        )

    def _node(self, tier: str) -> Path:
        assert self.cache is not None
        return self.cache / (tier.partition(":")[2] or NODES[0])

    def _flip_objects(self, change: Change) -> bool:
        return _flip_files(self.root / "objects", change)

    def lose(self, tier: str) -> None:
        """All of a tier is gone."""
        if tier == "zarr":
            self._lose_objects()
        else:
            shutil.rmtree(self._node(tier))

    def _lose_objects(self) -> None:
        shutil.rmtree(self.root / "objects")

    def end(self) -> None:
        """Whoever made the folder removes it."""


class Bucket(Folder):
    """A store in S3, its LMDBs in a local folder."""

    def __init__(self, url: str, cache: Path) -> None:
        self.url = url
        self.cache = cache

    def _objects(self) -> S3Objects:
        return S3Objects(self.url)

    def _flip_objects(self, change: Change) -> bool:
        found = False
        objects = self._objects()
        for name in list(objects.list("")):
            held = objects.get(name)
            if (changed := change(held)) != held:
                objects.put(name, [changed])
                found = True
        return found

    def _lose_objects(self) -> None:
        objects = self._objects()
        objects.delete(list(objects.list("")))

    def end(self) -> None:
        """Leave nothing behind."""
        self._lose_objects()


Place = Memory | Folder | Bucket


def find(url: str, cache: str) -> Place:
    """The place that another process has named."""
    return Bucket(url, Path(cache)) if url.startswith("s3:") else Folder(Path(cache).parent)


def _flip_files(folder: Path, change: Change) -> bool:
    found = False
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            held = path.read_bytes()
            if (changed := change(held)) != held:
                found = True
                path.write_bytes(changed)
    return found


def replacing(data: bytes, changed: bytes) -> Change:
    """Put some bytes in the place of others, wherever they are."""

    def change(held: Any) -> Any:
        return bytes(held).replace(data, changed) if data in bytes(held) else held

    return change
