"""Adopting what was restored: whether it is this run's, before a tensor is touched.

And what of an extra a rank can use where ranks or sharding are not the chain's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adacheck_store.format.errors import ModelMismatchError, UnsupportedError
from adacheck_store.restore import Restored
from adacheck_store.state import PartState

from .layouts import Binding, Match
from .load import fitting
from .tracked import Tracked
from .unfolded import TREE

ALONE = ("rng", "carried")
"""What a new rank does not take over: draws would repeat, and a batch be trained twice."""


def bare_of(binding: Binding) -> frozenset[str]:
    """Parameters that an optimizer was given here, and that it trains on other ranks (ZeRO-1)."""
    return frozenset(slot.item.name for slot in binding.given if slot.section.optimizer < 0)


def fit(
    restored: Restored, tracked: Tracked, binding: Binding
) -> tuple[PartState, Mapping[str, Any], Binding, list[Match]]:
    """What `load.load` takes of what was restored: state, extra, and what of it goes where.

    Raises `ModelMismatchError` if the model or what is tracked is not the chain's; see `adopted`.
    """
    (state,) = restored.parts.values()
    tree = adopted(restored, *restored.extras.values())
    tracked.check(tree)
    return state, tree, binding, fitting(state, tree, binding, step=state.step)


def adopted(restored: Restored, tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The extra as this rank loads it: its own, or for a new rank what the first one had.

    Raises `UnsupportedError` where gradients wait in it for the next micro-batch,
    `ModelMismatchError` where an optimizer that is kept whole is not the same on all ranks.
    """
    if not restored.certificate.topology:
        return tree
    if tree.get("grads"):
        raise UnsupportedError(
            "gradients were accumulated at this boundary, and they are of other pieces than this "
            "run's", step=restored.step,
            hint="name another step, or start as many ranks, sharded in the same way, as wrote it",
        )  # fmt: skip
    if restored.alike is None:
        return tree
    if tree.get(TREE) and TREE not in restored.alike:
        raise ModelMismatchError(
            "an optimizer that cannot be folded has another state on each rank", step=restored.step,
            hint="start as many ranks as wrote the chain",
        )  # fmt: skip
    return {name: value for name, value in tree.items() if name not in ALONE}
