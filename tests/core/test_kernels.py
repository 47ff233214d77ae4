"""The compiled kernels: torch's and numpy's bits, or not used."""

import importlib.util
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adacheck_store import kernels
from adacheck_store.engines import Piece, StepEngine
from adacheck_store.fingerprint import block_sum, piece_sum
from adacheck_store.optimizers import group_values, spec_of
from adacheck_store.trainer_hooks import stager
from adacheck_store.trainer_hooks.stager import round_into

SOURCE = Path(kernels.__file__).with_name("kernels.c")
NAME = "adacheck_store._kernels"
FLAGS = ("-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")


def forget() -> None:
    """Let the kernels be looked for and proven anew."""
    proofs = (kernels._adamw_is_right, kernels._sum_is_right, kernels.rounds)
    for kept in (kernels._compiled, *proofs):
        kept.cache_clear()


def wide() -> bool:
    """Whether this processor has AVX-512."""
    return "avx512f" in Path("/proc/cpuinfo").read_text().split()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module, compiled as the installation does; None where the processor lacks AVX-512."""
    target = tmp_path_factory.mktemp("built") / "_kernels.so"
    include = sysconfig.get_paths()["include"]
    compiler = shlex.split(sysconfig.get_config_var("CC"))
    command = [*compiler, *FLAGS, "-shared", "-fPIC", f"-I{include}", str(SOURCE), "-o"]
    subprocess.run([*command, str(target)], check=True, timeout=120)
    spec = importlib.util.spec_from_file_location(NAME, target)
    assert spec is not None
    assert spec.loader is not None
    if not wide():
        with pytest.raises(ImportError, match="AVX-512"):
            importlib.util.module_from_spec(spec)
        return None
    return importlib.util.module_from_spec(spec)


@pytest.fixture
def compiled(built: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module in the place of an installed one, its calls counted."""
    counting = SimpleNamespace(calls=0)
    if built:
        counting.block_sum, counting.round_half = built.block_sum, built.round_half

    def adamw(*args: Any) -> None:
        counting.calls += 1
        built.adamw(*args)

    counting.adamw = adamw
    monkeypatch.setitem(sys.modules, NAME, counting if built else None)
    forget()
    yield counting
    monkeypatch.undo()
    forget()


