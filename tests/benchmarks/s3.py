"""The zarr tier on a real S3 server against the raw client, moving the same bytes."""

from __future__ import annotations

import io
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from adacheck_store.arrays import byte_view
from adacheck_store.config import Settings
from adacheck_store.format.head import ArrayInfo, Head, SealedHead
from adacheck_store.format.ids import BLOCK_BYTES, block_count, block_digests
from adacheck_store.format.keys import base_key, layout_key, manifest_key, new_term, pack_key
from adacheck_store.format.layout import Layout
from adacheck_store.format.manifest import Manifest, PartEntry
from adacheck_store.format.record import Record, block_nbytes, verify_block
from adacheck_store.restore import restore_state
from adacheck_store.session import RunSession
from adacheck_store.store import open_for_reading
from adacheck_store.tiers.base import RecordSource
from adacheck_store.tiers.object_s3 import S3Objects
from adacheck_store.tiers.s3_client import requests_in
from adacheck_store.tiers.s3_place import parse_s3
from adacheck_store.tiers.zarr import ZarrTier
from tests.core.toy import Toy
from tests.s3.server import BUCKET, Server, server

from .rows import Row, paired, seconds

MIB = 1 << 20
PUT_MIB = int(os.environ.get("ADACHECK_BENCH_S3_MIB", "1024"))
PART_MIB = int(os.environ.get("ADACHECK_BENCH_S3_PART_MIB", "512"))
DELTAS = 64
STEPS = 100_000
STEPS_A_PACK = 32
_READ_BLOCKS = 64


class Mover:
    """Moves the same bytes as one base through the tier, and as one object by the raw client."""

    def __init__(self, real: Server, nbytes: int) -> None:
        self.objects = S3Objects(real.url())
        self.tier = ZarrTier(self.objects)
        self._raw, self._key = real.client(), f"raw-{secrets.token_hex(4)}"
        self._data = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        self._view = byte_view(self._data)
        self.info = ArrayInfo(name="s0/param", dtype="U8", elements=nbytes,
                              digests=block_digests(self._view))  # fmt: skip
        layout = Layout(optimizers=(), sections=()).seal("bench")
        term = str(new_term(1))
        manifest = Manifest(
            run="bench", term=term, step=0, ranks=(),
            parts=(PartEntry(name="p000000", layout=layout.id),),
        ).seal()  # fmt: skip
        self.tier.put(
            [RecordSource(str(layout_key("bench", layout.id)), Record(layout, {})),
             RecordSource(str(manifest_key("bench", term, 0)), Record(manifest, {}))]
        )  # fmt: skip
        body = {"boundary": [], "exactness": "exact", "source": "captured", "states": []}
        self._head = Head(
            kind="base", run="bench", term=term, part="p000000", step=1, arrays=(self.info,),
            body=body, manifest=manifest.id, layout=layout.id, parent=manifest.id,
        )  # fmt: skip
        self.key = ""

    def put(self) -> None:
        """One base, in place of the one before."""
        if self.key:
            self.tier.delete([self.key])
        self.key = str(base_key("bench", self._head.term, "p000000", 1))
        record = Record(SealedHead.seal(self._head), {self.info.name: self._view})
        self.tier.put([RecordSource(self.key, record)])

    def get(self) -> None:
        """All of it, every block verified."""
        total = block_count(self.info.nbytes)
        for first in range(0, total, _READ_BLOCKS):
            count = min(_READ_BLOCKS, total - first)
            data = memoryview(self.tier.read(self.key, self.info.name, first, count))
            for index in range(first, first + count):
                at = (index - first) * BLOCK_BYTES
                size = block_nbytes(self.info, index)
                verify_block(self.info, index, data[at : at + size])

    def raw_put(self) -> None:
        """By boto3's own managed transfer, with its defaults."""
        self._raw.upload_fileobj(io.BytesIO(self._view), BUCKET, self._key)

    def raw_get(self) -> None:
        """By boto3's own managed transfer, with its defaults."""
        self._raw.download_fileobj(BUCKET, self._key, io.BytesIO())


def rows() -> Iterator[Row]:
    """Put and get, a restore with many deltas, a long listing."""
    real = server()
    yield from _move(real)
    yield _restore(real)
    yield _list(real)


