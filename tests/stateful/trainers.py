"""What is trained in the state machine: a small model, its digests, a live session."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from adacheck_store import duty as duty_module
from adacheck_store import session as session_module
from adacheck_store import writer as writer_module
from adacheck_store.arrays import byte_view
from adacheck_store.catalog import RecordRef
from adacheck_store.config import Settings
from adacheck_store.restore import Restored
from adacheck_store.session import RunSession
from tests.core.kit import BrokenTier
from tests.core.toy import Toy

RUN = "run"
PART = "p000000"
RANK = "r000000"
BASE_EVERY = 4
WAIT_S = 120.0
SHAPES = [(3, 5), (), (17,)]
SETTINGS = Settings(
    base_every=BASE_EVERY, object_lag=3, grace_s=0.0, stall_timeout_s=5.0, lmdb_bytes=64 << 20,
    max_deaths=0,  # crashes here come in rows
)  # fmt: skip
NODES = ("a", "b")
QUICK: tuple[tuple[Any, str, Any], ...] = (
    (writer_module, "BACKOFF_S", (0.001, 0.01)),
    (duty_module, "BACKOFF_S", (0.001, 0.01)),
    (session_module, "CLOSE_S", 10.0),
)
"""Short pauses: module, name, value."""
DONE: Counter[str] = Counter()
"""How often what happened, in all worlds: so that one can see that a profile tries everything."""


def adamw(params: Any) -> torch.optim.Optimizer:
    """The toy's optimizer."""
    return torch.optim.AdamW(params, lr=1e-3)


def digest_of(arrays: dict[str, torch.Tensor], states: Any) -> str:
    """A digest over every bit of a state."""
    found = hashlib.blake2b(repr(sorted(dict(states).items())).encode(), digest_size=16)
    for name, tensor in sorted(arrays.items()):
        found.update(name.encode())
        found.update(byte_view(tensor))
    return found.hexdigest()


def digest_of_toy(toy: Toy) -> str:
    """Of a trainer's state now."""
    return digest_of(toy.arrays(), toy.states())


def digest_of_restored(restored: Restored) -> str:
    """Of a restored state."""
    state = restored.parts[PART]
    return digest_of(dict(state.arrays), state.states)


class Checked:
    """A boundary with a delta and a captured base beside it."""

    def __init__(self, toy: Toy) -> None:
        self.step = toy.step
        self._delta, self._base = toy.boundary(), toy.boundary({})
        self._base.saved["base"] = _frozen_base(toy)

    def delta(self, link: Any) -> Any:
        """The delta."""
        return self._delta.delta(link)

    def base(self, link: Any) -> Any:
        """The base."""
        return self._base.base(link)

    def extra(self, link: Any) -> Any:
        """The extra."""
        return self._delta.extra(link)

    def release(self) -> None:
        """Nothing."""


def _frozen_base(toy: Toy) -> Any:
    frozen = toy.boundary({"reason": "", "from": toy.step})
    head, arrays = frozen.saved["base"]
    body = {name: value for name, value in head.body.items() if name != "gap"}
    return replace(head, body={**body, "gap": None} if "gap" in head.body else body), arrays


@dataclass
class Writer:
    """A live session with its trainer."""

    node: str
    session: RunSession
    toy: Toy
    term: str
    broken: list[BrokenTier]
    keep_bases: int
    acknowledged: list[RecordRef] = field(default_factory=list)
    noted: int = 0
