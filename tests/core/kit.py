"""Sessions driven by a toy, a journal of what it had, and tiers that outlive a session."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from adacheck_store.arrays import byte_view, tensor_of
from adacheck_store.config import Settings
from adacheck_store.restore import Restored
from adacheck_store.session import RunSession
from adacheck_store.state import PartState
from adacheck_store.store import Store
from adacheck_store.tiers.base import Source, Tier
from adacheck_store.tiers.memory import MemoryTier
from adacheck_store.tiers.wrappers import WrapperTier
from tests.core.toy import Toy

SHAPES = [(5, 7), (), (130,)]
QUICK = Settings(base_every=8, object_lag=4, grace_s=0.0, stall_timeout_s=5.0)


def make_toy(
    shapes: list[tuple[int, ...]] | None = None, seed: int = 0, absent: float = 0.2
) -> Toy:
    """A toy with fused AdamW."""
    return Toy(
        shapes or SHAPES, lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        seed=seed, absent=absent,
    )  # fmt: skip


class Journal:
    """What the trainer had at each step of one branch: arrays, states, the generator."""

    def __init__(self) -> None:
        self.at: dict[int, tuple[dict[str, bytes], Any, torch.Tensor]] = {}

    def note(self, toy: Toy) -> None:
        """Write down the present."""
        arrays = {name: bytes(byte_view(t)) for name, t in toy.arrays().items()}
        self.at[toy.step] = (arrays, toy.states(), toy.generator.get_state())

    def assert_same(self, restored: Restored) -> None:
        """The restored state is what the trainer had at that step, and so is its extra."""
        state = restored.parts["p000000"]
        arrays, states, _ = self.at[restored.step]
        assert {name: bytes(byte_view(t)) for name, t in state.arrays.items()} == arrays
        assert dict(state.states) == states
        assert restored.extras["r000000"] == {"n": restored.step}


def load(toy: Toy, state: PartState, journal: Journal, seed: int | None = None) -> None:
    """Put a restored state into a toy, and its generator where it was (or on another path)."""
    section = state.states["s0"]
    toy.optimizer.state.clear()
    for index, (param, piece) in enumerate(zip(toy.params, toy.section.slices, strict=True)):
        cut = slice(piece.offset, piece.offset + piece.elements)
        with torch.no_grad():
            param.copy_(state.arrays["s0/param"][cut].reshape(param.shape))
        if section.present[index]:
            roles: dict[str, Any] = {
                role: state.arrays[f"s0/{role}"][cut].clone().reshape(param.shape)
                for role in toy.section.state_roles
            }
            for name, values in section.scalars.items():
                roles[name] = tensor_of(values[index])
            toy.optimizer.state[param] = roles
    toy.step = state.step
    if seed is None:
        toy.generator.set_state(journal.at[state.step][2])
    else:
        toy.generator.manual_seed(seed)


def begin(session: RunSession, toy: Toy, journal: Journal, *, seed: int | None = None,
          **how: Any) -> Restored | None:  # fmt: skip
    """Restore (if there is anything), load, start."""
    restored = session.restore(**how)
    if restored is not None:
        load(toy, restored.parts["p000000"], journal, seed)
    session.start(toy.layout, start_step=toy.step, base=toy.base, extra=toy.extra)
    journal.note(toy)
    return restored


def train(session: RunSession, toy: Toy, journal: Journal, steps: int) -> None:
    """So many boundaries, as trainer hooks make them."""
    for _ in range(steps):
        session.check()
        gap = session.wants_base()
        toy.train()
        journal.note(toy)
        session.append(toy.boundary(gap))


class KeptTier(MemoryTier):
    """A memory tier that outlives the session."""

    def close(self) -> None:
        """Stay."""


class GateTier(WrapperTier):
    """A tier whose puts hang while the gate is shut."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.gate = threading.Event()
        self.gate.set()

    def put(self, sources: Sequence[Source]) -> None:
        """Wait for the gate, then hand on."""
        assert self.gate.wait(60)
        super().put(sources)


class BrokenTier(WrapperTier):
    """A tier whose puts fail while ``fault`` gives an error for their keys."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.fault: Callable[[list[str]], Exception | None] = lambda keys: None

    def put(self, sources: Sequence[Source]) -> None:
        """Fail, or hand on."""
        error = self.fault([source.key for source in sources])
        if error is not None:
            raise error
        super().put(sources)


def session_on(near: Tier, far: Tier, settings: Settings = QUICK, run: str = "run") -> RunSession:
    """A session on two given tiers."""
    return RunSession(Store("memory://given", near, far), run, settings)
