"""Every optimizer of torch.optim has its class by trial; so has one of your own."""

import inspect
import random
from typing import Any

import pytest
import torch

import adacheck_store as ada
from adacheck_store import optimizers
from adacheck_store.engines import Piece, StepEngine
from adacheck_store.format.errors import UnsupportedError, UsageError
from adacheck_store.optimizer_kit import prove, register_optimizer
from adacheck_store.optimizers import arithmetic_digest, find_spec, group_values, spec_of
from tests.optimizers.mine import InGroup, Lion, Noisy, Normed, Secretive, Slowed

O = torch.optim  # noqa: E741
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True},
}  # fmt: skip
USUAL: list[tuple[Any, dict[str, Any]]] = [
    (O.Adam, {"amsgrad": True, "weight_decay": 0.1}), (O.AdamW, {}),
    (O.SGD, {"momentum": 0.9, "dampening": 0.1}),
    (O.Adagrad, {"lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    (O.RMSprop, {"momentum": 0.9, "centered": True}), (O.Adamax, {}), (O.Adadelta, {}),
    (O.NAdam, {}), (O.RAdam, {}), (O.ASGD, {"t0": 1.0}), (O.Rprop, {}),
]  # fmt: skip
FURTHER: list[tuple[Any, dict[str, Any]]] = [
    (O.Adam, {}), (O.Adam, {"maximize": True}), (O.Adam, {"decoupled_weight_decay": True}),
    (O.AdamW, {"amsgrad": True, "maximize": True}), (O.SGD, {}),
    (O.SGD, {"momentum": 0.9, "nesterov": True}), (O.SGD, {"weight_decay": 0.1, "maximize": True}),
    (O.Adagrad, {}), (O.Adagrad, {"weight_decay": 0.1, "maximize": True}),
    (O.RMSprop, {}), (O.RMSprop, {"centered": True, "weight_decay": 0.1, "maximize": True}),
    (O.RMSprop, {"momentum": 0.9}), (O.Adamax, {"weight_decay": 0.1, "maximize": True}),
    (O.Adadelta, {"weight_decay": 0.1, "maximize": True}),
    (O.NAdam, {"weight_decay": 0.1, "maximize": True}),
    (O.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (O.RAdam, {"weight_decay": 0.1, "maximize": True}),
    (O.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (O.ASGD, {"weight_decay": 0.1, "maximize": True}), (O.ASGD, {"lambd": 0.01, "alpha": 0.5}),
    (O.Rprop, {"maximize": True}), (O.Rprop, {"etas": (0.4, 1.1), "step_sizes": (1e-5, 1.0)}),
]  # fmt: skip
UNKNOWN = {
    "LBFGS": O.LBFGS, "SparseAdam": O.SparseAdam, "Adafactor": O.Adafactor,
    "Muon": getattr(O, "Muon", None),
}  # fmt: skip


def every(flags_of: list[tuple[Any, dict[str, Any]]]) -> list[Any]:
    """Classes under every implementation that they have."""
    found = []
    for cls, flags in flags_of:
        for name, implementation in IMPLEMENTATIONS.items():
            if set(implementation) <= set(inspect.signature(cls).parameters):
                words = [cls.__name__, name, *(f"{k}={v}" for k, v in flags.items())]
                both = {**flags, **implementation}
                found.append(pytest.param(cls, both, id="-".join(words)))
    return found


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(optimizers, "_SPECS", dict(optimizers._SPECS))


def check(cls: Any, flags: dict[str, Any], **more: Any) -> None:
    """The class is proven exact, or refused for a reason that test_halves.py shows."""
    dtype = more.get("dtype", torch.float32)

    def why(elements: int) -> str:
        return find_spec(cls([torch.nn.Parameter(torch.zeros(elements, dtype=dtype))], **flags)).why

    if why(3):
        assert dtype.itemsize == 2
        assert cls is O.SGD
        assert flags.get("momentum")
        return
    if cls is O.SGD and flags.get("fused") and flags.get("momentum"):
        more["absent"] = 0.0  # torch: momentum for all of a group, or for none
    verdict = prove(cls, large=not why(40_000), **more, **flags)
    assert verdict.exactness == "exact", verdict.why
    assert verdict.compared > 100


@pytest.mark.parametrize(("cls", "flags"), every(USUAL))
def test_two_hundred_random_steps_fold_to_the_same_bits(cls: Any, flags: dict[str, Any]) -> None:
    check(cls, flags)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("cls", "flags"), every([*USUAL, *FURTHER]))
def test_every_flag_and_dtype(
    cls: Any, flags: dict[str, Any], seed: int, dtype: torch.dtype
) -> None:
    check(cls, flags, seed=seed + 1, dtype=dtype)


def test_no_optimizer_of_torch_is_left_without_a_class() -> None:
    """A new one in torch fails here until somebody decides."""
    found = {
        name for name, cls in vars(O).items()
        if isinstance(cls, type) and issubclass(cls, O.Optimizer) and cls is not O.Optimizer
    }  # fmt: skip
    proven = {cls.__name__ for cls, _ in USUAL}
    assert found == proven | {name for name, cls in UNKNOWN.items() if cls is not None}
    params = [torch.nn.Parameter(torch.ones(3, 3))]
    for name in found:
        spec = find_spec(getattr(O, name)(params))
        assert spec.name == f"torch.optim.{name}"
        assert spec.exactness == ("exact" if name in proven else "unsupported")
        assert spec.foldable == (not spec.why)


@pytest.mark.parametrize(
    ("cls", "roles"),
    [(O.Adafactor, ["variance"]), (O.SparseAdam, ["exp_avg", "exp_avg_sq"]), (O.LBFGS, ["d"]),
     (getattr(O, "Muon", O.LBFGS), ["momentum_buffer"])],
)  # fmt: skip
def test_what_needs_the_whole_tensor_fails_its_proof(cls: Any, roles: list[str]) -> None:
    verdict = prove(cls, roles=roles, scalars=["step"], steps=10)
    assert not verdict.proven
    assert verdict.why


@pytest.mark.parametrize("cls", [O.AdamW, O.NAdam, O.Adadelta, O.Rprop, O.RAdam])
def test_capturable_is_a_devices_flag_and_folds_on_a_cpu(cls: Any) -> None:
    """Torch refuses it on a CPU; a fold there goes on without, and says the same arithmetic."""
    param = torch.nn.Parameter(torch.ones(5))
    optimizer = cls([param], capturable=True)
    param.grad = torch.ones(5)
    with pytest.raises((AssertionError, RuntimeError), match="capturable"):
        optimizer.step()
    (group,) = [group_values(group) for group in optimizer.param_groups]
    assert group["capturable"] is True
    spec, found = find_spec(optimizer), []
    for flag in (True, False):
        values = {role: torch.zeros(5) for role in spec.roles(group)}
        piece = Piece(slice=0, group=0, start=0, stop=5, param=torch.ones(5), grad=torch.ones(5),
                      roles=values, present=False)  # fmt: skip
        StepEngine(spec).apply([piece], ({**group, "capturable": flag},))
        found.append([piece.param, *values.values()])
    assert all(map(torch.equal, *found))
    assert not torch.equal(found[0][0], torch.ones(5))
    digests = {
        arithmetic_digest(spec.name, ({**group, "capturable": flag},), ["F32"])
        for flag in (True, False)
    }
    assert len(digests) == 1


def test_a_lion_is_registered_and_folded() -> None:
    params = [torch.nn.Parameter(torch.zeros(3))]
    assert find_spec(Lion(params)).exactness == "unsupported"
    with pytest.raises(UnsupportedError, match="register_optimizer"):
        spec_of(Lion(params))
    assert ada.register_optimizer(Lion, roles=["exp_avg"], scalars=["step"]).proven
    spec = spec_of(Lion(params, weight_decay=0.1))
    assert spec.name == "tests.optimizers.mine.Lion"
    assert spec.roles({}) == ("exp_avg",)
    assert spec_of(Lion(params, counted=True)).scalars == ("step",)


def test_a_registered_class_is_proven_again_under_the_flags_it_is_used_with() -> None:
    register_optimizer(Lion, roles=["exp_avg"])
    params = [torch.nn.Parameter(torch.zeros(3))]
    assert find_spec(Lion(params)).foldable
    spec = find_spec(Lion(params, counted=True))  # its counter was not named
    assert not spec.foldable
    assert "'step' is a int" in spec.why


@pytest.mark.parametrize(
    ("cls", "why"),
    [(Normed, "other bits"), (Noisy, "random numbers"), (Secretive, "other bits"),
     (InGroup, "other bits")],
)  # fmt: skip
def test_what_cannot_be_folded_is_not_registered(cls: Any, why: str) -> None:
    before = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    with pytest.raises(UnsupportedError, match=why):
        register_optimizer(cls, roles=["exp_avg"])
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), torch.get_num_threads())
    assert not find_spec(cls([torch.nn.Parameter(torch.zeros(3))])).foldable


def test_a_subclass_is_not_taken_for_its_parent() -> None:
    register_optimizer(Lion, roles=["exp_avg"])
    params = [torch.nn.Parameter(torch.zeros(3))]
    for optimizer in (Slowed(params), Normed(params)):
        assert find_spec(optimizer).why == "nothing is known of it"
        assert not find_spec(optimizer).foldable
    assert not prove(Slowed, roles=["exp_avg", "exp_avg_sq"], steps=5).proven  # step is no role


def test_another_class_of_the_same_name_is_not_taken_for_it() -> None:
    register_optimizer(Lion, roles=["exp_avg"])
    twin = type("Lion", (Lion,), {"__module__": Lion.__module__, "__qualname__": "Lion"})
    assert not find_spec(twin([torch.nn.Parameter(torch.zeros(3))])).foldable


def test_misuse_of_the_registration_is_refused() -> None:
    with pytest.raises(UsageError, match="is no optimizer"):
        register_optimizer(torch.nn.Linear, roles=["a"])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="roles='exp_avg'"):
        register_optimizer(Lion, roles="exp_avg")
    with pytest.raises(UsageError, match="torch's own"):
        register_optimizer(O.AdamW, roles=["exp_avg"])
    with pytest.raises(UnsupportedError, match="'exp_avg' is a tensor of shape"):
        register_optimizer(Lion, roles=["other"])
