"""`attach`: put a training run under a checkpointer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from adacheck_store.agent.crew import Agents
from adacheck_store.config import Settings
from adacheck_store.format.errors import UsageError
from adacheck_store.group import Group, together
from adacheck_store.policy import Retention
from adacheck_store.session import RunSession

from .checkpointer import Checkpointer
from .deepspeed import taken_apart
from .grace import Stopped
from .layouts import bind
from .live import Handover, Live
from .names import Model
from .ranks import find_group
from .seam import RestoreReport

__all__ = ["Agents", "Checkpointer", "RestoreReport", "Stopped", "attach"]


def attach(
    model: Model, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], run: str,
    store: str, cache: str | os.PathLike[str] | None = None, policy: str = "lossless",
    k: int = 1, window: int = 2, base_every: int = 64, full_every: int = 64,
    object_lag: int = 64, keep: int | Retention = 2, start_step: int = 0, resume: str = "auto",
    strict: bool = False, lmdb_bytes: int = 0, names: Mapping[str, torch.Tensor] | None = None,
    group: Group | None = None, bounded_every: int = 256, max_drift: float = 1e-3,
    agents: Agents | None = None, sigterm_grace_s: float = 0.0, max_deaths: int = 3,
    redundancy: str = "auto", live: Live | None = None,
) -> Checkpointer:  # fmt: skip
    """Keep a checkpoint of every step of a run in the store at a URL.

    ``model`` is a module, a list of modules or a DeepSpeed engine, ``optimizer`` its optimizer or a
    list of them (then `Checkpointer.end_step` is the boundary). ``policy`` is ``lossless``, or
    ``bf16``: gradients are rounded in place before the step, so training uses what is stored.
    ``window`` is how many steps may be in flight, ``base_every`` how often a base is made by
    folding, ``full_every`` how often the whole state is kept where updates cannot be folded (an
    unproven optimizer), ``object_lag`` how many steps the object tier may stay behind, ``keep`` how
    many bases are kept, or a `Retention`. With ``agents`` records go to an agent on this node,
    started if there is none, which outlives this process and passes them on to ``k`` others, folds,
    drains and prunes. ``resume`` is ``auto``, ``must`` (an error on a run without history) or
    ``never``. ``strict`` raises an error of saving at the next boundary. ``lmdb_bytes`` is the LMDB
    tier's capacity (0: nine tenths of what its disk has; it needs about ``keep`` + 1 whole states
    and the gradients of ``keep * base_every`` steps; an agent's takes what its disk has). ``names``
    names tensors of the optimizer that are not in the model. ``group`` is the ranks of the run: by
    default those of torch.distributed, where it is initialised with more than one process. Then
    every rank attaches, with the same arguments, and `Checkpointer.end_step` is the boundary. Where
    folds here cannot give the trainer's bits (class ``bounded``: training on a GPU) the whole state
    is kept besides, every ``bounded_every`` steps (at most 256), and compared with the fold that
    leads to it. If any number differs by more than ``max_drift``, in its own unit, the steps
    between are offered no longer, nor restored. With ``sigterm_grace_s`` SIGTERM, to any rank, ends
    the run within so many seconds: all leave the loop at one boundary by `Stopped`, a `SystemExit`
    of 143, and store what they can. After ``max_deaths`` attempts in a row that died without
    getting past the newest step (0: never) `restore` begins at an older one. What
    ranks prove to be on several of them is written by one, as long as its copies stay equal;
    ``redundancy="off"`` has each write all that it holds. With ``live``, which `Checkpointer.live`
    gave in this process, `restore` reads no tier for what replaced ranks are proven to have held as
    it is here. What is not supported is refused before anything is done.
    """
    ranks = find_group() if group is None else group
    model, optimizer, names = taken_apart(model, optimizer, names)

    def checked() -> Settings:
        bind(model, optimizer, names, ranks)
        _check(agents, lmdb_bytes)
        return Settings(
            policy=policy, window=window, base_every=base_every, full_every=full_every,
            object_lag=object_lag, **_kept(keep), start_step=start_step, resume=resume,
            strict=strict, lmdb_bytes=lmdb_bytes, bounded_every=bounded_every,
            max_drift=max_drift, k=k, sigterm_grace_s=sigterm_grace_s, max_deaths=max_deaths,
            redundancy=redundancy,
        )  # fmt: skip

    settings = together(ranks, "arguments of attach", checked)
    held = RunSession.open(store, run, cache=cache, settings=settings, group=ranks, agents=agents)
    held.living = Handover(live, ranks)
    return _held(held, lambda: Checkpointer(model, optimizer, held, settings, names, ranks))


def _kept(keep: int | Retention) -> dict[str, Any]:
    """The settings that ``keep`` stands for."""
    if isinstance(keep, Retention):
        return {"keep_bases": keep.last, "retention": keep}
    return {"keep_bases": keep}


def _held(session: RunSession, make: Callable[[], Checkpointer]) -> Checkpointer:
    """What ``make`` gives; the session is closed if it fails."""
    try:
        return make()
    except BaseException:
        session.close()
        raise


def _check(agents: object, lmdb_bytes: int) -> None:
    if not isinstance(agents, Agents | None):
        raise UsageError(f"agents={agents!r:.200}", hint="adacheck_store.Agents(...), or None")
    if agents is not None and lmdb_bytes:
        raise UsageError(
            f"lmdb_bytes={lmdb_bytes} with agents",
            hint="leave it out: an agent's LMDB may take what its disk has",
        )
