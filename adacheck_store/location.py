"""Where a store lies: a local folder or an S3 prefix, as its URL says; and what is beside it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from adacheck_store.format.errors import NotOursError, UsageError
from adacheck_store.format.keys import MARKER
from adacheck_store.tiers.medium import translate
from adacheck_store.tiers.object_local import LocalObjects
from adacheck_store.tiers.object_s3 import S3Objects
from adacheck_store.tiers.objects import Objects, open_marked
from adacheck_store.tiers.s3_place import S3Place, parse_s3

from .config import cache_folder

HINT = "give file:///folder or s3://bucket/prefix"


@dataclass(frozen=True, slots=True)
class Location:
    """A store's place: ``folder`` of a local one, else ``s3``."""

    folder: Path | None
    s3: S3Place | None = None

    @property
    def name(self) -> str:
        """One name for one store, however its URL is written."""
        return self.s3.name if self.s3 else f"file://{os.path.realpath(self._root)}"

    @property
    def url(self) -> str:
        """A URL of the store that holds in any folder, with all that the given one says."""
        return self.s3.url if self.s3 else self.name

    @property
    def path(self) -> str:
        """The place, for messages."""
        return self.s3.name if self.s3 else str(self._root)

    @property
    def _root(self) -> Path:
        assert self.folder is not None
        return self.folder

    def objects(self) -> Objects:
        """The objects, whether there are any or not."""
        return S3Objects(self.s3) if self.s3 else LocalObjects(self._root / "objects")

    def lmdb_folder(self, cache: str | os.PathLike[str] | None) -> Path:
        """The folder of LMDBs, one for each node: ``cache``, else in the store's own folder,
        else the user's cache folder, by the store."""
        if cache is not None:
            return Path(cache)
        if self.folder is not None:
            return self.folder / "lmdb"
        name = hashlib.blake2b(self.name.encode(), digest_size=8).hexdigest()
        return cache_folder() / name / "lmdb"

    def make(self) -> Objects:
        """The objects for a writer, marked as ours; the place is taken into use if it is empty.

        Raises `NotOursError`, `TooNewError`, `UnsupportedError` for a server by which two writers
        could both get a run, `TierReadOnlyError`.
        """
        if self.folder is not None:
            _refuse_foreign(self.folder)
        objects = self.objects()
        open_marked(objects, create=True)
        objects.probe(MARKER)
        return objects

    def found(self) -> Objects:
        """The objects of a store that stands; raises `NotOursError`, `TooNewError`."""
        if self.folder is not None:
            _see_folder(self.folder)
        objects = self.objects()
        if not open_marked(objects, create=False):
            what = "the folder of objects is empty" if self.folder else "nothing lies there"
            raise NotOursError(
                f"no store here: {what}", path=self.path,
                hint="check the URL; a writer makes a new store",
            )  # fmt: skip
        return objects


def locate(url: str) -> Location:
    """The place that a URL (or a plain path) names; raises `UsageError`."""
    if "://" not in url:
        if not url:
            raise UsageError("an empty store URL", hint=HINT)
        return Location(Path(url).absolute())
    parts = urlsplit(url)
    if parts.scheme == "s3":
        return Location(None, parse_s3(url))
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise UsageError(f"not a store URL: {url!r}", hint=HINT)
    if not parts.path.startswith("/") or parts.query or parts.fragment:
        raise UsageError(f"not a store URL: {url!r}", hint="percent-encode ? and # in the path")
    return Location(Path(unquote(parts.path)))


def _refuse_foreign(root: Path) -> None:
    """A writer makes a store in a new or empty folder, or in one that is a store already."""
    objects = root / "objects"
    if root.is_dir() and not objects.is_dir():
        foreign = sorted(path.name for path in root.iterdir() if path.name != "lmdb")
        if foreign and not objects.is_dir():  # which another rank may have made meanwhile
            raise NotOursError(
                f"a folder that is not ours: it holds {', '.join(foreign[:3])}", path=str(root),
                hint="give an empty folder, or one that does not exist yet",
            )  # fmt: skip


def _see_folder(root: Path) -> None:
    try:
        found = (root / "objects").is_dir()
        file = root.is_file()
    except OSError as error:
        raise translate(error, "zarr", str(root)) from error
    if not found:
        what = "a file, not the folder of a store" if file else "no store here"
        raise NotOursError(what, path=str(root), hint="check the URL; a writer makes a new store")
