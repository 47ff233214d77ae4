"""A trainer small enough to see through: real torch optimizers, records built by hand."""

from __future__ import annotations

import torch

from adacheck_store.arrays import byte_view, dtype_name, scalar_of, torch_dtype
from adacheck_store.boundary import Link
from adacheck_store.fingerprint import block_sum, blocks_at
from adacheck_store.format.bodies import (
    BaseBody,
    DeltaBody,
    ExtraBody,
    Fingerprint,
    Grad,
    SectionState,
    Update,
    grad_array,
)
from adacheck_store.format.head import ArrayInfo, Head, SealedHead
from adacheck_store.format.ids import block_digests, iter_blocks
from adacheck_store.format.layout import Layout, Section, Slice, align, whole_box
from adacheck_store.format.record import Record
from adacheck_store.optimizers import arithmetic_digest, group_values, spec_of
from adacheck_store.state import PartState


class Toy:
    """Parameters, an optimizer, and a seeded stream of gradients (some absent)."""

    def __init__(self, shapes, make, *, seed=0, absent=0.0, base_every=8, dtype=torch.float32):
        self.generator = torch.Generator().manual_seed(seed)
        self.params = [
            torch.nn.Parameter(torch.randn(s, generator=self.generator).to(dtype)) for s in shapes
        ]
        self.optimizer = make(self.params)
        self.spec = spec_of(self.optimizer)
        self.absent = absent
        self.base_every = base_every
        self.step = 0
        slices, offset = [], 0
        for i, p in enumerate(self.params):
            shape = tuple(p.shape)
            slices.append(
                Slice(name=f"w{i}", shape=shape, boxes=(whole_box(shape),), offset=offset, group=0)
            )
            offset = align(offset + p.numel())
        self.elements = offset
        name = dtype_name(dtype)
        roles = [("param", name)]
        roles += [(r, name) for r in self.spec.roles(self.optimizer.param_groups[0])]
        section = Section(name="s0", optimizer=0, roles=tuple(roles), slices=tuple(slices))
        self.section = section
        self.layout = Layout(optimizers=(self.spec.name,), sections=(section,))
        self.used = None

    def train(self, grads=None):
        """One optimizer step with bf16-valued gradients."""
        for p in self.params:
            p.grad = None
            if torch.rand((), generator=self.generator).item() >= self.absent:
                g = torch.randn(p.shape, generator=self.generator) * 1e-2
                p.grad = g.bfloat16().to(p.dtype)
        self.optimizer.step()
        self.used = tuple(group_values(g) for g in self.optimizer.param_groups)
        self.step += 1

    def arrays(self) -> dict[str, torch.Tensor]:
        """The state as a base's arrays."""
        out = {}
        for role, kind in self.section.roles:
            flat = torch.zeros(self.elements, dtype=torch_dtype(kind))
            seen = role == "param"
            for p, s in zip(self.params, self.section.slices, strict=True):
                t = p if role == "param" else self.optimizer.state[p].get(role)
                if t is not None:
                    seen = True
                    flat[s.offset : s.offset + s.elements] = t.detach().reshape(-1)
            if seen:
                out[f"s0/{role}"] = flat
        return out

    def states(self) -> dict[str, SectionState]:
        """Presence and counters."""
        found = [self.optimizer.state[p] for p in self.params]
        present = tuple(
            any(r in st and st[r] is not None for r in self.section.state_roles) for st in found
        )
        scalars = {}
        if any("step" in st for st in found):
            scalars["step"] = tuple(scalar_of(st["step"]) if "step" in st else None for st in found)
        return {"s0": SectionState(present=present, scalars=scalars)}

    def boundary_groups(self):
        """Hyper-parameters now."""
        return (tuple(group_values(g) for g in self.optimizer.param_groups),)

    def _seal(self, kind, link: Link, body, arrays, step, parent):
        infos = tuple(
            ArrayInfo(name=n, dtype=dtype_name(t.dtype), elements=t.numel(),
                      digests=block_digests(byte_view(t)))
            for n, t in sorted(arrays.items())
        )  # fmt: skip
        part = link.rank if kind == "extra" else link.part
        head = Head(
            kind=kind, run=link.run, term=link.term, part=part, step=step, parent=parent,
            manifest=link.manifest, layout="" if kind == "extra" else link.layout, arrays=infos,
            body=body.to_json(),
        )  # fmt: skip
        return Record(SealedHead.seal(head), {n: byte_view(t) for n, t in arrays.items()})

    def base(self, link: Link, gap=None) -> Record:
        """A captured base."""
        body = BaseBody(
            origin="captured", exactness="exact", states=self.states(),
            boundary=self.boundary_groups(), gap=gap,
        )  # fmt: skip
        return self._seal("base", link, body, self.arrays(), self.step, link.parent)

    def delta(self, link: Link, twist: int = 0) -> Record:
        """The delta of the last step; ``twist`` falsifies one fingerprint."""
        grads, absent, at = [], [], 0
        for i, p in enumerate(self.params):
            if p.grad is None:
                absent.append(("s0", i))
            else:
                grads.append(Grad(section="s0", slice=i, encoding="bf16", offset=at))
                at = align(at + p.numel())
        flat = torch.zeros(at, dtype=torch.bfloat16)
        for g in grads:
            p = self.params[g.slice]
            flat[g.offset : g.offset + p.numel()] = p.grad.reshape(-1).bfloat16()
        name = dtype_name(self.params[0].dtype)
        digest = arithmetic_digest(self.spec.name, self.used, [name])
        body = DeltaBody(
            updates=(Update(optimizer=0, groups=self.used, grads=tuple(grads),
                            absent=tuple(absent)),),
            boundary=self.boundary_groups(), arithmetic=(digest,),
            fingerprints=self.fingerprints(twist),
        )  # fmt: skip
        arrays = {grad_array(0, "s0", "bf16"): flat} if grads else {}
        return self._seal("delta", link, body, arrays, self.step, link.parent)

    def fingerprints(self, twist: int = 0):
        """As a trainer makes them."""
        found = []
        for name, t in sorted(self.arrays().items()):
            blocks = list(iter_blocks(byte_view(t)))
            which = blocks_at(self.step, len(blocks), self.base_every)
            if len(which):
                sums = tuple(block_sum(blocks[i]) + twist for i in which)
                found.append(
                    Fingerprint(array=name, first=which.start, stride=which.step, sums=sums)
                )
        return tuple(found)

    def extra(self, link: Link) -> Record:
        """An extra with a counter in it."""
        return self._seal("extra", link, ExtraBody(tree={"n": self.step}), {}, self.step, "")

    def boundary(self, gap=None, twist: int = 0, *, based: bool = False):
        """A closed boundary whose content is frozen now; ``based``: with a base besides."""
        toy = self

        class Frozen:
            step = toy.step
            released = False

            def __init__(self):
                self.saved = {}
                fake = Link(run="x", term="t000001-" + "0" * 16, part="p000000", rank="r000000",
                            parent="0" * 64, manifest="0" * 64, layout="0" * 64)  # fmt: skip
                make = {"base": lambda: toy.base(fake, gap)} if gap or based else {}
                if not gap:
                    make["delta"] = lambda: toy.delta(fake, twist)
                for kind, call in {**make, "extra": lambda: toy.extra(fake)}.items():
                    r = call()
                    copy = {n: memoryview(bytes(v)) for n, v in r.arrays.items()}
                    self.saved[kind] = (r.sealed.head, copy)

            def _again(self, kind, link, parent):
                import dataclasses

                if kind not in self.saved:
                    return None
                head, arrays = self.saved[kind]
                part = link.rank if kind == "extra" else link.part
                head = dataclasses.replace(
                    head, run=link.run, term=link.term, part=part, parent=parent,
                    manifest=link.manifest, layout="" if kind == "extra" else link.layout,
                )  # fmt: skip
                return Record(SealedHead.seal(head), arrays)

            def delta(self, link):
                return self._again("delta", link, link.parent)

            def base(self, link):
                return self._again("base", link, link.parent)

            def extra(self, link):
                return self._again("extra", link, "")

            def release(self):
                self.released = True

        return Frozen()

    def same_as(self, state: PartState) -> bool:
        """Bit equality with a restored state."""
        mine = self.arrays()
        if set(mine) != set(state.arrays):
            return False
        equal = all(bytes(byte_view(mine[n])) == bytes(byte_view(state.arrays[n])) for n in mine)
        return equal and dict(state.states) == self.states()
