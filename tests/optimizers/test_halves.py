"""Half precision: which updates depend on the threads at work, shown on bits, and are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from adacheck_store import optimizers
from adacheck_store.format.bodies import decode_delta
from adacheck_store.format.errors import NotProvableError, UnsupportedError
from adacheck_store.optimizer_kit import prove, register_optimizer
from adacheck_store.optimizers import HALVES, SHARED_ELEMENTS, find_spec, raw_step
from tests.hooks.helpers import attach, bits, check_records, new_url, restored, same
from tests.optimizers.mine import Lion
from tests.optimizers.test_proofs import FURTHER, USUAL, O, every

LARGE = 2 * (313 * 64 + 63)
"""Elements of a tensor that two threads share; the tail of a share is as long as can be."""
SHORT = 3
"""Elements of a tensor that is all tail: shorter than any vector."""

SCALED = {"aten::add.Tensor", "aten::add_.Tensor", "aten::_foreach_add.List",
          "aten::_foreach_add_.List"}  # fmt: skip
"""The one operation that rounds the end of a share otherwise, under its names."""

dtypes = pytest.mark.parametrize("dtype", HALVES, ids=str)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """The number of threads as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(optimizers, "_SPECS", dict(optimizers._SPECS))


class Ends(TorchDispatchMode):
    """Makes every operation on a large tensor once more on short stretches of it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.differ: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation; counts elements that come out otherwise in a short tensor."""
        before = tree_map(
            lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (args, kwargs or {})
        )
        out = func(*args, **(kwargs or {}))
        name = func._schema.name + "." + func._overloadname
        if "empty" in name or not any(self.large(x) for x in tree_leaves(before)):
            return out
        self.seen[name] += 1
        whole = [x for x in tree_leaves(args[0] if out is None else out) if self.large(x)]
        for start in range(0, 120, SHORT):
            stretch = slice(start, start + SHORT)
            a, k = tree_map(lambda x, s=stretch: x[s].clone() if wide(x) else x, before)
            again = func(*a, **k)
            short = [x for x in tree_leaves(a[0] if again is None else again)
                     if isinstance(x, torch.Tensor) and x.dtype == self.dtype
                     and x.shape == (SHORT,)]  # fmt: skip
            for x, y in zip(whole, short, strict=True):
                x = x[stretch]
                other = (x.view(torch.int16) != y.view(torch.int16)) & ~(x.isnan() & y.isnan())
                self.differ[name] += int(other.sum())
        return out

    def large(self, value: Any) -> bool:
        """Whether this is a large tensor of the dtype."""
        return wide(value) and value.dtype == self.dtype


def wide(value: Any) -> bool:
    """Whether this is a tensor of the parameter's shape."""
    return isinstance(value, torch.Tensor) and value.shape == (LARGE,)


