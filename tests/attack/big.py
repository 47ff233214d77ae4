"""A part of any size, made cheaply, and a verb run on it with its memory watched.

``python -m tests.attack.big make|harm|compact|fsck|repair|restore STORE ELEMENTS [TARGET]``; prints
its cost.
"""

from __future__ import annotations

import resource
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import torch

from adacheck_store.arrays import byte_view, scalar_of
from adacheck_store.boundary import Link
from adacheck_store.drain import TierSource
from adacheck_store.format.bodies import (
    BaseBody,
    DeltaBody,
    ExtraBody,
    Grad,
    SectionState,
    Update,
    grad_array,
)
from adacheck_store.format.head import ArrayInfo, Head, SealedHead
from adacheck_store.format.ids import BLOCK_BYTES, block_digest
from adacheck_store.format.keys import (
    base_key,
    delta_key,
    extra_key,
    layout_key,
    manifest_key,
    parse_key,
)
from adacheck_store.format.layout import Layout, Section, Slice, whole_box
from adacheck_store.format.manifest import Manifest, PartEntry
from adacheck_store.format.record import Block, Record
from adacheck_store.optimizers import arithmetic_digest, group_values, spec_of
from adacheck_store.store import Store, open_store
from adacheck_store.terms import claim_term
from adacheck_store.tiers.base import RecordSource
from adacheck_store.tools.compact import compact
from adacheck_store.tools.findings import Finding
from adacheck_store.tools.fsck import fsck
from adacheck_store.tools.fsck_deep import FoldedRow
from adacheck_store.tools.repair import REBUILT, repair
from adacheck_store.tools.restore import restore

RUN, PART, RANK = "big", "p000000", "r000000"
ROLES = ("param", "exp_avg", "exp_avg_sq")
DELTAS = 3


