"""Revisions of a term's manifest: what the term consists of, where tensors change in mid-run."""

from __future__ import annotations

import dataclasses
import threading

from adacheck_store.format.errors import UnsupportedError
from adacheck_store.format.keys import layout_key, manifest_key
from adacheck_store.format.layout import Layout
from adacheck_store.format.manifest import Manifest
from adacheck_store.format.record import Record
from adacheck_store.tiers.base import RecordSource

from .boundary import Link
from .catalog import RecordRef
from .config import writer_info
from .group import Group, share


class Revisions:
    """The revisions of a term, each following the one before, alike on all ranks.

    `follow` is called on the training thread, `revise` and `stored` on the writer's. ``layouts``
    are the run's by id; those of new revisions are put into it.
    """

    def __init__(
        self, run: str, group: Group, manifest: Manifest, layouts: dict[str, Layout],
        timeout_s: float,
    ) -> None:  # fmt: skip
        self._run = run
        self._group = group
        self._newest = manifest
        self._layouts = layouts
        self._timeout_s = timeout_s
        own = manifest.parts[group.rank].layout
        self._ids = {own: manifest.seal().id}
        self._documents: list[RecordSource] = []
        self._lock = threading.Lock()

    def follow(self, layout: Layout, step: int) -> None:
        """From this boundary on this rank's part has this layout: make the revision that says so.

        Every rank calls it at the same step. Raises `GroupError` where one does not, in time.
        """
        sealed = layout.seal(self._run)
        layouts = share(
            self._group, f"layout of step {step}", lambda: sealed.id, timeout_s=self._timeout_s
        )
        pairs = zip(self._newest.parts, layouts, strict=True)
        parts = tuple(dataclasses.replace(entry, layout=found) for entry, found in pairs)
        with self._lock:
            if parts == self._newest.parts:
                return
            before = self._newest.seal().id
            self._newest = dataclasses.replace(
                self._newest, step=step, previous=before, parts=parts
            )
            revised = self._newest.seal(writer_info())
            key = manifest_key(self._run, self._newest.term, step)
            self._layouts[sealed.id] = layout
            self._ids[sealed.id] = revised.id
            self._documents += [
                RecordSource(str(layout_key(self._run, sealed.id)), Record(sealed, {})),
                RecordSource(str(key), Record(revised, {})),
            ]

    def revise(self, link: Link, layout: Layout, step: int) -> tuple[Link, list[RecordSource]]:
        """A link under the revision that names another layout, and what to put with it.

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
            return (
                dataclasses.replace(link, manifest=identity, layout=wanted, parent=identity),
                list(self._documents),
            )

    def stored(self, refs: list[RecordRef]) -> None:
        """Take note of documents that are in the near tier."""
        done = {ref.key for ref in refs}
        with self._lock:
            self._documents = [item for item in self._documents if item.key not in done]
