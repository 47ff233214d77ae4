"""Revisions of a term's manifest: what the term consists of, where tensors change in mid-run."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from adacheck_store.format.errors import UnsupportedError
from adacheck_store.format.keys import layout_key, manifest_key, part_name
from adacheck_store.format.layout import Layout
from adacheck_store.format.manifest import Manifest, PartEntry
from adacheck_store.format.record import Record
from adacheck_store.tiers.base import RecordSource

from .boundary import Link
from .catalog import RecordRef
from .config import writer_info
from .group import Group, share, together
from .redundancy.shares import Sharing


class Revisions:
    """The revisions of a term, each following the one before, alike on all ranks.

    `follow` is called on the training thread, `revise` and `stored` on the writer's. ``layouts``
    are the run's by id; those of new revisions are put into it. ``announce`` is told of a revision
    by which ranks share what they write before anything is put under it.
    """

    def __init__(
        self, run: str, group: Group, manifest: Manifest, layouts: dict[str, Layout],
        timeout_s: float, announce: Callable[[Manifest, Layout], None],
    ) -> None:  # fmt: skip
        self._run = run
        self._group = group
        self._newest = manifest
        self._layouts = layouts
        self._timeout_s = timeout_s
        self._announce = announce
        own = manifest.parts[group.rank].layout
        self._ids = {own: manifest.seal().id}
        self._documents: list[RecordSource] = []
        self._lock = threading.Lock()

    def follow(
        self, layout: Layout, step: int, sharing: Sharing | None = None, group: Group | None = None
    ) -> None:
        """From this boundary on this rank's part has this layout: make the revision that says so.

        With a ``sharing`` the parts hold what it says; without one each rank's part holds all that
        the rank has. Every rank calls it at the same step; they speak in ``group``. Raises
        `GroupError` where one does not come in time: then others may have made the revision, and
        the next one follows it, on all.
        """
        group = group or self._group
        sealed = layout.seal(self._run)
        mine = [sealed.id, self._newest.step, self._newest.seal().id]
        told = share(group, f"layout of step {step}", lambda: mine, timeout_s=self._timeout_s)
        layouts = [each[0] for each in told]
        _, previous = max(each[1:] for each in told)
        parts = tuple(
            PartEntry(
                name=part_name(rank), layout=found, owner=rank,
                sources=sharing.sources[rank] if sharing else (rank,),
            )
            for rank, found in enumerate(layouts)
        )  # fmt: skip
        redundancy = sharing.redundancy if sharing else None
        alike = all(each[2] == previous for each in told)
        if alike and (parts, redundancy) == (self._newest.parts, self._newest.redundancy):
            return
        newest = dataclasses.replace(
            self._newest, step=step, previous=previous, parts=parts, redundancy=redundancy
        )
        if sharing is not None:
            together(
                group, f"announce {step}", lambda: self._announce(newest, layout),
                timeout_s=self._timeout_s,
            )  # fmt: skip
        revised = newest.seal(writer_info())
        with self._lock:
            self._newest = newest
            key = manifest_key(self._run, newest.term, step)
            self._layouts[sealed.id] = layout
            self._ids[sealed.id] = revised.id
            self._documents += [
                RecordSource(str(layout_key(self._run, sealed.id)), Record(sealed, {})),
                RecordSource(str(key), Record(revised, {})),
            ]

    def documents(self) -> list[RecordSource]:
        """Layouts and revisions to put with the next records."""
        with self._lock:
            return list(self._documents)

    def revise(self, link: Link, layout: Layout, step: int) -> Link:
        """A link under the revision that names another layout.

        A revision that a failed put may have left behind is kept: the one after it follows it.
        """
        wanted = layout.seal(self._run).id
        if wanted not in self._ids and self._group.size == 1:
            self.follow(layout, step)
        with self._lock:
            identity = self._ids.get(wanted)
            if identity is None:
                raise UnsupportedError(
                    "tensors or groups have changed, and the ranks did not agree on it: nothing "
                    "is saved from here on",
                    hint="change them on all ranks at the same step; to go on, restart all ranks",
                )
            return dataclasses.replace(link, manifest=identity, layout=wanted, parent=identity)

    def stored(self, refs: list[RecordRef]) -> None:
        """Take note of documents that are in the near tier."""
        done = {ref.key for ref in refs}
        with self._lock:
            self._documents = [item for item in self._documents if item.key not in done]