def _move(real: Server) -> Iterator[Row]:
    mover = Mover(real, PUT_MIB * MIB)
    for name, ours, raw, bar in (
        ("put", mover.put, mover.raw_put, 0.85), ("get", mover.get, mover.raw_get, 0.75),
    ):  # fmt: skip
        before = requests_in(mover.objects.requests())
        raw_s, our_s, ratio = paired(raw, ours, 3)
        calls = (requests_in(mover.objects.requests()) - before) / 4
        yield Row(
            f"S3 {name} of {PUT_MIB} MiB: raw client's time / ours", f"{ratio:.2f}", f">= {bar}",
            ratio >= bar, f"{PUT_MIB / our_s:.0f} against {PUT_MIB / raw_s:.0f} MiB/s, "
            f"{calls * 1024 / PUT_MIB:.0f} requests a GiB",
        )  # fmt: skip


def _restore(real: Server) -> Row:
    """A part with its deltas after one base, against a plain download of as many bytes."""
    url = real.url()
    with tempfile.TemporaryDirectory(prefix="adacheck-bench-", dir=os.curdir) as folder:
        os.environ["ADACHECK_CACHE"] = str(Path(folder) / "cache")
        train(url, DELTAS)
        shutil.rmtree(Path(folder) / "cache")
    found: dict[str, Any] = {}

    def ours() -> None:
        with open_for_reading(url) as store:
            found["restored"] = restore_state(store.tiers, "bench")
            found["requests"] = store.far.requests()

    ours()
    raw = Download(real, url, found["requests"]["bytes in"])
    raw_s, our_s, inverse = paired(raw.run, ours, 3, 4 * PART_MIB * MIB)
    assert found["restored"].step == DELTAS
    return Row(
        f"S3 restore of a {PART_MIB} MiB part with {DELTAS} deltas / raw download",
        f"{1 / inverse:.2f}", "<= 1.3", 1 / inverse <= 1.3,
        f"{our_s:.1f} against {raw_s:.1f} s for {raw.nbytes / MIB:.0f} MiB, "
        f"{requests_in(found['requests'])} requests against {len(raw.names)}",
    )  # fmt: skip


class Download:
    """The rival of what reads a whole store: boto3's `get_object` of its records' chunk objects.

    As many at once as our tier reads, each whole, none of the small documents beside them; and no
    more than ``most`` bytes in all: chunks are padded, and nobody asks for padding.
    """

    def __init__(self, real: Server, url: str, most: int) -> None:
        place = parse_s3(url)
        self._client = real.client(max_pool_connections=2 * place.parallel)
        self._parallel = place.parallel
        self.names: list[str] = []
        self.nbytes = 0
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=BUCKET, Prefix=f"{place.prefix}/"
        )
        for item in (item for page in pages for item in page.get("Contents", ())):
            if "/c/" in item["Key"] and self.nbytes + item["Size"] <= most:
                self.names.append(item["Key"])
                self.nbytes += item["Size"]

    def run(self) -> None:
        """Read them all, and keep none."""
        with ThreadPoolExecutor(self._parallel) as pool:
            assert sum(pool.map(self._get, self.names)) == self.nbytes

    def _get(self, key: str) -> int:
        return len(self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read())


def train(url: str, deltas: int) -> None:
    """A run of so many steps after its first base, of a part of `PART_MIB`."""
    elements = PART_MIB * MIB // 12
    toy = Toy([(elements // 1024, 1024)], lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True))
    settings = Settings(base_every=10 * deltas, object_lag=16)
    session = RunSession.open(url, "bench", settings=settings)
    try:
        session.restore()
        session.start(toy.layout, start_step=0, base=toy.base, extra=toy.extra)
        while toy.step < deltas:
            toy.train()
            session.append(toy.boundary())
        session.flush(600)
    finally:
        session.close()


def _list(real: Server) -> Row:
    """Keys of deltas and extras of a long run, from the names of packs that hold them."""
    objects = S3Objects(real.url())
    term, names = str(new_term(1)), []
    for part in ("p000000", "r000000"):
        for first in range(1, STEPS + 1, STEPS_A_PACK):
            last = min(STEPS, first + STEPS_A_PACK - 1)
            pack = pack_key("bench", term, part, first, last)
            names += [f"{pack}/{tail}" for tail in ("zarr.json", "data/zarr.json", "data/c/0")]
    with ThreadPoolExecutor(objects.parallel) as pool:
        list(pool.map(lambda name: objects.put(name, [b"x"]), names))
    count = [0]

    def walk() -> None:
        count[0] = sum(1 for _ in ZarrTier(objects).list(""))

    taken = seconds(walk)
    assert count[0] == 2 * STEPS
    return Row(
        f"S3 listing of {STEPS} steps in packs of {STEPS_A_PACK}", f"{taken:.1f} s", "<= 5 s",
        taken <= 5.0, f"{count[0]} records in {len(names)} objects",
    )  # fmt: skip
