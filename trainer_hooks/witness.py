"""Witnessing: digests of all that changes the states which this rank shares with others.

Made on the writer's thread, of the copies that it reads anyway for what this rank writes, and of
such as are made for nothing else of what another rank writes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import xxhash

from adacheck_store.arrays import byte_view
from adacheck_store.format import canonical
from adacheck_store.redundancy.witness import DIGEST_BYTES, Place, Witness

from .held import typed_groups
from .layouts import Binding

if TYPE_CHECKING:
    from .outside import SetCopy
    from .updates import CapturedUpdate

ABSENT = b"no gradient"
STATE_EDITED = "the optimizer's state was changed between its steps"

REMEMBERED = 64
"""Steps of which what was told is remembered."""


class Witnessing:
    """A digest of each shared state, that of the one before and of what has changed it since.

    Steps come in order; what does not follow the step before ends it until all are equal again.
    ``places`` are in the order in which a manifest has them. Any thread.
    """

    def __init__(self, binding: Binding) -> None:
        self._lock = threading.Condition()
        self._trained = {slot.item.name: n for n, slot in enumerate(binding.captured)}
        self._group = [slot.piece.group for slot in binding.captured]
        self._names: tuple[str, ...] = ()
        self._chain: dict[str, bytes] = {}
        self._since = self._step = -1
        self._trouble = ""
        self._told: dict[int, Witness] = {}

    def begin(self, step: int, places: Sequence[Place]) -> None:
        """At this step all copies of these states are equal."""
        with self._lock:
            if step <= self._step:
                return
            self._names = tuple(name for _, _, name in places)
            self._chain = dict.fromkeys(self._names, b"")
            self._since = self._step = step
            self._trouble = ""
            self._told.clear()
            self._remember()

    def follows(self, step: int) -> bool:
        """Whether a step is the next one to take in: those before it may still be on their way."""
        with self._lock:
            return bool(self._names) and self._step == step - 1

    def advance(
        self, step: int, updates: Sequence[CapturedUpdate], copies: Sequence[SetCopy],
        edited: bool = False,
    ) -> None:  # fmt: skip
        """Take in what a boundary's updates have used, and the bytes that it sets besides.

        ``edited``: optimizers' state was changed, and not by their steps. No digest tells of that.
        """
        with self._lock:
            if not self._names or step <= self._step:
                return
            if edited:
                self._trouble = STATE_EDITED
            if edited or step != self._step + 1:
                self._since = -1
            self._step = step
            for update in updates:
                self._take_in(update)
            edits: dict[str, list[SetCopy]] = {}
            for item in copies:
                if item.slot.item.name in self._chain:
                    edits.setdefault(item.slot.item.name, []).append(item)
            for name, items in edits.items():
                told = b"".join(item.role.encode() + _digest(item.data) for item in items)
                before = self._chain[name] if name in self._trained else b""
                self._chain[name] = xxhash.xxh3_128_digest(before + told)
            self._remember()

    def _remember(self) -> None:
        none = bytes(DIGEST_BYTES)
        digests = b"".join(self._chain[name] or none for name in self._names)
        self._told[self._step] = Witness(since=self._since, digests=digests, trouble=self._trouble)
        if len(self._told) > REMEMBERED:
            del self._told[min(self._told)]
        self._lock.notify_all()

    def _take_in(self, update: CapturedUpdate) -> None:
        groups = [canonical.dumps(canonical.to_json(g)) for g in typed_groups(update.groups)]
        used = [xxhash.xxh3_128_digest(each) for each in groups]
        for name in self._names:
            number = self._trained.get(name)
            if number is None or number not in update.area.views:
                continue
            told = ABSENT
            if number in update.given:
                told = _digest(update.late.get(number, update.area.views[number]))
            before = self._chain[name]
            self._chain[name] = xxhash.xxh3_128_digest(before + used[self._group[number]] + told)

    def of(self, step: int) -> Witness | None:
        """What to tell of a step; None where nothing is shared."""
        with self._lock:
            if not self._names:
                return None
            unknown = Witness(since=-1, digests=bytes(DIGEST_BYTES * len(self._names)))
            return self._told.get(step, unknown)

    def awaited(self, step: int, timeout_s: float) -> Witness | None:
        """What is told of a step, once it is taken in; with what troubles this rank by now."""
        with self._lock:
            if self._names:
                self._lock.wait_for(lambda: self._step >= step, timeout=timeout_s)
            found = self._told.get(step)
            return found and replace(found, trouble=self._trouble)

    def lately(self) -> dict[int, Witness]:
        """What was told of the last steps."""
        with self._lock:
            return dict(self._told)


def _digest(tensor: torch.Tensor) -> bytes:
    found: bytes = xxhash.xxh3_128_digest(byte_view(tensor.contiguous()))
    return found
