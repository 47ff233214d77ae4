"""Folding gives the trainer's bits: every optimizer, implementation and flag; and wrong folds."""

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch

from adacheck_store import fold as fold_module
from adacheck_store.ahead import NOW, Ahead, Now, Streamed
from adacheck_store.arrays import byte_view
from adacheck_store.compact import ReplayedBase
from adacheck_store.engines import GROUPS_MAX, StepEngine
from adacheck_store.fetch import ArrayReader, Fetcher
from adacheck_store.fingerprint import blocks_at
from adacheck_store.format.errors import NotProvableError, ReplayMismatchError
from adacheck_store.format.ids import block_count
from adacheck_store.optimizers import group_values
from adacheck_store.recovery import PartPlan
from adacheck_store.restore import restore_state
from adacheck_store.tools.whole import PieceSink, Tensors, add_fold
from adacheck_store.windows import Spare
from tests.core.rig import PART, RUN, TERM, Rig, small_blocks
from tests.core.toy import Toy

ADAM, ADAMW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
SHAPES = [(33, 7), (), (0,), (700,), (5,), (64,), (3, 41), (130,), (2, 0, 3), (9, 9)]
IMPLEMENTATIONS: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
ADAM_FLAGS: list[dict[str, Any]] = [
    {}, {"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.0},
    {"amsgrad": True, "maximize": True, "eps": 1e-6}, {"tensor_lr": torch.float32},
    {"tensor_lr": torch.float64}, {"differentiable": True},
]  # fmt: skip
SGD_FLAGS: list[dict[str, Any]] = [
    {"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.01}, {"momentum": 0.9, "maximize": True},
    {"momentum": 0.0, "weight_decay": 0.1, "maximize": True}, {"momentum": 0.9,
     "tensor_lr": torch.float32},
]  # fmt: skip


def cases() -> list[tuple[type, dict[str, Any]]]:
    """Every class with every implementation and flag that torch takes together."""
    found = []
    for cls, flags in ((ADAMW, ADAM_FLAGS), (ADAM, ADAM_FLAGS), (SGD, SGD_FLAGS)):
        for implementation, more in itertools.product(IMPLEMENTATIONS, flags):
            both = {**implementation, **more}
            if both.get("foreach") and cls is not SGD and "tensor_lr" in both:
                continue  # torch: not with foreach
            if both.get("differentiable") and (both.get("foreach") or both.get("fused")):
                continue  # torch: plain only
            found.append((cls, both))
    return found


NAMES = ["-".join([c.__name__, *(f"{k}={v}" for k, v in f.items())]) for c, f in cases()]


def make(cls: type, flags: dict[str, Any], *other: dict[str, Any]) -> Any:
    """A maker of the optimizer, ``other`` being what further groups have."""
    flags = dict(flags)
    kind = flags.pop("tensor_lr", None)

    def build(groups: list[list[torch.Tensor]]) -> torch.optim.Optimizer:
        lr: Any = 1e-2 if kind is None else torch.tensor(1e-2, dtype=kind)
        rows = [{"params": group, **more} for group, more in zip(groups, ({}, *other), strict=True)]
        optimizer: torch.optim.Optimizer = cls(rows, lr=lr, **flags)
        return optimizer

    return build


def rig_for(cls: type, flags: dict[str, Any], *other: dict[str, Any], **more: Any) -> Rig:
    """A rig with absent and late gradients, as far as torch allows."""
    if cls is SGD and flags.get("fused") and flags.get("momentum"):
        more = {"absent": 0.0, **more}  # torch: momentum for all of a group, or for none
    else:
        more = {"late": 11, **more}
    return Rig(SHAPES, make(cls, flags, *other), groups=1 + len(other), **more)


def schedule(rig: Rig) -> None:
    """Change what users change: learning rate each step, the rest now and then."""
    for number, group in enumerate(rig.optimizer.param_groups):
        factor = 0.995 if rig.step % 3 else 1.01
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].mul_(factor)
        else:
            group["lr"] *= factor
        if rig.step == 60 + number:
            group["weight_decay"] = 0.03
            if "betas" in group:
                group["betas"] = (0.85, 0.98)
        if rig.step == 120 and "eps" in group:
            group["eps"] = 1e-5
        if rig.step == 140 and group.get("momentum"):
            group["momentum"] = 0.7


def check(rig: Rig, steps: int) -> None:
    """Train and fold in one go."""
    base = rig.put_base()
    deltas = []
    for _ in range(steps):
        schedule(rig)
        deltas.append(rig.train())
    fold, sink = rig.fold(base, deltas)
    assert fold.report.exactness == "exact"
    assert fold.report.checked > 0
    assert fold.report.differed == 0
    last_full = rig.step // rig.base_every * rig.base_every
    assert fold.report.verified_through >= last_full
    rig.assert_same(fold, sink)


@pytest.mark.parametrize(("cls", "flags"), cases(), ids=NAMES)
def test_bit_exact(cls: type, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    check(rig_for(cls, flags, seed=len(flags)), 25)


TWO_HUNDRED: list[tuple[type, dict[str, Any], dict[str, Any]]] = [
    (ADAMW, {"fused": True}, {"amsgrad": True}),
    (ADAMW, {"foreach": True}, {"maximize": True, "weight_decay": 0.0}),
    (ADAM, {"fused": True, "amsgrad": True}, {"betas": (0.5, 0.9), "lr": 1e-3}),
    (ADAM, {}, {"eps": 1e-4, "amsgrad": True}),
    (SGD, {"momentum": 0.9, "nesterov": True}, {"nesterov": False, "momentum": 0.0}),
    (SGD, {"momentum": 0.9, "fused": True}, {"weight_decay": 0.02, "momentum": 0.0}),
]


@pytest.mark.parametrize(("cls", "flags", "second"), TWO_HUNDRED)
def test_bit_exact_for_two_hundred_steps_of_two_groups(
    cls: type, flags: dict[str, Any], second: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    check(rig_for(cls, flags, second), 200)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("cls", "flags"),
    [(ADAMW, {}), (ADAMW, {"foreach": True}), (ADAMW, {"fused": True}), (SGD, {"momentum": 0.9})],
)
def test_bit_exact_in_other_dtypes(
    cls: type, flags: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    check(rig_for(cls, flags, dtype=dtype), 30)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("cls", "flags"), cases(), ids=NAMES)
def test_bit_exact_at_length(
    cls: type, flags: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch, 512 << seed)
    rng = random.Random(seed)
    shapes = [tuple(rng.randint(0, 40) for _ in range(rng.randint(0, 3))) for _ in range(12)]
    rig = rig_for(cls, flags, seed=seed)
    check(Rig(shapes, rig.make, absent=rig.absent, late=rig.late, seed=seed), 200)


def test_windows_of_full_size() -> None:
    """Blocks of a MiB: a slice over three windows, and several slices in one."""
    shapes = [(300_001,), (17,), (400_003,), (64,), (3,)]
    check(Rig(shapes, make(ADAMW, {"fused": True}), sets=0.1), 17)


@pytest.mark.parametrize("encoding", ["raw", "bf16", "fp16", "scaled"])
def test_each_encoding_alone(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alike neighbours are decoded in one run; nothing leaks over their padding."""
    small_blocks(monkeypatch)
    for absent in (0.0, 0.4):
        rig = Rig(SHAPES, make(ADAMW, {"fused": True}), encodings=(encoding,), absent=absent)
        check(rig, 20)


@pytest.mark.parametrize("encoding", ["bf16", "scaled"])
def test_what_is_read_ahead_is_not_written_over(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of gradients that is free to be used again is spoilt before each update."""
    small_blocks(monkeypatch)
    rig = Rig(SHAPES, make(ADAMW, {"fused": True}), encodings=(encoding,), absent=0.3)
    base = rig.put_base()
    deltas = [rig.train() for _ in range(5)]
    spares: list[Spare] = []
    plain, used = StepEngine.apply, []

    class Seen(Spare):
        def __init__(self) -> None:
            super().__init__()
            spares.append(self)

    def spoil(self: StepEngine, pieces: Any, groups: Any) -> None:
        free = [memory.fill_(0xFF) for spare in spares for lot in spare._free.values()
                for memory in lot]  # fmt: skip
        used.append(len(free))
        plain(self, pieces, groups)

    monkeypatch.setattr(fold_module, "Spare", Seen)
    monkeypatch.setattr(StepEngine, "apply", spoil)
    with Ahead(3) as reader:
        fold, sink = rig.fold(base, deltas, reader)
    rig.assert_same(fold, sink)
    assert max(used) > 0


def test_groups_are_converted_once_for_all_windows() -> None:
    """Deltas of a leg come by turns; of a chain of any length few are kept."""
    toy = Toy([(3,)], lambda p: ADAMW(p, lr=1e-3))
    engine = StepEngine(toy.spec)
    groups = [tuple(group_values(g) for g in toy.optimizer.param_groups) for _ in range(100)]
    first = [engine._keywords(each) for each in groups[:8]]
    again = [engine._keywords(each) for each in groups[:8]]
    assert all(one is other for one, other in zip(first, again, strict=True))
    assert len({id(each) for each in first}) == 8
    for each in groups:
        engine._keywords(each)
        assert len(engine._groups) <= GROUPS_MAX


def test_spare_memory_is_of_few_sizes() -> None:
    """What is free is given again, whatever it was used as; of sizes long not asked for it goes."""
    spare = Spare()
    one, other = spare.take(100), spare.take(100)
    places = {one.data_ptr(), other.data_ptr()}
    spare.give(one.view(torch.float32))
    assert spare.take(100).data_ptr() == one.data_ptr()
    spare.give(one)
    spare.give(other)
    assert spare.take(60).numel() == 60
    assert {spare.take(100).data_ptr(), spare.take(100).data_ptr()} == places
    spare.give(one)
    spare.give(torch.empty(70, dtype=torch.uint8))
    assert spare.take(100).data_ptr() == one.data_ptr()
    spare.give(one)
    for nbytes in range(1, 10):
        spare.take(nbytes)
    assert spare.take(100).data_ptr() not in places


def replay(rig: Rig, base: Any, deltas: list[Any], reader: Now = NOW) -> Any:
    """Put the base that a fold gives, as compaction does; returns its reference."""
    from adacheck_store.catalog import make_ref
    from adacheck_store.format.keys import parse_key

    plan = PartPlan(part=PART, layout=rig.layout_id, base=base, deltas=tuple(deltas),
                    link=deltas[-1].id)  # fmt: skip
    source = ReplayedBase(Fetcher([rig.tier]), rig.layout, plan, run=RUN, term=TERM,
                          step=deltas[-1].step, manifest=rig.manifest_id,
                          reader=reader)  # fmt: skip
    rig.tier.put([source])
    sealed = rig.tier.head(source.key)
    return make_ref(parse_key(source.key), sealed, (rig.tier.traits.name,))


def written(rig: Rig, base: Any, deltas: list[Any], reader: Now = NOW) -> dict[str, bytes]:
    """What the commands that stream a fold write of each tensor."""
    fetcher = Fetcher([rig.tier])
    readers = [ArrayReader(fetcher, ref) for ref in (base, *deltas)]
    fold = fold_module.Fold(rig.layout, readers[0], readers[1:])
    tensors, found = Tensors(lambda part, piece: True), dict[str, bytearray]()
    add_fold(tensors, PART, fold)

    def write(label: str, at: int, elements: torch.Tensor) -> None:
        whole = tensors.all[label]
        memory = found.setdefault(label, bytearray(whole.nbytes))
        at *= elements.element_size()
        memory[at : at + elements.nbytes] = byte_view(elements)

    for _ in fold.steps(PieceSink(PART, tensors, write), reader):
        pass
    return {label: bytes(memory) for label, memory in found.items()}


def test_what_streams_ahead_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A base, and tensors, though memory is used again as soon as a window has gone."""
    small_blocks(monkeypatch)
    rig = rig_for(ADAMW, {"fused": True})
    base, give = rig.put_base(), Spare.give
    deltas = [rig.train() for _ in range(9)]
    plain, tensors = replay(rig, base, deltas), written(rig, base, deltas)

    def spoil(self: Spare, memory: torch.Tensor) -> None:
        memory.view(torch.uint8).fill_(0xFF)
        give(self, memory)

    monkeypatch.setattr(Spare, "give", spoil)
    with Streamed(3) as reader:
        assert replay(rig, base, deltas, reader).id == plain.id
        assert written(rig, base, deltas, reader) == tensors


@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True, "amsgrad": True}])
def test_splits_give_the_same_bases(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In one go, or over replayed bases at random steps: equal blocks, states and link."""
    small_blocks(monkeypatch)
    rig = rig_for(ADAMW, flags)
    start = rig.put_base()
    deltas = [rig.train() for _ in range(60)]
    captured = rig.put_base()
    whole = replay(rig, start, deltas)
    truth = rig.tier.head(captured.key).head
    for seed in range(4):
        rng = random.Random(seed)
        cuts = sorted(rng.sample(range(1, 60), 5))
        base = start
        for first, last in itertools.pairwise([0, *cuts, 60]):
            base = replay(rig, base, deltas[first:last])
        for ref in (whole, base):
            head = rig.tier.head(ref.key).head
            assert head.arrays == truth.arrays
            assert head.parent == truth.parent
            assert head.body["states"] == truth.body["states"]
            assert head.body["boundary"] == truth.body["boundary"]
            assert head.body["origin"] == "replayed"
        assert base.id == whole.id


def seen(rig: Rig, step: int, block: int, count: int) -> bool:
    """Whether a delta fingerprints the block."""
    return block in blocks_at(step, count, rig.base_every)


@pytest.mark.parametrize(("at", "element"), [(9, 0), (9, 5000), (20, 9999), (33, 777)])
def test_one_ulp_is_caught_and_the_chain_ends_at_the_last_match(
    at: int, element: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    rig = Rig([(10_000,)], make(ADAMW, {"fused": True}), absent=0.0, sets=0.0, base_every=16)
    base = rig.put_base()
    deltas = [rig.train() for _ in range(40)]
    block, count = element * 4 // 1024, block_count(10_048 * 4)
    width = 256
    window = element // width
    # The window's own updates come one after another: the planted call is number `at` of them.
    right = StepEngine.apply

    def wrong(self: StepEngine, pieces: Any, groups: Any) -> None:
        right(self, pieces, groups)
        if pieces and pieces[0].start == window * width:
            counter["n"] += 1
            if counter["n"] == at:
                pieces[0].param.view(torch.int32)[element % width] += 1

    counter = {"n": 0}
    monkeypatch.setattr(StepEngine, "apply", wrong)
    caught_at = next(s for s in range(at, 41) if seen(rig, s, block, count))
    matched = max([0, *(s for s in range(1, at) if seen(rig, s, block, count))])
    with pytest.raises(ReplayMismatchError) as caught:
        rig.fold(base, deltas)
    assert caught.value.place["step"] == caught_at
    assert caught.value.last_match == matched
    for word in (f"block {block} of s0/param", "step=", "part=", "term=", "->"):
        assert word in str(caught.value)


def test_a_wrong_number_in_a_delta_ends_the_chain_in_restore(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One hyper-parameter recorded wrongly at step 21: restore stops at the last match, aloud."""
    small_blocks(monkeypatch)
    rig = Rig(SHAPES, make(ADAMW, {"fused": True}), absent=0.0, sets=0.0, base_every=16)
    rig.put_base()
    body_of = rig._body

    def wrong(kept: Any, used: Any, sets: Any) -> Any:
        if rig.step == 21:
            used = ({**used[0], "lr": used[0]["lr"] * (1 + 2**-20)},)
        return body_of(kept, used, sets)

    monkeypatch.setattr(rig, "_body", wrong)
    snapshots = {}
    for _ in range(30):
        rig.train()
        snapshots[rig.step] = rig.arrays()
    done = restore_state([rig.tier], RUN)
    assert 16 <= done.step < 21
    assert done.lost == 30 - done.step
    assert any("is not what the trainer had" in reason for reason in done.reasons)
    state = done.parts[PART]
    for name, tensor in snapshots[done.step].items():
        assert torch.equal(tensor, state.arrays[name])
    with pytest.raises(NotProvableError):
        restore_state([rig.tier], RUN, step=25)


def test_a_base_with_drift_makes_no_exact_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows a bounded base is bounded, though this machine's arithmetic is the chain's."""
    from adacheck_store.format import bodies

    rig = Rig([(70,)], make(ADAMW, {}), absent=0.0)
    original = bodies.BaseBody
    monkeypatch.setattr(
        "tests.core.rig.BaseBody",
        lambda **body: original(**{**body, "exactness": "bounded"}),
    )
    base = rig.put_base()
    fold, sink = rig.fold(base, [rig.train() for _ in range(3)])
    assert fold.report.exactness == "bounded"
    rig.assert_same(fold, sink)
    replayed = replay(rig, base, rig.refs[1:])
    assert replayed.exactness == "bounded"


def test_other_arithmetic_is_bounded_and_differences_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chain written by another machine folds, in class bounded, without refusing."""
    small_blocks(monkeypatch)
    rig = Rig([(700,)], make(ADAMW, {}), absent=0.0, sets=0.0)
    monkeypatch.setattr("tests.core.rig.arithmetic_digest", lambda *a: "0" * 32)
    base = rig.put_base()
    deltas = [rig.train() for _ in range(20)]
    right = StepEngine.apply

    def drifting(self: StepEngine, pieces: Any, groups: Any) -> None:
        right(self, pieces, groups)
        for piece in pieces:
            piece.param.mul_(1 + 2**-22)

    monkeypatch.setattr(StepEngine, "apply", drifting)
    fold, _ = rig.fold(base, deltas)
    assert fold.report.exactness == "bounded"
    assert fold.report.differed > 0
    assert fold.report.verified_through < 16


class Mixed(Rig):
    """A rig whose optimizer's state is of twice the width of its parameters."""

    def _lay_out(self, params: list[torch.Tensor]) -> Any:
        for p in params:
            self.optimizer.state[p]["momentum_buffer"] = torch.zeros(p.shape)
        members, layout = super()._lay_out(params)
        sections = tuple(
            dataclasses.replace(s, roles=(s.roles[0], *((role, "F32") for role, _ in s.roles[1:])))
            for s in layout.sections
        )
        return members, dataclasses.replace(layout, sections=sections)


class Views:
    """Each window in memory of its own, and what it was in the end."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, torch.Tensor]] = {}

    def window(self, section: Any, role: str, start: int, stop: int) -> torch.Tensor:
        """Poison, until something is read."""
        kind = {"F32": torch.float32, "BF16": torch.bfloat16}[section.dtypes[role]]
        return torch.full((stop - start,), float("nan"), dtype=kind)

    def done(self, section: Any, start: int, stop: int, views: Any) -> None:
        """Keep it."""
        if start < stop:
            self.found |= {f"{section.name}/{role}": (start, view) for role, view in views.items()}


@pytest.mark.parametrize("half", [0, 1])
def test_half_a_block_is_not_compared_with_the_print_of_a_whole_one(
    half: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that needs a block of the wide role folds half a block of the narrow one."""
    small_blocks(monkeypatch)
    sgd = make(SGD, {"momentum": 0.9, "foreach": False})
    rig = Mixed([(2000,)], sgd, dtype=torch.bfloat16, absent=0.0, sets=0.0, encodings=("raw",),
                base_every=4)  # fmt: skip
    base = rig.put_base()
    chain = [base, *(rig.train() for _ in range(4))]
    readers = [ArrayReader(Fetcher([rig.tier]), ref) for ref in chain]
    fold, views = fold_module.Fold(rig.layout, readers[0], readers[1:]), Views()
    low, high = half * 256, half * 256 + 256
    report = fold.run(views, only={"s0": ((low, high),)})
    assert (report.exactness, report.differed) == ("exact", 0)
    assert report.checked > 0, "the wide role's block is whole, and is compared"
    for name, truth in rig.arrays().items():
        if name.startswith("s0/"):
            start, view = views.found[name]
            assert (start, view.numel()) == (low, 256)
            assert torch.equal(view, truth[low:high]), name
