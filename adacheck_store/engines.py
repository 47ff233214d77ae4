"""Engines: apply an optimizer's update to pieces of state in memory.

An engine works on *pieces*: cuts of slices at multiples of 64 elements from the slice's start,
one tensor per role. Pieces of different slices are never merged into one tensor, because the
fused kernels treat the last ``numel % 8`` elements of a tensor differently.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from adacheck_store.format.bodies import Groups

from . import kernels
from .arrays import from_typed
from .optimizers import OptimizerSpec, make_optimizer, on_cpu, raw_step


@dataclass(slots=True)
class Piece:
    """A cut of a slice: ``param`` and the state tensors are views of the fold's window.

    ``grad`` is a view of scratch memory; where ``kept`` is given, the gradient as bfloat16, it is
    decoded only if need be. ``scalars`` are per-slice counters (0-dim tensors or
    numbers), None where the slice has no state yet. ``cuts`` is the engine's own.
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
    kept: torch.Tensor | None = None
    cuts: list[Piece] = field(default_factory=list)


PLAIN_ELEMENTS = 1 << 17
"""Elements that plain arithmetic takes at once: its temporaries stay in the cache, and are not
mapped anew for every operation (measured: 0.63 against 0.21 G parameters a second)."""

GROUPS_MAX = 64
"""Groups of which an engine keeps the keywords: of more deltas than lie side by side in a leg."""


class StepEngine:
    """Runs the optimizer class's own ``step`` (without hooks) over pieces.

    The oracle: whatever torch's eager arithmetic is for the class and its flags, this is it.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        self._cls = spec.cls
        self._optimizer = make_optimizer(spec)
        self._step = raw_step(spec)
        self._groups: dict[int, tuple[Groups, list[dict[str, Any]]]] = {}
        self._halves: dict[int, tuple[Groups, bool]] = {}

    def apply(self, pieces: Sequence[Piece], groups: Groups) -> None:
        """One update of the given pieces (those with a gradient), in place."""
        keywords = self._keywords(groups)
        pieces = [piece for piece in pieces if not self._compiled(piece, keywords)]
        if any(_taken_whole(piece, keywords[piece.group]) for piece in pieces):
            self._apply(pieces, keywords)
            return
        for batch in _batches(pieces):
            self._apply(batch, keywords)
        for piece in pieces:
            if piece.cuts:
                last = piece.cuts[-1]
                piece.present, piece.scalars, piece.cuts = last.present, last.scalars, []

    def takes_halves(self, groups: Groups) -> bool:
        """Whether pieces should come with gradients as they are kept, for the compiled kernel."""
        kept = self._halves.get(id(groups))
        if kept is None:
            if len(self._halves) == GROUPS_MAX:
                self._halves.clear()
            takes = all(kernels.takes(self._cls, values) for values in self._keywords(groups))
            kept = self._halves[id(groups)] = groups, takes
        return kept[1]

    def _compiled(self, piece: Piece, keywords: list[dict[str, Any]]) -> bool:
        """Let the compiled kernel do a piece; False, and the gradient decoded, if it cannot."""
        kept, piece.kept = piece.kept, None
        if kept is None:
            return False
        whole = kept.numel() - kept.numel() % kernels.WIDTH
        if not piece.present or not whole:
            piece.grad.copy_(kept.reshape(piece.grad.shape))
            return False
        number = piece.scalars["step"] + 1
        state = [piece.param, piece.roles["exp_avg"], piece.roles["exp_avg_sq"]]
        main = state if whole == kept.numel() else [tensor[:whole] for tensor in state]
        kernels.adamw(main, kept[:whole], keywords[piece.group], float(number))
        if main is not state:
            rest = _part(piece, slice(whole, None))
            rest.grad.copy_(kept[whole:])
            self._apply([rest], keywords)
        piece.scalars = {**piece.scalars, "step": number}
        return True

    def _apply(self, pieces: Sequence[Piece], keywords: list[dict[str, Any]]) -> None:
        optimizer = self._optimizer
        by_group: dict[int, list[torch.Tensor]] = defaultdict(list)
        optimizer.state.clear()
        for piece in pieces:
            piece.param.grad = piece.grad
            by_group[piece.group].append(piece.param)
            if piece.present:
                optimizer.state[piece.param] = {**piece.scalars, **piece.roles}
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
        """Typed groups as keyword values, kept: a fold's deltas come again for every window."""
        kept = self._groups.get(id(groups))  # nobody else's, as long as the groups are kept too
        if kept is None:
            if len(self._groups) == GROUPS_MAX:
                self._groups.clear()
            kept = groups, [on_cpu(from_typed(dict(group))) for group in groups]
            self._groups[id(groups)] = kept
        return kept[1]

    def _take_back(self, piece: Piece, state: Mapping[str, Any]) -> None:
        """Bind state the step has made anew to the window's memory, and keep the counters."""
        for name, value in state.items():
            view = piece.roles.get(name)
            if view is None:
                piece.scalars[name] = value
            elif value is not view:
                view.copy_(value)
        piece.present = piece.present or bool(state)


def _taken_whole(piece: Piece, keywords: Mapping[str, Any]) -> bool:
    """Fused kernels make no temporaries; half precision is proven for windows as they are."""
    return bool(keywords.get("fused")) or piece.param.element_size() < 4


def _batches(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Runs of pieces of about `PLAIN_ELEMENTS`; a larger piece is cut, its cuts left in it."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        count = piece.param.numel()
        if batch and size + count > PLAIN_ELEMENTS:
            yield batch
            batch, size = [], 0
        if count > PLAIN_ELEMENTS:
            piece.cuts = _cut(piece)
            yield from ([cut] for cut in piece.cuts)
        else:
            batch.append(piece)
            size += count
    if batch:
        yield batch


def _cut(piece: Piece) -> list[Piece]:
    """The piece in cuts of `PLAIN_ELEMENTS`, each with counters of its own."""
    starts = range(0, piece.param.numel(), PLAIN_ELEMENTS)
    return [_part(piece, slice(start, start + PLAIN_ELEMENTS)) for start in starts]


def _part(piece: Piece, cut: slice) -> Piece:
    """Some of a piece's elements, with counters of their own."""
    start, stop, _ = cut.indices(piece.param.numel())
    scalars = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in piece.scalars.items()
    }
    return Piece(
        slice=piece.slice, group=piece.group, start=piece.start + start, stop=piece.start + stop,
        param=piece.param[cut], grad=piece.grad[cut],
        roles={role: view[cut] for role, view in piece.roles.items()},
        present=piece.present, scalars=scalars,
    )  # fmt: skip