def numbers(dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
    """A large tensor of random numbers over some powers of two."""
    spread = torch.randint(-6, 3, (LARGE,), generator=generator)
    return torch.ldexp(torch.randn(LARGE, generator=generator) * scale, spread).to(dtype)


def trained(
    cls: Any, flags: dict[str, Any], dtype: torch.dtype, threads: int, watch: Any = None
) -> list[torch.Tensor]:
    """Parameter and state after some steps on a number of threads."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(3)
    param = torch.nn.Parameter(numbers(dtype, generator))
    optimizer = cls([param], **{"lr": 1e-2, **flags})
    step = raw_step(find_spec(optimizer))
    for _ in range(8):
        param.grad = numbers(dtype, generator, 0.1)
        with torch.no_grad():
            if watch is None:
                step(optimizer)
            else:
                with watch:
                    step(optimizer)
    state = [x for x in optimizer.state[param].values() if isinstance(x, torch.Tensor)]
    return [x.detach().reshape(-1).view(torch.uint8) for x in (param, *state)]


def foldable(cls: Any, flags: dict[str, Any], dtype: torch.dtype, elements: int = LARGE) -> bool:
    """Whether such an optimizer of one parameter is folded."""
    params = [torch.nn.Parameter(torch.zeros(elements, dtype=dtype))]
    return find_spec(cls(params, **flags)).foldable


def cases(*, fused: bool) -> list[Any]:
    """Every class and set of flags; those that are not USUAL are slow."""
    found = []
    for item in (*every(USUAL), *every(FURTHER)):
        if bool(item.values[1].get("fused")) == fused:
            marks = [] if fused or len(found) < len(every(USUAL)) else [pytest.mark.slow]
            found.append(pytest.param(*item.values, id=item.id, marks=marks))
    return found


@dtypes
@pytest.mark.parametrize(("cls", "flags"), cases(fused=False))
def test_only_add_with_alpha_rounds_the_end_of_a_share_otherwise(
    cls: Any, flags: dict[str, Any], dtype: torch.dtype
) -> None:
    """What is folded uses no such operation; what uses none of note is not refused."""
    ends = Ends(dtype)
    trained(cls, flags, dtype, 1, ends)
    differ = {name for name, count in ends.differ.items() if count}
    assert sum(ends.seen.values()) >= 8
    assert differ <= SCALED
    if foldable(cls, flags, dtype):
        assert not differ


@dtypes
@pytest.mark.parametrize(("cls", "flags"), cases(fused=True))
def test_fused_kernels_share_out_whole_vectors(
    cls: Any, flags: dict[str, Any], dtype: torch.dtype
) -> None:
    if not foldable(cls, flags, dtype, 3):
        assert cls is O.SGD  # see below
        return
    assert foldable(cls, flags, dtype)
    alone = trained(cls, flags, dtype, 1)
    for threads in (2, 3, 5):
        assert all(map(torch.equal, alone, trained(cls, flags, dtype, threads))), threads


@dtypes
@pytest.mark.parametrize(
    ("cls", "flags"),
    [(O.SGD, {"momentum": 0.9, "dampening": 0.1}), (O.Adam, {"weight_decay": 0.1}),
     (O.RMSprop, {"momentum": 0.9}), (O.Adagrad, {"weight_decay": 0.1}),
     (O.NAdam, {"weight_decay": 0.1})],
)  # fmt: skip
def test_what_is_refused_does_depend_on_the_threads(
    cls: Any, flags: dict[str, Any], dtype: torch.dtype
) -> None:
    """Else the refusal would be needless; small parameters and other dtypes are folded."""
    assert not foldable(cls, flags, dtype)
    assert foldable(cls, flags, dtype, SHARED_ELEMENTS)
    assert foldable(cls, flags, torch.float32)
    alone, shared = (trained(cls, flags, dtype, threads) for threads in (1, 2))
    assert not all(map(torch.equal, alone, shared))
    assert not prove(cls, dtype=dtype, large=True, steps=20, **flags).proven


@dtypes
def test_foreach_sgd_with_momentum_rounds_by_what_others_have(dtype: torch.dtype) -> None:
    """As long as one parameter has no momentum the others get another product: refused."""

    def second(late: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        params = [torch.nn.Parameter(torch.zeros(64, dtype=dtype)) for _ in range(2)]
        optimizer = O.SGD(params, lr=0.1, momentum=0.9, foreach=True)
        for number in range(2):
            for index, param in enumerate(params):
                grad = torch.randn(64, generator=generator).to(dtype)
                param.grad = None if late and index == 1 and number == 0 else grad
            optimizer.step()
        return optimizer.state[params[0]]["momentum_buffer"]

    assert not torch.equal(second(late=False), second(late=True))
    flags = {"momentum": 0.9, "foreach": True}
    assert not foldable(O.SGD, flags, dtype, 64)
    assert foldable(O.SGD, flags, torch.float32, 64)
    assert foldable(O.SGD, {**flags, "foreach": False}, dtype, 64)
    assert not foldable(O.SGD, {"momentum": 0.9, "fused": True}, dtype, 64)


def test_a_flag_that_makes_a_large_parameter_unsteady_keeps_it_whole() -> None:
    """An L2 penalty switched on in mid-run: from then on its bytes come with each delta."""

    def make(seed: int = 0) -> Any:
        model = torch.nn.Module()
        generator = torch.Generator().manual_seed(seed)
        for name, count in (("large", LARGE), ("small", 100)):
            value = torch.randn(count, generator=generator).bfloat16()
            model.register_parameter(name, torch.nn.Parameter(value))
        return model, O.Adam(model.parameters(), lr=1e-2, foreach=False)

    url = new_url()
    torch.set_num_threads(2)
    model, optimizer = make()
    with attach(model, optimizer, url) as ckpt:
        ckpt.restore()
        for number in range(6):
            optimizer.param_groups[0]["weight_decay"] = 0.1 * (number in (2, 3))
            for param in model.parameters():
                param.grad = torch.randn(param.shape).bfloat16()
            optimizer.step()
        end = bits(model, optimizer)
    sets = [len(decode_delta(head).sets) for _, head in sorted(check_records(url).items())]
    assert sets == [0, 0, 3, 3, 0, 0]
    torch.set_num_threads(3)
    with restored(make, url) as (again, mine, _, report):
        assert (report.step, report.certificate.exactness) == (6, "exact")
        same(end, bits(again, mine))


def test_a_flag_that_ends_folding_in_mid_run_keeps_bases_from_then_on() -> None:
    """Momentum switched on for steps 4 to 6 of a foreach SGD: a base at once, then every other.

    Switched off again, updates are folded from the next multiple of base_every on.
    """

    def make(seed: int = 0, momentum: float = 0.0) -> Any:
        torch.manual_seed(seed)
        model = torch.nn.Linear(5, 33).bfloat16()
        optimizer = O.SGD(model.parameters(), lr=0.1, foreach=True)
        optimizer.param_groups[0]["momentum"] = momentum
        return model, optimizer

    url, marks = new_url(), {}
    model, optimizer = make()
    with attach(model, optimizer, url, full_every=2, base_every=8, keep=9) as ckpt:
        ckpt.restore()
        for number in range(1, 9):
            optimizer.param_groups[0]["momentum"] = 0.9 * (4 <= number < 7)
            for param in model.parameters():
                param.grad = torch.randn(param.shape).bfloat16()
            optimizer.step()
            marks[number] = bits(model, optimizer)
    for asked, kind in [(8, "exact"), (7, ""), (6, "unsupported"), (5, ""),
                        (4, "unsupported"), (3, "exact")]:  # fmt: skip
        make_then = partial(make, momentum=0.9 * (4 <= asked < 7))
        if not kind:
            with pytest.raises(NotProvableError), restored(make_then, url, step=asked):
                pass
            continue
        with restored(make_then, url, step=asked, keep=9) as (again, mine, _, report):
            assert report.certificate.exactness == kind
            same(marks[asked], bits(again, mine))


@dtypes
def test_one_of_your_own_is_proven_in_the_dtypes_it_is_used_with(dtype: torch.dtype) -> None:
    """A proof in fp32 says nothing about halves; large ones need a proof of their own."""
    register_optimizer(Lion, roles=["exp_avg"])

    def spec(kind: torch.dtype, elements: int) -> Any:
        return find_spec(Lion([torch.nn.Parameter(torch.zeros(elements, dtype=kind))]))

    assert spec(torch.float32, LARGE).foldable
    assert spec(dtype, SHARED_ELEMENTS).foldable
    assert (
        spec(dtype, LARGE).foldable
        == prove(Lion, roles=["exp_avg"], dtype=dtype, large=True, lr=1e-4).proven
    )

    class Scaled(Lion):
        """Adds a multiple of the gradient to its state."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            """One update."""
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        state = self.state[p]
                        state.setdefault("exp_avg", torch.zeros_like(p)).add_(p.grad, alpha=0.3)
                        p.add_(state["exp_avg"], alpha=-group["lr"])

    register_optimizer(Scaled, roles=["exp_avg"])
    params = [torch.nn.Parameter(torch.zeros(LARGE, dtype=dtype))]
    assert "other bits" in find_spec(Scaled(params)).why
    assert str(dtype) in find_spec(Scaled(params)).why
    with pytest.raises(UnsupportedError, match="other bits"):
        optimizers.spec_of(Scaled(params))