def pieces(sizes: list[int], *, present: bool, kept: bool, seed: int) -> list[Piece]:
    """Pieces of a window, with their gradients as they are kept or decoded."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, size in enumerate(sizes):
        param, first, second, grad = (torch.randn(size, generator=generator) for _ in range(4))
        half = (grad * 1e-3).bfloat16()
        found.append(
            Piece(
                slice=number, group=0, start=0, stop=size, param=param,
                grad=torch.empty(size) if kept else half.float(), kept=half if kept else None,
                roles={"exp_avg": first * 1e-3, "exp_avg_sq": second.square() * 1e-6},
                present=present, scalars={"step": torch.tensor(3.0)} if present else {},
            )
        )  # fmt: skip
    return found


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam])
def test_fold_is_the_same(compiled: Any, cls: Any, present: bool, decay: float) -> None:
    """Bits and counters after some updates, of tensors of any length."""
    sizes = [1, 15, 16, 63, 64, 65, 127, 4096, 70_001]
    optimizer = cls([torch.nn.Parameter(torch.zeros(1))], fused=True, weight_decay=decay)
    groups = (group_values(optimizer.param_groups[0]),)
    engine = StepEngine(spec_of(optimizer))
    able = wide() and (cls is torch.optim.AdamW or not decay)
    assert engine.takes_halves(groups) is able
    proof = compiled.calls
    ours = pieces(sizes, present=present, kept=able, seed=1)
    theirs = pieces(sizes, present=present, kept=False, seed=1)
    for step in range(4):
        for mine, other in zip(ours, theirs, strict=True):
            half = (
                torch.randn(mine.stop, generator=torch.Generator().manual_seed(step))
            ).bfloat16()
            other.grad.copy_(half)
            mine.kept = half if able else None
            mine.grad.copy_(half.float() * torch.nan if able else half)
        engine.apply(ours, groups)
        engine.apply(theirs, groups)
    for mine, other in zip(ours, theirs, strict=True):
        assert float(mine.scalars["step"]) == float(other.scalars["step"])
        assert mine.scalars.keys() == other.scalars.keys()
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(
                mine.roles[name].view(torch.int32), other.roles[name].view(torch.int32)
            )
        assert torch.equal(mine.param.view(torch.int32), other.param.view(torch.int32))
    large = sum(size >= kernels.WIDTH for size in sizes)
    assert compiled.calls - proof == (large * (4 if present else 3) if able else 0)


def test_sums_are_the_same(compiled: Any) -> None:
    """Of any length, at any place in memory."""
    data = np.random.default_rng(3).integers(0, 256, 5000, dtype=np.uint8).tobytes()
    for start, stop in ((0, 0), (0, 4), (1, 33), (3, 67), (0, 5000), (2, 4999)):
        piece = memoryview(data)[start:stop]
        padded = bytes(piece) + bytes(-len(piece) % 4)
        words = np.frombuffer(padded, dtype="<i4").astype(np.int64)
        right = int(np.dot(words, 2 * np.arange(len(words)) + 1)) & (2**64 - 1)
        assert block_sum(piece) == right
        if wide() and len(piece) % 4 == 0:
            assert kernels.block_sum(piece) == right


def test_pieces_add_up_to_a_block(compiled: Any) -> None:
    """Wherever it is cut, at whole words."""
    data = np.random.default_rng(4).integers(0, 256, 4096, dtype=np.uint8).tobytes()
    for cut in (0, 4, 36, 2048, 4096):
        told = [piece_sum(data[:cut], 0), piece_sum(data[cut:], cut // 4)]
        if wide():
            assert sum(told) % 2**64 == block_sum(data)
        else:
            assert told == [None, None]


def test_rounding_is_the_same(compiled: Any) -> None:
    """Strange numbers, ties, overflows; any length; a half that a NaN gives is some NaN."""
    for count in (0, 1, 15, 16, 17, 70_001):
        values = kernels._numbers(3, count)
        values.view(torch.int32)[::2].bitwise_and_(~0xFFFF).bitwise_or_(0x8000)
        values.view(torch.int32)[5:9] = 0x7F7FFFFF
        right, halves = values.bfloat16(), torch.zeros(count).bfloat16()
        before = values._version
        assert kernels.round_half(values, halves) is wide()
        if wide():
            nan = right.isnan()
            assert torch.equal(halves.isnan(), nan)
            assert torch.equal(halves.view(torch.int16)[~nan], right.view(torch.int16)[~nan])
            assert torch.equal(values.view(torch.int32), halves.float().view(torch.int32))
            assert values._version > before
    whole = torch.randn(4, 6)
    for values, halves in (
        (whole.t(), torch.zeros(6, 4).bfloat16()), (whole, torch.zeros(6, 4).bfloat16()),
        (whole.double(), torch.zeros(4, 6).bfloat16()), (whole, torch.zeros(4, 6).half()),
        (torch._neg_view(whole), torch.zeros(4, 6).bfloat16()),
    ):  # fmt: skip
        kept = values.clone()
        assert not kernels.round_half(values, halves)
        assert torch.equal(values, kept)


def test_what_it_does_not_take(compiled: Any) -> None:
    """Flags, numbers of other types, and tensors that would be read wrongly."""
    good = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
    assert kernels.takes(torch.optim.AdamW, good) is wide()
    assert not kernels.takes(torch.optim.Adam, good)
    assert not kernels.takes(torch.optim.SGD, good)
    for change in (
        {"fused": False}, {"amsgrad": True}, {"maximize": True}, {"lr": torch.tensor(1e-3)},
        {"betas": (0.5, 0.99)}, {"betas": (torch.tensor(0.9), 0.99)}, {"betas": (0.9, 1.0)},
        {"betas": (0.50000001, 0.99)}, {"eps": "x"}, {"weight_decay": None},
    ):  # fmt: skip
        assert not kernels.takes(torch.optim.AdamW, {**good, **change}), change
    state, grad = [torch.zeros(128) for _ in range(3)], torch.zeros(128).bfloat16()
    for wrong in (
        (state, grad.float()), (state, grad[:64]), (state[:2], grad),
        ([s.double() for s in state], grad), ([s[:65] for s in state], grad[:65]),
        ([torch.zeros(256)[::2], *state[1:]], grad),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="does not take"):
            kernels.adamw(*wrong, good, 1.0)


@pytest.mark.parametrize("wrong", ["none", "adamw", "sum", "round", "older"])
def test_a_wrong_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """A bit that differs, or no module at all: torch and numpy do it."""

    def adamw(*args: Any) -> None:
        """Changes nothing."""

    def off_by_one(data: Any, first: int) -> int:
        words = np.frombuffer(data, dtype="<i4").astype(np.int64)
        right = int(np.dot(words, 2 * np.arange(first, first + len(words)) + 1)) & (2**64 - 1)
        return right + (wrong == "sum" and first > 0)

    whole = SimpleNamespace(adamw=adamw, block_sum=off_by_one, round_half=adamw)
    # Older: one that was built from another source, and left in the tree.
    module = {"none": None, "older": object()}.get(wrong, whole)
    monkeypatch.setitem(sys.modules, NAME, module)
    forget()
    group = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
    assert not kernels.takes(torch.optim.AdamW, group)
    expected = 5 if wrong in ("adamw", "round") else None
    values, halves = torch.full((32,), 1 / 3), torch.zeros(32).bfloat16()
    assert not kernels.round_half(values, halves)
    round_into([halves], [values])
    assert torch.equal(values, torch.full((32,), 1 / 3).bfloat16().float())
    assert torch.equal(values, halves.float())
    assert kernels.block_sum(b"\x05\0\0\0") == expected
    assert block_sum(b"\x05\0\0\0") == 5
    monkeypatch.undo()
    forget()


def test_where_nothing_rounds_each_gradient_is_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of small ones, a bunch at a time."""
    counted, bunches = [], []

    class Counted(torch.Tensor):
        def numel(self) -> int:
            counted.append(1)
            return super().numel()

    def copy(to: Any, what: Any) -> None:
        bunches.append(len(to))
        together(to, what)

    together = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    monkeypatch.setattr(stager, "ROUNDED_TOGETHER", 100 * 8)
    monkeypatch.setattr(kernels, "round_half", lambda values, halves: False)
    grads = [torch.full((8,), 1 / 3).as_subclass(Counted) for _ in range(250)]
    round_into([torch.zeros(8).bfloat16() for _ in grads], grads)
    assert len(counted) == 250
    assert bunches == [100, 100, 100, 100, 50, 50]  # there and back
    assert all(torch.equal(each, torch.full((8,), 1 / 3).bfloat16().float()) for each in grads)
