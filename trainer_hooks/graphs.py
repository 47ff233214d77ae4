"""Optimizer steps recorded into CUDA graphs: hooks see the recording, nobody sees a replay.

So the recording itself is made to tell. It copies the gradients aside on the device, as the step
consumes them, and counts: how often it was replayed, and how often the step skipped itself. What
a replay has left is taken over at the next boundary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from adacheck_store.format.errors import UnsupportedError


@dataclass(slots=True, eq=False)
class Recording:
    """What an optimizer's recorded step leaves at every replay, in memory that stays where it is.

    ``grads`` maps parameters' ids to copies of their gradients; ``counts`` are the replays since
    it was last zeroed, and those of them that skipped themselves (int64, on the device; made
    before the recording). ``groups`` are the hyper-parameters: numbers are fixed in the graph, of
    tensors they hold copies, for a schedule may change those before the boundary comes.
    ``recorded`` are the very objects. ``scales`` are observed clip coefficients, and
    ``unrounded`` the parameters whose gradients the policy would round and the step did not.
    """

    counts: torch.Tensor
    grads: dict[int, torch.Tensor] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    recorded: list[dict[str, Any]] = field(default_factory=list)
    scales: Sequence[torch.Tensor] = ()
    unrounded: set[int] = field(default_factory=set)
    _counting: bool = False

    @property
    def made(self) -> bool:
        """Whether a step has been recorded."""
        return bool(self.groups)

    def record(
        self, grads: Mapping[int, torch.Tensor], groups: Sequence[Mapping[str, Any]],
        scales: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        """Put the copies into the graph that is being recorded, after the step.

        Several graphs share the memory, so they must be alike.
        """
        plain = [
            {k: v for k, v in group.items() if k not in ("params", "param_names")}
            for group in groups
        ]
        if not self.made:
            self.recorded, self.groups = plain, _memory_for(plain)
            self.grads = {index: torch.empty_like(grad) for index, grad in grads.items()}
            self.scales = tuple(torch.empty_like(scale) for scale in scales)
        elif (
            self.grads.keys() != grads.keys() or len(self.scales) != len(scales)
            or not _alike(self.recorded, plain)
        ):  # fmt: skip
            raise UnsupportedError(
                "graphs that record an optimizer's step with other gradients or other numbers",
                hint="make what changes (lr) a tensor, and record one step for all graphs",
            )
        for index, grad in grads.items():
            self.grads[index].copy_(grad)
        pairs = [*zip(self.scales, scales, strict=True)]
        pairs += zip(_numbers(self.groups), _numbers(plain), strict=True)
        for mine, theirs in pairs:
            mine.copy_(theirs)

    def count(self, found_inf: torch.Tensor | None) -> None:
        """Put the counting into the graph that is being recorded, after the step."""
        with torch.no_grad():
            self.counts[0].add_(1)
            if found_inf is not None:
                self.counts[1].add_((found_inf != 0).sum())
        self._counting = True

    def forget(self) -> None:
        """The replays so far belong to a boundary that is closed."""
        if self._counting:
            with torch.no_grad():
                self.counts.zero_()

    @property
    def replays(self) -> int:
        """Replays since the last boundary; waits for the device."""
        return int(self.counts[0]) if self._counting else 0


def _memory_for(value: Any) -> Any:
    """The same with 0-dim tensors of its own."""
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value) if value.dim() == 0 else value
    if isinstance(value, list | tuple):
        return type(value)(_memory_for(item) for item in value)
    if isinstance(value, dict):
        return {key: _memory_for(item) for key, item in value.items()}
    return value


def _numbers(value: Any) -> list[torch.Tensor]:
    """The 0-dim tensors in a value, in its order."""
    if isinstance(value, torch.Tensor):
        return [value] if value.dim() == 0 else []
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return []
    return [number for item in value for number in _numbers(item)]


def _alike(left: Any, right: Any) -> bool:
    """Equal in every number, and the same tensors."""
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_alike(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_alike, left, right))
    return bool(left == right)
