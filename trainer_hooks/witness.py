"""Witnessing: digests of all that changes the states which this rank shares with others.

Made on the writer's thread, of the copies that it reads anyway for what this rank writes, and of
such as are made for nothing else of what another rank writes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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

log = logging.getLogger(__name__)

ABSENT = b"no gradient"
STATE_EDITED = "the optimizer's state was changed between its steps"

REMEMBERED = 32
"""Steps of which what was told is remembered."""

Sets = Mapping[Place, str]
"""Of each state that a rank shares a name for the ranks it shares it with."""

Brief = Mapping[str, str]
"""Of each set of ranks 64 bits of what is shared with them; empty where that is not known."""


class Witnessing:
    """A digest of each shared state, that of the one before and of what has changed it since.

    Boundaries are taken in in order, each once; where one is missing that ends it until all are
    equal again. It begins with the first look; before that nothing is told. Any thread.
    """

    def __init__(self, binding: Binding) -> None:
        self._lock = threading.Condition()
        self._trained = {slot.item.name: n for n, slot in enumerate(binding.captured)}
        self._group = [slot.piece.group for slot in binding.captured]
        self._seen = {slot.item.name for slot in (*binding.captured, *binding.watched)}
        self._chain: dict[str, bytes] = {}
        self._by_set: dict[str, list[str]] = {}
        self._since = self._step = -1
        self._trouble = ""
        self._told: dict[int, tuple[Witness, Brief]] = {}
        self._coming: deque[tuple[int, Callable[[], None]]] = deque()

    def coming(self, step: int, take: Callable[[], None]) -> None:
        """A boundary is being closed (training thread); ``take`` is to `begin` or `advance`."""
        self._coming.append((step, take))  # no lock: training must not wait for digests

    def take_in(self, step: int) -> None:
        """Take in, in order, what has come up to a boundary, whose buffers must still be there.

        In a stall boundaries are given up while those before them wait to be stored: these come
        first. What cannot be read this rank does not know, until the next look.
        """
        with self._lock:
            while self._coming and self._coming[0][0] <= step:
                at, take = self._coming.popleft()
                try:
                    take()
                except Exception as error:
                    self._since = -1
                    log.warning("step %d is not compared with other ranks: %s", at, error)

    def begin(self, step: int, sets: Sets) -> None:
        """At this step all copies of these states are equal; they are in a manifest's order."""
        with self._lock:
            if step <= self._step:
                return
            self._chain = {name: b"" for _, _, name in sets}
            self._by_set = {}
            for (_, _, name), ranks in sets.items():
                self._by_set.setdefault(ranks, []).append(name)
            self._since = self._step = step
            if not self._chain.keys() <= self._seen:
                self._since = -1  # a digest that nothing changes would be equal for ever
            self._trouble = ""
            self._remember()

    @property
    def begun(self) -> bool:
        """Whether anything is told."""
        return self._step >= 0

    def advance(
        self, step: int, updates: Sequence[CapturedUpdate], copies: Sequence[SetCopy],
        edited: bool = False,
    ) -> None:  # fmt: skip
        """Take in what a boundary's updates have used, and the bytes that it sets besides.

        ``edited``: optimizers' state was changed, and not by their steps. No digest tells of that.
        """
        with self._lock:
            if self._step < 0 or step <= self._step:
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
        digests = b"".join([each or none for each in self._chain.values()])
        brief = dict.fromkeys(self._by_set, "")
        if self._since >= 0:
            begun = self._since.to_bytes(8, "little")
            for ranks, names in self._by_set.items():
                data = b"".join([self._chain[name] for name in names])
                brief[ranks] = xxhash.xxh3_64_hexdigest(begun + data)
        told = Witness(since=self._since, digests=digests, trouble=self._trouble)
        self._told[self._step] = told, brief
        if len(self._told) > REMEMBERED:
            del self._told[min(self._told)]
        self._lock.notify_all()

    def _take_in(self, update: CapturedUpdate) -> None:
        groups = [canonical.dumps(canonical.to_json(g)) for g in typed_groups(update.groups)]
        used = [xxhash.xxh3_128_digest(each) for each in groups]
        for name in self._chain:
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
            unknown = Witness(since=-1, digests=bytes(DIGEST_BYTES * len(self._chain)))
            told, _ = self._told.get(step, (unknown, {}))
            return told if told.digests else None

    def unknown(self, step: int) -> bool:
        """Whether this rank shares something and does not know what others have at a step."""
        told = self.of(step)
        return told is not None and told.since < 0

    def awaited(self, step: int, timeout_s: float) -> Witness | None:
        """What is told of a step, once it is taken in; with what troubles this rank by now."""
        with self._lock:
            if self._step >= 0:
                self._lock.wait_for(lambda: self._step >= step, timeout=timeout_s)
            found = self._told.get(step)
            return found and replace(found[0], trouble=self._trouble)

    def lately(self) -> dict[int, Brief]:
        """What is told of the last steps, in brief."""
        with self._lock:
            return {step: brief for step, (_, brief) in self._told.items()}


def _digest(tensor: torch.Tensor) -> bytes:
    found: bytes = xxhash.xxh3_128_digest(byte_view(tensor.contiguous()))
    return found
