"""The model of a plan: its tensors, from dimensions that are shipped or given, or a meta model."""

from __future__ import annotations

import importlib
import importlib.resources
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adacheck_store.format.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A trained tensor. ``expert`` is its expert's number; -1 if every token passes through it.

    ``cut`` is the dimension that tensor parallelism cuts, -1 if it leaves the tensor whole.
    """

    name: str
    shape: tuple[int, ...]
    expert: int = -1
    cut: int = -1

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model by name; ``cuts`` says whether its tensors know how tensor parallelism cuts them."""

    name: str
    tensors: tuple[Tensor, ...]
    cuts: bool

    @property
    def elements(self) -> int:
        """Number of trained parameters."""
        return sum(tensor.elements for tensor in self.tensors)


def shipped() -> dict[str, dict[str, Any]]:
    """Dimensions of the models that are known by name."""
    text = importlib.resources.files(__package__).joinpath("plan_models.json").read_text("utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


def model(name: str) -> Model:
    """A model by a shipped name, a JSON file of dimensions, or a factory ``module:function``.

    Raises `UsageError` that says what is wrong with the name, the file or the factory.
    """
    known = shipped()
    if name in known:
        return from_dimensions(name, known[name])
    if name.endswith(".json"):
        try:
            given = json.loads(Path(name).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"no dimensions of a model: {error}", path=name, hint="a JSON object: see the docs"
            ) from error
        return from_dimensions(name, given)
    if ":" in name:
        return _from_factory(name)
    raise UsageError(
        f"no such model: {name!r}",
        hint=f"one of {', '.join(sorted(known))}; a JSON file; or a factory module:function",
    )


def from_dimensions(name: str, given: Any) -> Model:
    """A model of a family; raises `UsageError` for dimensions that are missing or wrong."""
    family = given.get("family") if isinstance(given, Mapping) else None
    if family not in FAMILIES:
        raise UsageError(
            f"model {name}: family is {family!r}", hint=f'give "family": {" or ".join(FAMILIES)}'
        )
    make, wanted = FAMILIES[family]
    sizes = {key: value for key, value in given.items() if key != "family"}
    wrong = sorted(sizes.keys() ^ set(wanted))
    wrong += sorted(k for k, v in sizes.items() if k in wanted and (type(v) is not int or v < 1))
    if wrong:
        raise UsageError(
            f"model {name}: missing, unknown or not a positive number: {', '.join(wrong)}",
            hint=f"{family} has {', '.join(wanted)}",
        )
    if "heads" in sizes and sizes["hidden"] % sizes["heads"]:
        raise UsageError(
            f"model {name}: hidden {sizes['hidden']} is no multiple of heads {sizes['heads']}",
            hint="correct one of them",
        )
    return Model(name=name, tensors=tuple(make(**sizes)), cuts=True)


def _gpt2(*, layers: int, hidden: int, vocab: int, positions: int) -> Iterator[Tensor]:
    """GPT-2; the head is tied to the embedding."""
    yield Tensor(name="wte", shape=(vocab, hidden), cut=0)
    yield Tensor(name="wpe", shape=(positions, hidden))
    for layer in range(layers):
        for norm in ("ln_1", "ln_2"):
            yield from _norm(f"h.{layer}.{norm}", hidden)
        for part, rows, columns, cut in (
            ("attn.c_attn", hidden, 3 * hidden, 1), ("attn.c_proj", hidden, hidden, 0),
            ("mlp.c_fc", hidden, 4 * hidden, 1), ("mlp.c_proj", 4 * hidden, hidden, 0),
        ):  # fmt: skip
            name = f"h.{layer}.{part}"
            yield Tensor(name=f"{name}.weight", shape=(rows, columns), cut=cut)
            yield Tensor(name=f"{name}.bias", shape=(columns,), cut=0 if cut else -1)
    yield from _norm("ln_f", hidden)


def _norm(name: str, hidden: int) -> Iterator[Tensor]:
    yield Tensor(name=f"{name}.weight", shape=(hidden,))
    yield Tensor(name=f"{name}.bias", shape=(hidden,))


def _llama(
    *, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, experts: int = 0
) -> Iterator[Tensor]:
    """Llama, and with ``experts`` Mixtral; the head is a tensor of its own."""
    kv = hidden // heads * kv_heads
    yield Tensor(name="embed_tokens", shape=(vocab, hidden), cut=0)
    for layer in range(layers):
        at = f"layers.{layer}"
        yield Tensor(name=f"{at}.q_proj", shape=(hidden, hidden), cut=0)
        yield Tensor(name=f"{at}.k_proj", shape=(kv, hidden), cut=0)
        yield Tensor(name=f"{at}.v_proj", shape=(kv, hidden), cut=0)
        yield Tensor(name=f"{at}.o_proj", shape=(hidden, hidden), cut=1)
        if experts:
            yield Tensor(name=f"{at}.gate", shape=(experts, hidden))
        for expert in range(experts) if experts else (-1,):
            own = f"{at}.experts.{expert}" if experts else f"{at}.mlp"
            yield Tensor(name=f"{own}.w1", shape=(inner, hidden), expert=expert, cut=0)
            yield Tensor(name=f"{own}.w2", shape=(hidden, inner), expert=expert, cut=1)
            yield Tensor(name=f"{own}.w3", shape=(inner, hidden), expert=expert, cut=0)
        yield Tensor(name=f"{at}.input_norm", shape=(hidden,))
        yield Tensor(name=f"{at}.post_norm", shape=(hidden,))
    yield Tensor(name="norm", shape=(hidden,))
    yield Tensor(name="lm_head", shape=(vocab, hidden), cut=0)


_LLAMA = ("layers", "hidden", "inner", "heads", "kv_heads", "vocab")
FAMILIES: dict[str, tuple[Callable[..., Iterator[Tensor]], tuple[str, ...]]] = {
    "gpt2": (_gpt2, ("layers", "hidden", "vocab", "positions")),
    "llama": (_llama, _LLAMA),
    "mixtral": (_llama, (*_LLAMA, "experts")),
}
"""How the tensors of a family follow from its dimensions, and which those are."""


def _from_factory(name: str) -> Model:
    """What a function without arguments builds on the meta device: shapes and no memory."""
    module, _, function = name.partition(":")
    hint = "module:function, importable, that takes nothing and returns a torch.nn.Module"
    try:
        factory = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"no factory {name}: {error}", hint=hint) from error
    try:
        with torch.device("meta"):
            built = factory()
    except Exception as error:
        raise UsageError(f"{name} failed: {type(error).__name__}: {error}", hint=hint) from error
    if not isinstance(built, torch.nn.Module):
        raise UsageError(f"{name} returned a {type(built).__name__}", hint=hint)
    tensors = tuple(
        Tensor(name=name, shape=tuple(param.shape), expert=_expert(name))
        for name, param in built.named_parameters()
        if param.requires_grad
    )
    if not tensors:
        raise UsageError(f"{name}: nothing of it is trained", hint=hint)
    return Model(name=name, tensors=tensors, cuts=False)


def _expert(name: str) -> int:
    found = re.search(r"\bexperts\.(\d+)\.", name)
    return int(found[1]) if found else -1
