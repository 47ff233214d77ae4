"""The fold against the memory limit of the same run."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from adacheck_store import kernels
from adacheck_store.engines import Piece, StepEngine
from adacheck_store.fold import WINDOW_BYTES
from adacheck_store.optimizers import group_values, spec_of

from .rows import Row, paired, seconds

ELEMENTS = 32 << 20


def _state() -> tuple[torch.Tensor, ...]:
    param, grad = torch.randn(ELEMENTS), torch.randn(ELEMENTS).mul_(1e-3).bfloat16()
    return param, torch.zeros(ELEMENTS), torch.zeros(ELEMENTS), grad


def rows() -> Iterator[Row]:
    """One delta, fused and plain, against the limit; 32 deltas against one."""
    torch.set_num_threads(1)  # what an updater beside a trainer has; steadier than a team
    param, first, second, grad = _state()
    width = WINDOW_BYTES // 4
    scratch = torch.empty(width)
    spare = torch.empty(width)

    def limit() -> None:
        """The same streams with no arithmetic to speak of: three read and written, one read."""
        for at in range(0, ELEMENTS, width):
            cut = slice(at, at + width)
            torch.add(param[cut], 1.0, out=param[cut])
            torch.add(first[cut], 1.0, out=first[cut])
            torch.add(second[cut], 1.0, out=second[cut])
            spare.copy_(grad[cut])

    def fold(deltas: int, *, fused: bool, compiled: bool = True) -> None:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=fused)
        groups = (group_values(optimizer.param_groups[0]),)
        engine = StepEngine(spec_of(optimizer))
        for at in range(0, ELEMENTS, width):
            cut = slice(at, at + width)
            piece = Piece(
                slice=0, group=0, start=at, stop=at + width, param=param[cut], grad=scratch,
                roles={"exp_avg": first[cut], "exp_avg_sq": second[cut]}, present=True,
                scalars={"step": torch.tensor(3.0)},
            )  # fmt: skip
            for _ in range(deltas):
                if compiled and engine.takes_halves(groups):
                    piece.kept = grad[cut]
                else:
                    scratch.copy_(grad[cut])
                engine.apply([piece], groups)

    for fused, bar in ((True, 0.85), (False, 0.3)):
        second.zero_(), first.zero_()
        limit_s, fold_s, ratio = paired(limit, lambda fused=fused: fold(1, fused=fused), 5)
        second.zero_()
        yield Row(
            f"fold of one delta, {'fused' if fused else 'plain'} arithmetic / memory limit",
            f"{ratio:.2f}", f">= {bar}", ratio >= bar,
            f"{ELEMENTS / fold_s / 1e9:.2f} against {ELEMENTS / limit_s / 1e9:.2f} G elements/s, "
            "one thread",
        )  # fmt: skip
    one = sorted(seconds(lambda: fold(1, fused=True)) for _ in range(3))[1]
    many = sorted(seconds(lambda: fold(32, fused=True)) for _ in range(3))[1] / 32
    yield Row(
        "fold of 32 deltas at once, per delta / one alone", f"{one / many:.2f} x faster",
        ">= 1.2 x", one / many >= 1.2, f"{many * 1e3:.1f} against {one * 1e3:.1f} ms",
    )  # fmt: skip
    if not kernels.takes(torch.optim.AdamW, torch.optim.AdamW([param], fused=True).param_groups[0]):
        return
    torch_s, compiled_s, ratio = paired(
        lambda: fold(32, fused=True, compiled=False), lambda: fold(32, fused=True), 3
    )
    yield Row(
        "fold of 32 deltas, torch's own fused step / compiled kernel", f"{ratio:.2f} x faster",
        ">= 1.8 x", ratio >= 1.8,
        f"{compiled_s / 32 * 1e3:.1f} against {torch_s / 32 * 1e3:.1f} ms a delta",
    )  # fmt: skip
