"""A trainer for another process: writes a run, and says what its state was at the end."""

from __future__ import annotations

import sys

import adacheck_store as ada
from tests.hooks.helpers import adamw, mlp, train


def main(url: str, steps: int) -> None:
    """Train so many steps and print the sum of all parameters, exactly."""
    model = mlp(0)
    optimizer = adamw(model, foreach=False)
    with ada.attach(model, optimizer, run="r", store=url, base_every=8, keep=9) as ckpt:
        ckpt.restore()
        for _ in range(steps):
            train(model, optimizer)
    print([p.double().sum().item().hex() for p in model.parameters()])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
