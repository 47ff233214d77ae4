"""Engines: apply an optimizer's update to pieces of state in memory.

An engine works on *pieces*: cuts of slices at multiples of 64 elements from the slice's start,
one tensor per role. Pieces of different slices are never merged into one tensor, because the
fused kernels treat the last ``numel % 8`` elements of a tensor differently.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from adacheck_store.format.bodies import Groups

from .arrays import from_typed
from .optimizers import OptimizerSpec, make_optimizer, on_cpu, raw_step


@dataclass(slots=True)
class Piece:
    """A cut of a slice: ``param`` and the state tensors are views of the fold's window.

    ``grad`` is a view of scratch memory. ``scalars`` are per-slice counters (0-dim tensors or
    numbers), None where the slice has no state yet.
    """

    slice: int
    group: int
    start: int
    stop: int
    param: torch.Tensor
    grad: torch.Tensor
    roles: Mapping[str, torch.Tensor]
    present: bool
    scalars: dict[str, Any] = field(default_factory=dict)


class StepEngine:
    """Runs the optimizer class's own ``step`` (without hooks) over pieces.

    The oracle: whatever torch's eager arithmetic is for the class and its flags, this is it.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        self._optimizer = make_optimizer(spec)
        self._step = raw_step(spec)
        self._groups: tuple[Groups, list[dict[str, Any]]] | None = None

    def apply(self, pieces: Sequence[Piece], groups: Groups) -> None:
        """One update of the given pieces (those with a gradient), in place."""
        if not pieces:
            return
        optimizer = self._optimizer
        by_group: dict[int, list[torch.Tensor]] = defaultdict(list)
        optimizer.state.clear()
        for piece in pieces:
            piece.param.grad = piece.grad
            by_group[piece.group].append(piece.param)
            if piece.present:
                optimizer.state[piece.param] = {**piece.scalars, **piece.roles}
        keywords = self._keywords(groups)
        optimizer.param_groups = [
            {**optimizer.defaults, **keywords[index], "params": params}
            for index, params in sorted(by_group.items())
        ]
        with torch.no_grad():
            self._step(optimizer)
        for piece in pieces:
            self._take_back(piece, optimizer.state.get(piece.param, {}))
            piece.param.grad = None

    def _keywords(self, groups: Groups) -> list[dict[str, Any]]:
        """Typed groups as keyword values, kept while the same groups come again."""
        if self._groups is None or self._groups[0] is not groups:
            self._groups = (groups, [on_cpu(from_typed(dict(group))) for group in groups])
        return self._groups[1]

    def _take_back(self, piece: Piece, state: Mapping[str, Any]) -> None:
        """Bind state the step has made anew to the window's memory, and keep the counters."""
        for name, value in state.items():
            view = piece.roles.get(name)
            if view is None:
                piece.scalars[name] = value
            elif value is not view:
                view.copy_(value)
        piece.present = piece.present or bool(state)
