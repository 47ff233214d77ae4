"""Durable puts against a plain file with fsync."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from adacheck_store.arrays import byte_view
from adacheck_store.format.head import ArrayInfo, Head, SealedHead
from adacheck_store.format.ids import block_digests
from adacheck_store.format.keys import delta_key, layout_key, manifest_key, new_term
from adacheck_store.format.layout import Layout
from adacheck_store.format.manifest import Manifest, PartEntry
from adacheck_store.format.record import Record
from adacheck_store.tiers.base import RecordSource, Tier
from adacheck_store.tiers.lmdb import LmdbTier
from adacheck_store.tiers.object_local import LocalObjects
from adacheck_store.tiers.zarr import ZarrTier, open_marked

from .rows import Row, paired

BYTES = 64 << 20


class Filler:
    """Puts one delta after another into a tier."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._data = torch.randint(0, 255, (BYTES,), dtype=torch.uint8)
        self._info = ArrayInfo(
            name="set/s0/param", dtype="U8", elements=BYTES,
            digests=block_digests(byte_view(self._data)),
        )  # fmt: skip
        layout = Layout(optimizers=(), sections=()).seal("bench")
        self._term = str(new_term(1))
        manifest = Manifest(
            run="bench", term=self._term, step=0, ranks=(),
            parts=(PartEntry(name="p000000", layout=layout.id),),
        ).seal()  # fmt: skip
        self._ids = {"manifest": manifest.id, "layout": layout.id, "parent": manifest.id}
        self._step = 0
        tier.put(
            [RecordSource(str(layout_key("bench", layout.id)), Record(layout, {})),
             RecordSource(str(manifest_key("bench", self._term, 0)), Record(manifest, {}))]
        )  # fmt: skip

    def put(self) -> None:
        """One durable delta of `BYTES`; the one before the last is deleted."""
        self._step += 1
        body = {"updates": [], "sets": [["s0", "param", 0, 0]], "boundary": [], "arithmetic": [],
                "fingerprints": []}  # fmt: skip
        head = Head(
            kind="delta", run="bench", term=self._term, part="p000000", step=self._step,
            arrays=(self._info,), body=body, **self._ids,
        )  # fmt: skip
        record = Record(SealedHead.seal(head), {self._info.name: byte_view(self._data)})
        key = str(delta_key("bench", self._term, "p000000", self._step))
        self._tier.put([RecordSource(key, record)])
        self._tier.sync()
        old = str(delta_key("bench", self._term, "p000000", max(1, self._step - 2)))
        self._tier.delete([old])


def rows() -> Iterator[Row]:
    """LMDB, and zarr in a local directory."""
    with tempfile.TemporaryDirectory(prefix="adacheck-bench-", dir=os.curdir) as folder:
        root = Path(folder)
        payload = torch.randint(0, 255, (BYTES,), dtype=torch.uint8)

        def plain() -> None:
            with (root / "plain.tmp").open("wb") as file:
                file.write(byte_view(payload))
                file.flush()
                os.fsync(file.fileno())
            os.replace(root / "plain.tmp", root / "plain")

        objects = LocalObjects(root / "objects")
        open_marked(objects, create=True)
        for name, tier, bar in (
            ("LMDB", LmdbTier(root / "lmdb"), 0.6),
            ("zarr in a local directory", ZarrTier(objects), None),
        ):
            filler = Filler(tier)
            plain_s, put_s, ratio = paired(plain, filler.put, 7)
            yield Row(
                f"{name}: durable put of 64 MiB / plain file + fsync", f"{ratio:.2f}",
                f">= {bar}" if bar else "", ratio >= bar if bar else None,
                f"{BYTES / put_s / 2**20:.0f} against {BYTES / plain_s / 2**20:.0f} MiB/s",
            )  # fmt: skip
            tier.close()
