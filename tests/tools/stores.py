"""Stores made by a tiny trainer, and ways to damage them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner, Result

from adacheck_store.cli import main
from adacheck_store.config import Settings
from adacheck_store.restore import Restored, restore_state
from adacheck_store.session import RunSession
from adacheck_store.store import open_for_reading
from adacheck_store.tiers.base import Tier
from tests.core.toy import Toy

RUN = "toy"
FIRST, LAST = 20, 30
"""Steps of the first term, and of the second, which forks from it."""

LOCK = "lock.mdb"
"""LMDB's table of readers: every reader enters itself there."""


def adamw(params: Any) -> torch.optim.Optimizer:
    """The toy's optimizer."""
    return torch.optim.AdamW(params, lr=1e-3)


def make_toy() -> Toy:
    """A toy with an empty and an odd tensor."""
    return Toy([(40, 30), (7,), (0,), (64,)], adamw, base_every=8)


def load(toy: Toy, restored: Restored) -> None:
    """Put a restored state back into a toy."""
    state = restored.parts["p000000"]
    toy.step = restored.step
    counters = state.states["s0"].scalars["step"]
    for index, (p, piece) in enumerate(zip(toy.params, toy.section.slices, strict=True)):
        cut = slice(piece.offset, piece.offset + piece.elements)
        shape = p.shape
        p.data.copy_(state.arrays["s0/param"][cut].reshape(shape))
        if state.states["s0"].present[index]:
            kept = {r: state.arrays[f"s0/{r}"][cut].reshape(shape).clone()
                    for r in ("exp_avg", "exp_avg_sq")}  # fmt: skip
            step = torch.frombuffer(bytearray(counters[index].data), dtype=torch.float32)
            toy.optimizer.state[p] = {"step": step.reshape(()).clone(), **kept}


def train(
    url: str, to: int, *, run: str = RUN, even: bool = False, flush_s: float = 60,
    **settings: Any,
) -> Toy:  # fmt: skip
    """Train a run up to a step in a term of its own, and flush.

    ``even``: with a base at every multiple of ``base_every``, however slow the machine is; else
    upkeep may be behind and pass some over.
    """
    chosen = {"base_every": 8, "object_lag": 4, "grace_s": 0.0, **settings}
    session = RunSession.open(url, run, settings=Settings(**chosen))
    toy = make_toy()
    deadline = time.monotonic() + 120
    try:
        restored = session.restore()
        if restored is not None:
            load(toy, restored)
        session.start(toy.layout, start_step=toy.step, base=toy.base, extra=toy.extra)
        while toy.step < to:
            toy.train()
            session.append(toy.boundary())
            while even and toy.step % chosen["base_every"] == 0:
                if session.status().base >= toy.step:
                    break
                assert time.monotonic() < deadline, "no base was made"
                time.sleep(0.01)
        session.flush(flush_s)
    finally:
        session.close()
    return toy


def cli(*arguments: object) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(main, [str(item) for item in arguments])


def cli_json(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Run a verb with ``--json``; its exit code and its document."""
    result = cli(*arguments, "--json")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


def findings(store: Path, *more: str) -> tuple[int, list[dict[str, Any]]]:
    """What fsck finds above notes."""
    code, document = cli_json("fsck", store, *more)
    assert code == document["exit_code"]
    rows = [row for row in document["rows"] if row["row"] == "Finding"]
    return code, [row for row in rows if row["severity"] != "info"]


def tree_digest(root: Path) -> str:
    """A digest of every name and byte below a folder (but LMDB's table of readers)."""
    state = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.name == LOCK:
            continue
        state.update(f"{path.relative_to(root)} {path.is_dir()}\n".encode())
        if path.is_file():
            state.update(path.read_bytes())
    return state.hexdigest()


def tiers_of(store: Path) -> dict[str, Tier]:
    """The tiers of a store, open for reading."""
    return {tier.traits.name: tier for tier in open_for_reading(str(store)).tiers}


def keys_of(store: Path, tier: str, word: str) -> list[str]:
    """Keys of a tier with a word in them."""
    with open_for_reading(str(store)) as opened:
        found = next(t for t in opened.tiers if t.traits.name == tier)
        return [key for key in found.list("") if f"/{word}/" in key]


def restored(store: Path) -> Restored:
    """The state that restore gives."""
    with open_for_reading(str(store)) as opened:
        return restore_state(opened.tiers, RUN)


def lmdb_file(store: Path) -> Path:
    """The one LMDB file of a store."""
    (found,) = store.glob("lmdb/*/data.mdb")
    return found


def objects(store: Path, pattern: str) -> list[Path]:
    """Objects of the zarr tier, by a pattern."""
    found = sorted((store / "objects").glob(pattern))
    assert found, pattern
    return found


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(bytes(data))


def flip_where(path: Path, needle: bytes, offset: int = 0) -> None:
    """Flip a bit of every place where some bytes stand."""
    data = bytearray(path.read_bytes())
    at = data.find(needle)
    assert at >= 0
    while at >= 0:
        data[at + offset] ^= 1
        at = data.find(needle, at + 1)
    path.write_bytes(bytes(data))


Damage = Callable[[Path], None]
