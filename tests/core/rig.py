"""A rig that trains real torch optimizers and writes every step as a delta, in all encodings."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from adacheck_store import fold as fold_module
from adacheck_store.ahead import NOW, Now
from adacheck_store.arrays import byte_view, dtype_name, scalar_of
from adacheck_store.catalog import RecordRef, make_ref
from adacheck_store.fetch import ArrayReader, Fetcher
from adacheck_store.fingerprint import block_sum, blocks_at
from adacheck_store.fold import Fold
from adacheck_store.format import ids
from adacheck_store.format.bodies import (
    BaseBody,
    DeltaBody,
    Fingerprint,
    Grad,
    SectionState,
    SetPiece,
    Update,
    decode_delta,
    grad_array,
    set_array,
)
from adacheck_store.format.check import check_base, check_delta
from adacheck_store.format.head import ArrayInfo, Head, SealedHead
from adacheck_store.format.ids import block_digests, iter_blocks
from adacheck_store.format.keys import base_key, delta_key, layout_key, manifest_key, parse_key
from adacheck_store.format.layout import Layout, Section, Slice, align, whole_box
from adacheck_store.format.manifest import Manifest, PartEntry
from adacheck_store.format.record import Record
from adacheck_store.optimizers import arithmetic_digest, group_values, spec_of
from adacheck_store.reading import StateSink
from adacheck_store.tiers.base import RecordSource
from adacheck_store.tiers.memory import MemoryTier

RUN, TERM, PART = "rig", "t000001-" + "a" * 16, "p000000"
ENCODINGS = ("raw", "bf16", "fp16", "scaled")


def small_blocks(monkeypatch, nbytes: int = 1024) -> None:
    """Blocks and windows of so many bytes, everywhere."""
    for name, module in list(sys.modules.items()):
        if name.startswith("adacheck_store") and hasattr(module, "BLOCK_BYTES"):
            monkeypatch.setattr(module, "BLOCK_BYTES", nbytes)
    monkeypatch.setattr(fold_module, "WINDOW_BYTES", nbytes)
    assert nbytes == ids.BLOCK_BYTES


@dataclass
class Member:
    """A parameter or buffer and where it lies."""

    tensor: torch.Tensor
    section: str
    index: int
    piece: Slice


@dataclass
class Rig:
    """Trains, and writes its chain into a memory tier.

    ``make(params by group)`` gives the optimizer; parameters take the groups in turn.
    """

    shapes: list[tuple[int, ...]]
    make: Any
    groups: int = 1
    seed: int = 0
    dtype: torch.dtype = torch.float32
    absent: float = 0.1
    late: int = 0
    encodings: tuple[str, ...] = ENCODINGS
    sets: float = 0.05
    base_every: int = 16
    step: int = 0
    tier: MemoryTier = field(default_factory=MemoryTier)
    refs: list[RecordRef] = field(default_factory=list)
    parent: str = ""

    def __post_init__(self) -> None:
        self.rng = torch.Generator().manual_seed(self.seed)
        params = [
            torch.nn.Parameter(self.normal(shape).to(self.dtype), requires_grad=False)
            for shape in self.shapes
        ]
        self.optimizer = self.make([params[g :: self.groups] for g in range(self.groups)])
        self.spec = spec_of(self.optimizer)
        self.members, self.layout = self._lay_out(params)
        layout = self.layout.seal(RUN)
        manifest = Manifest(run=RUN, term=TERM, step=0, ranks=(),
                            parts=(PartEntry(name=PART, layout=layout.id),)).seal()  # fmt: skip
        self.layout_id, self.manifest_id, self.parent = layout.id, manifest.id, manifest.id
        self.tier.put([
            RecordSource(str(layout_key(RUN, layout.id)), Record(layout, {})),
            RecordSource(str(manifest_key(RUN, TERM, 0)), Record(manifest, {})),
        ])  # fmt: skip

    def normal(self, shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
        """Random numbers over a few powers of two."""
        spread = torch.randint(-6, 3, shape, generator=self.rng).float()
        return torch.ldexp(torch.randn(shape, generator=self.rng) * scale, spread)

    def chance(self, share: float) -> bool:
        """True so often."""
        return torch.rand((), generator=self.rng).item() < share

    def _lay_out(self, params: list[torch.Tensor]) -> tuple[list[Member], Layout]:
        """Sections by the roles of the parameters' groups, and one of a buffer."""
        group_of = {
            id(p): g for g, group in enumerate(self.optimizer.param_groups) for p in group["params"]
        }
        by_roles: dict[tuple[str, ...], list[torch.Tensor]] = {}
        for p in params:
            roles = self.spec.roles(self.optimizer.param_groups[group_of[id(p)]])
            by_roles.setdefault(roles, []).append(p)
        sections, members, kind = [], [], dtype_name(self.dtype)
        for number, (roles, tensors) in enumerate(by_roles.items()):
            pieces, at = [], 0
            for index, p in enumerate(tensors):
                shape = tuple(p.shape)
                pieces.append(
                    Slice(name=f"w{number}.{index}", shape=shape, boxes=(whole_box(shape),),
                          offset=at, group=group_of[id(p)])
                )  # fmt: skip
                at = align(at + p.numel())
                members.append(Member(p, f"s{number}", index, pieces[-1]))
            sections.append(
                Section(name=f"s{number}", optimizer=0, slices=tuple(pieces),
                        roles=(("param", kind), *((role, kind) for role in roles)))
            )  # fmt: skip
        buffer = torch.zeros(77)
        piece = Slice(name="buffer", shape=(77,), boxes=(whole_box((77,)),), offset=0)
        sections.append(Section(name="b", optimizer=-1, roles=(("buffer", "F32"),),
                                slices=(piece,)))  # fmt: skip
        members.append(Member(buffer, "b", 0, piece))
        return members, Layout(optimizers=(self.spec.name,), sections=tuple(sections))

    # What the trainer holds ------------------------------------------------------------------

    def role(self, member: Member, role: str) -> torch.Tensor | None:
        """A tensor of a member's state."""
        if role in ("param", "buffer"):
            return member.tensor
        return self.optimizer.state.get(member.tensor, {}).get(role)

    def arrays(self) -> dict[str, torch.Tensor]:
        """The arrays of a base now."""
        out = {}
        for section in self.layout.sections:
            mine = [m for m in self.members if m.section == section.name]
            for role, kind in section.roles:
                flat = torch.zeros(section.elements, dtype=getattr(torch, _TORCH[kind]))
                seen = role == section.main_role
                for member in mine:
                    value = self.role(member, role)
                    if value is not None:
                        seen = True
                        at = member.piece.offset
                        flat[at : at + value.numel()] = value.detach().reshape(-1)
                if seen:
                    out[f"{section.name}/{role}"] = flat
        return out

    def states(self) -> dict[str, SectionState]:
        """Presence and counters, as a fold must give them."""
        out = {}
        for section in self.layout.sections:
            found = [
                self.optimizer.state.get(m.tensor, {})
                for m in self.members if m.section == section.name
            ]  # fmt: skip
            roles = section.state_roles
            present = tuple(any(s.get(r) is not None for r in roles) for s in found)
            scalars = {}
            if any("step" in s for s in found):
                scalars["step"] = tuple(scalar_of(s["step"]) if "step" in s else None
                                        for s in found)  # fmt: skip
            out[section.name] = SectionState(present=present, scalars=scalars)
        return out

    def boundary(self):
        """Hyper-parameters now."""
        return (tuple(group_values(g) for g in self.optimizer.param_groups),)

    # Records ---------------------------------------------------------------------------------

    def _put(self, kind: str, body, arrays: dict[str, torch.Tensor]) -> RecordRef:
        infos = tuple(
            ArrayInfo(name=n, dtype=dtype_name(t.dtype), elements=t.numel(),
                      digests=block_digests(byte_view(t)))
            for n, t in arrays.items()
        )  # fmt: skip
        head = Head(kind=kind, run=RUN, term=TERM, part=PART, step=self.step, parent=self.parent,
                    manifest=self.manifest_id, layout=self.layout_id, arrays=infos,
                    body=body.to_json())  # fmt: skip
        sealed = SealedHead.seal(head)
        if kind == "delta":
            check_delta(sealed.head, decode_delta(sealed.head), self.layout)
        else:
            check_base(sealed.head, body, self.layout)
        make_key = delta_key if kind == "delta" else base_key
        key = str(make_key(RUN, TERM, PART, self.step))
        views = {n: byte_view(t) for n, t in arrays.items()}
        self.tier.put([RecordSource(key, Record(sealed, views))])
        ref = make_ref(parse_key(key), sealed, (self.tier.traits.name,))
        self.refs.append(ref)
        return ref

    def put_base(self) -> RecordRef:
        """A captured base of this step."""
        body = BaseBody(origin="captured", exactness="exact", states=self.states(),
                        boundary=self.boundary())  # fmt: skip
        return self._put("base", body, self.arrays())

    def _gradient(self, member: Member) -> tuple[str, torch.Tensor, int | None]:
        """(encoding, kept tensor, scale bits); sets the gradient it stands for."""
        which = self.encodings[int(torch.randint(len(self.encodings), (), generator=self.rng))]
        value = self.normal(tuple(member.tensor.shape), 1e-2)
        scale = None
        if which == "raw":
            kept = grad = value.to(self.dtype)
        else:
            kept = value.half() if which == "fp16" else value.bfloat16()
            grad = kept.to(self.dtype)
            if which == "scaled":
                factor = torch.rand((), generator=self.rng) + 1e-3
                scale = int(factor.view(torch.int32))
                grad = (kept.float() * factor).to(self.dtype)
        member.tensor.grad = grad.clone()
        return ("bf16" if which == "scaled" else which), kept, scale

    def train(self) -> RecordRef:
        """One boundary: an optimizer step, now and then an edit from outside, and its delta."""
        self.step += 1
        kept: dict[tuple[str, int], tuple[str, torch.Tensor, int | None]] = {}
        trained = [m for m in self.members if m.piece.group >= 0]
        for place, member in enumerate(trained):
            member.tensor.grad = None
            if self.chance(self.absent) or (place % 3 == 1 and self.step <= self.late):
                continue
            kept[member.section, member.index] = self._gradient(member)
        used = tuple(group_values(g) for g in self.optimizer.param_groups)
        self.optimizer.step()
        sets = self._edit()
        body, arrays = self._body(kept, used, sets)
        ref = self._put("delta", body, arrays)
        self.parent = ref.id
        return ref

    def _edit(self) -> list[tuple[Member, str]]:
        edited = []
        for member in self.members:
            if self.chance(self.sets):
                member.tensor.copy_(self.normal(tuple(member.tensor.shape)))
                edited.append((member, "buffer" if member.section == "b" else "param"))
        return edited

    def _body(self, kept, used, sets) -> tuple[DeltaBody, dict[str, torch.Tensor]]:
        grads, absent, at = [], [], {}
        arrays: dict[str, torch.Tensor] = {}
        pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for member in (m for m in self.members if m.piece.group >= 0):
            place = (member.section, member.index)
            if place not in kept:
                absent.append(place)
                continue
            encoding, value, scale = kept[place]
            name = grad_array(0, member.section, encoding)
            offset = at.get(name, 0)
            grads.append(Grad(section=member.section, slice=member.index, encoding=encoding,
                              offset=offset, scale=scale))  # fmt: skip
            pieces.setdefault(name, []).append((offset, value))
            at[name] = align(offset + value.numel())
        items = []
        for member, role in sets:
            name = set_array(member.section, role)
            offset = at.get(name, 0)
            items.append(SetPiece(section=member.section, role=role, slice=member.index,
                                  offset=offset))  # fmt: skip
            pieces.setdefault(name, []).append((offset, member.tensor.detach().clone()))
            at[name] = align(offset + member.tensor.numel())
        for name, found in pieces.items():
            flat = torch.zeros(at[name], dtype=found[0][1].dtype)
            for offset, value in found:
                flat[offset : offset + value.numel()] = value.reshape(-1)
            arrays[name] = flat
        updates = (Update(optimizer=0, groups=used, grads=tuple(grads), absent=tuple(absent)),)
        digest = arithmetic_digest(self.spec.name, used, [dtype_name(self.dtype)])
        body = DeltaBody(updates=updates, sets=tuple(items), boundary=self.boundary(),
                         arithmetic=(digest,), fingerprints=self.fingerprints())  # fmt: skip
        return body, arrays

    def fingerprints(self) -> tuple[Fingerprint, ...]:
        """As a trainer makes them."""
        out = []
        for name, tensor in self.arrays().items():
            blocks = list(iter_blocks(byte_view(tensor)))
            which = blocks_at(self.step, len(blocks), self.base_every)
            if len(which):
                sums = tuple(block_sum(blocks[i]) for i in which)
                out.append(Fingerprint(array=name, first=which.start, stride=which.step, sums=sums))
        return tuple(out)

    # Folding ---------------------------------------------------------------------------------

    def fold(
        self, base: RecordRef, deltas: list[RecordRef], reader: Now = NOW
    ) -> tuple[Fold, StateSink]:
        """Fold deltas into a base, into memory."""
        fetcher = Fetcher([self.tier])
        fold = Fold(self.layout, ArrayReader(fetcher, base),
                    [ArrayReader(fetcher, ref) for ref in deltas])  # fmt: skip
        sink = StateSink()
        fold.run(sink, reader)
        return fold, sink

    def assert_same(self, fold: Fold, sink: StateSink) -> None:
        """The fold gave exactly what the trainer has now."""
        mine = self.arrays()
        assert set(sink.arrays) == set(mine)
        for name, tensor in mine.items():
            theirs = sink.arrays[name]
            assert theirs.dtype == tensor.dtype
            same = bytes(byte_view(theirs)) == bytes(byte_view(tensor))
            if not same:
                where = (byte_bits(theirs) != byte_bits(tensor)).nonzero().reshape(-1)
                raise AssertionError(f"{name} differs at {where[:8].tolist()} ({len(where)})")
        assert fold.report.states == self.states()
        assert fold.report.boundary == self.boundary()


def byte_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as integers."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(sizes[tensor.element_size()])


_TORCH = {"F32": "float32", "F64": "float64", "BF16": "bfloat16", "F16": "float16"}