class Patterned:
    """Arrays of one block again and again, as a `tiers.base.Source` that needs no memory."""

    expected_id = None

    def __init__(self, key: str, head: dict, names: list[str], dtype: str, elements: int) -> None:
        self.key, self._head = key, head
        size = {"F32": 4, "BF16": 2}[dtype]
        block = torch.full((BLOCK_BYTES // size,), 0.125)
        block = block.to(torch.bfloat16) if dtype == "BF16" else block
        self._block = byte_view(block)
        self._count = -(-elements * size // BLOCK_BYTES)
        assert elements * size % BLOCK_BYTES == 0
        digest = block_digest(self._block)
        self._infos = tuple(
            ArrayInfo(name=name, dtype=dtype, elements=elements, digests=(digest,) * self._count)
            for name in names
        )

    def blocks(self) -> Iterator[Block]:
        """The same block again and again."""
        for info in self._infos:
            for index in range(self._count):
                yield Block(info.name, index, self._block)

    def seal(self) -> SealedHead:
        """The head."""
        return SealedHead.seal(Head(arrays=self._infos, **self._head))


def make(url: str, elements: int) -> None:
    """A base and some deltas of one tensor, straight into the object tier."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    spec, groups = spec_of(optimizer), (group_values(optimizer.param_groups[0]),)
    box = whole_box((elements,))
    piece = Slice(name="w", shape=(elements,), boxes=(box,), offset=0, group=0)
    section = Section(
        name="s0", optimizer=0, roles=tuple((role, "F32") for role in ROLES), slices=(piece,)
    )
    layout = Layout(optimizers=(spec.name,), sections=(section,)).seal(RUN)
    with open_store(url, write=True) as store:
        far = store.far
        term = str(claim_term(far, RUN))
        manifest = Manifest(
            run=RUN, term=term, step=1, parts=(PartEntry(name=PART, layout=layout.id),),
            ranks=(RANK,), settings={},
        ).seal()  # fmt: skip
        link = Link(run=RUN, term=term, part=PART, rank=RANK, parent=manifest.id,
                    manifest=manifest.id, layout=layout.id)  # fmt: skip
        far.put([
            RecordSource(str(layout_key(RUN, layout.id)), Record(layout, {})),
            RecordSource(str(manifest_key(RUN, term, 1)), Record(manifest, {})),
        ])  # fmt: skip
        place = {"run": RUN, "term": term, "manifest": link.manifest}
        counter = torch.optim.AdamW([p := torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
        p.grad = torch.zeros(1)
        counter.step()
        counters = {"step": (scalar_of(counter.state[p]["step"]),)}
        states = {"s0": SectionState(present=(True,), scalars=counters)}
        body = BaseBody(origin="captured", exactness="exact", states=states, boundary=(groups,),
                        gap=None)  # fmt: skip
        head = {"kind": "base", "part": PART, "step": 1, "parent": link.parent,
                "layout": layout.id, "body": body.to_json(), **place}  # fmt: skip
        names = [f"s0/{role}" for role in ROLES]
        far.put([Patterned(str(base_key(RUN, term, PART, 1)), head, names, "F32", elements)])
        parent = manifest.id
        for step in range(1, 2 + DELTAS):
            extra = SealedHead.seal(
                Head(kind="extra", part=RANK, step=step, parent="", layout="",
                     body=ExtraBody(tree={"n": step}).to_json(), **place)
            )  # fmt: skip
            far.put([RecordSource(str(extra_key(RUN, term, RANK, step)), Record(extra, {}))])
            if step == 1:
                continue
            grad = Grad(section="s0", slice=0, encoding="bf16", offset=0)
            update = Update(optimizer=0, groups=groups, grads=(grad,), absent=())
            body = DeltaBody(
                updates=(update,), boundary=(groups,), fingerprints=(),
                arithmetic=(arithmetic_digest(spec.name, groups, ["F32"]),),
            )  # fmt: skip
            head = {"kind": "delta", "part": PART, "step": step, "parent": parent,
                    "layout": layout.id, "body": body.to_json(), **place}  # fmt: skip
            key = str(delta_key(RUN, term, PART, step))
            name = grad_array(0, "s0", "bf16")
            far.put([Patterned(key, head, [name], "BF16", elements)])
            parent = far.head(key).id
        far.sync()


def harm(url: str) -> None:
    """All is copied to this node's LMDB; of the objects a base and a delta are damaged, and
    a delta is lost."""
    with open_store(url, write=True, lmdb_bytes=64 << 30) as store:
        keys = list(store.far.list(f"{RUN}/"))
        order = ("layout", "manifest", "base", "delta", "extra")
        kinds = {key: parse_key(key).kind for key in keys}
        for key in sorted(kinds, key=lambda key: order.index(kinds[key]) if kinds[key] in order
                          else len(order)):  # fmt: skip
            if kinds[key] in order:
                store.near.put([TierSource(store.far, key)])
        store.near.sync()
    root = Path(urlsplit(url).path) / "objects"
    (lost, flipped, *_) = sorted(root.glob("*/*/p000000/pack/*"))
    (base,) = root.glob("*/*/p000000/base/*")
    for path in (flipped / "data" / "c" / "0", base / "s0" / "param" / "c" / "0"):
        data = bytearray(path.read_bytes())
        data[1000] ^= 1
        path.write_bytes(data)
    shutil.rmtree(lost)


def mend(store: Store) -> None:
    """Repair what `harm` did."""
    rows = list(repair(store, RUN))
    assert {row.done for row in rows} == {REBUILT}, rows
    assert sorted(row.was for row in rows) == ["damaged", "damaged", "missing"], rows


def anonymous_kib() -> int:
    """RssAnon of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    return 0


def watched(what: str, url: str, target: str) -> None:
    """Run a verb; print the most RssAnon it took above what the imports take, and the time."""
    torch.set_num_threads(1)
    before, most, done = anonymous_kib(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], anonymous_kib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.monotonic()
    with open_store(url) as store:
        if what == "compact":
            (row,) = compact(store, RUN)
            assert (row.done, row.deltas) == ("folded", DELTAS), row
        elif what == "repair":
            mend(store)
        elif what == "fsck":
            found = list(fsck(store, RUN, deep=1))
            (folded,) = [row for row in found if isinstance(row, FoldedRow)]
            assert folded.step == 1 + DELTAS
            assert not [row for row in found if isinstance(row, Finding) and row.unchecked]
            assert not [row for row in found if getattr(row, "severity", "") == "damage"]
        else:
            assert restore(store, target, RUN).step == 1 + DELTAS
    took = time.monotonic() - start
    done.set()
    watcher.join(10)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(most[0] >> 10, before >> 10, peak >> 10, round(took, 1))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1] == "harm":
        harm(sys.argv[2])
    else:
        watched(sys.argv[1], sys.argv[2], sys.argv[-1])
