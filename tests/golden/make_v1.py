"""Makes the golden records of format v1: run on purpose, ``python -m tests.golden.make_v1``.

The files in ``v1/`` are what version 1 *is*. They are made once; a change of an existing file
means that old stores can no longer be read. Tests compare the files with `golden`.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adacheck_store.format.bodies import (
    BaseBody,
    DeltaBody,
    ExtraBody,
    Fingerprint,
    Grad,
    SectionState,
    SetPiece,
    Update,
    decode_base,
    decode_delta,
    decode_extra,
)
from adacheck_store.format.canonical import ArrayRef, Scalar
from adacheck_store.format.head import ArrayInfo, Head, SealedHead
from adacheck_store.format.ids import block_digests
from adacheck_store.format.layout import Layout, Section, Slice, decode_layout, whole_box
from adacheck_store.format.manifest import (
    Claim,
    Floor,
    Manifest,
    PartEntry,
    Tag,
    decode_log,
    decode_manifest,
)
from adacheck_store.format.record import Record
from adacheck_store.format.redundancy import Ground, HeldPart, Redundancy

FOLDER = Path(__file__).parent / "v1"
RUN = "golden-run"
TERM = "t000001-00112233445566aa"
CHILD = "t000002-bb77889900aabbcc"
INFO = {"writer": "golden"}
TIP = "ab" * 32


@dataclass(frozen=True)
class Golden:
    """A golden record: its value, what decodes it again, and the record."""

    value: Any
    decode: Callable[[Head], Any]
    record: Record


def pack(code: str, *values: float, elements: int = 64) -> bytes:
    """Values in little-endian binary, padded with zeros to ``elements``."""
    data = struct.pack(f"<{len(values)}{code}", *values)
    return data.ljust(elements * struct.calcsize(code), b"\0")


def seal(head: Head, arrays: dict[str, tuple[str, bytes]], sizes: dict[str, int]) -> Record:
    """A record of these arrays (name -> dtype, bytes)."""
    infos = tuple(
        ArrayInfo(
            name=name, dtype=dtype, elements=len(data) // sizes[dtype],
            digests=block_digests(memoryview(data)),
        )
        for name, (dtype, data) in arrays.items()
    )  # fmt: skip
    head = Head(**{name: getattr(head, name) for name in Head.__slots__} | {"arrays": infos})
    views = {name: memoryview(data) for name, (_, data) in arrays.items()}
    return Record(SealedHead.seal(head, INFO), views)


SIZES = {"U8": 1, "BOOL": 1, "BF16": 2, "F16": 2, "F32": 4, "I64": 8, "F64": 8, "C64": 8}


def make_slice(name: str, shape: tuple[int, ...], offset: int, **fields: Any) -> Slice:
    """A slice that is a whole tensor, unless ``boxes`` or ``flat`` say otherwise."""
    whole = {"boxes": (whole_box(shape),), "group": 0}
    return Slice(name=name, shape=shape, offset=offset, **(whole | fields))


LAYOUT = Layout(
    optimizers=("torch.optim.adamw.AdamW", "torch.optim.sgd.SGD"),
    sections=(
        Section(
            name="adamw.f32", optimizer=0,
            roles=(("param", "F32"), ("exp_avg", "F32"), ("exp_avg_sq", "F32")),
            slices=(
                make_slice("embed.weight", (3, 2), 0, aliases=("head.weight",)),
                make_slice("shard", (100,), 64, boxes=(), flat=(10, 80), scope="tp=1"),
                make_slice("boxed", (4, 4), 192, boxes=(((0, 2), (0, 2)), ((2, 4), (2, 4)))),
                make_slice("frozen", (1,), 256, group=1),
            ),
        ),
        Section(
            name="adamw.bf16", optimizer=0, roles=(("param", "BF16"), ("exp_avg", "BF16")),
            slices=(make_slice("experte ☃", (2,), 0, group=1),),
        ),
        Section(
            name="sgd.c64", optimizer=1, roles=(("param", "C64"), ("momentum_buffer", "C64")),
            slices=(make_slice("rotary", (1,), 0),),
        ),
        Section(
            name="buffers", optimizer=-1, roles=(("buffer", "I64"),),
            slices=(
                make_slice("bn.num_batches_tracked", (), 0, group=-1),
                make_slice("empty", (0, 7), 64, group=-1),
            ),
        ),
    ),
)  # fmt: skip

ADAMW: dict[str, Any] = {
    "lr": Scalar("F32", struct.pack("<f", 1e-3)), "betas": (0.9, 0.999), "eps": 1e-8,
    "weight_decay": 0.01, "amsgrad": False, "fused": True, "foreach": None,
}  # fmt: skip
SGD: dict[str, Any] = {"lr": 0.5, "momentum": 0.9, "nesterov": False, "dampening": 0}
AFTER = ({**ADAMW, "lr": 5e-4}, {**ADAMW, "weight_decay": 0.0})


REDUNDANCY = Redundancy(
    k=1, policy="live", agreed=11, nodes=(("n0", "host a"), ("n1", "label rack/7")), ranks=(0, 1),
    sets=((0, 1, 1), (0, 1, 2)), names=("head.bias", "head.weight"),
    grounds=(
        Ground(scope="", param=1, optimizer=-1, keep="nothing", why=""),
        Ground(scope="", param=1, optimizer=0, keep="gradient", why=""),
        Ground(scope="r000000", param=0, optimizer=0, keep="parameter", why="never changed"),
    ),
    parts=(
        HeldPart(degree="none", holders=((1, 0),), states=(0, 1, 1, 1, 1, 2)),
        HeldPart(degree="full", holders=(), states=(0, 0)),
    ),
)  # fmt: skip


def manifests(layout_id: str) -> dict[str, Manifest]:
    """A first revision on a fresh run, and the first revision of a child term."""
    parts = (
        PartEntry(name="p000000", layout=layout_id),
        PartEntry(name="p000001", layout=layout_id, sources=(0, 1), owner=1),
    )
    first = Manifest(
        run=RUN, term=TERM, step=0, parts=parts, ranks=("r000000", "r000001"),
        settings={"base_every": 64, "policy": "lossless"},
    )  # fmt: skip
    child = Manifest(
        run=RUN, term=CHILD, step=48, parts=parts[:1], ranks=("r000000",), parent_term=TERM,
        fork_step=40, tips={"p000000": TIP, "p000001": TIP}, previous="cd" * 32,
    )  # fmt: skip
    found = dataclasses.replace(first, step=12, previous="cd" * 32, redundancy=REDUNDANCY)
    return {"manifest": first, "manifest-fork": child, "manifest-redundancy": found}


DELTA = DeltaBody(
    updates=(
        Update(
            optimizer=0,
            groups=(ADAMW, {**ADAMW, "maximize": True}),
            grads=(
                Grad(section="adamw.f32", slice=0, encoding="raw", offset=0),
                Grad(section="adamw.f32", slice=1, encoding="bf16", offset=0, scale=0x3F000001),
                Grad(section="adamw.f32", slice=2, encoding="fp16", offset=0),
                Grad(section="adamw.bf16", slice=0, encoding="raw", offset=0),
            ),
            absent=(("adamw.f32", 3),),
        ),
        Update(optimizer=1, groups=(SGD,), grads=(), absent=(("sgd.c64", 0),)),
        Update(
            optimizer=1,
            groups=(SGD,),
            grads=(Grad(section="sgd.c64", slice=0, encoding="raw", offset=0),),
        ),
    ),
    sets=(SetPiece(section="buffers", role="buffer", slice=0, offset=0),),
    boundary=(AFTER, (SGD,)),
    arithmetic=("a1" * 16, "b2" * 16),
    fingerprints=(
        Fingerprint(array="adamw.f32/param", first=0, stride=16, sums=(2**64 - 1,)),
        Fingerprint(array="sgd.c64/param", first=0, stride=1, sums=(7,)),
    ),
)

DELTA_ARRAYS = {
    "0/adamw.f32/grad.raw": ("F32", pack("f", 1, -2, 0.5, 3, 4, 5)),
    "0/adamw.f32/grad.bf16": ("BF16", pack("H", *range(0x3F80, 0x3F80 + 70), elements=128)),
    "0/adamw.f32/grad.fp16": ("F16", pack("e", *range(8))),
    "0/adamw.bf16/grad.raw": ("BF16", pack("H", 0x3F80, 0xFF80)),
    "2/sgd.c64/grad.raw": ("C64", pack("f", 1, -1, elements=128)),
    "set/buffers/buffer": ("I64", pack("q", 17)),
}

BASE = BaseBody(
    origin="captured",
    exactness="exact",
    states={
        "adamw.f32": SectionState(
            present=(True, True, True, False),
            scalars={"step": (*(Scalar("F32", struct.pack("<f", 12.0)),) * 3, None)},
        ),
        "adamw.bf16": SectionState(present=(True,), scalars={"step": (12,)}),
        "sgd.c64": SectionState(present=(False,)),
    },
    boundary=(AFTER, (SGD,)),
    gap={"reason": "a source restarted", "from": 12},
)

BASE_ARRAYS = {
    "adamw.f32/param": ("F32", pack("f", *range(300), elements=320)),
    "adamw.f32/exp_avg": ("F32", pack("f", *range(250), elements=320)),
    "adamw.f32/exp_avg_sq": ("F32", pack("f", *range(200), elements=320)),
    "adamw.bf16/param": ("BF16", pack("H", 1, 2)),
    "adamw.bf16/exp_avg": ("BF16", pack("H", 3, 4)),
    "sgd.c64/param": ("C64", pack("f", 0.25, 0.75, elements=128)),
    "buffers/buffer": ("I64", pack("q", 16)),
}

REPLAYED = BaseBody(
    origin="replayed",
    exactness="bounded",
    states={
        "adamw.f32": SectionState(present=(False,) * 4),
        "adamw.bf16": SectionState(present=(False,)),
        "sgd.c64": SectionState(present=(True,)),
    },
    boundary=(AFTER, (SGD,)),
)

BOUNDED = dataclasses.replace(REPLAYED, since=0)

REPLAYED_ARRAYS = {
    **{name: BASE_ARRAYS[name] for name in BASE_ARRAYS if "exp_avg" not in name},
    "sgd.c64/momentum_buffer": ("C64", pack("f", 1, 2, elements=128)),
}

EXTRA = ExtraBody(
    tree={
        "rng": {
            "torch": ArrayRef("rng/torch", "U8", (5,)),
            "python": (3, (2**31, 2**53, 2**53 + 1, -(2**64)), None),
        },
        "values": [
            None, True, False, 0, -7, "text \" \\ \n \x00 ☃", 0.1, -0.0, float("inf"), b"\x00\xff",
            (), [], {}, {1: "int", None: "none", "$": "dollar", (2.5,): [b""]},
            Scalar("BF16", b"\x80\x3f"),
        ],
        "tensors": {
            "again": ArrayRef("t/0", "F64", (3, 2)),
            "flags": ArrayRef("t/1", "BOOL", (2,)),
            "matrix": ArrayRef("t/0", "F64", (2, 3)),
            "none": ArrayRef("t/2", "F32", (0, 4)),
        },
    },
    refs={"scheduler": 11, "loader": 0},
)  # fmt: skip

EXTRA_ARRAYS = {
    "rng/torch": ("U8", bytes(range(1, 6))),
    "t/0": ("F64", pack("d", 1, 2, 3, 4, 5, 6, elements=6)),
    "t/1": ("BOOL", b"\x01\x00"),
    "t/2": ("F32", b""),
}


def golden() -> dict[str, Golden]:
    """Every golden record by the name of its file."""
    layout = LAYOUT.seal(RUN)
    found: dict[str, Golden] = {"layout": Golden(LAYOUT, decode_layout, Record(layout, {}))}
    for name, manifest in manifests(layout.id).items():
        found[name] = Golden(manifest, decode_manifest, Record(manifest.seal(INFO), {}))
    manifest_id = found["manifest"].record.sealed.id
    claim = Claim(run=RUN, term=TERM, index=0)
    floor = Floor(
        run=RUN, term=CHILD, index=7, tier="zarr", terms=(CHILD, TERM), step=64, kept=(10, 20)
    )
    excused = Claim(run=RUN, term=CHILD, index=8, excuse="ended")
    tag = Tag(run=RUN, term=CHILD, index=9, name="before-lr-drop", step=20)
    found["claim"] = Golden(claim, decode_log, Record(claim.seal(INFO), {}))
    found["claim-excused"] = Golden(excused, decode_log, Record(excused.seal(INFO), {}))
    found["floor"] = Golden(floor, decode_log, Record(floor.seal(INFO), {}))
    found["tag"] = Golden(tag, decode_log, Record(tag.seal(INFO), {}))

    def state(
        kind: str, step: int, body: DeltaBody | BaseBody, arrays: dict[str, tuple[str, bytes]]
    ) -> Record:
        head = Head(
            kind=kind, run=RUN, term=TERM, part="p000000", step=step, parent=TIP,
            manifest=manifest_id, layout=layout.id, body=body.to_json(),
        )  # fmt: skip
        return seal(head, arrays, SIZES)

    found["delta"] = Golden(DELTA, decode_delta, state("delta", 13, DELTA, DELTA_ARRAYS))
    skip = DeltaBody(boundary=(AFTER, (SGD,)), arithmetic=("a1" * 16, "b2" * 16))
    found["delta-empty"] = Golden(skip, decode_delta, state("delta", 14, skip, {}))
    found["base"] = Golden(BASE, decode_base, state("base", 12, BASE, BASE_ARRAYS))
    found["base-replayed"] = Golden(
        REPLAYED, decode_base, state("base", 16, REPLAYED, REPLAYED_ARRAYS)
    )
    found["base-bounded"] = Golden(
        BOUNDED, decode_base, state("base", 16, BOUNDED, REPLAYED_ARRAYS)
    )
    head = Head(
        kind="extra", run=RUN, term=TERM, part="r000000", step=12, manifest=manifest_id,
        body=EXTRA.to_json(), other={"note": "a field of a newer writer"},
    )  # fmt: skip
    found["extra"] = Golden(EXTRA, decode_extra, seal(head, EXTRA_ARRAYS, SIZES))
    return found


def main() -> None:
    """Write the golden records."""
    FOLDER.mkdir(exist_ok=True)
    for name, item in golden().items():
        path = FOLDER / f"{name}.safetensors"
        path.write_bytes(b"".join(item.record.buffers()))
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()
